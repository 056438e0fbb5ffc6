"""What a rank can say of its own stream, as plain numbers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


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
