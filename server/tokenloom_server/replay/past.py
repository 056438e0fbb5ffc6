"""The past of a run, made again: one thread, in turns, from the nearest state known.

Peeks, traces, receipts and the way of a restore to its snapshot share it, so that together they cost a training run at
most one core. It reads the run's ledger and what it last committed, and writes nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import TypeVar

from tokenloom_proto.threads import pool

from tokenloom_server.core import caller
from tokenloom_server.core.state import State
from tokenloom_server.errors import BeyondHorizon, ServerStopping, TooManyPeeks
from tokenloom_server.order.replay import Replay, beyond_the_end
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.run.coordinator import RunCoordinator
from tokenloom_server.run.lineage import NearestState
from tokenloom_server.run.past_states import PastStates

#: Peeks, traces and the like of a run at once. Each has a pipeline: a block of every source, and a message.
MAX_PEEKS = 8
#: How far one goes forward from the last state known, where the ledger's journal does not reach: seconds of one core,
#: on most data.
AHEAD_SAMPLES = 2**16
#: States that are remembered: each peek's last messages, so that a stream that breaks goes on at once.
KNOWN_STATES = 8 * MAX_PEEKS

_T = TypeVar("_T")


class Past:
    """Thread-safe. Whatever is made again waits for its turn and raises ``ServerStopping`` when the server stops."""

    def __init__(self, coordinator: RunCoordinator, past_states: PastStates) -> None:
        self.coordinator = coordinator
        self.states = past_states
        self._lock = threading.Lock()
        # One thread: its queue is what makes them take turns. It starts with the first.
        self._pool = pool(1, "peeks", coordinator.name)
        self._room = threading.BoundedSemaphore(MAX_PEEKS)
        # By the generation in whose line they lie, and sample index; of the timeline that is in force.
        self._known: OrderedDict[tuple[int, int], State] = OrderedDict()
        self._timeline = coordinator.timeline
        self.stopping = False

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

    def nearest(self, index: int, generation: int | None = None) -> NearestState:
        """The nearest state known at or before a sample index, as a generation had it (None: the present one).

        Raises ``BeyondHorizon`` where that is too far away, ``NotFound`` for an unknown generation.
        """
        nearest = self.states.nearest(index, generation)
        state, line = nearest.state, nearest.generation
        with self._lock:
            between = [known for of, known in self._known if of == line and state.sample_index < known <= index]
            if nearest.timeline is self._in_force() and between:
                state = self._known[line, max(between)]
        if index > nearest.reach and index - state.sample_index > AHEAD_SAMPLES:
            raise BeyondHorizon(
                f"sample {index} is {index - state.sample_index} samples beyond sample {state.sample_index}, the last "
                f"before it that is known of run {self.coordinator.name!r}; a peek goes {AHEAD_SAMPLES} further at "
                f"most (committed: {nearest.reach})"
            )
        return nearest._replace(state=state)

    def remember(self, generation: int, state: State, timeline: Timeline) -> None:
        """Keeps a state of a generation's line to go forward from, as long as no revision changes its timeline."""
        with self._lock:
            if timeline is not self._in_force() or state.clock_offset != timeline.clock_offset:
                return
            self._known[generation, state.sample_index] = state
            self._known.move_to_end((generation, state.sample_index))
            while len(self._known) > KNOWN_STATES:
                self._known.popitem(last=False)

    def forward(
        self,
        state: State,
        index: int,
        timeline: Timeline,
        generation: int | None = None,
        out_of_time: Callable[[], bool] = lambda: False,
    ) -> State:
        """Goes forward from a state to a sample index; not all the way where the data end.

        ``generation``: the one in whose line that is. How far it came is remembered then, also where it gives up since
        the caller has gone, or it is ``out_of_time``: who asks again, or near by, goes on from there.
        """
        replay = Replay(timeline, state)
        with self.coordinator.way_forward.reported(replay, index) as report:
            while replay.is_before(index) and not (caller.has_gone() or out_of_time()):
                report()
                self.turn(partial(replay.turn, index))
        if generation is not None:
            self.remember(generation, replay.state(), timeline)
        if replay.is_before(index):
            raise ServerStopping(
                f"nobody waits any more for this peek at sample {index}, which came to {replay.sample_index}; ask again"
            )
        return replay.state()

    def state_at(self, index: int) -> tuple[int, State]:
        """The state at a sample index and the generation in whose line it lies.

        Raises ``BeyondHorizon``, ``TooManyPeeks`` and the ledger's errors.
        """
        self.coordinator.require_lead()
        with self.admitted():
            nearest = self.nearest(index)
            state = self.forward(nearest.state, index, nearest.timeline, nearest.generation)
            if state.sample_index < index:
                raise beyond_the_end(index, state.sample_index)
            return nearest.generation, state

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
