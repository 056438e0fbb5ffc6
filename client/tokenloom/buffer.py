"""The steps between the background thread and ``next()``: the sole owner of what the two share.

Three parties meet here under one lock. The reader puts steps in, the trainer takes them out, and the
writer tells the server how far the trainer is. Each sleeps on its own condition, and is woken only
when it has something to do: a wake-up costs more than taking a step.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenloom.batch import Batch
from tokenloom.errors import Fenced
from tokenloom.snapshot import Point

log = logging.getLogger("tokenloom")

#: A server that says nothing for so long, not even a heartbeat, is taken for gone.
SILENCE_S = 60.0
#: After so long a wait for a batch, and again after each further, the log says what it waits for.
PATIENCE_S = 30.0
#: The server hears of consumed steps at most this often: they cost a message each, and it needs none.
REPORT_EVERY_S = 0.005
#: How often sleepers look for silence; all else wakes them.
TICK_S = 1.0


@dataclass(frozen=True, slots=True)
class Step:
    """A batch, and where the trainer stands after it."""

    batch: Batch
    point: Point


class StepBuffer:
    """Steps that were received and not yet yielded, and how the stream stands."""

    def __init__(self, start_index: int, capacity_steps: int) -> None:
        self.capacity_steps = capacity_steps
        self.received_through = start_index
        self.consumed_through = start_index
        self.committed_through = 0
        self.end_reason: str | None = None
        self.closing = False
        self._steps: deque[Step] = deque()
        self._error: BaseException | None = None
        self._waiting_for = "the connection"
        self._heard_at = time.monotonic()
        self._lock = threading.Lock()
        self._step_ready = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._report = threading.Condition(self._lock)
        self._reporter_idle = False

    # The reader's side

    def heard(self, committed_through: int, waiting_for: str = "") -> None:
        """Notes a sign of life, and what the server waits for."""
        self.committed_through = max(self.committed_through, committed_through)
        self._waiting_for = waiting_for
        self._heard_at = time.monotonic()

    def waits_for(self, what: str) -> None:
        """Notes what a batch would wait for now, for the log."""
        self._waiting_for = what

    def put(self, steps: Sequence[Step]) -> None:
        """Adds a message's steps. Waits while a server ignores its credits, so that memory stays bounded."""
        with self._lock:
            if len(self._steps) >= self.capacity_steps:
                self._heard_at = math.inf  # while nobody reads, silence means nothing
                self._room.wait_for(lambda: len(self._steps) < self.capacity_steps or self.closing)
                self._heard_at = time.monotonic()
            self._steps.extend(steps)
            self.received_through = steps[-1].point.sample_index
            self._step_ready.notify_all()

    def end(self, reason: str) -> None:
        """No step follows those received."""
        with self._lock:
            self.end_reason = reason
            self._step_ready.notify_all()
            self._report.notify_all()

    def fail(self, error: BaseException) -> None:
        """Ends the stream with an error: after the steps received, or instead of them where those are void."""
        with self._lock:
            if isinstance(error, Fenced):
                self._steps.clear()
            self._error = error
            self._step_ready.notify_all()

    def silent(self) -> bool:
        """Whether the server has not been heard for too long."""
        return time.monotonic() - self._heard_at > SILENCE_S

    def all_committed(self) -> bool:
        """Whether the data ended, the trainer has all of it, and the ledger, too: other ranks may be behind,
        and until they are not, a restarted server has to be told again."""
        done = self.end_reason is not None and self.consumed_through == self.received_through
        return done and self.committed_through >= self.consumed_through

    def pause(self, seconds: float | None, until: Callable[[], bool] = bool) -> bool:
        """Sleeps the reader, bounded by ``seconds``, until closing or ``until``; whether it is closing."""
        with self._lock:
            self._room.wait_for(lambda: self.closing or until(), seconds)
            return self.closing

    # The trainer's side

    def take(self, on_silence: Callable[[], None]) -> Step | None:
        """The next step, waiting for it; None at the end of the data."""
        with self._lock:
            if not self._steps:
                self._await_step(on_silence)
                if not self._steps:
                    return None
            step = self._steps.popleft()
            self.consumed_through = step.point.sample_index
            if self._reporter_idle:
                self._report.notify()
            self._room.notify()
            return step

    def _await_step(self, on_silence: Callable[[], None]) -> None:
        began = time.monotonic()
        patience_s = PATIENCE_S
        while not (self._steps or self._error or self.end_reason is not None):
            if self.closing:
                raise RuntimeError("the RemoteDataset was closed while a batch was waited for")
            if not self._step_ready.wait(TICK_S):
                if self.silent():
                    on_silence()
                if time.monotonic() - began > patience_s:
                    patience_s += PATIENCE_S
                    what = self._waiting_for or "nothing that it names"
                    log.warning("no batch for %.0f s; waiting for: %s", time.monotonic() - began, what)
        if not self._steps and self._error is not None:
            raise self._error

    def close(self) -> None:
        """Lets all parties come to an end."""
        with self._lock:
            self.closing = True
            for condition in (self._step_ready, self._room, self._report):
                condition.notify_all()

    # The writer's side

    def next_report(
        self, reported: int, last_at: float, over: Callable[[], bool], on_silence: Callable[[], None]
    ) -> int:
        """Sleeps until the trainer is beyond ``reported``, or all is said; returns how far it is."""
        with self._lock:
            while not (over() or self.closing or self.all_committed()):
                news = self.consumed_through > reported
                rest_s = last_at + REPORT_EVERY_S - time.monotonic()
                if news and rest_s <= 0:
                    break
                if self.silent():
                    on_silence()
                self._reporter_idle = not news
                self._report.wait(rest_s if news else TICK_S)
            self._reporter_idle = False
            return self.consumed_through

    def wake_writer(self) -> None:
        """Makes the writer look again whether its stream is over."""
        with self._lock:
            self._report.notify_all()
