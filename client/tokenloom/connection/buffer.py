"""The micro-steps between the background thread and ``next()``: the sole owner of what the two share.

Three parties meet here. The reader puts micro-steps in, the trainer takes them out, and the writer tells the
server how far the trainer is. Each sleeps on its own condition of one lock, and is woken only when it has
something to do: a wake-up costs more than taking a micro-step, for which the trainer needs none of it. Who is
about to sleep says first what is to wake it, and then looks once more.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from tokenloom.batch.arrays import Steps
from tokenloom.connection.join import Opening, Request
from tokenloom.errors import Fenced, JoinRefused, ServerUnavailable, SnapshotInvalid
from tokenloom.snapshot import Point

# What a rank can say of its own stream, as plain numbers.


class Metrics(NamedTuple):
    """Those of ``ConnectedDataset.metrics``; all 0 before the Join."""

    wait_ms_last: float = 0
    wait_ms_mean: float = 0
    wait_ms_max: float = 0
    queue_micro_steps: int = 0
    queue_capacity_micro_steps: int = 0
    micro_steps: int = 0
    tokens: int = 0
    sample_index: int = 0
    total_tokens: int = 0
    uncommitted_samples: int = 0
    reconnects: int = 0


class Waits:
    """How long a trainer waited for its batches: sums that are read now and then, and begin anew with each look. Only
    batches that were not there are timed."""

    def __init__(self) -> None:
        self._seen = 0
        self._total_s = self._longest_s = self._last_s = 0.0
        self._last_step = -1
        #: Of all waits that are over, and when the present one began.
        self._waited_s = 0.0
        self._since: float | None = None

    @property
    def waited_s(self) -> float:
        """Seconds of all waits until now, that of the present one too."""
        since = self._since
        return self._waited_s + (time.perf_counter() - since if since is not None else 0.0)

    @contextmanager
    def waiting(self, step: int) -> Iterator[None]:
        """Times what ``next()`` does until a micro-step is there, counted from 0."""
        self._since = began = time.perf_counter()
        try:
            yield
        finally:
            self._since, seconds = None, time.perf_counter() - began
            self._waited_s += seconds
            self.note(step, seconds)

    def note(self, step: int, seconds: float) -> None:
        """``next()`` waited for a micro-step, counted from 0; several times where it was interrupted."""
        self._last_s = self._last_s + seconds if self._last_step == step else seconds
        self._last_step = step
        self._total_s += seconds
        self._longest_s = max(self._longest_s, self._last_s)

    def read(self, taken: int) -> tuple[float, float, float]:
        """Seconds over the micro-steps since the last look: of the last one, on average, the longest. ``taken``: the
        micro-steps up to now; one that was ready was waited for no time."""
        steps, self._seen = taken - self._seen, taken
        last_s = self._last_s if self._last_step == taken - 1 else 0.0
        waited = last_s, self._total_s / max(1, steps), self._longest_s
        self._total_s = self._longest_s = 0.0
        return waited


log = logging.getLogger("tokenloom")

#: A server that says nothing for so long, not even a heartbeat, is taken for gone.
SILENCE_S = 20.0
#: After so long a wait for a batch, and again after each further, the log says what it waits for.
PATIENCE_S = 30.0
#: The server hears of consumed micro-steps within this time, for what it commits and shows.
REPORT_WITHIN_S = 0.02
#: It hears earlier where it may be waiting for that, but never more often than this: each report costs a message.
REPORT_APART_S = 0.005
#: And without news at least this often, so that the server knows that somebody is here.
SIGN_OF_LIFE_S = 2.0
#: When the trainer has waited so long for a micro-step, the server may be waiting, too: its window may be full.
STARVED_S = 0.01
#: How often sleepers look for silence; all else wakes them.
TICK_S = 1.0

#: Where the trainer stands after a micro-step, and the step's place in its message.
Step: TypeAlias = tuple[Point, Steps, int]


class StepBuffer:
    """Micro-steps that were received and not yet yielded, and how the stream stands."""

    def __init__(self, request: Request, opening: Opening, on_silence: Callable[[], None]) -> None:
        """``on_silence`` is called by whoever waits and notices that the server says nothing. All micro-steps of an
        optimiser step are there before its first is taken, so the schedule's capacity is at least that."""
        self._start = opening.start
        self._schedule = opening.schedule
        self._timeout_s = request.options.batch_timeout_s
        self._accumulate = request.accumulate
        self._on_silence = on_silence
        # Of the optimiser step that the trainer is in: how many micro-steps are taken at its end, and the labels of
        # all.
        self._optimizer_end = 0
        self._label_tokens = 0
        self._counted = request.counted
        self.received = opening.start
        #: Where the trainer stands; what lies before is reported as consumed.
        self.consumed = opening.start
        self.committed_through = 0
        self.end_reason: str | None = None
        self.closing = False
        self._steps: deque[Step] = deque()
        self._maker = request.maker(opening.layout)
        self._error: BaseException | None = None
        self._waiting_for = "the connection"
        self._heard_at = time.monotonic()
        self._lock = threading.Lock()
        self._step_ready = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._report = threading.Condition(self._lock)
        self._taking = threading.Lock()
        self._reader_waits = False
        self._starved = False
        # For metrics: micro-steps taken, and what some of them were waited for.
        self.taken = 0
        self._waits = Waits()
        # What the writer sleeps for: it has news and delays them, and the sample index at which the trainer wakes it.
        self._writer_delays = False
        self._wakes_writer_at = math.inf

    @property
    def capacity_steps(self) -> int:
        """Micro-steps that are held at most, beyond those consumed."""
        return self._schedule.capacity_steps(self.consumed.sample_index)

    @property
    def received_through(self) -> int:
        """End index of the last micro-step that was received."""
        return self.received.sample_index

    @property
    def consumed_through(self) -> int:
        """End index of the last micro-step that ``next()`` returned."""
        return self.consumed.sample_index

    @property
    def drained(self) -> bool:
        """Whether the data ended and the trainer has all of it."""
        return self.end_reason is not None and self.consumed_through == self.received_through

    # The reader's side

    def heard(self, committed_through: int, waiting_for: str = "") -> None:
        """Notes a sign of life, and what the server waits for."""
        self.committed_through = max(self.committed_through, committed_through)
        self._waiting_for = waiting_for
        self._heard_at = time.monotonic()

    def waits_for(self, obstacle: str) -> None:
        """Notes what a batch would wait for now, for the log."""
        self._waiting_for = obstacle

    def put(self, steps: Sequence[Step]) -> None:
        """Adds a message's micro-steps. Waits while a server ignores its credits, so that memory stays bounded."""
        with self._lock:
            if len(self._steps) >= self.capacity_steps:
                self._heard_at = math.inf  # while nobody reads, silence means nothing
                self._reader_waits = True
                self._room.wait_for(lambda: len(self._steps) < self.capacity_steps or self.closing)
                self._reader_waits = False
                self._heard_at = time.monotonic()
            self._steps.extend(steps)
            self.received = steps[-1][0]
            self._step_ready.notify_all()

    def end(self, reason: str) -> None:
        """No micro-step follows those received."""
        with self._lock:
            self.end_reason = reason
            self._step_ready.notify_all()
            self._report.notify_all()

    def fail(self, error: BaseException) -> None:
        """Ends the stream with an error: after the micro-steps received, or instead of them where those are void."""
        with self._lock:
            if isinstance(error, Fenced | JoinRefused | SnapshotInvalid):
                self._steps.clear()
            self._error = error
            self._step_ready.notify_all()

    def silent(self) -> bool:
        """Whether the server has not been heard for too long."""
        return time.monotonic() - self._heard_at > SILENCE_S

    def all_committed(self) -> bool:
        """Whether the data ended, the trainer has all of it, and the ledger, too: other ranks may be slower, and
        until they are done a restarted server has to hear it again."""
        return self.drained and self.nothing_to_commit()

    def nothing_to_commit(self) -> bool:
        """Whether the server need not hear again how far the trainer is."""
        return not self._counted or self.committed_through >= self.consumed_through

    def pause(self, seconds: float | None, until: Callable[[], bool] = bool) -> bool:
        """Sleeps the reader, bounded by ``seconds``, until closing or ``until``; whether it is closing."""
        with self._lock:
            self._room.wait_for(lambda: self.closing or until(), seconds)
            return self.closing

    # The trainer's side

    def take(self) -> tuple[dict[str, Any], Point] | None:
        """The next batch, and where the trainer stands after it; waits for it, at most ``timeout_s``. None at the end
        of the data."""
        with self._taking:  # else two threads would get the same micro-step
            if self._accumulate > 1 and self.taken == self._optimizer_end:
                self._begin_optimizer_step()
            step = self._steps[0] if self._steps else self._await_step()
            if step is None:
                return None
            point, message, number = step
            batch = self._maker.batch(message, number)
            if self._accumulate > 1:
                batch["global_label_tokens"] = self._label_tokens
            # Only now, so that a micro-step whose batch could not be made is not lost.
            try:
                self._steps.popleft()
            except IndexError:  # fenced just now
                self._await_step()
            self.consumed = point
            self.taken += 1
            if point.sample_index >= self._wakes_writer_at:
                self._wakes_writer_at = math.inf  # once
                self.wake_writer()
            if self._reader_waits:
                with self._lock:
                    self._room.notify()
            self._send_following()
            return batch, point

    def _begin_optimizer_step(self) -> None:
        """Waits for all micro-steps of an optimiser step, fewer where the data end, and counts their labels."""
        self._await_step(self._accumulate)
        with self._lock:
            steps = list(islice(self._steps, self._accumulate))
        self._label_tokens = sum(message.label_tokens[number] for _, message, number in steps)
        self._optimizer_end = self.taken + len(steps)

    def _await_step(self, count: int = 1) -> Step | None:
        """The next micro-step, as soon as ``count`` of them are there, or the data end after it."""
        # Of this process's own time: one that was stopped has not waited.
        waited_s, patience_s = 0.0, PATIENCE_S
        with self._lock, self._waits.waiting(self.taken):
            while not (len(self._steps) >= count or self._error or self.end_reason is not None):
                if self.closing:
                    raise RuntimeError("the dataset was closed while a batch was waited for")
                tick_s = TICK_S if self._starved else STARVED_S
                if self._step_ready.wait(tick_s):
                    continue
                waited_s += tick_s
                self._starved = True
                if self._writer_delays:
                    self._report.notify_all()
                if self.silent():
                    self._on_silence()
                obstacle = self._waiting_for or "nothing that it names"
                if waited_s > self._timeout_s:
                    raise ServerUnavailable(
                        f"no batch for {self._timeout_s:g} s (batch_timeout_s); waiting for: {obstacle}. See the "
                        "server's log; where it is back, next() goes on"
                    )
                if waited_s > patience_s:
                    patience_s += PATIENCE_S
                    log.warning("no batch for %.0f s; waiting for: %s", waited_s, obstacle)
            self._starved = False
            if self._error is not None and len(self._steps) < count:
                raise self._error
            return self._steps[0] if self._steps else None

    def _send_following(self) -> None:
        """Begins the micro-step that ``take`` would give next, if it is there. What cannot be begun now is tried
        again, and raised, when it is asked for."""
        try:
            _, message, number = self._steps[0]
            self._maker.send(message, number)
        except Exception:
            pass

    def close(self) -> None:
        """Lets all parties come to an end."""
        with self._lock:
            self.closing = True
            for condition in (self._step_ready, self._room, self._report):
                condition.notify_all()

    @property
    def waited_s(self) -> float:
        """For how long ``next()`` has waited for micro-steps since the Join, seconds."""
        return self._waits.waited_s

    def metrics(self, reconnects: int) -> Metrics:
        """The stream's figures; it was opened again ``reconnects`` times. Waits are those since the last call."""
        with self._lock:
            last_s, mean_s, longest_s = self._waits.read(self.taken)
        point = self.consumed
        return Metrics(
            wait_ms_last=1000 * last_s,
            wait_ms_mean=1000 * mean_s,
            wait_ms_max=1000 * longest_s,
            queue_micro_steps=len(self._steps),
            queue_capacity_micro_steps=self.capacity_steps,
            micro_steps=self.taken,
            tokens=point.total_tokens - self._start.total_tokens,
            sample_index=point.sample_index,
            total_tokens=point.total_tokens,
            uncommitted_samples=max(0, point.sample_index - self.committed_through),
            reconnects=reconnects,
        )

    # The writer's side

    def next_report(self, reported: int, last_at: float, over: Callable[[], bool]) -> Point:
        """Sleeps until the trainer is beyond ``reported`` and the server should know, a sign of life is due, or all is
        said; returns where the trainer stands."""
        with self._lock:
            while not (over() or self.closing or self.all_committed()):
                rest_s = self._plan_report(reported, time.monotonic() - last_at)
                if rest_s <= 0:
                    break
                if self.silent():
                    self._on_silence()
                if self.consumed_through < self._wakes_writer_at:
                    self._report.wait(rest_s)
            return self.consumed

    def _plan_report(self, reported: int, age_s: float) -> float:
        """For how long the writer may sleep, ``age_s`` after its last report; notes what is to wake it before."""
        self._writer_delays = False
        self._wakes_writer_at = math.inf
        if age_s < REPORT_APART_S:
            return REPORT_APART_S - age_s
        if self.consumed_through == reported:
            self._wakes_writer_at = reported + 1
            return min(TICK_S, SIGN_OF_LIFE_S - age_s)
        early_at = reported + self._schedule.half_of_capacity(reported)
        if self._starved or self.consumed_through >= early_at:
            return 0
        self._writer_delays = True
        self._wakes_writer_at = early_at
        return REPORT_WITHIN_S - age_s

    def wake_writer(self) -> None:
        """Makes the writer look again: whether its stream is over, and what there is to report."""
        with self._lock:
            self._report.notify_all()
