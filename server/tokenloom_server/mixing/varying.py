"""Weights that follow the run: what ``soft_sequential``, ``balance_remaining`` and ``schedule`` have in common.

Choices are those of ``least_consumed``. Weights are integers, made anew at every pick index of the run that is a
multiple of ``UPDATE_PICKS``, from the counters at exactly that index, and constant between; the state keeps those
in force. Where a child goes out, they are made anew from the same totals, so that its share is not lost.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tokenloom_server.mixing.least_consumed import LeastConsumedChooser, OwesTokens
from tokenloom_server.mixing.policy import Chooser, Floats, NodeStart, Span, normal
from tokenloom_server.mixing.weights import reduced

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
