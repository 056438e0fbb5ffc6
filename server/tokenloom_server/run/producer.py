"""The producer: the thread that turns a run's pipeline into groups, as far ahead as the window allows."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import NamedTuple

from tokenloom_proto.threads import Background, Loop

from tokenloom_server.errors import OrderMismatch, SourceError, TokenizerError, TokenloomError
from tokenloom_server.order.pipeline import Pipeline
from tokenloom_server.order.steps import BatchPlan, StepGroup
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.run.active_generation import ActiveGeneration
from tokenloom_server.run.context import RunContext
from tokenloom_server.run.head import Head
from tokenloom_server.run.present_generation import PresentGeneration
from tokenloom_server.sources.manifest import verify_spots

_log = logging.getLogger(__name__)

#: How long the files of a run are compared with their spot digests, seconds.
COMPARE_S = 60.0


class ProductionTask(NamedTuple):
    """Micro-steps that the producer has to make now, all of one group."""

    active: ActiveGeneration
    timeline: Timeline
    plan: BatchPlan
    steps: int
    #: Micro-steps of the group that are published already; 0 where it begins.
    published: int


class Producer(Loop):
    """Owns the pipeline of the present generation."""

    def __init__(self, context: RunContext, head: Head, present: PresentGeneration) -> None:
        super().__init__("producer", self.step, context.name)
        self._context, self._head, self._present = context, head, present
        self._active: ActiveGeneration | None = None
        #: For which the files were compared, or are now.
        self._compared: ActiveGeneration | None = None
        self._pipeline: Pipeline | None = None
        self._group: StepGroup | None = None
        # What the pipeline follows.
        self._timeline: Timeline = head.timeline
        # After a fault: one micro-step at a time, so that all good ones before it go out.
        self._step_by_step = False

    def run(self) -> None:
        super().run()
        self._pipeline = self._group = None  # and what it has under way

    def step(self) -> bool:
        """Waits until micro-steps are wanted, and produces one burst of them; False where the server stops."""
        task = self._await_task()
        if task is not None:
            try:
                self._produce(task)
            except BaseException as error:  # a library's panic among them
                self._unexpected(task, error)
        return task is not None

    def _await_task(self) -> ProductionTask | None:
        """Waits for micro-steps that are wanted; None where the server stops."""
        present = self._present
        with self._context.lock:
            self._context.wakes.producer.wait_for(
                lambda: present.ending is not None or present.steps_wanted()
            )
            active, steps = present.active, present.steps_wanted()
            if present.ending is not None or active is None or not steps:
                return None
            plan, published = active.ask_for(steps)
            return ProductionTask(active, self._head.timeline, plan, steps, published)

    def _produce(self, task: ProductionTask) -> None:
        context = self._context
        if task.active is not self._active:
            self._active, self._pipeline, self._group, self._step_by_step = (
                task.active,
                None,
                None,
                False,
            )
        steps = 1 if self._step_by_step else task.steps
        try:
            with context.measures.productions.timing(context.clock):
                pipeline, group = self._fill(task, steps)
        except (SourceError, TokenizerError) as error:
            if steps == 1:
                self._give_up(task, error)
            else:
                _log.warning("%s: going on step by step towards a fault: %s", context.name, error)
                self._step_back(task)
        except TokenloomError as error:
            self._give_up(task, error)
        else:
            self._publish(task, group, pipeline.ended, pipeline.dropped_samples)
            if task.active is not self._compared:
                self._compared = task.active
                Background("files", partial(self._compare_files, task), context.name).start()

    def _publish(
        self, task: ProductionTask, group: StepGroup, ended: str | None, dropped_samples: int
    ) -> None:
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

    def _compare_files(self, task: ProductionTask) -> None:
        """Beside production: the spots of the files, once for each launch, after its first samples."""
        order = self._context.order
        try:
            verify_spots(
                order.record.manifest, order.resources.base_dir, time.monotonic() + COMPARE_S
            )
        except TokenloomError as error:
            self.fail(task.active, error)

    def _fill(self, task: ProductionTask, steps: int) -> tuple[Pipeline, StepGroup]:
        """Adds micro-steps to the task's group, on the pipeline under what is in force."""
        if self._pipeline is None:
            self._pipeline = task.timeline.pipeline(task.active.base, ahead=True)
        elif self._timeline is not task.timeline:
            switches = task.timeline.switches(self._pipeline.sample_index, ahead=True)
            self._pipeline.replace_switches(switches)
        self._timeline = task.timeline
        if self._group is None or not task.published:
            self._group = None
            self._group = self._pipeline.begin_group(task.plan)
            self._group.resume_state = task.timeline.encode(
                self._group.base, task.active.generation.number
            )
        self._pipeline.fill(self._group, steps)
        return self._pipeline, self._group

    def _step_back(self, task: ProductionTask) -> None:
        """Makes the pipeline anew where the last published micro-step ends: the burst with the fault in it is void."""
        self._step_by_step = True
        group = self._group
        if group is None:
            self._pipeline = None
            return
        group.forget_after(task.published)
        state = group.state_after(task.published - 1) if task.published else group.base
        try:
            self._timeline = task.timeline
            self._pipeline = self._timeline.pipeline(state)
        except TokenloomError as error:
            self._give_up(task, error)

    def _unexpected(self, task: ProductionTask, error: BaseException) -> None:
        """Ends the launch for what nobody expects: what is under way may lack samples, so nothing goes on from it."""
        context = self._context
        if self._present.ending is not None:
            self._active = None
            return  # the interpreter ends: it lets nothing more be read ahead
        if isinstance(error, RuntimeError) and "cannot schedule new futures" in str(error):
            # The same, of a process that has the run within it and did not close it: nobody's fault. Only a thread
            # of its own that trains on has to hear of it.
            ending = SourceError(
                "this process ends with its main thread, so no more samples are read: let that wait for the one "
                "that trains"
            )
            self._give_up(task, ending, logging.INFO)
            return
        _log.error("%s: producing failed", context.name, exc_info=error)
        self._give_up(
            task, SourceError(f"producing samples failed: {type(error).__name__}: {error}")
        )

    def _give_up(
        self, task: ProductionTask, error: TokenloomError, level: int = logging.ERROR
    ) -> None:
        self._active = None
        self.fail(task.active, error, level)

    def fail(
        self, active: ActiveGeneration, error: TokenloomError, level: int = logging.ERROR
    ) -> None:
        """Stops the run with an error, if the generation is still the present one; ``level`` is the log's."""
        with self._context.lock:
            if active is self._present.active:
                self._present.stop(error, level)
