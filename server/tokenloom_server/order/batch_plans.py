"""Which micro-steps a generation has: plans of one batch size each, one after the other.

Total tokens are linear in the sample index within a generation, because a phase with another sequence length ends it.
So where the batch size changes is known when the generation is opened. A constant batch size is one plan.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from tokenloom_proto.batch_schedule import BatchSchedule

from tokenloom_server.core.state import MAX_COUNTER
from tokenloom_server.order.steps import BatchPlan


class BatchPlans:
    """The micro-steps of a generation, counted from its start. Immutable."""

    def __init__(self, plans: Sequence[BatchPlan], schedule: BatchSchedule) -> None:
        """``plans`` of consecutive micro-steps; the last has no end."""
        self.plans = tuple(plans)
        self.schedule = schedule
        self.accumulate = schedule.accumulate
        self.world_size = plans[0].world_size
        self.start_index = plans[0].start_index
        self._first_steps = [plan.first_step for plan in plans]
        # What lies before the generation is the first plan's.
        self._start_indices = [-MAX_COUNTER, *(plan.start_index for plan in plans[1:])]

    @classmethod
    def constant(cls, plan: BatchPlan) -> BatchPlans:
        """The plans of a run with one batch size, and with one micro-step for each optimiser step."""
        return cls([plan], BatchSchedule(((0, plan.batch_size),)))

    @classmethod
    def lay(
        cls,
        schedule: BatchSchedule,
        *,
        start_index: int,
        start_tokens: int,
        sample_tokens: int,
        world_size: int,
        group_micro_steps: Callable[[int], int],
    ) -> BatchPlans:
        """The plans of a batch schedule from a sample index on, at which the run has had ``start_tokens`` tokens.
        ``group_micro_steps`` gives the micro-steps of a group for a batch size."""
        starts = schedule.starts(
            sample_tokens=sample_tokens,
            world_size=world_size,
            start_index=start_index,
            start_tokens=start_tokens,
        )
        return cls._of(
            [(index, size, group_micro_steps(size)) for index, size in starts], world_size, schedule
        )

    @classmethod
    def _of(
        cls, parts: Sequence[tuple[int, int, int]], world_size: int, schedule: BatchSchedule
    ) -> BatchPlans:
        """``parts``: sample index, batch size and micro-steps between boundaries."""
        plans: list[BatchPlan] = []
        for index, size, group_micro_steps in parts:
            plan = BatchPlan(
                start_index=index,
                world_size=world_size,
                batch_size=size,
                group_micro_steps=group_micro_steps,
            )
            if plans:
                before = plans[-1]
                steps = (index - before.start_index) // before.step_samples
                end = before.first_step + steps
                groups = -(-steps // before.group_micro_steps)
                plans[-1] = replace(before, end_step=end)
                plan = replace(plan, first_step=end, first_group=before.first_group + groups)
            plans.append(plan)
        return cls(plans, schedule)

    @cached_property
    def text(self) -> str:
        """As the ledger keeps it beside the first plan; empty where that says all."""
        if len(self.schedule.sizes) == 1 and self.accumulate == 1:
            return ""
        plans = [[plan.start_index, plan.batch_size, plan.group_micro_steps] for plan in self.plans]
        fields = {"accumulate": self.accumulate, "batch_sizes": self.schedule.sizes, "plans": plans}
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def read(cls, text: str, first: BatchPlan) -> BatchPlans:
        """Reads ``text`` back."""
        if not text:
            return cls.constant(first)
        fields = json.loads(text)
        sizes = tuple((tokens, size) for tokens, size in fields["batch_sizes"])
        parts = [
            (index, size, group_micro_steps) for index, size, group_micro_steps in fields["plans"]
        ]
        return cls._of(parts, first.world_size, BatchSchedule(sizes, fields["accumulate"]))

    # Where a micro-step lies.

    def number_at(self, step: int) -> int:
        """Which of the plans has a micro-step."""
        return bisect_right(self._first_steps, step) - 1

    def at_step(self, step: int) -> BatchPlan:
        """The plan that has a micro-step."""
        return self.plans[self.number_at(step)]

    def at_index(self, sample_index: int) -> BatchPlan:
        """The plan that has the sample at an index; the first one for what lies before the generation."""
        return self.plans[bisect_right(self._start_indices, sample_index) - 1]

    def index_of(self, step: int) -> int:
        """The sample index at which a micro-step begins."""
        return self.at_step(step).index_of(step)

    def steps_until(self, sample_index: int) -> tuple[int, int]:
        """How many whole micro-steps lie before a sample index, and how many samples after them."""
        plan = self.at_index(sample_index)
        steps, rest = divmod(sample_index - plan.start_index, plan.step_samples)
        return plan.first_step + steps, rest

    def group_begin(self, step: int) -> int:
        """The first micro-step of the group that a micro-step is of."""
        return self.at_step(step).group_begin(step)

    def boundary(self, sample_index: int) -> int:
        """The state boundary that a snapshot at a sample index starts from: the one at which the group
        of the last micro-step before it begins, so that whoever has that micro-step has the boundary, too."""
        if sample_index <= self.start_index:
            return self.start_index
        plan = self.at_index(sample_index - 1)
        return sample_index - ((sample_index - plan.start_index - 1) % plan.group_samples + 1)

    def boundary_after(self, sample_index: int) -> int:
        """The first state boundary after a sample index."""
        plan = self.at_index(sample_index)
        groups = (sample_index - plan.start_index) // plan.group_samples + 1
        return plan.index_of(min(plan.first_step + groups * plan.group_micro_steps, plan.end_step))
