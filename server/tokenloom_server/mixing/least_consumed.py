"""``least_consumed``: every child stays within one pick of its share.

Tijdeman's rule for the chairman assignment problem (R. Tijdeman, *The chairman assignment problem*,
Discrete Mathematics 32, 1980): among the children that are due, the one with the earliest deadline.
With n live children, shares s and picks of L tokens, a child whose credit after the next pick would be at
least L / (2n − 2) is due, and its deadline is when its credit reaches L (1 − 1 / (2n − 2)).
Every child then stays within 1 − 1 / (2n − 2) picks of its share. With equal weights this is the
child with the fewest tokens. Ties go by a seeded hash.

Seen from now, the due time and the deadline of a child's k-th next pick depend on its own credit and
k alone. So thousands of choices are one sort of all these picks and one pass over a heap (earliest
deadline first), and a policy built from credits alone, at any time, continues identically.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tokenloom_server.core.hashing import Purpose, draws
from tokenloom_server.mixing.credits import balanced, begun, carried, rescaled
from tokenloom_server.mixing.policy import (
    Children,
    Choices,
    Chooser,
    Elsewhere,
    NodeChange,
    NodeShape,
    NodeStart,
    Policy,
    Weighed,
)

#: Deadlines are kept in 2^-20 tokens.
_DEADLINE_BITS = 20
#: Choices that are worked out ahead; fewer at first, so that a new mixer answers at once.
_FIRST_AHEAD, _AHEAD = 64, 4096
#: Weights that follow the run stay in force while every share is within 1/1024 of what it would be: what was worked
#: out ahead then holds. A part of the order's rules.
CLOSE = 1024
#: Jobs so many tokens from now are never reached, and all as far: within 64 bits with whatever is added.
_FAR = 2**62

_Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Anchor:
    """Credits, tokens and weights (0 for a child that is out) when any of the weights last changed; the totals that
    they were made from, if any."""

    credits: tuple[int, ...]
    tokens: tuple[int, ...]
    weights: tuple[int, ...]
    live_weight: int
    totals: tuple[int, ...] = ()


class OwesTokens(Policy):
    """A policy of which a child's credit is what it is owed, in 1/W tokens, where W is the sum of the live children's
    weights. Such credits keep their meaning when a revision puts one of these in place of another."""

    credit = "owed tokens"

    def revised(self, change: NodeChange) -> Sequence[int]:
        if change.old_policy is None or change.old_policy.credit != self.credit:
            return [0] * len(change.new)
        owed = [child.credit if child is not None else 0 for child in change.old]
        if list(change.old_weights) == list(change.new_weights):
            return owed
        return carried(owed, change.old_weights, change.new_weights, change.pick_tokens)


class LeastConsumed(Weighed, OwesTokens):
    """Of the children that are due, the one with the earliest deadline is next."""

    name = "least_consumed"

    def chooser(self, node: NodeStart) -> Chooser:
        return LeastConsumedChooser(node.shape, node.children, [child.credit for child in node.states])

    def imported(self, node: Elsewhere) -> tuple[Sequence[int], Sequence[int] | None]:
        """Balances go on: what each child had there counts, and a new one begins as ``baseline`` says."""
        weights = [weight if live else 0 for weight, live in zip(node.weights, node.live, strict=True)]
        balances = begun(node.baseline, weights, node.tokens, node.known)
        return balanced(weights, balances), balances


class LeastConsumedChooser(Chooser):
    """Implements ``Chooser``. Credits are in 1/W tokens, W being the sum of the live children's weights."""

    def __init__(self, shape: NodeShape, children: Children, owed: Sequence[int]) -> None:
        self._shape = shape
        self._children = children
        self._ahead = _FIRST_AHEAD
        self._planned: Choices = np.empty(0, np.intp)
        self._at = 0
        self._anchor: _Anchor
        self._rebuild(tuple(owed), shape.weights)

    def upcoming(self, count: int) -> Choices:
        if len(self._planned) - self._at < count:
            self._planned, self._at = self._plan(max(count, self._ahead)), 0
            self._ahead = min(2 * self._ahead, _AHEAD)
        return self._planned[self._at : self._at + count]

    def issued(self, count: int) -> None:
        self._at += count

    def lost(self, child: int) -> None:
        """Leaves the remaining children in their proportions: credits are rescaled to the new sum of
        weights, and what the child was owed or had in advance is spread by weight."""
        weights = self._masked(self._anchor.weights)
        if not any(weights):
            return
        before = self.credits(self._anchor, self._children.tokens)
        self._rebuild(rescaled(before, self._anchor.live_weight, weights), weights)

    def reweigh(self, weights: Sequence[int], totals: tuple[int, ...] = ()) -> None:
        """From here on other weights, unless the present ones are close; what is owed under those is carried over."""
        weights = self._masked(weights)
        anchor = self._anchor
        if _are_close(anchor.weights, weights):
            # Nothing is owed anew, and what was worked out ahead holds.
            self._anchor = replace(anchor, totals=totals)
            return
        owed = self.credits(anchor, self._children.tokens)
        self._rebuild(carried(owed, anchor.weights, weights, self._shape.pick_tokens), weights, totals)

    def weights(self) -> Sequence[int]:
        return self._anchor.weights

    def mark(self) -> _Anchor:
        return self._anchor

    def credits(self, mark: object, tokens: Sequence[int]) -> tuple[int, ...]:
        anchor = self._anchor_of(mark)
        since = [now - then for now, then in zip(tokens, anchor.tokens, strict=True)]
        issued = sum(since)
        return tuple(
            credit + weight * issued - anchor.live_weight * own if weight else credit
            for credit, weight, own in zip(anchor.credits, anchor.weights, since, strict=True)
        )

    @staticmethod
    def _anchor_of(mark: object) -> _Anchor:
        assert isinstance(mark, _Anchor)
        return mark

    def _masked(self, weights: Sequence[int]) -> tuple[int, ...]:
        return tuple(0 if out else weight for weight, out in zip(weights, self._children.out, strict=True))

    def _rebuild(self, owed: tuple[int, ...], weights: Sequence[int], totals: tuple[int, ...] = ()) -> None:
        # A weight of 0 freezes the credit of a child that is out.
        weights = self._masked(weights)
        self._anchor = _Anchor(owed, tuple(self._children.tokens), weights, sum(weights), totals)
        self._live = [i for i, weight in enumerate(weights) if weight]
        self._planned, self._at, self._ahead = self._planned[:0], 0, _FIRST_AHEAD

    def _plan(self, count: int) -> Choices:
        """The next ``count`` choices from the present counters."""
        live = np.array(self._live, np.intp)
        if len(live) == 1:
            return np.full(count, live[0])
        jobs = _Jobs(self, count)
        slots, ranks = jobs.slots.tolist(), jobs.ranks.tolist()
        slots.append(count)
        released: list[int] = []
        chosen: list[int] = []
        passed = 0
        for slot in range(count):
            while slots[passed] <= slot:
                heapq.heappush(released, ranks[passed])
                passed += 1
            if released:
                chosen.append(heapq.heappop(released))
                continue
            # Only when rounding left the credits' sum a hair below zero: nobody is due, the next one goes.
            first = jobs.first_of_each_child(ranks[passed:])
            soonest = min(first, key=first.__getitem__)
            chosen.append(first[soonest])
            del slots[passed + soonest], ranks[passed + soonest]
        return live[jobs.child_of_rank[chosen]]


