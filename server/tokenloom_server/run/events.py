"""What happened to a run between two looks at it: its events, found by comparing.

The ledger tells most of it, so that a restart or a fail-over loses no event and repeats none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from tokenloom_server.ledger.records import Opening
from tokenloom_server.order.segments import Origin
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.reports.history import EventKind
from tokenloom_server.reports.stats import RunStats, ranks_text, skips_text
from tokenloom_server.run.history import Event

#: A rank that is away, and was heard before, is lost after so long a silence: one whose connection broke comes back.
LOST_AFTER_S = 15.0

#: Kinds that comparing finds, too; what of them it does not find is an audit event.
_OF_CALLERS = frozenset({"launch", "pin", "revision"})


class Seen(NamedTuple):
    """Up to where a run's events are recorded."""

    holder: str = ""
    epoch: int = 0
    generation: int = 0
    #: When each revision was made, Unix time.
    revisions: Sequence[float] = ()
    #: What was last pinned for the next launch; empty where nothing is.
    pin: str = ""
    #: The last end and error, each after the number of its generation.
    ended: str = ""
    error: str = ""
    #: By source id.
    bad_rows: Sequence[int] = ()
    exhausted: Sequence[bool] = ()
    #: Of the generation: the ranks that are lost, and those that hold the others up.
    lost: Sequence[int] = ()
    stragglers: Sequence[int] = ()

    @classmethod
    def read(cls, text: str) -> Seen:
        """Reads ``text`` back."""
        return cls(**json.loads(text))

    @property
    def text(self) -> str:
        """JSON."""
        return json.dumps(self._asdict(), separators=(",", ":"))


class Look(NamedTuple):
    """A run at one moment."""

    time: float
    holder: str
    stats: RunStats
    timeline: Timeline
    #: The generations since the one that was seen last, oldest first.
    openings: Sequence[Opening]
    #: How far each generation had come, as far as is known.
    reached: Mapping[int, int]

    def event(
        self,
        kind: EventKind,
        text: str,
        sample_index: int,
        generation: int,
        time: float,
        author: str = "",
    ) -> Event:
        return Event(
            kind,
            time,
            text,
            sample_index,
            self.timeline.tokens_at(sample_index),
            generation,
            author,
        )

    def now(self, kind: EventKind, text: str) -> Event:
        return self.event(kind, text, self.stats.sample_index, self.stats.generation, self.time)


def compared(seen: Seen, look: Look) -> tuple[Seen, list[Event]]:
    """What is seen with a look, and the events since the one before, by time."""
    stats, baseline, exhausted = look.stats, seen.bad_rows, seen.exhausted
    if look.openings:
        start = look.timeline.decode(look.openings[-1].start_state)
        baseline = [source.row_counts.bad_rows for source in start.sources]
        exhausted = [source.exhausted for source in start.sources]
        seen = seen._replace(lost=(), stragglers=())
    if stats.server_epoch != seen.epoch:  # a server that has just taken over has not seen who waits
        seen = seen._replace(stragglers=())
    seen = seen._replace(exhausted=exhausted)
    stands = stats.sample_index <= look.reached.get(stats.generation, -1)
    bad_rows = [source.bad_rows for source in stats.sources]
    # Right after a restart the counts are those of a state before.
    bad_rows = [
        max(count, *baseline[source : source + 1], 0) for source, count in enumerate(bad_rows)
    ]
    pin = (
        f"{stats.pin.sample_index} {stats.pin.digest} {stats.pin.skips}"
        if stats.pin is not None
        else ""
    )
    after = Seen(
        holder=look.holder,
        epoch=stats.server_epoch,
        generation=max([seen.generation, *(opening.generation for opening in look.openings)]),
        revisions=[revision.made_at for revision in look.timeline.revisions],
        pin=pin,
        ended=f"{stats.generation} {stats.ended}" if stats.ended is not None else seen.ended,
        error=f"{stats.generation} {stats.error}" if stats.error is not None else seen.error,
        bad_rows=bad_rows,
        exhausted=[
            source.exhausted or (stands and any(exhausted[source.id : source.id + 1]))
            for source in stats.sources
        ],
        lost=_lost(seen, stats) if stats.ended is None else seen.lost,
        stragglers=stats.straggler.ranks if stats.straggler is not None else (),
    )
    events = [
        *_launches(look),
        *_revisions(seen.revisions, look),
        *_of_server(seen, after, look),
        *_bad_rows(baseline, bad_rows, look),
        *_exhausted(seen, after, look),
        *_of_ranks(seen, after, look),
    ]
    return after, sorted(events, key=lambda event: event.time)


def _launches(look: Look) -> Iterator[Event]:
    for opening in look.openings:
        start, number = opening.start_index, opening.generation
        origin = Origin.from_json(opening.parent_run)
        came_to = look.reached.get(number - 1, 0)
        kind: EventKind = "launch"
        text = f"generation {number} begins at sample {start:,}"
        if origin is not None and not opening.parent:
            kind = "fork"
            text += f", where run {origin.run} stood at sample {origin.sample_index:,},"
        elif start < came_to:
            kind = "rewind"
            text = f"generation {number} goes back from sample {came_to:,} to {start:,}"
        text += (
            f" with {opening.world_size:,} ranks and batches of {opening.batch_size:,} samples each"
        )
        yield look.event(kind, text, start, number, opening.opened_at)


