"""``schedule``: weights over the run's total tokens, between points."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tokenloom_server.config.catalog import FileWeight
from tokenloom_server.mixing.policy import (
    Chooser,
    Floats,
    NodeStart,
    Points,
    Span,
    normal,
    points_of,
)
from tokenloom_server.mixing.varying import Varying, VaryingChooser
from tokenloom_server.mixing.weights import whole

#: Between two points, weights are kept in 2^-32 of the smallest step in which the points are written.
_FRACTION_BITS = 32
#: Parts of the way between two points that a plan goes over one by one.
_SLOPE_STEPS = 64
#: Places and parts of a mean over [0, 1] (Gauss-Legendre): exact for polynomials of degree 5.
_MEAN = ((0.1127016653792583, 5 / 18), (0.5, 8 / 18), (0.8872983346207417, 5 / 18))


class Schedule(Varying):
    """Weights follow the run's total tokens. Where every child that is left has the weight 0, they share equally
    rather than end the node."""

    name = "schedule"
    takes = "points"
    options = ("interpolate",)

    def check(self, weights: Sequence[FileWeight], options: Mapping[str, Any]) -> None:
        """That some weight is above 0 at every token: between two points it is, if it is so at one of them."""
        points = [points_of(weight) for weight in weights]
        for tokens in sorted({0, *(edge for own in points for edge, _ in own)}):
            if not any(_is_above_0(own, tokens, options["interpolate"]) for own in points):
                raise ValueError(
                    f"children: at {tokens} tokens every weight is 0, and nothing could be given; let the weight of "
                    "one child begin earlier or end later"
                )

    def chooser(self, node: NodeStart) -> Chooser:
        return ScheduleChooser(node)


class WeightCurve:
    """The weights of a node's children as a function of tokens, in integers: constant before the first and after the
    last point, and between two of them in a straight line, or (``step``) as at the one before."""

    def __init__(self, children: Sequence[Points], *, linear: bool) -> None:
        scaled = iter(whole([weight for points in children for _, weight in points]))
        self._tokens = [[tokens for tokens, _ in points] for points in children]
        self._weights = [[next(scaled) << _FRACTION_BITS for _ in points] for points in children]
        self._linear = linear

    def weights(self, tokens: int) -> list[int]:
        """Integers in proportion, by child; 0 only where a weight is 0."""
        return [
            self._between(edges, own, tokens)
            for edges, own in zip(self._tokens, self._weights, strict=True)
        ]

    def straight(self, tokens: int) -> float:
        """Up to how many tokens later a mean may be taken at once: not across a point, nor over much of a slope."""
        edges = sorted({edge for own in self._tokens for edge in own})
        passed = bisect_right(edges, tokens)
        if passed == len(edges):
            return math.inf
        slope = self._linear and passed > 0
        return min(
            edges[passed] - tokens,
            (edges[passed] - edges[passed - 1]) / _SLOPE_STEPS if slope else math.inf,
        )

    def _between(self, edges: Sequence[int], weights: Sequence[int], tokens: int) -> int:
        passed = bisect_right(edges, tokens)
        if not passed:
            return weights[0]
        before, begin = weights[passed - 1], edges[passed - 1]
        if passed == len(edges) or not self._linear:
            return before
        after, end = weights[passed], edges[passed]
        if before == after or tokens == begin:
            return before
        return max(1, (before * (end - tokens) + after * (tokens - begin)) // (end - begin))


class ScheduleChooser(VaryingChooser):
    def __init__(self, node: NodeStart) -> None:
        super().__init__(node)
        self._curve = WeightCurve(node.shape.points, linear=node.shape.linear)

    def update(self, totals: Sequence[int], run_tokens: int) -> None:
        self.reweigh(self._made(self._curve.weights(run_tokens)), self._mark.totals)

    def mean_shares(self, span: Span) -> Floats:
        shares = np.zeros(len(self._children.out))
        for place, part in _MEAN:
            shares += part * normal(
                self._made(self._curve.weights(round(span.begin + place * span.tokens)))
            )
        return shares

    def horizon(self, run_tokens: int, rate: float) -> float:
        return self._curve.straight(run_tokens)

    def _without(self, child: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self._made(self._mark.weights), self._mark.totals

    def _made(self, weights: Sequence[int]) -> tuple[int, ...]:
        live = [weights[i] for i in self._children.live]
        return self._of_live(live if any(live) else [1] * len(live))


def _is_above_0(points: Points, tokens: int, interpolate: str) -> bool:
    before = [weight for edge, weight in points if edge <= tokens] or [points[0][1]]
    if before[-1] > 0 or interpolate == "step":
        return before[-1] > 0
    after = [weight for edge, weight in points if edge > tokens]
    return (
        points[0][0] <= tokens
        and tokens not in [edge for edge, _ in points]
        and bool(after)
        and after[0] > 0
    )