def _are_close(present: Sequence[int], others: Sequence[int]) -> bool:
    """Whether no share changes by more than 1/``CLOSE`` of what it would be."""
    total, other_total = sum(present), sum(others)
    return total > 0 and all(
        CLOSE * abs(weight * other_total - other * total) <= other * total
        for weight, other in zip(present, others, strict=True)
    )


class _Jobs:
    """The next picks of each live child, as many as may come up within ``count`` slots of one pick.

    In the order in which they are released: ``slots``, the first slot in which a job is due; ``ranks``,
    its place among all by deadline, tie and child; ``child_of_rank``, whose it is (among the live ones).
    """

    def __init__(self, chooser: LeastConsumedChooser, count: int) -> None:
        anchor, counters, shape, live = chooser._anchor, chooser._children, chooser._shape, chooser._live
        length, pairs = shape.pick_tokens, 2 * len(live) - 2
        pick = anchor.live_weight * length
        credit = chooser.credits(anchor, counters.tokens)
        # In units of 1 / (pairs × weight) tokens from now, exactly: job k of a child is due a pick before
        # begin + k × period, and its deadline is end + k × period. Quotient and remainder stay within 64 bits.
        period = pairs * pick
        units = [pairs * anchor.weights[i] for i in live]
        begins = [pick - pairs * credit[i] for i in live]
        horizon = count * length
        # None gets more than all, however much it is owed.
        counts = [
            min(count, max(0, (horizon * unit - begin) // period + 1)) + 1
            for unit, begin in zip(units, begins, strict=True)
        ]
        if len(live) == 2:
            # Where a job is taken before it is due (see _plan; that needs two children), more may be needed.
            counts = [count + 1] * 2
        begin_q, begin_r = _quotients(begins, units)
        end_q, end_r = _quotients([(pairs - 1) * pick - pairs * credit[i] for i in live], units)
        period_q, period_r = _quotients([period] * len(live), units)

        child = np.repeat(np.arange(len(live)), counts)
        k = np.arange(len(child)) - np.repeat(np.cumsum([0, *counts[:-1]]), counts)
        unit = np.array(units, np.int64)[child]
        whole, rest = np.minimum(k, (_FAR // np.maximum(period_q, 1))[child]) * period_q[child], k * period_r[child]
        due = begin_q[child] + whole + (begin_r[child] + rest + unit - 1) // unit - length
        ends, fractions = np.divmod(end_r[child] + rest, unit)
        ends += end_q[child] + whole
        fractions = (fractions << _DEADLINE_BITS) // unit

        ties = np.zeros(len(child), np.uint64)
        by_deadline = np.lexsort((fractions, ends))
        same = (np.diff(ends[by_deadline]) == 0) & (np.diff(fractions[by_deadline]) == 0)
        if same.any():
            tied = by_deadline[np.append(same, False) | np.insert(same, 0, False)]
            ids = np.array([shape.child_ids[i] for i in live], np.uint64)[child[tied]]
            picks = np.array([counters.picks[i] for i in live], np.int64)[child[tied]] + k[tied]
            ties[tied] = draws(shape.seed, Purpose.TIE, ids, picks.astype(np.uint64))
            by_deadline = np.lexsort((child, ties, fractions, ends))
        ranks = np.empty(len(child), np.int64)
        ranks[by_deadline] = np.arange(len(child))
        slots = np.maximum(-(-due // length), 0)
        by_release = np.argsort(slots, kind="stable")
        self.slots: _Int64s = slots[by_release]
        self.ranks: _Int64s = ranks[by_release]
        self.child_of_rank: Choices = child[by_deadline]

    def first_of_each_child(self, ranks: Sequence[int]) -> dict[int, int]:
        """Of jobs in order of release, the position and rank of each child's first."""
        firsts: dict[int, tuple[int, int]] = {}
        for position, rank in enumerate(ranks):
            firsts.setdefault(int(self.child_of_rank[rank]), (position, rank))
        return dict(firsts.values())


def _quotients(numerators: Sequence[int], units: Sequence[int]) -> tuple[_Int64s, _Int64s]:
    pairs = [divmod(numerator, unit) for numerator, unit in zip(numerators, units, strict=True)]
    return np.array([q for q, _ in pairs], np.int64), np.array([r for _, r in pairs], np.int64)
