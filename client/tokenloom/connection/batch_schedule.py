"""How many samples a step has, where that follows a schedule, and how many steps may be fetched ahead."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from tokenloom.errors import ProtocolError

#: Pairs (total tokens of the run, samples per rank and step), ascending from 0 on.
Schedule: TypeAlias = Sequence[tuple[int, int]]

#: Groups of steps that are fetched ahead: one to take from, one to follow it, and two on their way while the
#: server hears that it may send them.
PREFETCH_GROUPS = 4
#: Numbers on the wire end here.
_MAX_TOKENS = 2**53 - 1


class BatchPlan(NamedTuple):
    """Steps of one batch size: from which sample index on, samples per rank, and steps between state boundaries."""

    begin_index: int
    batch_size: int
    group_steps: int


class StepSchedule:
    """The steps of a generation. Immutable."""

    def __init__(
        self, plans: Sequence[BatchPlan], *, world_size: int, accumulate: int = 1, prefetch_steps: int | None = None
    ) -> None:
        """``prefetch_steps`` are fetched ahead, where it is not None. Raises ``ProtocolError``."""
        for before, after in pairwise(plans):
            steps, rest = divmod(after.begin_index - before.begin_index, world_size * before.batch_size)
            if rest or steps < 1:
                raise ProtocolError(
                    f"steps of {world_size} × {before.batch_size} samples from {before.begin_index} on cannot end at "
                    f"{after.begin_index}, where the server changes the batch size"
                )
        self.plans = tuple(plans)
        self._begins = [plan.begin_index for plan in plans]
        self._step_samples = [world_size * plan.batch_size for plan in plans]
        # An optimiser step is taken from, and one more is on its way.
        self._ahead = [prefetch_steps or max(PREFETCH_GROUPS * plan.group_steps, 2 * accumulate) for plan in plans]

    def number_at(self, sample_index: int) -> int:
        """Which of the plans has the step that begins at a sample index."""
        return max(0, bisect_right(self._begins, sample_index) - 1)

    def capacity_steps(self, sample_index: int) -> int:
        """Steps to hold at most, for who has consumed what lies before a sample index: the least that any plan has
        whose steps are among them, so that larger steps take no more memory than their own plan's."""
        at = self.number_at(sample_index)
        capacity = total = self._ahead[at]
        steps = 0
        while at + 1 < len(self.plans):
            steps += (self._begins[at + 1] - max(sample_index, self._begins[at])) // self._step_samples[at]
            if total <= steps:
                break
            at += 1
            capacity = min(capacity, self._ahead[at])
            total = max(steps, capacity)
        return total

    def half_of_capacity(self, sample_index: int) -> int:
        """Half of these steps, at least one, in samples."""
        return max(1, self.capacity_steps(sample_index) // 2) * self._step_samples[self.number_at(sample_index)]


def check(batch_size: object) -> tuple[tuple[int, int], ...]:
    """The pairs of a schedule; none for a number of samples, or for None. Raises ``ValueError``."""
    if batch_size is None or (type(batch_size) is int and batch_size >= 1):
        return ()
    if not isinstance(batch_size, Sequence) or isinstance(batch_size, str):
        raise ValueError(
            f"batch_size must be an integer of at least 1; got {batch_size!r}. Or pairs (total_tokens, batch_size), "
            "such as [(0, 4), (1_000_000, 8)]"
        )
    pairs: list[tuple[int, int]] = []
    for number, pair in enumerate(batch_size):
        if not isinstance(pair, Sequence) or len(pair) != 2 or any(type(value) is not int for value in pair):
            raise ValueError(
                f"batch_size[{number}] must be a pair of integers (total_tokens, batch_size); got {pair!r}"
            )
        tokens, size = pair
        if size < 1:
            raise ValueError(f"batch_size[{number}] has a batch size of {size}; expected at least 1")
        if not pairs and tokens != 0:
            raise ValueError(f"batch_size[0] begins at {tokens} total tokens; expected 0: (0, {size})")
        if pairs and not pairs[-1][0] < tokens <= _MAX_TOKENS:
            raise ValueError(
                f"batch_size[{number}] begins at {tokens} total tokens; expected more than {pairs[-1][0]}, where the "
                "one before it begins, and at most 2^53 − 1"
            )
        pairs.append((tokens, size))
    if not pairs:
        raise ValueError("batch_size has no pair; expected a first one such as (0, 4)")
    return tuple(pairs)
