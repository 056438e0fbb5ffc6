"""The plans of a live run: its sources are measured once, and whoever asks again only waits for the arithmetic."""

from __future__ import annotations

import threading

from tokenloom_server.extents import Extent, measure
from tokenloom_server.order import Order
from tokenloom_server.plan import RunPlan
from tokenloom_server.planning.forecast import forecast
from tokenloom_server.state import State


class Planner:
    """Thread-safe; one plan is made at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By spec and files: a revision may append some.
        self._measured: dict[tuple[str, tuple[str, ...]], Extent] = {}

    def plan(self, order: Order, state: State, until: int | None) -> RunPlan:
        """From a state on (see ``forecast``). Raises also what ``measure`` raises."""
        with self._lock:
            return forecast(order.config, [self._extent(order, i) for i in range(len(order.specs))], state, until)

    def _extent(self, order: Order, source_id: int) -> Extent:
        key = (order.specs[source_id], order.shard_paths[source_id])
        if key not in self._measured:
            self._measured[key] = measure(order, source_id)
        return self._measured[key]
