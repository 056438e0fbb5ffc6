"""Policies whose weights follow the run: ``soft_sequential``, ``balance_remaining``, ``schedule``.

Choices are those of ``least_consumed``. Weights are integers, made anew at every sample index of the run that is a
multiple of ``UPDATE_SAMPLES``, from the counters at exactly that index, and constant between; the state keeps those
in force. Where a child goes out, they are made anew from the same totals, so that its share is not lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tokenloom_server.core.state import ChildState
from tokenloom_server.mixing.credits import rescaled
from tokenloom_server.mixing.least_consumed import LeastConsumed
from tokenloom_server.mixing.policy import Children, NodeShape
from tokenloom_server.mixing.schedule import Schedule
from tokenloom_server.mixing.weights import MAX_SUM, reduced

#: Samples of the run between two updates of weights. A part of the order's rules.
UPDATE_SAMPLES = 256


class Left(NamedTuple):
    """What a live child has to give: of ``total`` samples the ``remaining`` ones, from 1 to all of them."""

    remaining: int
    total: int


def soft_sequential(children: Sequence[Left]) -> list[int]:
    """With left = 1, each child in order gets left × remaining/total, and left is multiplied by 1 − remaining/total.
    Integers in the proportion of what they get."""
    # Shares are in 2^-60, each rounded down, and what they leave is exact: they and the rest are 2^60.
    if not children:
        return []
    left, shares = 1 << 60, []
    for child in children:
        share = left * child.remaining // child.total
        shares.append(share)
        left -= share
    total, room = sum(shares), MAX_SUM - len(shares)
    # Whoever has a share, however small, has a weight.
    return [max(1, share * room // total) if share else 0 for share in shares]


def balance_remaining(children: Sequence[Left]) -> list[int]:
    """Each child's weight is what it has to give, so that all end together."""
    return [child.remaining for child in children]


class _Varying(LeastConsumed, ABC):
    """``LeastConsumed`` under weights that a state keeps, and that an update may replace."""

    def __init__(self, shape: NodeShape, children: Children, states: Sequence[ChildState]) -> None:
        owed = [child.credit for child in states]
        super().__init__(shape, children, owed)
        self._rebuild(tuple(owed), [child.weight for child in states], tuple(child.total for child in states))

    def lost(self, child: int) -> None:
        anchor = self._anchor
        owed = self.credits(anchor, self._children.tokens)
        weights, totals = self._without(child)
        if any(weights):
            owed = rescaled(owed, anchor.live_weight, weights)
        self._rebuild(owed, weights, totals)

    def made(self, mark: object) -> Sequence[tuple[int, int]]:
        anchor = self._anchor_of(mark)
        return list(zip(anchor.weights, anchor.totals, strict=True))

    @abstractmethod
    def _without(self, child: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The weights and totals once a child is out."""

    def _of_live(self, weights: Sequence[int]) -> tuple[int, ...]:
        """Weights of the live children as weights of all."""
        found = [0] * len(self._children.out)
        if weights:
            for child, weight in zip(self._children.live, reduced(weights), strict=True):
                found[child] = weight
        return tuple(found)


class Estimated(_Varying):
    """Implements ``Policy``: weights from what the children have left."""

    def __init__(
        self,
        shape: NodeShape,
        children: Children,
        states: Sequence[ChildState],
        rule: Callable[[Sequence[Left]], Sequence[int]],
    ) -> None:
        super().__init__(shape, children, states)
        self._rule = rule

    def update(self, totals: Sequence[int]) -> None:
        """Makes weights anew from estimates in samples, by child."""
        self.reweigh(self._made(totals), tuple(totals))

    def _without(self, child: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        totals = list(self._anchor.totals)
        totals[child] = self._children.samples[child]
        return self._made(totals), tuple(totals)

    def _made(self, totals: Sequence[int]) -> tuple[int, ...]:
        live, samples = self._children.live, self._children.samples
        rests = [max(1, totals[i] - samples[i]) for i in live]
        return self._of_live(
            self._rule([Left(rest, max(rest, totals[i])) for i, rest in zip(live, rests, strict=True)])
        )


class Scheduled(_Varying):
    """Implements ``Policy``: weights from the run's total tokens. Where every child that is left has the weight 0,
    they share equally rather than end the node."""

    def __init__(self, shape: NodeShape, children: Children, states: Sequence[ChildState], schedule: Schedule) -> None:
        super().__init__(shape, children, states)
        self._schedule = schedule

    def update(self, run_tokens: int) -> None:
        """Makes weights anew for the run's total tokens."""
        self.reweigh(self._made(self._schedule.weights(run_tokens)), self._anchor.totals)

    def _without(self, child: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self._made(self._anchor.weights), self._anchor.totals

    def _made(self, weights: Sequence[int]) -> tuple[int, ...]:
        found = [weights[i] for i in self._children.live]
        return self._of_live(found if any(found) else [1] * len(found))
