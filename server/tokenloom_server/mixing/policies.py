"""The policies that there are; here those without balances, the others in ``least_consumed`` and ``varying``."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType

import numpy as np

from tokenloom_server.core.hashing import Purpose, draw, draws
from tokenloom_server.mixing.least_consumed import LeastConsumed
from tokenloom_server.mixing.policy import (
    Choices,
    Chooser,
    Elsewhere,
    NodeChange,
    NodeStart,
    Policy,
)
from tokenloom_server.mixing.varying import BalanceRemaining, Schedule, SoftSequential

# ``sequential``: the first child until it is out, then the second, and so on.


class Sequential(Policy):
    """The first live child in the order of the file is next; there is nothing to save."""

    name = "sequential"
    follows_progress = True

    def chooser(self, node: NodeStart) -> Chooser:
        return SequentialChooser(node)


class SequentialChooser(Chooser):
    def work_out(self, count: int) -> Choices:
        return np.full(count, self._children.out.index(False), np.intp)

    def weights(self) -> Sequence[int]:
        weights = [0] * len(self._children.out)
        if not all(self._children.out):
            weights[self._children.out.index(False)] = 1
        return weights


# ``round_robin``: one pick of each live child in turn, in the order of the file.


class RoundRobin(Policy):
    """A child's turns are its picks, and for one that joined later those that went by before (its credit); the live
    one with the fewest is next, the first in the file among several. So live children are never more than one turn
    apart."""

    name = "round_robin"
    credit = "turns"

    def chooser(self, node: NodeStart) -> Chooser:
        return RoundRobinChooser(node)

    def revised(self, change: NodeChange) -> Sequence[int]:
        picks = [child.samples // change.pick_samples for child in change.new]
        live = [weight > 0 for weight in change.new_weights]
        if not isinstance(change.old_policy, RoundRobin):
            return first_round(picks, live)
        # A node that sources joined or left counts other picks than before; its turns are what they were.
        turns = [
            was.samples // change.pick_samples + was.credit - now if was is not None else 0
            for was, now in zip(change.old, picks, strict=True)
        ]
        return levelled(picks, turns, [weight > 0 for weight in change.old_weights], live)

    def forked(self, node: Elsewhere) -> Sequence[int]:
        # None has turns to make up for that others had elsewhere.
        return first_round(node.picks, node.live)


class RoundRobinChooser(Chooser):
    def work_out(self, count: int) -> Choices:
        live = self._children.live
        turns = [self._children.picks[i] + self._mark.credits[i] for i in live]
        most = max(turns)
        late = [i for i, taken in zip(live, turns, strict=True) if taken < most]
        # Whoever has not had the present round comes first; then whole rounds.
        rounds = np.tile(np.array(live, np.intp), -(-count // len(live)))
        return np.concatenate([np.array(late, np.intp), rounds])

    def weights(self) -> Sequence[int]:
        return [0 if out else 1 for out in self._children.out]


def first_round(picks: Sequence[int], live: Sequence[bool]) -> tuple[int, ...]:
    """The credits under which the next round is the first for all that are live."""
    return levelled(picks, [0] * len(picks), [False] * len(picks), live)


def levelled(
    picks: Sequence[int], joined: Sequence[int], before: Sequence[bool], after: Sequence[bool]
) -> tuple[int, ...]:
    """The credits of a node whose live children change from ``before`` to ``after``: who joins has its first turn in
    the next round, and catches up with nothing."""
    turns = [taken + credit for taken, credit in zip(picks, joined, strict=True)]
    joins = [now and not was for was, now in zip(before, after, strict=True)]
    stay = [turn for turn, was, now in zip(turns, before, after, strict=True) if was and now]
    level = max(stay or [turn for turn, new in zip(turns, joins, strict=True) if new], default=0)
    return tuple(
        level - taken if new else credit
        for taken, credit, new in zip(picks, joined, joins, strict=True)
    )


# ``weighted``: seeded draws by weight.


class Weighted(Policy):
    """The draw for a node's k-th pick is a hash of (seed, node id, k, retry), scaled to the sum of the live children's
    integer weights: exact proportions, nothing to save."""

    name = "weighted"
    takes = "numbers"
    options = ("unit",)

    def chooser(self, node: NodeStart) -> Chooser:
        return WeightedChooser(node)


class WeightedChooser(Chooser):
    def __init__(self, node: NodeStart) -> None:
        super().__init__(node)
        self._rebuild()

    def work_out(self, count: int) -> Choices:
        picks = sum(self._children.picks)
        indices = np.arange(picks, picks + count, dtype=np.uint64)
        ids = np.full(count, self._shape.node_id, np.uint64)
        total = self._cumulative[-1]
        numbers = draws(self._shape.seed, Purpose.CHOICE, ids, indices)
        return np.array([self._child_at(number * total >> 64) for number in numbers], np.intp)

    def choose(self, retry: int) -> int:
        if not retry:
            return super().choose(retry)
        number = draw(
            self._shape.seed, Purpose.CHOICE, self._shape.node_id, sum(self._children.picks), retry
        )
        return self._child_at(number * self._cumulative[-1] >> 64)

    def lost(self, child: int) -> None:
        super().lost(child)
        self._rebuild()

    def weights(self) -> Sequence[int]:
        return [
            0 if out else own
            for own, out in zip(self._shape.weights, self._children.out, strict=True)
        ]

    def _child_at(self, point: int) -> int:
        return self._live[bisect_right(self._cumulative, point)]

    def _rebuild(self) -> None:
        self._live = self._children.live
        self._cumulative = list(accumulate(self._shape.weights[i] for i in self._live))


# All of them. CONTRIBUTING.md shows how to add one.


BUILT_IN: Sequence[type[Policy]] = (
    LeastConsumed,
    Weighted,
    RoundRobin,
    Sequential,
    SoftSequential,
    BalanceRemaining,
    Schedule,
)


@functools.cache
def policies() -> Mapping[str, Policy]:
    """The built-in policies by name: always the same ones, so that configs of equal fields are equal."""
    return MappingProxyType({policy.name: policy() for policy in BUILT_IN})