def _revisions(known: Sequence[float], look: Look) -> Iterator[Event]:
    revisions = look.timeline.revisions
    same = len(
        [*takewhile(lambda pair: pair[0] == pair[1].made_at, zip(known, revisions, strict=False))]
    )
    if same < len(known):
        yield look.now(
            "revision",
            f"the revisions from number {same + 1} on, up to {len(known)}, were taken back",
        )
    for one in revisions[same:]:
        skips = json.loads(one.content).get("skips")
        if skips is not None:
            text = (
                f"from sample {one.sample_index:,} on the run passes over {skips_text(dict(skips))}"
            )
        else:
            text = f"revision {one.number} holds from sample {one.sample_index:,} on: {one.reason}"
        kind: EventKind = "revision" if skips is None else "skip"
        yield look.event(
            kind, text, one.sample_index, look.stats.generation, one.made_at, one.author
        )


def _of_server(seen: Seen, after: Seen, look: Look) -> Iterator[Event]:
    if seen.epoch and seen.epoch != after.epoch:
        another = f"server {after.holder} took the lead over from {seen.holder}"
        again = f"server {after.holder} took the lead again"
        text = f"{again if seen.holder == after.holder else another}, at server epoch {after.epoch}"
        yield look.now("failover", text)
    pin = look.stats.pin
    if pin is not None and seen.pin != after.pin:
        passed = f", and to pass over {skips_text(pin.skips)}" if pin.skips is not None else ""
        yield look.now("pin", f"the next launch is to begin at sample {pin.sample_index:,}{passed}")
    elif pin is None and seen.pin and not look.openings:
        yield look.now(
            "pin", "the next launch is to begin as it asks to: what was pinned was taken back"
        )
    if look.stats.error is not None and seen.error != after.error:
        yield look.now("error", look.stats.error)
    if look.stats.ended is not None and seen.ended != after.ended:
        yield look.now(
            "end", f"the data end at sample {look.stats.produced_index:,}: {look.stats.ended}"
        )


def _bad_rows(before: Sequence[int], now: Sequence[int], look: Look) -> Iterator[Event]:
    more = [count - sum(before[source : source + 1]) for source, count in enumerate(now)]
    of_source = [
        f"{count:,} of {look.stats.sources[source].alias}"
        for source, count in enumerate(more)
        if count > 0
    ]
    if of_source:
        yield look.now(
            "bad_rows", f"rows that did not decode were passed over: {', '.join(of_source)}"
        )


def _exhausted(seen: Seen, after: Seen, look: Look) -> Iterator[Event]:
    # Where the data end, that event says so.
    for source in look.stats.sources if look.stats.ended is None else ():
        if after.exhausted[source.id] and not any(seen.exhausted[source.id : source.id + 1]):
            passes = f"{source.tokens:,} tokens, {source.epoch:.2f} passes"
            text = f"source {source.alias} ran out after {passes}: the others share what it had"
            yield look.now("exhausted", text)


def _lost(seen: Seen, stats: RunStats) -> list[int]:
    """Of the ranks that are away, those that were silent for long, or were lost when this server took over."""
    return [
        rank.rank
        for rank in stats.ranks
        if rank.state == "away"
        and (
            rank.rank in seen.lost
            if rank.last_heard_s is None
            else rank.last_heard_s >= LOST_AFTER_S
        )
    ]


def _of_ranks(seen: Seen, after: Seen, look: Look) -> Iterator[Event]:
    lost = [rank for rank in after.lost if rank not in seen.lost]
    back = [
        rank.rank
        for rank in look.stats.ranks
        if rank.state == "connected" and rank.rank in seen.lost and rank.rank not in after.lost
    ]
    if lost:
        silent_s = min(look.stats.ranks[rank].last_heard_s or 0 for rank in lost)
        text = f"{ranks_text(lost, 'is', 'are')} lost: nothing was heard for {silent_s:.0f} s"
        yield look.now("rank", text)
    if back:
        yield look.now("rank", f"{ranks_text(back, 'is', 'are')} back")
    if look.stats.straggler is not None and not {*after.stragglers} <= {*seen.stragglers}:
        yield look.now("straggler", look.stats.straggler.text)
    elif seen.stragglers and not after.stragglers:
        yield look.now("straggler", "no rank holds the others up any more")


def with_authors(events: Sequence[Event], noted: Sequence[Event]) -> list[Event]:
    """What was found by comparing and what a caller noted of the same act, as one event, whose author that caller is
    if it has none; whatever else is noted follows as it is."""
    seen, rest = [*events], []
    same = {"fork": "launch", "rewind": "launch"}
    open_to = [same.get(event.kind, event.kind) for event in seen]
    for event in reversed(noted):
        if event.kind in open_to:
            newest = len(open_to) - 1 - open_to[::-1].index(event.kind)
            open_to[newest] = ""
            seen[newest] = seen[newest]._replace(author=seen[newest].author or event.author)
        else:
            rest.append(event._replace(kind="audit") if event.kind in _OF_CALLERS else event)
    return [*seen, *reversed(rest)]
