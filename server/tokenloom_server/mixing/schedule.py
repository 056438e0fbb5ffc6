"""Weights over the run's total tokens, between points."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from tokenloom_server.mixing.weights import whole

#: Between two points, weights are kept in 2^-32 of the smallest step in which the points are written.
_FRACTION_BITS = 32

#: [total tokens, weight], ascending in tokens; a plain weight is one point.
Points = Sequence[tuple[int, float]]


class Schedule:
    """The weights of a node's children as a function of tokens, in integers: constant before the first and behind the
    last point, and between two of them in a straight line, or (``step``) as at the one before."""

    def __init__(self, children: Sequence[Points], *, linear: bool) -> None:
        scaled = iter(whole([weight for points in children for _, weight in points]))
        self._tokens = [[tokens for tokens, _ in points] for points in children]
        self._weights = [[next(scaled) << _FRACTION_BITS for _ in points] for points in children]
        self._linear = linear

    def weights(self, tokens: int) -> list[int]:
        """Integers in proportion, by child; 0 only where a weight is 0."""
        return [self._between(at, weights, tokens) for at, weights in zip(self._tokens, self._weights, strict=True)]

    def _between(self, at: Sequence[int], weights: Sequence[int], tokens: int) -> int:
        behind = bisect_right(at, tokens)
        if not behind:
            return weights[0]
        before, begin = weights[behind - 1], at[behind - 1]
        if behind == len(at) or not self._linear:
            return before
        after, end = weights[behind], at[behind]
        if before == after or tokens == begin:
            return before
        return max(1, (before * (end - tokens) + after * (tokens - begin)) // (end - begin))
