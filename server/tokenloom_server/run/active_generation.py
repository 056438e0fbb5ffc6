"""A generation that a server leads, with what belongs to it alone. Pure: the parts of the run pass the time in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from tokenloom_server.core.measures import RankState
from tokenloom_server.core.state import State
from tokenloom_server.ledger.records import date_of
from tokenloom_server.order.steps import BatchPlan, StepGroup
from tokenloom_server.reports.stats import SLOW_DATA_SHARE, Straggler
from tokenloom_server.run.generation import EndOfData, Generation
from tokenloom_server.run.slots import WaitShare

#: A rank holds others up where these wait at least such a part of their time, once this is known of so many seconds.
STRAGGLER_SHARE, STRAGGLER_AFTER_S = 0.25, 120.0


class RankView(NamedTuple):
    """A rank of the present generation."""

    rank: int
    state: RankState
    #: Sample index up to which it has consumed.
    position: int
    #: Of its last message, by the run's clock; None where it was never heard.
    last_heard: float | None
    #: For how long it has waited for data since it joined, seconds; and the part of its last half a minute.
    waited_s: float
    wait_share: float | None
    #: The same over minutes, and how many seconds these are.
    long_wait: WaitShare | None
    #: The client's, as its Join said; empty where it did not.
    release: str


class GenerationView(NamedTuple):
    """The present generation at one moment; the defaults are of none."""

    number: int = 0
    #: Sample indices at which it began, up to which it is produced, and up to which it may be.
    start_index: int = 0
    produced_index: int = 0
    horizon_index: int = 0
    #: The first state boundary after all that may have been produced.
    first_unproduced: int = 0
    #: Where production ended, if it did; and whether all until there is committed.
    end: EndOfData | None = None
    over: bool = False
    world_size: int = 0
    #: Of the next micro-step to commit.
    batch_size: int = 0
    #: Micro-steps that are produced and not committed, and how many may be.
    held_steps: int = 0
    window_micro_steps: int = 1
    #: By when all of its ranks were heard, by the run's clock; None where one was not.
    heard_at: float | None = None
    #: Whether none of its ranks trains: each said goodbye, or is silent for longer than the liveness.
    stands_still: bool = False
    #: Whether every rank has come to this server, so that it knows how far each is.
    all_attached: bool = True
    #: Whether a revision closed it.
    closed: bool = False
    ranks: Sequence[RankView] = ()

    @property
    def data_wait_share(self) -> float | None:
        """The part of its last half a minute that the rank which waited least for data did; None where none that is
        connected says it."""
        connected = (rank.wait_share for rank in self.ranks if rank.state == "connected")
        return min((share for share in connected if share is not None), default=None)

    @property
    def straggler(self) -> Straggler | None:
        """The ranks that hardly wait for data, where most others do for long: the window is full, and they wait for
        these; None where none holds others up."""
        known = {
            rank.rank: rank.long_wait
            for rank in self.ranks
            if rank.state == "connected" and rank.long_wait is not None
        }
        slow = [rank for rank, wait in known.items() if wait.share < SLOW_DATA_SHARE]
        others = [wait.share for wait in known.values() if wait.share >= SLOW_DATA_SHARE]
        seconds = min((wait.seconds for wait in known.values()), default=0.0)
        if not slow or len(slow) > len(others) or seconds < STRAGGLER_AFTER_S:
            return None
        share = median(others)
        if share < STRAGGLER_SHARE:
            return None
        return Straggler(ranks=slow, waited_share=share, seconds=round(seconds, 1))


@dataclass(slots=True)
class ActiveGeneration:
    """Changed by the parts of the run alone, under its lock; others hold it to name the generation."""

    generation: Generation
    #: The state at which production begins.
    base: State
    #: The committed digest that production has to meet again after a restart; None once met.
    expected_digest: str | None
    #: The server epoch at which it was opened or taken up.
    epoch: int
    #: Unix time, for people.
    opened_at: float
    #: Rank 0's process, as far as known: one may begin anew without waiting for itself.
    process: str
    #: Since when ranks are listened to without a pause of the server, by the run's clock.
    since: float
    #: Whether ranks may hold more than this server knows: they were another one's, or those of its former life.
    taken_up: bool
    #: Whether a revision closed it: nothing more is produced.
    closed: bool = False
    #: The micro-step up to which production was last asked for.
    asked_for: int = 0
    #: By process (nonce), the number that it gave its present stream.
    stream_numbers: dict[str, int] = field(default_factory=dict)

    def note_stream(self, nonce: str, number: int, process: str) -> None:
        """A process began a stream of this number; ``process``: rank 0's, where it says."""
        self.stream_numbers[nonce] = number
        self.process = process or self.process  # which a restarted server did not know

    def ask_for(self, steps: int) -> tuple[BatchPlan, int]:
        """Production is asked for so many micro-steps; (their plan, how many of their group are published)."""
        produced = self.generation.produced
        self.asked_for = produced + steps
        plan = self.generation.batch_plans.at_step(produced)
        return plan, produced - plan.group_begin(produced)

    def close(self, closed: bool) -> None:
        """A revision closes it, or does not."""
        self.closed = closed

    def listen(self, now: float) -> None:
        """The server was paused until now: no rank was silent meanwhile, as far as is known."""
        self.since = now

    def view(self, now: float, liveness_s: float) -> GenerationView:
        generation, index_of = self.generation, self.generation.index_of
        ranks = [
            RankView(
                slot.rank,
                slot.state,
                index_of(slot.consumed),
                slot.last_heard,
                slot.waited_s,
                slot.wait_share,
                slot.long_wait,
                slot.release,
            )
            for slot in generation.slots
        ]
        return GenerationView(
            number=generation.number,
            start_index=generation.batch_plans.start_index,
            produced_index=generation.index_of(generation.produced),
            horizon_index=generation.batch_plans.index_of(generation.horizon),
            first_unproduced=self._first_unproduced(),
            end=generation.end,
            over=generation.over,
            world_size=generation.batch_plans.world_size,
            batch_size=generation.batch_plans.at_step(generation.committed).batch_size,
            held_steps=max(0, generation.produced - generation.committed),
            window_micro_steps=generation.window_micro_steps,
            heard_at=generation.slots.heard_at(),
            stands_still=self.stands_still(now, liveness_s),
            all_attached=not self.taken_up or all(slot.session for slot in generation.slots),
            closed=self.closed,
            ranks=ranks,
        )

    def stands_still(self, now: float, liveness_s: float) -> bool:
        """Whether no rank trains on it: each said goodbye, or was silent for so long while it was listened to."""
        return self.closed or all(
            not slot.connected
            and (slot.left or now - max(self.since, slot.last_heard or self.since) >= liveness_s)
            for slot in self.generation.slots
        )

    def trained_on(self, now: float, liveness_s: float) -> str | None:
        """Who trains on it, if each rank was heard within ``liveness_s``; None where nobody does."""
        generation = self.generation
        heard = generation.slots.heard_at()
        if heard is None or generation.over or self.closed or now - heard >= liveness_s:
            return None
        process = f", rank 0 in process {self.process.partition(' ')[0]}" if self.process else ""
        return (
            f"generation {generation.number} (attempt {generation.attempt!r}, {len(generation.slots)} ranks"
            f"{process}) trains on it since {date_of(self.opened_at)}, and each rank of it was heard "
            f"{now - heard:.1f} s ago or later, so another may begin in {liveness_s - now + heard:.0f} s or later"
        )

    def steps_wanted(self, revising_at: int | None) -> int:
        """How many micro-steps to produce now, none of them under a revision that is being written; 0 to wait."""
        generation = self.generation
        steps = 0 if self.closed else generation.steps_wanted()
        if steps and revising_at is not None:
            # Nothing at the index itself, and no group that it lies in, may be there before the revision is.
            begin = generation.batch_plans.boundary(revising_at + 1)
            limit = begin - (begin == revising_at)
            return min(
                steps, max(0, generation.batch_plans.steps_until(limit)[0] - generation.produced)
            )
        return steps

    def _first_unproduced(self) -> int:
        """The first state boundary after all that may have been produced."""
        generation = self.generation
        if self.closed:
            return generation.index_of(generation.committed)
        # After a restart ranks may hold more than is produced again: as much as the window allows until they say it.
        sent = [
            slot.sent if slot.session or not self.taken_up else generation.horizon
            for slot in generation.slots
        ]
        return generation.batch_plans.boundary_after(
            generation.index_of(max(generation.produced, self.asked_for, *sent))
        )

    def check_order(self, ended: bool) -> None:
        """Raises ``OrderMismatch`` where what is produced is not what was committed, or what a rank has."""
        generation = self.generation
        if self.expected_digest is not None and (
            generation.produced >= generation.committed or ended
        ):
            generation.check_digest(self.expected_digest)
            self.expected_digest = None
        if generation.claims:
            generation.check_claims()

    def waiting_for(self) -> str:
        """Which ranks production waits for; empty where it waits for none."""
        generation = self.generation
        if self.closed or (
            generation.end is None and all(slot.state == "finished" for slot in generation.slots)
        ):
            return "a trainer"
        if generation.end is not None or generation.steps_wanted():
            return ""
        absent = [slot.rank for slot in generation.slots if not slot.connected]
        if absent:
            named = ", ".join(map(str, absent[:8])) + (", …" if len(absent) > 8 else "")
            return f"rank {named} to connect"
        slot = next(generation.slots.laggards())
        return f"rank {slot.rank} to go on from sample {generation.index_of(slot.consumed)}"

    def starves(self) -> bool:
        """Whether a rank has consumed all that is produced."""
        generation = self.generation
        return any(
            slot.connected and slot.consumed >= generation.produced for slot in generation.slots
        )

    def point_at(self, index: int) -> tuple[StepGroup, int] | None:
        """(group of the boundary before it, how many of its micro-steps lie before it) of a sample index; None where
        that is not held."""
        if self.expected_digest is not None:
            return None  # after a restart the order is not proven yet
        generation = self.generation
        boundary = generation.batch_plans.boundary(index)
        for group in generation.groups:
            if group.begin == boundary:
                # Only micro-steps that were published: the producer may be filling the group right now.
                published = group.marks[: generation.produced - group.first_step]
                ends = [boundary, *(mark.sample_index for mark in published)]
                return (group, ends.index(index)) if index in ends else None
        return None
