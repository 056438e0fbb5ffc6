"""Looking at a run without taking part in it: nothing is opened, claimed, counted or written.

A peek is the order for a world of one rank, made by a pipeline of its own that goes forward from the nearest
state known. The run is only read: its ledger, and what it last committed. All peeks of a run are made by
one thread, in turns, so that together they cost a training run at most one core.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import TypeAlias, TypeVar

from tokenloom_server.core.state import State, digest_hex
from tokenloom_server.errors import (
    BeyondHorizon,
    JoinRefused,
    NotFound,
    OrderMismatch,
    ServerStopping,
    SourceError,
    TokenizerError,
    TooManyPeeks,
)
from tokenloom_server.order.pipeline import BatchPlan, Pipeline
from tokenloom_server.order.snapshot import ResumePoint
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.run.coordinator import RunCoordinator
from tokenloom_server.run.delivery import Delivery, EndOfData, Waiting
from tokenloom_server.run.history import LATEST, History, Known

#: Peeks of a run at once. Each has a pipeline: a block of every source, and a message.
MAX_PEEKS = 8
#: How far a peek goes forward from the last state known, where the ledger's journal does not reach: seconds of one
#: core, on most data.
AHEAD_SAMPLES = 2**16
#: The largest step of a peek, bytes.
MAX_STEP_BYTES = 16 * 2**20
#: Going forward, the thread of all peeks is free for the others after so many tokens.
_TURN_TOKENS = 2**20
#: Or bytes, where rows travel as they are.
_TURN_BYTES = 2**25
#: A peek that rests for so long lets its pipeline go, seconds: a notebook may stay open for days.
REST_S = 30.0
#: States that are remembered: each peek's last messages, so that a stream that breaks goes on at once.
_KNOWN_STATES = 8 * MAX_PEEKS
#: A sample index has at most so many digits.
_INDEX_DIGITS = 16

#: What a turn gives: something to send, or nothing yet.
Made: TypeAlias = Delivery | EndOfData | None

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeekCall:
    """A Join that only looks. ``resume`` and ``state`` as in ``JoinCall``; ``resume`` may be a sample index, too."""

    rank: int
    world_size: int
    batch_size: int
    resume: str
    state: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PeekStart:
    """Where a peek starts. ``generation`` is the one in whose lineage that lies; 0 for none."""

    uid: str
    generation: int
    state: State


class Peeks:
    """All peeks of one run. Thread-safe."""

    def __init__(self, coordinator: RunCoordinator, history: History) -> None:
        self._coordinator = coordinator
        self._history = history
        self._lock = threading.Lock()
        # One thread: its queue is what makes the peeks take turns. It starts with the first.
        self._pool = ThreadPoolExecutor(1, f"{coordinator.name}-peeks")
        self._places = 0
        self._streams: set[Peek] = set()
        # By the generation in whose line they lie, and sample index; of the course that is in force.
        self._known: OrderedDict[tuple[int, int], State] = OrderedDict()
        self._timeline = coordinator.timeline
        self.stopping = False

    def join(self, call: PeekCall, interrupted: Callable[[], bool]) -> PeekStart:
        """Where a peek starts: as asked for, else where the ledger stands. Goes forward to it.

        Raises ``JoinRefused``, ``SnapshotInvalid``, ``NotFound``, ``BeyondHorizon``, ``TooManyPeeks`` and the
        ledger's errors.
        """
        self._check(call)
        self._coordinator.require_lead()
        timeline = self._coordinator.timeline
        with self.place():
            if call.resume.isdecimal() and len(call.resume) <= _INDEX_DIGITS:
                index = int(call.resume)
                # Of a run of batches the one that has the sample comes as a whole.
                index -= index % timeline.at(index).config.pick_samples
                found = self.nearest(index)
                generation, state = found.generation, self.advance(found.state, index, interrupted, timeline)
                if state.sample_index < index:
                    raise _beyond_the_end(index, state)
            else:
                point = self._point(call)
                state = self._history.forward(
                    point, lambda base, index: self.advance(base, index, interrupted, timeline)
                )
                generation = point.generation or self._history.nearest(state.sample_index).generation
            self.remember(generation, state, timeline)
            return PeekStart(uid=self._coordinator.uid, generation=generation, state=state)

    def state_at(self, index: int) -> State:
        """The state at a sample index, remembered: who searches for one asks near by again. Raises what ``join``
        does."""
        self._coordinator.require_lead()
        timeline = self._coordinator.timeline
        with self.place():
            found = self.nearest(index)
            state = self.advance(found.state, index, lambda: self.stopping, timeline)
            if state.sample_index < index:
                raise _beyond_the_end(index, state)
            self.remember(found.generation, state, timeline)
            return state

    @contextmanager
    def open(self, uid: str, index: int, batch_size: int, digest: str = "") -> Iterator[Peek]:
        """A stream of samples from ``index`` on, in steps of ``batch_size``; it is over with the context.

        ``digest`` is what the client has behind the samples before, empty for none. Raises what ``join`` does.
        """
        self._check_batch_size(batch_size)
        if index < 0:
            raise JoinRefused(f"a peek begins at sample {index}; expected one from 0 on")
        self._coordinator.require_lead()
        if uid != self._coordinator.uid:
            raise NotFound(
                f"run {self._coordinator.name!r} has uid {self._coordinator.uid}, but this peek began with {uid}: its "
                "ledger is another one now; peek again"
            )
        batch_size = self._coordinator.order.config.global_batch_size or batch_size
        with self.place():
            found = self.nearest(index)
            peek = Peek(self._coordinator, self, found, index, batch_size, digest)
            with self._lock:
                self._streams.add(peek)
            try:
                yield peek
            finally:
                with self._lock:
                    self._streams.discard(peek)
                peek.close()

    def submit(self, work: Callable[[], _T]) -> Future[_T]:
        """Has work done when its turn comes. Raises ``ServerStopping``."""
        with self._lock:
            self._refuse_when_stopping()
            return self._pool.submit(work)

    def remember(self, generation: int, state: State, timeline: Timeline) -> None:
        """Keeps a state of a generation's line to go forward from, as long as no revision changes its course."""
        with self._lock:
            if timeline is not self._in_force():
                return
            self._known[generation, state.sample_index] = state
            self._known.move_to_end((generation, state.sample_index))
            while len(self._known) > _KNOWN_STATES:
                self._known.popitem(last=False)

    def stop(self) -> None:
        """Ends all peeks with ``ServerStopping``."""
        with self._lock:
            self.stopping = True
            streams = list(self._streams)
            self._pool.shutdown(wait=False, cancel_futures=True)
        for peek in streams:
            peek.wake()

    def _in_force(self) -> Timeline:
        """The course (the caller holds the lock); what is known of another is forgotten."""
        if self._timeline is not self._coordinator.timeline:
            self._timeline = self._coordinator.timeline
            self._known.clear()
        return self._timeline

    @contextmanager
    def place(self) -> Iterator[None]:
        """One of the few at once. Raises ``TooManyPeeks`` and ``ServerStopping``."""
        with self._lock:
            self._refuse_when_stopping()
            if self._places >= MAX_PEEKS:
                raise TooManyPeeks(
                    f"{MAX_PEEKS} peeks at run {self._coordinator.name!r} are open already, and a server makes no "
                    "more at once, so that training is not slowed: close one, or try again"
                )
            self._places += 1
        try:
            yield
        finally:
            with self._lock:
                self._places -= 1

    def _refuse_when_stopping(self) -> None:
        if self.stopping:
            raise ServerStopping("the server is stopping; peek again when it is back")

    def _check(self, call: PeekCall) -> None:
        if (call.rank, call.world_size) != (0, 1):
            raise JoinRefused(
                f"a peek is rank {call.rank} of {call.world_size}; expected rank 0 of 1: whoever looks sees whole steps"
            )
        if call.state and call.resume:
            raise JoinRefused(f"a peek brings a loaded state and resume={call.resume!r}: give one of them")
        self._check_batch_size(call.batch_size)

    def _check_batch_size(self, batch_size: int) -> None:
        if self._coordinator.order.config.global_batch_size is not None:
            return  # whole batches come, whatever is asked for
        step_bytes = batch_size * self._coordinator.timeline.sample_bytes
        if batch_size < 1 or step_bytes > MAX_STEP_BYTES:
            raise JoinRefused(
                f"a peek's step of {batch_size} samples has {step_bytes} bytes; expected 1 sample to {MAX_STEP_BYTES} "
                "bytes: take another batch size"
            )

    def _point(self, call: PeekCall) -> ResumePoint:
        history, coordinator = self._history, self._coordinator
        point = history.asked_for(coordinator.stored(), call.state, call.resume or LATEST)
        assert point is not None
        if point.notes and point.base is not None and not history.began_from(point):
            raise JoinRefused(
                f"an older data loader's checkpoint begins an order of its own, and run {coordinator.name!r} has not "
                "begun from it: train from it first (load_state_dict, or a restore), then peek"
            )
        return point

    def pin(self, text: str, skip: int) -> str:
        """``History.pin``, in turns with the peeks."""
        timeline = self._coordinator.timeline
        return self._history.pin(text, skip, lambda base, index: self.advance(base, index, lambda: False, timeline))

    def nearest(self, index: int, generation: int | None = None) -> Known:
        """The nearest state known at or before a sample index, as a generation had it (None: the present one).

        Raises ``BeyondHorizon`` where that is too far away, ``NotFound`` for an unknown generation.
        """
        found = self._history.nearest(index, generation)
        state = found.state
        with self._lock:
            line = found.generation
            before = [at for of, at in self._known if of == line and state.sample_index < at <= index]
            if found.timeline is self._in_force() and before:
                state = self._known[line, max(before)]
        if index > found.reach and index - state.sample_index > AHEAD_SAMPLES:
            raise BeyondHorizon(
                f"sample {index} is {index - state.sample_index} samples beyond sample {state.sample_index}, the last "
                f"before it that is known of run {self._coordinator.name!r}; a peek goes {AHEAD_SAMPLES} further at "
                f"most (committed: {found.reach})"
            )
        return found._replace(state=state)

    def advance(
        self, state: State, index: int, interrupted: Callable[[], bool], timeline: Timeline, line: int | None = None
    ) -> State:
        """Goes forward, in turns with the other peeks; not all the way where the data end.

        ``line``: the generation in whose line that is; where it is interrupted, whoever asks again goes on from there.
        """
        if state.sample_index == index:
            return state
        way = _Way(timeline, state)
        while way.index < index and not way.over:
            if interrupted():
                if line is not None:
                    self.remember(line, way.pipeline.state(), timeline)
                raise ServerStopping(
                    f"nobody waits any more for this peek at sample {index}, which came to {way.index}; ask again"
                )
            self.turn(partial(way.turn, index))
        return way.pipeline.state()

    def turn(self, work: Callable[[], _T]) -> _T:
        """Does work in its turn, and waits for it. Raises ``ServerStopping``, and what the work does."""
        try:
            return self.submit(work).result()
        except CancelledError:
            self._refuse_when_stopping()
            raise


