"""How many samples a micro-step has, where that follows the run's tokens: what trainers ask for, and both sides agree
on.

The batch size is a function of the run's total tokens where an optimiser step begins, and of nothing else. So where it
changes is known before the first micro-step is made, and a resume goes on with the size that it would have had.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

#: The largest batch size, samples per rank and micro-step.
MAX_BATCH_SIZE = 2**20
#: The most micro-steps that one optimiser step may take, and the most pairs that a schedule may have.
MAX_ACCUMULATE = 2**16
MAX_SIZES = 2**10
#: The last number that JSON and Lua hold exactly.
MAX_TOKENS = 2**53 - 1

#: Pairs (total tokens of the run, samples per rank and micro-step), ascending from 0 on.
Sizes: TypeAlias = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """Each of ``sizes`` holds from the first optimiser step, of ``accumulate`` micro-steps, that begins at so many
    total tokens or later; optimiser steps are counted from a generation's start."""

    sizes: tuple[tuple[int, int], ...]
    accumulate: int = 1

    @classmethod
    def read(cls, batch_size: object, accumulate: int = 1) -> BatchSchedule:
        """Of the pairs that a user gives. Raises ``ValueError``, as ``check``."""
        if not isinstance(batch_size, Sequence) or isinstance(batch_size, str):
            raise ValueError(
                f"batch_size must be an integer of at least 1, or pairs (total_tokens, batch_size), such as "
                f"[(0, 4), (1_000_000, 8)]; got {batch_size!r}"
            )
        for number, pair in enumerate(batch_size):
            if (
                not isinstance(pair, Sequence)
                or len(pair) != 2
                or any(type(value) is not int for value in pair)
            ):
                raise ValueError(
                    f"batch_size[{number}] must be a pair of integers (total_tokens, batch_size); got {pair!r}"
                )
        schedule = cls(tuple((tokens, size) for tokens, size in batch_size), accumulate)
        schedule.check()
        return schedule

    @property
    def greatest(self) -> int:
        """The largest batch size."""
        return max(size for _, size in self.sizes)

    def check(self) -> None:
        """Raises ``ValueError`` for what is no schedule."""
        if not 1 <= self.accumulate <= MAX_ACCUMULATE:
            raise ValueError(
                f"accumulate is {self.accumulate}; expected 1 to {MAX_ACCUMULATE} micro-steps"
            )
        if not 1 <= len(self.sizes) <= MAX_SIZES:
            raise ValueError(
                f"batch_size has {len(self.sizes)} pairs; expected 1 to {MAX_SIZES}, such as (0, 4)"
            )
        for number, (_, size) in enumerate(self.sizes):
            if not 1 <= size <= MAX_BATCH_SIZE:
                which = (
                    f"batch_size[{number}] has a batch size of"
                    if len(self.sizes) > 1
                    else "batch size is"
                )
                raise ValueError(
                    f"{which} {size}; expected 1 to {MAX_BATCH_SIZE} samples per rank: give batch_size"
                )
        tokens, size = self.sizes[0]
        if tokens:
            raise ValueError(
                f"batch_size[0] begins at {tokens} total tokens; expected 0: (0, {size})"
            )
        for number, ((before, _), (tokens, _)) in enumerate(pairwise(self.sizes), 1):
            if not before < tokens <= MAX_TOKENS:
                raise ValueError(
                    f"batch_size[{number}] begins at {tokens} total tokens; expected more than {before}, where the "
                    "one before it begins, and at most 2^53 − 1"
                )

    def starts(
        self, *, sample_tokens: int, world_size: int, start_index: int = 0, start_tokens: int = 0
    ) -> Iterator[tuple[int, int]]:
        """Sample index and batch size of the first micro-step, and of each further one that has another batch size
        than the one before it; from ``start_index`` on, where the run has had ``start_tokens``."""
        thresholds = [tokens for tokens, _ in self.sizes]
        index, size_before = start_index, 0
        while True:
            tokens = start_tokens + (index - start_index) * sample_tokens
            reached = bisect_right(thresholds, tokens)
            size = self.sizes[reached - 1][1]
            if size != size_before:
                yield index, size
            if reached == len(thresholds):
                return
            size_before = size
            # The first optimiser step that begins at the next threshold or after it.
            step_samples = self.accumulate * world_size * size
            index += (
                -((tokens - thresholds[reached]) // (step_samples * sample_tokens)) * step_samples
            )

    def __str__(self) -> str:
        first, *others = self.sizes
        return ", ".join(
            [str(first[1]), *(f"{size} from {tokens} total tokens on" for tokens, size in others)]
        )
