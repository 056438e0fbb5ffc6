"""The past of a run: which state is nearest to a sample index, and the one place that goes forward from there.

Peeks, traces, receipts and restores take turns on one thread, so that together they cost a training run at most one
core; a launch, or a snapshot, goes forward at once. It reads the run's ledger and what it last committed, and writes
nothing.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from datetime import timedelta
from functools import partial
from typing import NamedTuple, TypeVar

from tokenloom_proto.threads import pool

from tokenloom_server.core import caller
from tokenloom_server.core.state import MAX_COUNTER, Imported, State
from tokenloom_server.errors import BeyondHorizon, NotFound, ServerStopping, TooManyPeeks
from tokenloom_server.ledger.records import JournalEntry, Opening
from tokenloom_server.order.replay import Replay, beyond_the_end
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.run.coordinator import RunCoordinator

_log = logging.getLogger(__name__)

#: Peeks, traces and the like of a run at once. Each has a pipeline: a block of every source, and a message.
MAX_PEEKS = 8
#: How far one goes forward from the last state known, where the ledger's journal does not reach: seconds of one core,
#: on most data.
AHEAD_SAMPLES = 2**16
#: States that are remembered: each peek's last messages, so that a stream that breaks goes on at once.
KNOWN_STATES = 8 * MAX_PEEKS
#: How often it is said how far the way to a far sample is, seconds.
REPORT_EVERY_S = 5.0

_T = TypeVar("_T")


class NearestState(NamedTuple):
    """A state to go forward from to a sample index."""

    state: State
    #: The one that the state is of; 0 where the ledger has none that far back.
    generation: int
    #: Up to there samples were delivered, as far as the ledger can tell, so that any of them may be asked for.
    reach: int
    #: The order that the generation saw.
    timeline: Timeline


def lineage(openings: Sequence[Opening], generation: int | None = None) -> Iterator[Opening]:
    """A generation (None: the present one), the one that it went on from, and so on to the first. Raises ``NotFound``
    for a generation that the ledger does not have."""
    by_number = {opening.generation: opening for opening in openings}
    if generation is not None and generation not in by_number:
        known = (
            f"{min(by_number)} to {max(by_number)}"
            if by_number
            else "none: no trainer has joined yet"
        )
        raise NotFound(f"there is no generation {generation}; the ledger has {known}")
    if generation is None and openings:
        generation = openings[-1].generation
    opening = by_number.get(generation or 0)
    while opening is not None:
        yield opening
        opening = by_number.get(opening.parent)


def covering(
    openings: Sequence[Opening], index: int, generation: int | None = None
) -> Opening | None:
    """The generation in whose part of the run's lineage a sample index lies: the present one (or the one given) from
    its start on, before that its parent, and so on. Raises ``NotFound`` for a generation that the ledger does not have.
    """
    return next(
        (opening for opening in lineage(openings, generation) if index >= opening.start_index), None
    )


def with_samples(openings: Sequence[Opening]) -> list[Opening]:
    """The generations that the run's samples are of, oldest first: the lineage of the present one, without those of
    which nothing is left."""
    kept: list[Opening] = []
    for opening in lineage(openings):
        if not kept or opening.start_index < kept[-1].start_index:
            kept.append(opening)
    return kept[::-1]


class Past:
    """Thread-safe. Whatever takes turns raises ``ServerStopping`` when the server stops."""

    def __init__(self, coordinator: RunCoordinator) -> None:
        self.coordinator = coordinator
        self._lock = threading.Lock()
        # One thread: its queue is what makes them take turns. It starts with the first.
        self._pool = pool(1, "peeks", coordinator.name)
        self._room = threading.BoundedSemaphore(MAX_PEEKS)
        # Of who goes forward at once: one at a time.
        self._at_once = threading.Lock()
        # By the generation in whose line they lie, and sample index; of the timeline that is in force.
        self._known: OrderedDict[tuple[int, int], State] = OrderedDict()
        self._timeline = coordinator.timeline
        self.stopping = False
        #: How the way forward to a far sample stands, for people; empty where none is asked for.
        self.way_forward = ""

    # --- which state is nearest --------------------------------------------------------------------

    def openings(self) -> Sequence[Opening]:
        """All generations that the ledger has."""
        return self.coordinator.ledger.openings(self.coordinator.uid, self.coordinator.stream)

    def in_ledger(self, index: int, generation: int | None = None) -> NearestState:
        """The newest state that the ledger has at or before a sample index; the initial one where it has none.

        ``generation``: as that one saw the order; None for the present one. Raises ``NotFound`` for an unknown one, and
        ``BeyondHorizon`` for what is another run's, that this one was forked from.
        """
        coordinator, openings = self.coordinator, self.openings()
        opening = covering(openings, index, generation)
        timeline = self.timeline_of(openings, generation)
        origin = timeline.origin
        if origin is not None and index < origin.sample_index:
            raise BeyondHorizon(
                f"sample {index} lies before sample {origin.sample_index}, at which run {coordinator.name!r} was "
                f"forked from {origin.run!r}: look for it there"
            )
        if opening is None:
            begin = self.foreign_start(openings)
            if begin is not None:
                raise BeyondHorizon(
                    f"sample {index} lies before the first state that the ledger holds; run {coordinator.name!r} "
                    f"began at sample {begin.sample_index} from an older data loader's checkpoint, and samples before "
                    "that are not of its order"
                )
            return NearestState(timeline.initial(), 0, 0, timeline)
        state = self.journalled(opening, index, timeline)
        if generation is not None and generation != openings[-1].generation:
            return NearestState(
                state, opening.generation, self._farthest(generation, timeline), timeline
            )
        commit = coordinator.view().commit
        if opening is openings[-1] and state.sample_index < commit.sample_index <= index:
            # After the newest journal entry there may be a good deal more, and its boundary is at hand.
            state = timeline.decode(commit.state)
        return NearestState(state, opening.generation, commit.sample_index, timeline)

    def nearest(self, index: int, generation: int | None = None) -> NearestState:
        """The nearest state known at or before a sample index, as a generation had it (None: the present one).

        Raises ``BeyondHorizon`` where that is too far away, ``NotFound`` for an unknown generation.
        """
        nearest = self.in_ledger(index, generation)
        state, line = nearest.state, nearest.generation
        with self._lock:
            between = [
                known
                for of, known in self._known
                if of == line and state.sample_index < known <= index
            ]
            if nearest.timeline is self._in_force() and between:
                state = self._known[line, max(between)]
        if index > nearest.reach and index - state.sample_index > AHEAD_SAMPLES:
            raise BeyondHorizon(
                f"sample {index} is {index - state.sample_index} samples beyond sample {state.sample_index}, the last "
                f"before it that is known of run {self.coordinator.name!r}; a peek goes {AHEAD_SAMPLES} further at "
                f"most (committed: {nearest.reach})"
            )
        return nearest._replace(state=state)

    def foreign_start(self, openings: Sequence[Opening]) -> Imported | None:
        """Where the present line began, if from an older data loader's checkpoint."""
        return (
            self.coordinator.timeline.decode(openings[-1].start_state).imported
            if openings
            else None
        )

    def timeline_of(self, openings: Sequence[Opening], generation: int | None) -> Timeline:
        """The timeline that a generation had when it ended; that of the run for the present one, or None."""
        timeline = self.coordinator.timeline
        later = [
            opening
            for opening in openings
            if generation is not None and opening.generation > generation
        ]
        if not later:
            return timeline
        timeline = timeline.with_revisions(
            [r for r in timeline.revisions if r.made_at < later[0].opened_at]
        )
        return timeline.of_state(openings[-len(later) - 1].start_state)

    def _farthest(self, generation: int, timeline: Timeline) -> int:
        """How far a generation that is over may have come, guessed from its journal, whose entries lie apart.

        Raises ``SnapshotInvalid`` where it came there under a revision that was dropped since.
        """
        last = self._journal(generation, MAX_COUNTER)
        if last is None:
            return 0
        timeline.decode(last.state)
        before = self._journal(generation, max(0, last.sample_index - 1))
        # Every second entry may have gone since, the newest too.
        return last.sample_index + 2 * (last.sample_index - (before or last).sample_index)

    def journalled(self, opening: Opening, index: int, timeline: Timeline) -> State:
        """The newest state at or before a sample index that the ledger's journal has of a generation."""
        start, entry = (
            timeline.decode(opening.start_state),
            self._journal(opening.generation, index),
        )
        if entry is None:
            return start
        journalled = timeline.decode(entry.state)
        return journalled if start.sample_index < journalled.sample_index <= index else start

    def _journal(self, generation: int, index: int) -> JournalEntry | None:
        """The newest entry of a generation at or before a sample index."""
        coordinator = self.coordinator
        return coordinator.ledger.journal(coordinator.uid, coordinator.stream, generation, index)

    def remember(self, generation: int, state: State, timeline: Timeline) -> None:
        """Keeps a state of a generation's line to go forward from, as long as no revision changes its timeline."""
        with self._lock:
            if timeline is not self._in_force() or state.clock_offset != timeline.clock_offset:
                return
            self._known[generation, state.sample_index] = state
            self._known.move_to_end((generation, state.sample_index))
            while len(self._known) > KNOWN_STATES:
                self._known.popitem(last=False)

    # --- going forward -----------------------------------------------------------------------------

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Makes the caller one of the few at once. Raises ``TooManyPeeks`` and ``ServerStopping``."""
        self._refuse_when_stopping()
        if not self._room.acquire(blocking=False):
            raise TooManyPeeks(
                f"{MAX_PEEKS} peeks at run {self.coordinator.name!r} are open already, and a server makes no more "
                "at once, so that training is not slowed: close one, or try again"
            )
        try:
            yield
        finally:
            self._room.release()

    def submit(self, work: Callable[[], _T]) -> Future[_T]:
        """Has work done when its turn comes. Raises ``ServerStopping``."""
        with self._lock:
            self._refuse_when_stopping()
            return self._pool.submit(copy_context().run, work)

    def turn(self, work: Callable[[], _T]) -> _T:
        """Does work in its turn, and waits for it. Raises ``ServerStopping``, and what the work does."""
        try:
            return self.submit(work).result()
        except CancelledError:
            self._refuse_when_stopping()
            raise

    def in_turns(self, made: Iterator[_T]) -> Iterator[_T]:
        """What an iterator gives, each made in its turn. Raises ``ServerStopping``, and what the iterator does."""
        while (one := self.turn(partial(next, made, None))) is not None:
            yield one

    def forward(
        self,
        replay: Replay,
        index: int,
        *,
        generation: int | None = None,
        at_once: bool = False,
        out_of_time: Callable[[], bool] = lambda: False,
    ) -> State:
        """Has a replay go to a sample index, and returns the state there; not all the way where the data end. In turns
        with all others; ``at_once``: on this thread, as soon as nobody else does.

        ``generation``: the one in whose line that is. How far it came is remembered then, also where it gives up since
        the caller has gone, or it is ``out_of_time``: who asks again, or near by, goes on from there.
        """
        if replay.is_before(index):
            with (
                self._at_once if at_once else nullcontext(),
                self._reported(replay, index) as report,
            ):
                while replay.is_before(index) and not (caller.has_gone() or out_of_time()):
                    report()
                    turn = partial(replay.turn, index)
                    turn() if at_once else self.turn(turn)
        if generation is not None:
            self.remember(generation, replay.state(), replay.timeline)
        if replay.is_before(index):
            raise ServerStopping(
                f"nobody waits any more for sample {index}, and {replay.sample_index} is reached; ask again"
            )
        return replay.state()

    def state_at(self, index: int) -> tuple[int, State]:
        """The state at a sample index and the generation in whose line it lies.

        Raises ``BeyondHorizon``, ``TooManyPeeks`` and the ledger's errors.
        """
        self.coordinator.require_lead()
        with self.admitted():
            nearest = self.nearest(index)
            state = self.forward(
                Replay(nearest.timeline, nearest.state), index, generation=nearest.generation
            )
            if state.sample_index < index:
                raise beyond_the_end(index, state.sample_index)
            return nearest.generation, state

    @contextmanager
    def _reported(self, replay: Replay, index: int) -> Iterator[Callable[[], None]]:
        """What is to be called before each turn of a replay to a sample index. Where that takes several turns it says
        at once, and every few seconds, how far it is and when it will be there: in the log and in the stats."""
        clock = self.coordinator.clock
        start, began = replay.sample_index, clock()
        report_at = began if replay.takes_turns(index) else float("inf")

        def report() -> None:
            nonlocal report_at
            now, made = clock(), replay.sample_index - start
            if now < report_at:
                return
            report_at = now + REPORT_EVERY_S
            left_s = (index - start - made) * (now - began) / made if made else 0.0
            pace = (
                f", {made / (now - began):.0f} samples/s, {timedelta(seconds=round(left_s))} to go"
                if made
                else ""
            )
            self.way_forward = f"from sample {start} to {index}: at sample {start + made}{pace}"
            _log.info("%s: going forward %s", self.coordinator.name, self.way_forward)

        try:
            yield report
        finally:
            self.way_forward = ""

    def stop(self) -> None:
        """Ends all that is under way with ``ServerStopping``."""
        with self._lock:
            self.stopping = True
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _in_force(self) -> Timeline:
        """The timeline in force (the caller holds the lock); what is known of another is forgotten."""
        if self._timeline is not self.coordinator.timeline:
            self._timeline = self.coordinator.timeline
            self._known.clear()
        return self._timeline

    def _refuse_when_stopping(self) -> None:
        if self.stopping:
            raise ServerStopping("the server is stopping; peek again when it is back")
