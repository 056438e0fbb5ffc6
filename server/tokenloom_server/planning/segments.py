"""Shares over time, as segments of the run, and fewer of them where so many are not wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

#: Segments that are kept of a run.
MAX_SEGMENTS = 400


@dataclass(frozen=True, slots=True)
class PlanSegment:
    """From ``begin`` to ``end``, in the run's total tokens: each source's mean share of them, by source id."""

    begin: float
    end: float
    shares: Floats


def merged(segments: Sequence[PlanSegment], most: int) -> list[PlanSegment]:
    """At most so many segments, neighbours that differ least joined; nothing is lost of what each source gets."""
    ends = np.array([segment.end for segment in segments])
    lengths = ends - np.array([segment.begin for segment in segments])
    shares = np.array([segment.shares for segment in segments])
    begin = segments[0].begin if segments else 0.0
    while len(ends) > max(1, most):
        # What joining two would move, in tokens: twice the product of their lengths by their sum, times the difference.
        moved = (
            np.abs(shares[1:] - shares[:-1]).sum(axis=1)
            * lengths[1:]
            * lengths[:-1]
            / (lengths[1:] + lengths[:-1])
        )
        # All that is cheap at once, but no two joins side by side.
        excess = len(ends) - most
        order = np.argsort(moved, kind="stable")[: max(1, excess // 2)]
        chosen: set[int] = set()
        for position in order.tolist():
            if position - 1 not in chosen and position + 1 not in chosen:
                chosen.add(position)
        first = np.array(sorted(chosen))
        total = lengths[first] + lengths[first + 1]
        shares[first] = (
            shares[first] * lengths[first, None] + shares[first + 1] * lengths[first + 1, None]
        ) / total[:, None]
        lengths[first], ends[first] = total, ends[first + 1]
        keep = np.setdiff1d(np.arange(len(ends)), first + 1)
        ends, lengths, shares = ends[keep], lengths[keep], shares[keep]
    begins = [begin, *ends[:-1].tolist()]
    return [PlanSegment(b, e, s) for b, e, s in zip(begins, ends.tolist(), shares, strict=False)]
