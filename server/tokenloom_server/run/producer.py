"""The producer: the thread that turns a run's pipeline into groups, as far ahead as the window allows."""

from __future__ import annotations

import logging
import threading

from tokenloom_server.errors import SourceError, TokenizerError, TokenloomError
from tokenloom_server.order.pipeline import BatchPlan, Pipeline, StepGroup
from tokenloom_server.run.coordinator import ActiveGeneration, RunCoordinator

_log = logging.getLogger(__name__)


class Producer(threading.Thread):
    """Owns the pipeline of the present generation. Works outside the host's lock."""

    def __init__(self, coordinator: RunCoordinator) -> None:
        super().__init__(name=f"{coordinator.name}-producer", daemon=True)
        self._coordinator = coordinator
        self._active: ActiveGeneration | None = None
        self._pipeline: Pipeline | None = None
        self._group: StepGroup | None = None
        # What the pipeline was made by.
        self._timeline = coordinator.timeline
        # Behind a fault: one step at a time, so that all good ones before it go out.
        self._careful = False

    def run(self) -> None:
        coordinator = self._coordinator
        while True:
            with coordinator.lock:
                coordinator.producer_wakes.wait_for(lambda: coordinator.stopping or coordinator.steps_wanted())
                if coordinator.stopping:
                    self._pipeline = self._group = None  # and what it has under way
                    return
            self.step()

    def step(self) -> bool:
        """Produces one burst, if steps are wanted now; whether they were. Does not wait for that."""
        coordinator = self._coordinator
        with coordinator.lock:
            active, steps = coordinator.active, coordinator.steps_wanted()
            if active is None or not steps:
                return False
            if active is not self._active:
                self._active, self._pipeline, self._group, self._careful = active, None, None, False
            generation = active.generation
            plan = generation.ramp.at_step(generation.produced)
            published = generation.produced - plan.group_begin(generation.produced)
            fresh = not published
        try:
            self._fill(active, plan, 1 if self._careful else steps, fresh)
        except (SourceError, TokenizerError) as error:
            if self._careful or steps == 1:
                self._give_up(active, error)
            else:
                _log.warning("%s: going on step by step towards a fault: %s", coordinator.name, error)
                self._step_back(active, published)
            return True
        except TokenloomError as error:
            self._give_up(active, error)
            return True
        except Exception as error:
            if coordinator.stopping:
                return True  # the interpreter ends: it lets nothing more be read ahead
            if isinstance(error, RuntimeError) and "cannot schedule new futures" in str(error):
                # The same, of a process that has the run within it and did not close it. Only a thread of its own
                # that trains on has to hear of it.
                self._active = None
                coordinator.end_with_interpreter(active)
                return True
            _log.exception("%s: producing failed", coordinator.name)
            self._give_up(active, SourceError(f"producing samples failed: {type(error).__name__}: {error}"))
            return True
        assert self._group is not None and self._pipeline is not None
        with coordinator.lock:
            if active is coordinator.active:
                coordinator.publish(active, self._group, fresh, self._pipeline.ended, self._pipeline.dropped_samples)
        return True

    def _fill(self, active: ActiveGeneration, plan: BatchPlan, steps: int, fresh: bool) -> None:
        if self._pipeline is None:
            self._timeline = self._coordinator.timeline
            self._pipeline = self._timeline.pipeline(active.base, ahead=True)
        elif self._timeline is not self._coordinator.timeline:
            self._timeline = self._coordinator.timeline
            self._pipeline.switch(self._timeline.switches(self._pipeline.sample_index, ahead=True))
        if fresh:
            self._group = None
        if self._group is None:
            self._group = self._pipeline.begin_group(plan)
        self._pipeline.fill(self._group, steps)

    def _step_back(self, active: ActiveGeneration, published: int) -> None:
        """Makes the pipeline anew where the last published step ends, so many in the group: the burst with the fault
        in it is void."""
        self._careful = True
        group = self._group
        if group is None:
            self._pipeline = None
            return
        group.forget_behind(published)
        state = group.state_behind(published - 1) if published else group.base
        try:
            self._timeline = self._coordinator.timeline
            self._pipeline = self._timeline.pipeline(state)
        except TokenloomError as error:
            self._give_up(active, error)

    def _give_up(self, active: ActiveGeneration, error: TokenloomError) -> None:
        self._active = None
        self._coordinator.fail(active, error)
