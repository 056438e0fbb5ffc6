"""Weights that follow the run: what ``soft_sequential``, ``balance_remaining`` and ``schedule`` have in common.

Choices are those of ``least_consumed``. Weights are integers, made anew at every pick index of the run that is a
multiple of ``UPDATE_PICKS``, from the counters at exactly that index, and constant between; the state keeps those
in force. Where a child goes out, they are made anew from the same totals, so that its share is not lost.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tokenloom_server.config.catalog import FileWeight
from tokenloom_server.mixing.least_consumed import LeastConsumedChooser, OwesTokens
from tokenloom_server.mixing.policy import (
    MAX_SUM,
    Chooser,
    Floats,
    NodeStart,
    Points,
    Span,
    normal,
    points_of,
    reduced,
    whole,
)

#: Picks of the run between two updates of weights. A part of the order's rules.
UPDATE_PICKS = 256
#: The part of what a child has left that a plan gives at once.
_STEP = 0.05


class Left(NamedTuple):
    """What a live child has to give: of ``total`` picks the ``remaining`` ones, from 1 to all of them, and their
    ``tokens`` as balances count them, or numbers in proportion."""

    remaining: int
    total: int
    tokens: int = 1

    @classmethod
    def of(cls, total: int, picks: int) -> Left:
        """What an estimate has left; a live child has one pick at least."""
        remaining = max(1, total - picks)
        return cls(remaining, max(remaining, total), remaining)


class Varying(OwesTokens):
    """A policy that makes its weights itself."""

    follows_progress = True
    makes_weights = True


class Estimating(Varying):
    """A policy whose weights are a ``rule`` of what the children have left, by estimates."""

    estimates = True

    @abstractmethod
    def rule(self, children: Sequence[Left]) -> Sequence[int]:
        """The weights of live children, in the file's order."""

    def chooser(self, node: NodeStart) -> Chooser:
        return EstimatingChooser(node, self)


class VaryingChooser(LeastConsumedChooser):
    """``LeastConsumedChooser`` under weights that a state keeps, and that an update may replace."""

    def __init__(self, node: NodeStart) -> None:
        super().__init__(node)
        weights, totals = zip(*((child.weight, child.total) for child in node.states), strict=True)
        self._rebuild(self._mark.credits, weights, totals)

    def _of_live(self, weights: Sequence[int]) -> tuple[int, ...]:
        """Weights of the live children as weights of all."""
        every = [0] * len(self._children.out)
        if weights:
            for child, weight in zip(self._children.live, reduced(weights), strict=True):
                every[child] = weight
        return tuple(every)


class EstimatingChooser(VaryingChooser):
    """Weights from what the children have left."""

    def __init__(self, node: NodeStart, policy: Estimating) -> None:
        super().__init__(node)
        self._rule = policy.rule

    def update(self, totals: Sequence[int], run_tokens: int) -> None:
        self.reweigh(self._made(totals), tuple(totals))

    def mean_shares(self, span: Span) -> Floats:
        # Those in the middle of the span.
        shares = super().mean_shares(span)
        picks = [
            own + round(span.picks / 2 * share)
            for own, share in zip(self._children.picks, shares, strict=True)
        ]
        return normal(self._made(self._mark.totals, picks))

    def horizon(self, run_tokens: int, rate: float) -> float:
        shares = super().mean_shares(Span(run_tokens, 0, 0))
        rests = np.maximum(1, np.subtract(self._mark.totals, self._children.picks))
        picks = np.maximum(1, _STEP * rests) / np.maximum(shares, 1e-300)
        return float(picks.min()) * self._shape.pick_tokens / rate

    def _without(self, child: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        totals = list(self._mark.totals)
        totals[child] = self._children.picks[child]
        return self._made(totals), tuple(totals)

    def _made(self, totals: Sequence[int], picks: Sequence[int] | None = None) -> tuple[int, ...]:
        """Weights where so many ``picks`` were given; as many as there were if not given."""
        picks = self._children.picks if picks is None else picks
        children = self._children
        left = {i: Left.of(totals[i], picks[i]) for i in children.live}
        if children.lengths is not None:
            # The picks to come are as long as those that were given, on average.
            for i, (remaining, total, _) in left.items():
                length = children.balances[i] or self._shape.pick_tokens
                left[i] = Left(
                    remaining, total, max(1, remaining * length // (children.picks[i] or 1))
                )
        return self._of_live(self._rule(list(left.values())))


# ``balance_remaining``: each child's weight is what it has to give, so that all end together.


class BalanceRemaining(Estimating):
    """Weights are what the remaining picks have, in tokens."""

    name = "balance_remaining"

    def rule(self, children: Sequence[Left]) -> Sequence[int]:
        return [child.tokens for child in children]


# ``soft_sequential``: one child after the other, but each begins while the one before it comes to its end.


class SoftSequential(Estimating):
    """With left = 1, each child in order gets left × remaining/total, and left is multiplied by
    1 − remaining/total."""

    name = "soft_sequential"

    def rule(self, children: Sequence[Left]) -> Sequence[int]:
        # Shares are in 2^-60, each rounded down, and what they leave is exact: they and the rest are 2^60.
        left, shares = 1 << 60, []
        for child in children:
            share = left * child.remaining // child.total
            shares.append(share)
            left -= share
        total, room = sum(shares), MAX_SUM - len(shares)
        # Whoever has a share, however small, has a weight.
        return [max(1, share * room // total) if share else 0 for share in shares]


# ``schedule``: weights over the run's total tokens, between points.


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
