"""The plans of a live run: its sources are measured once, and whoever asks again only waits for the arithmetic."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from fractions import Fraction

from tokenloom_server.core.state import State
from tokenloom_server.core.token_curve import TokenCurve
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.size_estimates import measure
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.planning.forecast import Part, forecast
from tokenloom_server.planning.plan import RunPlan


class Planner:
    """Thread-safe; one plan is made at a time."""

    def __init__(self, measuring: Callable[[str], object] | None = None) -> None:
        """``measuring`` is called with a source's name before it is measured."""
        self._measuring = measuring
        self._lock = threading.Lock()
        # By spec and files: a revision may append some.
        self._measured: dict[tuple[str, tuple[str, ...]], TokenCurve] = {}
        # Every rank of a launch asks for the same.
        self._last: tuple[Timeline, State, int | None, RunPlan] | None = None

    def plan(self, timeline: Timeline, state: State, until: int | None) -> RunPlan:
        """From a state on (see ``forecast``). Raises also what ``measure`` raises."""
        with self._lock:
            if (
                self._last is not None
                and self._last[0] is timeline
                and self._last[1:3] == (state, until)
            ):
                return self._last[3]
            plan = forecast(list(self._parts(timeline, state)), state, until)
            self._last = timeline, state, until, plan
            return plan

    def _parts(self, timeline: Timeline, state: State) -> Iterator[Part]:
        """The parts of a run that a plan from a state on goes through."""
        first = max(
            i for i, segment in enumerate(timeline.segments) if segment.begin <= state.sample_index
        )
        for segment in timeline.segments[first:]:
            factory = segment.factory
            yield Part(
                config=factory.config,
                curves=[
                    self._curve(factory, source.id) if source.presence != "dropped" else None
                    for source in factory.config.sources
                ],
                size_estimates=factory.record.size_estimates,
                tokens=segment.tokens,
                grown=segment.grown,
                returning=segment.returning,
                skip=segment.skip,
            )

    def _curve(self, factory: PipelineFactory, source_id: int) -> TokenCurve:
        spec, files = factory.record.specs[source_id], factory.record.shard_paths[source_id]
        curve = factory.record.size_estimates.get(source_id) or self._measured.get((spec, files))
        if curve is None:
            if self._measuring is not None:
                self._measuring(factory.config.sources[source_id].name)
            curve = self._measured[spec, files] = measure(factory, source_id)
        # Rows that are left out are read as rows without tokens.
        excluded = factory.record.excluded.count(spec)
        return (
            curve.scaled(Fraction(max(0, curve.epoch_rows - excluded), curve.epoch_rows))
            if excluded
            else curve
        )
