"""The plans of a live run: its sources are measured once, and whoever asks again only waits for the arithmetic."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tokenloom_server.core.state import State
from tokenloom_server.order.record import Order
from tokenloom_server.order.size_estimates import SizeEstimate
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.planning.forecast import forecast, parts_of
from tokenloom_server.planning.plan import RunPlan


class Planner:
    """Thread-safe; one plan is made at a time."""

    def __init__(self, measuring: Callable[[str], object] | None = None) -> None:
        """``measuring`` is told a source's name before it is measured."""
        self._measuring = measuring
        self._lock = threading.Lock()
        # By spec and files: a revision may append some.
        self._measured: dict[tuple[str, tuple[str, ...]], SizeEstimate] = {}
        # Every rank of a launch asks for the same.
        self._last: tuple[Timeline, State, int | None, RunPlan] | None = None

    def plan(self, timeline: Timeline, state: State, until: int | None) -> RunPlan:
        """From a state on (see ``forecast``). Raises also what ``measure`` raises."""
        with self._lock:
            if self._last is not None and self._last[0] is timeline and self._last[1:3] == (state, until):
                return self._last[3]
            plan = forecast(parts_of(timeline, self._extent, state), state, until)
            self._last = timeline, state, until, plan
            return plan

    def _extent(self, order: Order, source_id: int) -> SizeEstimate:
        key = (order.specs[source_id], order.shard_paths[source_id])
        if key not in self._measured:
            if self._measuring is not None:
                self._measuring(order.config.sources[source_id].name)
            self._measured[key] = order.measure(source_id)
        return self._measured[key]
