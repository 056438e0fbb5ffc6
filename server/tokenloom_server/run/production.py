"""What is to be produced, and what was. Commands of the ``producer``."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

from tokenloom_server.errors import OrderMismatch, TokenloomError
from tokenloom_server.order.steps import BatchPlan, StepGroup
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.run.active_generation import ActiveGeneration
from tokenloom_server.run.context import RunContext
from tokenloom_server.run.head import Head
from tokenloom_server.run.present_generation import PresentGeneration

_log = logging.getLogger(__name__)


class ProductionTask(NamedTuple):
    """Micro-steps that the producer has to make now, all of one group."""

    active: ActiveGeneration
    timeline: Timeline
    plan: BatchPlan
    steps: int
    #: Micro-steps of the group that are published already; 0 where it begins.
    published: int


@dataclass(eq=False)
class Production:
    """That of one run. Thread-safe."""

    _context: RunContext
    _head: Head
    _present: PresentGeneration

    def await_task(self) -> ProductionTask | None:
        """Waits for micro-steps that are wanted; None where the server stops."""
        present = self._present
        with self._context.lock:
            self._context.wakes.producer.wait_for(lambda: present.ending is not None or present.steps_wanted())
            active, steps = present.active, present.steps_wanted()
            if present.ending is not None or active is None or not steps:
                return None
            plan, published = active.ask_for(steps)
            return ProductionTask(active, self._head.timeline, plan, steps, published)

    def publish(self, task: ProductionTask, group: StepGroup, ended: str | None, dropped_samples: int) -> None:
        """The group got micro-steps, or the data ended: for the ranks, if the generation is still the present one."""
        active, generation, present = task.active, task.active.generation, self._present
        with self._context.lock:
            if active is not present.active:
                return
            generation.filled(group, ended, dropped_samples)
            try:
                active.check_order(ended is not None)
            except OrderMismatch as error:
                present.alarm(error)
                return
            if ended is not None:
                _log.info("%s: end of data at sample %d: %s", self._context.name, group.end, ended)
            for rank in range(len(generation.slots)):
                present.wake_rank(rank)
            present.wake_committer()

    def fail(self, active: ActiveGeneration, error: TokenloomError, level: int = logging.ERROR) -> None:
        """Stops the run with an error, if the generation is still the present one; ``level`` is the log's."""
        with self._context.lock:
            if active is self._present.active:
                self._present.stop(error, level)
