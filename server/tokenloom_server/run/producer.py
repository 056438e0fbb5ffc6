"""The producer: the thread that turns a run's pipeline into groups, as far ahead as the window allows."""

from __future__ import annotations

import logging
import threading

from tokenloom_server.errors import SourceError, TokenizerError, TokenloomError
from tokenloom_server.order.pipeline import BatchPlan, Group, Pipeline
from tokenloom_server.run.coordinator import Host, Live

_log = logging.getLogger(__name__)


class Producer(threading.Thread):
    """Owns the pipeline of the present generation. Works outside the host's lock."""

    def __init__(self, host: Host) -> None:
        super().__init__(name=f"{host.name}-producer", daemon=True)
        self._host = host
        self._live: Live | None = None
        self._pipeline: Pipeline | None = None
        self._group: Group | None = None
        # What the pipeline was made by.
        self._course = host.course
        # Behind a fault: one step at a time, so that all good ones before it go out.
        self._careful = False

    def run(self) -> None:
        host = self._host
        while True:
            with host.lock:
                host.producer_wakes.wait_for(lambda: host.stopping or host.steps_wanted())
                if host.stopping:
                    self._pipeline = self._group = None  # and what it has under way
                    return
            self.step()

    def step(self) -> bool:
        """Produces one burst, if steps are wanted now; whether they were. Does not wait for that."""
        host = self._host
        with host.lock:
            live, steps = host.live, host.steps_wanted()
            if live is None or not steps:
                return False
            if live is not self._live:
                self._live, self._pipeline, self._group, self._careful = live, None, None, False
            generation = live.generation
            plan = generation.ramp.at_step(generation.produced)
            published = generation.produced - plan.group_begin(generation.produced)
            fresh = not published
        try:
            self._fill(live, plan, 1 if self._careful else steps, fresh)
        except (SourceError, TokenizerError) as error:
            if self._careful or steps == 1:
                self._give_up(live, error)
            else:
                _log.warning("%s: going on step by step towards a fault: %s", host.name, error)
                self._step_back(live, published)
            return True
        except TokenloomError as error:
            self._give_up(live, error)
            return True
        except Exception as error:
            if host.stopping:
                return True  # the interpreter ends: it lets nothing more be read ahead
            if isinstance(error, RuntimeError) and "cannot schedule new futures" in str(error):
                # The same, of a process that has the run within it and did not close it. Only a thread of its own
                # that trains on has to hear of it.
                self._live = None
                host.end_with_interpreter(live)
                return True
            _log.exception("%s: producing failed", host.name)
            self._give_up(live, SourceError(f"producing samples failed: {type(error).__name__}: {error}"))
            return True
        assert self._group is not None and self._pipeline is not None
        with host.lock:
            if live is host.live:
                host.publish(live, self._group, fresh, self._pipeline.ended, self._pipeline.dropped_samples)
        return True

    def _fill(self, live: Live, plan: BatchPlan, steps: int, fresh: bool) -> None:
        if self._pipeline is None:
            self._course = self._host.course
            self._pipeline = self._course.pipeline(live.base, ahead=True)
        elif self._course is not self._host.course:
            self._course = self._host.course
            self._pipeline.switch(self._course.switches(self._pipeline.sample_index, ahead=True))
        if fresh:
            self._group = None
        if self._group is None:
            self._group = self._pipeline.begin_group(plan)
        self._pipeline.fill(self._group, steps)

    def _step_back(self, live: Live, published: int) -> None:
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
            self._course = self._host.course
            self._pipeline = self._course.pipeline(state)
        except TokenloomError as error:
            self._give_up(live, error)

    def _give_up(self, live: Live, error: TokenloomError) -> None:
        self._live = None
        self._host.fail(live, error)
