"""Where the batch size of a generation changes, and how many of its micro-steps may be fetched ahead."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from tokenloom.errors import ProtocolError

#: Groups of micro-steps that are fetched ahead: one to take from, one to follow it, and two on their way while the
#: server hears that it may send them.
PREFETCH_GROUPS = 4


class BatchPlan(NamedTuple):
    """Where micro-steps of one batch size begin, their samples per rank, and how many lie between state boundaries."""

    begin_index: int
    batch_size: int
    group_micro_steps: int


class StepSchedule:
    """The micro-steps of a generation. Immutable."""

    def __init__(
        self,
        plans: Sequence[BatchPlan],
        *,
        world_size: int,
        accumulate: int = 1,
        prefetch_steps: int | None = None,
    ) -> None:
        """``prefetch_steps`` are fetched ahead, where it is not None. Raises ``ProtocolError``."""
        for before, after in pairwise(plans):
            steps, rest = divmod(
                after.begin_index - before.begin_index, world_size * before.batch_size
            )
            if rest or steps < 1:
                raise ProtocolError(
                    f"micro-steps of {world_size} × {before.batch_size} samples from {before.begin_index} on cannot "
                    f"end at {after.begin_index}, where the server changes the batch size"
                )
        self.plans = tuple(plans)
        self._begins = [plan.begin_index for plan in plans]
        self._step_samples = [world_size * plan.batch_size for plan in plans]
        # An optimiser step is taken from, and one more is on its way.
        self._ahead = [
            prefetch_steps or max(PREFETCH_GROUPS * plan.group_micro_steps, 2 * accumulate)
            for plan in plans
        ]

    def number_at(self, sample_index: int) -> int:
        """Which of the plans has the micro-step that begins at a sample index."""
        return max(0, bisect_right(self._begins, sample_index) - 1)

    def capacity_steps(self, sample_index: int) -> int:
        """Micro-steps to hold at most, for who has consumed what lies before a sample index: the least that any plan
        has whose micro-steps are among them, so that larger micro-steps take no more memory than their own plan's."""
        number = self.number_at(sample_index)
        capacity = total = self._ahead[number]
        steps = 0
        while number + 1 < len(self.plans):
            steps += (
                self._begins[number + 1] - max(sample_index, self._begins[number])
            ) // self._step_samples[number]
            if total <= steps:
                break
            number += 1
            capacity = min(capacity, self._ahead[number])
            total = max(steps, capacity)
        return total

    def half_of_capacity(self, sample_index: int) -> int:
        """Half of these micro-steps, at least one, in samples."""
        return (
            max(1, self.capacity_steps(sample_index) // 2)
            * self._step_samples[self.number_at(sample_index)]
        )