class _Way:
    """A pipeline on its way to a sample index."""

    def __init__(self, timeline: Timeline, state: State) -> None:
        self.timeline = timeline
        self.pipeline: Pipeline = timeline.pipeline(state)
        self.index = state.sample_index
        order = timeline.at(state.sample_index)
        self._turn_samples = max(1, _TURN_TOKENS // order.config.sequence_length)
        if order.config.batching is not None:
            pick = order.config.pick_samples
            self._turn_samples = max(1, _TURN_BYTES // (pick * order.sample_bytes)) * pick

    def take(self, timeline: Timeline) -> None:
        """Goes on under what is in force now. Raises ``OrderMismatch`` where it is behind a revision that came or went
        since."""
        if timeline is self.timeline:
            return
        for before, now in zip_longest(self.timeline.revisions, timeline.revisions):
            if before != now:
                changed = min(revision.sample_index for revision in (before, now) if revision is not None)
                if changed < self.index:
                    raise OrderMismatch(
                        f"the mixture was revised at sample {changed} while this peek was at sample {self.index}: what "
                        "it saw behind that is not the run's order any more; peek again"
                    )
                break
        self.timeline = timeline
        self.pipeline.switch(timeline.switches(self.index))

    @property
    def over(self) -> bool:
        return self.pipeline.ended is not None

    def turn(self, index: int) -> None:
        """Goes a bit further, at most to ``index``."""
        samples = min(index - self.index, self._turn_samples)
        self.pipeline.advance(samples)
        self.index = self.pipeline.state().sample_index if self.over else self.index + samples


class Peek:
    """One stream: what ``next`` gives is made by the thread of all peeks, as far as the credits allow.

    ``next`` is for one thread; ``progress`` and ``wake`` may come from others.
    """

    #: Of a world of one.
    rank = 0

    def __init__(
        self, coordinator: RunCoordinator, peeks: Peeks, known: Known, index: int, batch_size: int, digest: str
    ) -> None:
        """Samples from ``index`` on; ``known`` is a state at or before it."""
        self._coordinator = coordinator
        self._peeks = peeks
        self._batch_size = batch_size
        self._message_steps = coordinator.message_steps(batch_size)
        self.name = f"{coordinator.name}-peek"
        # Where the pipeline begins while there is none, and the sample that is next.
        self._state, self._timeline = known.state, known.timeline
        self._line = known.generation
        self._index = index
        self._digest = digest
        self._way: _Way | None = None
        self._careful = False
        self._end: EndOfData | None = None
        self._changed = threading.Condition()
        self._consumed = 0
        self._credit_steps = 0
        self._work: Future[Made] | None = None
        self._worked_at = time.monotonic()

    def progress(self, consumed_through: int, credit_steps: int, digest: str = "") -> None:
        """The client consumed up to a sample index, and takes so many steps beyond it. The first one begins it all.

        ``digest``, of what it consumed, tells nothing new: what was sent had it. Raises ``JoinRefused`` for a sample
        that was not sent.
        """
        if consumed_through > self._index:
            raise JoinRefused(
                f"a peek reports sample {consumed_through} as consumed, but it was sent nothing beyond {self._index}"
            )
        with self._changed:
            self._consumed = max(self._consumed, consumed_through)
            self._credit_steps = max(1, credit_steps)
            self._changed.notify_all()

    def next(self, timeout_s: float, interrupted: Callable[[], bool]) -> Delivery | EndOfData | Waiting:
        """What comes next; waits for it at most ``timeout_s``, or until ``interrupted`` (see ``wake``).

        Raises ``ServerStopping``, and what making samples raises, behind all that is good.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                if self._peeks.stopping:
                    raise ServerStopping("the server is stopping; this peek goes on when it is back")
                if self._work is not None and self._work.done():
                    work, self._work = self._work, None
                    self._worked_at = time.monotonic()
                    found = work.result()
                    if found is not None:
                        return found
                if self._work is None and (steps := self._steps_wanted()):
                    self._work = self._peeks.submit(partial(self._make, steps))
                    self._work.add_done_callback(lambda _: self.wake())
                    # It may be done by now, and nobody would be woken for it.
                    continue
                left = deadline - time.monotonic()
                if left <= 0 or interrupted():
                    self._rest()
                    return Waiting(self._waiting_for())
                self._changed.wait(left)

    def wake(self) -> None:
        """Makes a waiting ``next`` look at what interrupts it."""
        with self._changed:
            self._changed.notify_all()

    def finish(self, said_goodbye: bool) -> None:
        """The client has all that it wants: nothing of a peek is to be committed."""

    def close(self) -> None:
        """Takes back what was not begun."""
        if self._work is not None:
            self._work.cancel()

    def _steps_wanted(self) -> int:
        if self._end is not None:
            return 0
        credit = (self._consumed - self._index) // self._batch_size + self._credit_steps
        return min(max(0, credit), 1 if self._careful else self._message_steps)

    def _waiting_for(self) -> str:
        if self._work is None or self._way is None or self._way.index >= self._index:
            return ""
        return f"sample {self._index}: this peek is at {self._way.index}, going forward to it"

    def _rest(self) -> None:
        if self._work is None and self._way is not None and time.monotonic() - self._worked_at > REST_S:
            self._state, self._timeline, self._way = self._way.pipeline.state(), self._way.timeline, None

    # On the thread of all peeks, while ``next`` waits for it:

    def _make(self, steps: int) -> Made:
        """A message of so many steps, or the end of the data; None for nothing yet."""
        way = self._way = self._way or _Way(self._timeline, self._state)
        way.take(self._coordinator.timeline)
        if way.index < self._index:
            way.turn(self._index)
            if way.over and way.index < self._index:
                raise _beyond_the_end(self._index, way.pipeline.state())
            return None
        # Each message is a group of its own: once it is sent, nothing of it is needed any more.
        pipeline = way.pipeline
        plan = BatchPlan(start_index=self._index, world_size=1, batch_size=self._batch_size, group_steps=steps)
        group = pipeline.begin_group(plan)
        self._check_digest(group.base)
        self._peeks.remember(self._line, group.base, way.timeline)
        try:
            pipeline.fill(group, steps)
        except (SourceError, TokenizerError):
            if steps == 1:
                raise
            # What is good before the fault goes out first, step by step.
            self._state, self._timeline, self._way, self._careful = group.base, way.timeline, None, True
            return None
        if group.marks:
            self._index = way.index = group.end
            return Delivery(group, 0, len(group.marks), with_base=True)
        assert pipeline.ended is not None
        self._end = EndOfData(self._index, pipeline.ended, pipeline.dropped_samples)
        self._way = None
        return self._end

    def _check_digest(self, state: State) -> None:
        found = digest_hex(state.digest)
        came, self._digest = self._digest, ""
        if came and found != came:
            raise OrderMismatch(
                f"sample {state.sample_index} has digest {found} here, but this peek came there with {came}: "
                "the data, the tokeniser or the software changed; peek again"
            )


def _beyond_the_end(index: int, end: State) -> BeyondHorizon:
    return BeyondHorizon(f"sample {index} does not exist: the data end at sample {end.sample_index}")
