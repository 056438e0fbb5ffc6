"""The recorder: the thread that writes a run's history, while this server leads it.

It looks at what stats and ledger say, and nothing waits for it: what it cannot write is lost.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import NamedTuple

from tokenloom_proto.threads import Loop

from tokenloom_server.core.state import MAX_COUNTER
from tokenloom_server.errors import TokenloomError
from tokenloom_server.ledger.base import HistoryEntry, HistoryStore, Kind
from tokenloom_server.order.replay import Replay
from tokenloom_server.reports.history import EventKind
from tokenloom_server.reports.stats import NewestEvent, RunStats
from tokenloom_server.run.coordinator import RunCoordinator
from tokenloom_server.run.events import Look, Seen, compared, with_authors
from tokenloom_server.run.history import EVERY_S, Event, is_kept, point_text
from tokenloom_server.run.losses import Losses
from tokenloom_server.run.stats import StatsReader

_log = logging.getLogger(__name__)

#: The recorder wakes this often, seconds: to see whether the ledger can be reached, and points of a run's beginning.
LOOK_S = 1.0
#: So many points of a run may be nearer than ``EVERY_S`` to each other: a run may be short.
FIRST_POINTS = 100
#: Events that are kept, of those that are rare and of those that are not; and noted between two writes.
MAX_EVENTS, MAX_NOTED = 1000, 1000
#: Points that a list of runs shows the rates of.
RECENT_POINTS = 60
#: Points are thinned out once for so many that are added.
THIN_EVERY = 32
_FREQUENT = frozenset({"audit", "bad_rows", "failover", "ledger", "pin", "rank", "straggler"})
#: Events that are said in the log, too: what else says them nowhere.
_LOGGED: Mapping[EventKind, int] = {
    "exhausted": logging.INFO,
    "rank": logging.WARNING,
    "straggler": logging.WARNING,
}


class _Point(NamedTuple):
    time: float
    #: Generation and sample index.
    place: tuple[int, int]
    text: str


class Recent(NamedTuple):
    """The newest of a history: tokens per second of its points, and its last event."""

    rates: Sequence[float] = ()
    last_event: NewestEvent | None = None

    def after(self, entries: Iterable[HistoryEntry]) -> Recent:
        """With what was written since."""
        rates, last = [*self.rates], self.last_event
        for entry in entries:
            if entry.kind == "points":
                rates.append(json.loads(entry.text)["tokens_per_s"])
            elif entry.kind != "mark" and (last is None or entry.time >= last.time):
                event = Event(**json.loads(entry.text))
                last = NewestEvent(kind=event.kind, time=event.time, text=event.text)
        return Recent(rates[-RECENT_POINTS:], last)


class _Stored:
    """What the store holds of a run, by the one server that writes there."""

    def __init__(self, store: HistoryStore, uid: str, stream: str, epoch: int) -> None:
        self.run = uid, epoch
        self.entries: dict[Kind, list[HistoryEntry]] = {
            "points": [],
            "events": [],
            "frequent": [],
            "mark": [],
        }
        for entry in store.entries(uid, stream, *self.entries):
            self.entries[entry.kind].append(entry)
        last = self.entries["points"][-RECENT_POINTS:], self.entries["events"][-1:]
        texts = store.read(
            uid, stream, [*self.entries["mark"], *chain(*last), *self.entries["frequent"][-1:]]
        )
        self.recent = Recent().after(texts)
        self.seen = next((Seen.read(entry.text) for entry in texts if entry.kind == "mark"), Seen())
        #: Generation and sample index of the last point.
        self.last = (0, 0)
        for point in (json.loads(entry.text) for entry in texts if entry.kind == "points"):
            self.last = point["generation"], point["sample_index"]

    def next_number(self, *kinds: Kind) -> int:
        return (
            max((self.entries[kind][-1].number for kind in kinds if self.entries[kind]), default=-1)
            + 1
        )

    def too_old(self, sources: int) -> list[HistoryEntry]:
        """The entries that are kept no longer."""
        points, thinned = self.entries["points"], []
        if points and points[-1].number % THIN_EVERY == 0:
            thinned = [one for one in points if not is_kept(one.number, points[-1].number, sources)]
        return [
            *thinned,
            *self.entries["events"][:-MAX_EVENTS],
            *self.entries["frequent"][:-MAX_EVENTS],
        ]


class Recorder(Loop):
    """Writes the history of one run. ``note`` may be called by any thread."""

    def __init__(
        self, coordinator: RunCoordinator, stats: StatsReader, losses: Losses, holder: str
    ) -> None:
        """``holder`` names this server in the ledger."""
        super().__init__("recorder", self._record, coordinator.name)
        self._coordinator = coordinator
        self._stats = stats
        self._losses = losses
        self._holder = holder
        self._store = coordinator.ledger.history()
        self.recent = Recent()
        self._noted: deque[Event] = deque(maxlen=MAX_NOTED)
        # None until this server leads, and once another one does.
        self._stored: _Stored | None = None
        #: The run and server epoch whose data do not end where that found them.
        self._sought: tuple[str, int] | None = None
        # Points that are not written yet, numbered when they are.
        self._points: list[_Point] = []
        #: What was committed and reported at the last point that was nearer than ``EVERY_S``.
        self._moved: object = None
        #: What is written at once, for nothing in the ledger tells of it.
        self._urgent: object = None
        self._away_since: float | None = None
        self._fails = False
        self._due = 0.0

    def note(self, kind: EventKind, text: str, *, author: str = "") -> None:
        """Notes an event of now, to be written with the next ones; returns at once, and raises nothing. ``text``: a
        plain sentence."""
        view, time = self._coordinator.view(), self._coordinator.wall_clock()
        commit, generation = view.commit, view.generation.number
        self._noted.append(
            Event(kind, time, text, commit.sample_index, commit.total_tokens, generation, author)
        )

    def _record(self) -> bool:
        is_last, now = self.ending.wait(LOOK_S), self._coordinator.clock()
        is_due = is_last or now >= self._due
        if is_due:
            self._due = now + EVERY_S
        self.step(is_due)
        return not is_last

    def step(self, is_due: bool = True) -> None:
        """Looks, and where it is due writes what is new, if this server leads; or says why that fails."""
        if self._store is None:
            return
        try:
            self._look()
            view, before = self._coordinator.view(), self._urgent
            self._urgent = view.generation.end, view.error
            if is_due or self._urgent != before:
                self._write(self._store)
                self._fails = False
        except Exception as error:
            self._coordinator.measures.history_failures.add()
            if not self._fails:
                name = self._coordinator.name
                _log.warning(
                    "%s: the history cannot be written, and is lost meanwhile: %s", name, error
                )
            self._fails = True

    def _look(self) -> None:
        """What is to be seen between two writes."""
        coordinator = self._coordinator
        away = coordinator.not_ready() if coordinator.lease.held else None
        if away is not None and self._away_since is None:
            self._away_since = coordinator.clock()
            self.note("ledger", away)
        elif away is None and self._away_since is not None:
            self.note(
                "ledger", f"the ledger is back after {coordinator.clock() - self._away_since:.0f} s"
            )
            self._away_since = None
        stored, newest = self._stored, self._losses.newest()[0]
        moved = coordinator.committed_through, newest and newest.sample_index
        if (
            stored is not None
            and moved[0]
            and stored.next_number("points") < FIRST_POINTS
            and moved != self._moved
        ):
            self._moved = moved
            self._points = [*self._points, self._point(self._stats.read())][:FIRST_POINTS]

    def _write(self, store: HistoryStore) -> None:
        coordinator = self._coordinator
        of_run, epoch = (coordinator.uid, coordinator.stream), coordinator.lease.epoch
        if not coordinator.leads():
            return
        stored, stats, noted = self._stored, self._stats.read(), list(self._noted)
        if stored is None or stored.run != (coordinator.uid, epoch):
            stored = self._stored = _Stored(store, *of_run, epoch)
            self.recent = stored.recent
            is_known = (
                stored.last == (stats.generation, stats.sample_index) or self._sought == stored.run
            )
            if stats.generation and stats.ended is None and not is_known:
                stats = self._with_end(stats)
                self._sought = stored.run if stats.ended is None else None
        seen, events = compared(stored.seen, self._look_at(stats, stored))
        events = with_authors(events, noted)
        points, last = self._points, self._point(stats)
        if last.place != (points[-1].place if points else stored.last):
            points = [*points, last]
        # Readers look for a time among them.
        least = max((entry.time for entry in stored.entries["points"][-1:]), default=0.0)
        put = [
            HistoryEntry("points", number, max(least, point.time), point.text)
            for number, point in enumerate(points, stored.next_number("points"))
        ]
        for number, event in enumerate(events, stored.next_number("events", "frequent")):
            kind: Kind = "frequent" if event.kind in _FREQUENT else "events"
            put.append(HistoryEntry(kind, number, event.time, event.as_json()))
        if not put:
            return
        if seen != stored.seen:
            put.append(HistoryEntry("mark", 0, 0.0, seen.text))
        for entry in put:
            if entry.kind != "mark":
                stored.entries[entry.kind].append(entry._replace(text=""))
        drop = stored.too_old(len(stats.sources))
        # Until it is known that this was written, nothing is known of the store.
        self._stored = None
        if not store.write(*of_run, epoch, put, drop):
            return
        gone = set(drop)
        stored.entries = {
            kind: [one for one in all_ if one not in gone] for kind, all_ in stored.entries.items()
        }
        stored.seen, stored.last = seen, last.place
        self._stored = stored
        self._points = []
        self.recent = self.recent.after(put)
        for event in events:
            if event.kind in _LOGGED:
                _log.log(_LOGGED[event.kind], "%s: %s", coordinator.name, event.text)
        for event in noted:
            if self._noted and self._noted[0] is event:
                self._noted.popleft()

    def _with_end(self, stats: RunStats) -> RunStats:
        """Of a run whose server was killed before it wrote all down: with why the data end where it stands, if they
        do. Its ranks may have left, so that nothing is produced any more that would tell."""
        view = self._coordinator.view()
        timeline, index, generation = view.timeline, view.commit.sample_index, view.generation
        config = timeline.at(index).config
        pads = config.last_micro_step == "pad"
        replay = Replay(timeline, timeline.decode(view.commit.state))
        with suppress(TokenloomError):
            replay.forward(
                index
                + (config.pick_samples if pads else generation.world_size * generation.batch_size)
            )
        ended = {"ended": replay.ended, "produced_index": index}
        return stats.model_copy(update=ended if replay.ended else {})

    def _point(self, stats: RunStats) -> _Point:
        place = stats.generation, stats.sample_index
        return _Point(round(self._coordinator.wall_clock(), 3), place, point_text(stats))

    def _look_at(self, stats: RunStats, stored: _Stored) -> Look:
        coordinator, seen, (last_generation, last_index) = (
            self._coordinator,
            stored.seen,
            stored.last,
        )
        of_run, ledger = (coordinator.uid, coordinator.stream), coordinator.ledger
        openings = ledger.openings(*of_run) if stats.generation != seen.generation else []
        openings = [opening for opening in openings if opening.generation > seen.generation]
        reached = {last_generation: last_index}
        for opening in openings:
            journalled = ledger.journal(*of_run, opening.generation - 1, MAX_COUNTER)
            reached[opening.generation - 1] = max(
                journalled.sample_index if journalled is not None else 0,
                reached.get(opening.generation - 1, 0),
            )
        now = coordinator.wall_clock()
        return Look(now, self._holder, stats, coordinator.timeline, openings, reached)
