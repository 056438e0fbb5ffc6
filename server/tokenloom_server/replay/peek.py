"""Looking at a run without taking part in it: nothing is opened, claimed, counted or written.

A peek is the order for a world of one rank, made again from the nearest state known, in turns with all others who look
at the run's past.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from tokenloom_server.core.state import State, digest_hex
from tokenloom_server.errors import JoinRefused, NotFound, OrderMismatch, ServerStopping
from tokenloom_server.order.replay import Replay, beyond_the_end
from tokenloom_server.order.snapshot import ResumePoint
from tokenloom_server.run.generation import Delivery, EndOfData, Waiting
from tokenloom_server.run.past import NearestState, Past
from tokenloom_server.run.resume_points import LATEST, ResumePoints

#: The largest micro-step of a peek, bytes.
MAX_STEP_BYTES = 16 * 2**20
#: A peek that rests for so long lets its pipeline go, seconds: a notebook may stay open for days.
REST_S = 30.0
#: A sample index has at most so many digits.
_INDEX_DIGITS = 16

#: What a turn gives: something to send, or nothing yet.
Made: TypeAlias = Delivery | EndOfData | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeekCall:
    """A Join that only looks. ``resume`` and ``state`` as in ``JoinCall``; ``resume`` may be a sample index, too."""

    rank: int
    world_size: int
    batch_size: int
    resume: str
    state: bytes


class Peeks:
    """All peeks of one run. Thread-safe."""

    def __init__(self, points: ResumePoints) -> None:
        self._coordinator = points.coordinator
        self._points = points
        self._past = points.past
        self._lock = threading.Lock()
        self._streams: set[Peek] = set()

    def join(self, call: PeekCall) -> tuple[int, State]:
        """Where a peek starts: as asked for, else where the ledger stands. Goes forward to it.

        Returns the generation in whose lineage that lies, 0 for none, and the state there.

        Raises ``JoinRefused``, ``SnapshotInvalid``, ``NotFound``, ``BeyondHorizon``, ``TooManyPeeks`` and the
        ledger's errors.
        """
        self._check(call)
        past, timeline = self._past, self._coordinator.timeline
        if call.resume.isdecimal() and len(call.resume) <= _INDEX_DIGITS:
            index = int(call.resume)
            # Of a run of batches the one that has the sample comes as a whole.
            index -= index % timeline.at(index).config.pick_samples
            generation, state = past.state_at(index)
        else:
            self._coordinator.require_lead()
            with past.admitted():
                point = self._point(call)
                state = self._points.forward(point, in_turn=True)
                generation = point.generation or past.in_ledger(state.sample_index).generation
                past.remember(generation, state, timeline)
        return generation, state

    @contextmanager
    def open(self, uid: str, index: int, batch_size: int, digest: str = "") -> Iterator[Peek]:
        """A stream of samples from ``index`` on, in micro-steps of ``batch_size``; it is over with the context.

        ``digest`` is what the client has of the samples before, empty for none. Raises what ``join`` does.
        """
        self._check_batch_size(batch_size)
        if index < 0:
            raise JoinRefused(f"a peek begins at sample {index}; expected one from 0 on")
        coordinator = self._coordinator
        coordinator.require_lead()
        if uid != coordinator.uid:
            raise NotFound(
                f"run {coordinator.name!r} has uid {coordinator.uid}, but this peek began with {uid}: its ledger is "
                "another one now; peek again"
            )
        batch_size = coordinator.order.config.global_batch_size or batch_size
        with self._past.admitted():
            peek = Peek(self._past, self._past.nearest(index), index, batch_size, digest)
            with self._lock:
                self._streams.add(peek)
            try:
                yield peek
            finally:
                with self._lock:
                    self._streams.discard(peek)
                peek.close()

    def stop(self) -> None:
        """Ends all peeks with ``ServerStopping``."""
        self._past.stop()
        with self._lock:
            streams = list(self._streams)
        for peek in streams:
            peek.wake()

    def _check(self, call: PeekCall) -> None:
        if (call.rank, call.world_size) != (0, 1):
            raise JoinRefused(
                f"a peek is rank {call.rank} of {call.world_size}; expected rank 0 of 1: whoever looks sees whole "
                "micro-steps"
            )
        if call.state and call.resume:
            raise JoinRefused(
                f"a peek brings a loaded state and resume={call.resume!r}: give one of them"
            )
        self._check_batch_size(call.batch_size)

    def _check_batch_size(self, batch_size: int) -> None:
        if self._coordinator.order.config.global_batch_size is not None:
            return  # whole batches come, whatever is asked for
        step_bytes = batch_size * self._coordinator.timeline.sample_bytes
        if batch_size < 1 or step_bytes > MAX_STEP_BYTES:
            step = f"a peek's micro-step of {batch_size} samples has {step_bytes} bytes"
            raise JoinRefused(
                f"{step if batch_size else 'batch_size is missing'}; expected 1 sample to {MAX_STEP_BYTES} bytes a "
                "micro-step: give another batch_size"
            )

    def _point(self, call: PeekCall) -> ResumePoint:
        coordinator = self._coordinator
        point = self._points.asked_for(coordinator.stored(), call.state, call.resume or LATEST)
        assert point is not None
        if point.notes and point.digest is not None and not self._points.began_from(point):
            raise JoinRefused(
                f"an older data loader's checkpoint begins an order of its own, and run {coordinator.name!r} has not "
                "begun from it: train from it first (load_state_dict, or a restore), then peek"
            )
        return point


class Peek:
    """One stream: what ``next`` gives is made in its turn, as far as the credits allow.

    ``next`` is for one thread; ``progress`` and ``wake`` may come from others.
    """

    #: Of a world of one.
    rank = 0

    def __init__(
        self, past: Past, nearest: NearestState, index: int, batch_size: int, digest: str
    ) -> None:
        """Samples from ``index`` on; ``nearest`` is a state at or before it."""
        coordinator = past.coordinator
        self._past = past
        self._batch_size = batch_size
        self._message_steps = coordinator.message_steps(batch_size)
        self._replay = Replay(nearest.timeline, nearest.state)
        self._generation = nearest.generation
        # The sample that is next.
        self._index = index
        self._digest = digest
        self._end: EndOfData | None = None
        self._changed = threading.Condition()
        self._consumed = 0
        self._credit_micro_steps = 0
        self._work: Future[Made] | None = None
        self._worked_at = time.monotonic()

    def progress(
        self,
        consumed_through: int,
        credit_micro_steps: int,
        digest: str = "",
        waited_s: float = 0.0,
    ) -> None:
        """The client consumed up to a sample index, and takes so many micro-steps beyond it. The first one begins it
        all.

        ``digest``, of what it consumed, tells nothing new: what was sent had it. Raises ``JoinRefused`` for a sample
        that was not sent.
        """
        if consumed_through > self._index:
            raise JoinRefused(
                f"a peek reports sample {consumed_through} as consumed, but it was sent nothing beyond {self._index}"
            )
        with self._changed:
            self._consumed = max(self._consumed, consumed_through)
            self._credit_micro_steps = max(1, credit_micro_steps)
            self._changed.notify_all()

    def next(
        self, timeout_s: float, interrupted: Callable[[], bool]
    ) -> Delivery | EndOfData | Waiting:
        """What comes next; waits for it at most ``timeout_s``, or until ``interrupted`` (see ``wake``).

        Raises ``ServerStopping``, and what making samples raises, after all samples that are good.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                if self._past.stopping:
                    raise ServerStopping(
                        "the server is stopping; this peek goes on when it is back"
                    )
                if self._work is not None and self._work.done():
                    work, self._work = self._work, None
                    self._worked_at = time.monotonic()
                    made = work.result()
                    if made is not None:
                        return made
                if self._work is None and (steps := self._steps_wanted()):
                    self._work = self._past.submit(partial(self._make, steps))
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

    def close(self) -> None:
        """Takes back what was not begun."""
        if self._work is not None:
            self._work.cancel()

    def _steps_wanted(self) -> int:
        if self._end is not None:
            return 0
        credit = (self._consumed - self._index) // self._batch_size + self._credit_micro_steps
        return min(max(0, credit), self._message_steps)

    def _waiting_for(self) -> str:
        if self._work is None or self._replay.rests or self._replay.sample_index >= self._index:
            return ""
        return f"sample {self._index}: this peek is at {self._replay.sample_index}, going forward to it"

    def _rest(self) -> None:
        if self._work is None and time.monotonic() - self._worked_at > REST_S:
            self._replay.rest()

    # On the thread that makes the past again, while ``next`` waits for it:

    def _make(self, steps: int) -> Made:
        """A message of so many micro-steps, or the end of the data; None for nothing yet."""
        replay, timeline = self._replay, self._past.coordinator.timeline
        replay.switch_to(timeline)
        if replay.is_before(self._index):
            replay.turn(self._index)
            if replay.ended is not None and replay.sample_index < self._index:
                raise beyond_the_end(self._index, replay.sample_index)
            return None
        if self._digest:
            self._check_digest(replay.state())
        # Each message is a group of its own: once it is sent, nothing of it is needed any more.
        group = replay.samples(self._batch_size, steps)
        self._past.remember(self._generation, group.base, timeline)
        if group.marks:
            self._index = group.end
            group.resume_state = timeline.encode(group.base)
            return Delivery(group, 0, len(group.marks), with_base=True)
        assert replay.ended is not None
        self._end = EndOfData(self._index, replay.ended, replay.dropped_samples)
        replay.rest()
        return self._end

    def _check_digest(self, state: State) -> None:
        actual, expected, self._digest = digest_hex(state.digest), self._digest, ""
        if actual != expected:
            raise OrderMismatch(
                f"sample {state.sample_index} has digest {actual} here, but this peek came there with {expected}: "
                "the data, the tokeniser or the software changed; peek again"
            )
