"""How long a trainer waited for its batches: only those that were not there are timed."""

from __future__ import annotations

from typing import NamedTuple


class Waited(NamedTuple):
    """Seconds, over the ``next()`` since the last look: that of the last one, of all on average, the longest."""

    last_s: float
    mean_s: float
    longest_s: float


class Waits:
    """Sums that are read now and then, and begin anew with each look."""

    def __init__(self) -> None:
        self._seen = 0
        self._total_s = self._longest_s = self._last_s = 0.0
        self._last_step = -1

    def note(self, step: int, seconds: float) -> None:
        """``next()`` waited for a micro-step, counted from 0; several times where it was interrupted."""
        self._last_s = self._last_s + seconds if self._last_step == step else seconds
        self._last_step = step
        self._total_s += seconds
        self._longest_s = max(self._longest_s, self._last_s)

    def read(self, taken: int) -> Waited:
        """``taken``: the micro-steps up to now. A micro-step that was ready was waited for no time."""
        steps, self._seen = taken - self._seen, taken
        waited = Waited(
            self._last_s if self._last_step == taken - 1 else 0.0, self._total_s / max(1, steps), self._longest_s
        )
        self._total_s = self._longest_s = 0.0
        return waited
