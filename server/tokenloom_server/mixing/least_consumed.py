"""``least_consumed``: every child stays within one pick of its share.

Tijdeman's rule for the chairman assignment problem (R. Tijdeman, *The chairman assignment problem*,
Discrete Mathematics 32, 1980): among the children that are due, the one with the earliest deadline.
With n live children, shares s and picks of L tokens, a child whose credit after the next pick would be at
least L / (2n − 2) is due, and its deadline is when its credit reaches L (1 − 1 / (2n − 2)).
Every child then stays within 1 − 1 / (2n − 2) picks of its share. With equal weights this is the
child with the fewest tokens. Ties go by a seeded hash.

Where picks differ in length, L is the longest that there can be, and the rule is the same in tokens: a child
whose credit with its share of L tokens more would be at least L / (2n − 2) is due, and its deadline is when its
credit reaches L (1 − 1 / (2n − 2)). A child is chosen before the length of its pick is known; that length, and no
more, then goes from its credit. Tijdeman's argument holds, since of a pick it needs only that it has L tokens at
most: every child stays within 1 − 1 / (2n − 2) of the longest sample of its share. With equal weights this is again
the child with the fewest tokens.

Seen from now, the due time and the deadline of a child's k-th next pick depend on its own credit and
k alone. So thousands of choices are one sort of all these picks and one pass over a heap (earliest
deadline first), and a policy built from credits alone, at any time, continues identically.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice, repeat, tee
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenloom_server.core.hashing import Purpose, draw, draws
from tokenloom_server.core.state import MAX_COUNTER
from tokenloom_server.mixing.policy import (
    Children,
    Choices,
    Chooser,
    Elsewhere,
    Mark,
    NodeChange,
    NodeShape,
    NodeStart,
    Policy,
)

#: Deadlines are kept in 2^-20 tokens.
_DEADLINE_BITS = 20
#: Weights that follow the run stay in force while every share is within 1/1024 of what it would be: what was worked
#: out ahead then holds. A part of the order's rules.
CLOSE = 1024
#: In place of a tie's draw, before all of them: most jobs need none.
_UNDRAWN = -1
#: Jobs so many tokens from now are never reached, and all as far: within 64 bits with whatever is added.
_FAR = 2**62

_Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Anchor(Mark):
    """Credits, balances and weights (0 for a child that is out) when any of the weights last changed; the totals that
    they were made from, if any."""

    balances: tuple[int, ...]
    weights: tuple[int, ...]
    live_weight: int
    totals: tuple[int, ...] = ()

    def credits_at(self, balances: Sequence[int]) -> tuple[int, ...]:
        since = [now - then for now, then in zip(balances, self.balances, strict=True)]
        issued = sum(since)
        return tuple(
            credit + weight * issued - self.live_weight * own if weight else credit
            for credit, weight, own in zip(self.credits, self.weights, since, strict=True)
        )

    def made(self) -> Sequence[tuple[int, int]]:
        return list(zip(self.weights, self.totals, strict=True)) if self.totals else Mark.made(self)


class _Jobs(NamedTuple):
    """The next picks of each live child, in the order in which they are released.

    ``slots``: the first slot, of one pick each, in which a job is due. ``ranks``: its place among all by deadline, tie
    and child. ``child_of_rank``: whose it is (among the live ones).
    """

    slots: _Int64s
    ranks: _Int64s
    child_of_rank: Choices


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


class LeastConsumed(OwesTokens):
    """Of the children that are due, the one with the earliest deadline is next."""

    name = "least_consumed"
    takes = "numbers"

    def chooser(self, node: NodeStart) -> Chooser:
        return LeastConsumedChooser(node)

    def imported(self, node: Elsewhere) -> tuple[Sequence[int], Sequence[int] | None]:
        """Balances go on: what each child had there counts, and a new one begins as ``baseline`` says."""
        weights = [
            weight if live else 0 for weight, live in zip(node.weights, node.live, strict=True)
        ]
        balances = begun(node.baseline, weights, node.tokens, node.known)
        return balanced(weights, balances), balances


class LeastConsumedChooser(Chooser):
    """Implements ``Chooser``. Credits are in 1/W tokens, W being the sum of the live children's weights."""

    def __init__(self, node: NodeStart) -> None:
        super().__init__(node)
        self._mark: _Anchor
        self._rebuild(tuple(child.credit for child in node.states), node.shape.weights)

    def lost(self, child: int) -> None:
        """Leaves the remaining children in their proportions: credits are rescaled to the new sum of
        weights, and what the child was owed or had in advance is spread by weight."""
        anchor = self._mark
        owed = anchor.credits_at(self._children.balances)
        weights, totals = self._without(child)
        if any(weights):
            owed = rescaled(owed, anchor.live_weight, weights)
        self._rebuild(owed, weights, totals)

    def reweigh(self, weights: Sequence[int], totals: tuple[int, ...] = ()) -> None:
        """Puts other weights in force, unless the present ones are close; what is owed under those is carried over."""
        weights = self._masked(weights)
        anchor = self._mark
        if _are_close(anchor.weights, weights):
            # Nothing is owed anew, and what was worked out ahead holds.
            self._mark = replace(anchor, totals=totals)
            return
        owed = anchor.credits_at(self._children.balances)
        self._rebuild(
            carried(owed, anchor.weights, weights, self._shape.pick_tokens), weights, totals
        )

    def weights(self) -> Sequence[int]:
        return self._mark.weights

    def _masked(self, weights: Sequence[int]) -> tuple[int, ...]:
        return tuple(
            0 if out else weight for weight, out in zip(weights, self._children.out, strict=True)
        )

    def _without(self, child: int) -> tuple[Sequence[int], tuple[int, ...]]:
        """The weights once a child is out, and the totals that they are made from, if any."""
        return self._masked(self._mark.weights), ()

    def _rebuild(
        self, owed: tuple[int, ...], weights: Sequence[int], totals: tuple[int, ...] = ()
    ) -> None:
        # A weight of 0 freezes the credit of a child that is out.
        weights = self._masked(weights)
        self._mark = _Anchor(owed, tuple(self._children.balances), weights, sum(weights), totals)
        self._live = [i for i, weight in enumerate(weights) if weight]
        self.forget()

    def forget(self) -> None:
        super().forget()
        #: Where picks differ in length, the next choices, worked out as they are asked for; None before the first.
        self._by_length: Iterator[int] | None = None

    def choices(self) -> Iterator[int]:
        if self._children.lengths is None:
            return super().choices()
        if self._by_length is None:
            self._by_length = _by_length(self._mark, self._shape, self._children, self._live)
        self._by_length, choices = tee(self._by_length)
        return choices

    def taken(self, count: int) -> None:
        super().taken(count)
        if self._by_length is not None:
            next(islice(self._by_length, count, count), None)

    def work_out(self, count: int) -> Choices:
        if self._children.lengths is not None:
            return np.fromiter(islice(self.choices(), count), np.intp)
        live = np.array(self._live, np.intp)
        if len(live) == 1:
            return np.full(count, live[0])
        jobs = self._jobs(count)
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
            first: dict[int, int] = {}
            for position, rank in enumerate(ranks[passed:], passed):
                first.setdefault(int(jobs.child_of_rank[rank]), position)
            soonest = min(first.values(), key=ranks.__getitem__)
            chosen.append(ranks[soonest])
            del slots[soonest], ranks[soonest]
        return live[jobs.child_of_rank[chosen]]

    def _jobs(self, count: int) -> _Jobs:
        """The jobs that may come up within ``count`` slots."""
        anchor, shape, live = self._mark, self._shape, self._live
        length, pairs = shape.pick_tokens, 2 * len(live) - 2
        pick = anchor.live_weight * length
        credit = anchor.credits_at(self._children.balances)
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
        whole, rest = (
            np.minimum(k, (_FAR // np.maximum(period_q, 1))[child]) * period_q[child],
            k * period_r[child],
        )
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
            picks = (
                np.array([self._children.picks[i] for i in live], np.int64)[child[tied]] + k[tied]
            )
            ties[tied] = draws(shape.seed, Purpose.TIE, ids, picks.astype(np.uint64))
            by_deadline = np.lexsort((child, ties, fractions, ends))
        ranks = np.empty(len(child), np.int64)
        ranks[by_deadline] = np.arange(len(child))
        slots = np.maximum(-(-due // length), 0)
        by_release = np.argsort(slots, kind="stable")
        return _Jobs(slots[by_release], ranks[by_release], child[by_deadline])


def _by_length(
    anchor: _Anchor, shape: NodeShape, children: Children, live: Sequence[int]
) -> Iterator[int]:
    """The choices from the counters on where picks differ in length, by the same rule: each pick is debited by its own
    length once it is chosen, and of a child that was not chosen none is asked for. Ends after a choice whose length is
    not there."""
    assert children.lengths is not None, "every pick counts alike"
    if len(live) == 1:
        yield from repeat(live[0])
    lengths: dict[int, Iterator[int]] = {}
    picks = list(children.picks)
    # As in ``_jobs``: when each child's next job is due, and its deadline, in 1 / (pairs × weight) tokens from now.
    pairs = 2 * len(live) - 2
    step, longest = pairs * anchor.live_weight, shape.pick_tokens
    window = (pairs - 2) * anchor.live_weight * longest
    units = [pairs * weight for weight in anchor.weights]
    credit = anchor.credits_at(children.balances)
    begins = [step // pairs * longest - pairs * owed for owed in credit]
    # With equal weights the child with the earliest deadline is always due.
    is_equal = len({anchor.weights[i] for i in live}) == 1

    def tie_of(child: int) -> int:
        return draw(shape.seed, Purpose.TIE, shape.child_ids[child], picks[child])

    def job_of(child: int) -> tuple[int, int, int]:
        due = 0 if is_equal else -(-begins[child] // units[child]) - longest
        return due, (begins[child] + window << _DEADLINE_BITS) // units[child], child

    now, jobs = 0, [job_of(i) for i in live]
    #: Jobs that are not due yet, by when they are; and those that are, by deadline. Each with its child.
    waiting = [job for job in jobs if job[0] > now]
    released = [(deadline, _UNDRAWN, i) for due, deadline, i in jobs if due <= now]
    heapq.heapify(waiting)
    heapq.heapify(released)
    while True:
        while waiting and waiting[0][0] <= now:
            _, deadline, i = heapq.heappop(waiting)
            heapq.heappush(released, (deadline, _UNDRAWN, i))
        if not released:
            # Only when rounding left the credits' sum a hair below zero: nobody is due, the next one goes.
            first = min(waiting, key=lambda job: (job[1], tie_of(job[2]), job[2]))
            waiting = sorted(set(waiting) - {first})
            released.append((first[1], _UNDRAWN, first[2]))
        deadline, tie, child = heapq.heappop(released)
        while tie == _UNDRAWN and released and released[0][0] == deadline:
            deadline, tie, child = heapq.heappushpop(released, (deadline, tie_of(child), child))
        if child not in lengths:
            lengths[child] = children.lengths[child]()
        length = next(lengths[child], None)
        yield child
        if length is None:
            return
        now += length
        picks[child] += 1
        begins[child] += step * length
        heapq.heappush(waiting, job_of(child))


def _are_close(present: Sequence[int], others: Sequence[int]) -> bool:
    """Whether no share changes by more than 1/``CLOSE`` of what it would be."""
    total, other_total = sum(present), sum(others)
    return total > 0 and all(
        CLOSE * abs(weight * other_total - other * total) <= other * total
        for weight, other in zip(present, others, strict=True)
    )


def _quotients(numerators: Sequence[int], units: Sequence[int]) -> tuple[_Int64s, _Int64s]:
    pairs = [divmod(numerator, unit) for numerator, unit in zip(numerators, units, strict=True)]
    return np.array([q for q, _ in pairs], np.int64), np.array([r for _, r in pairs], np.int64)


# Credits in owed tokens: converted when weights change, and taken over from an older data loader's balances.
#
# A source that is new to those balances gets one, no counters: it begins as if it had consumed as much for each unit of
# its weight as the mixture file's ``new_source_baseline`` says of its siblings, so that it neither starves them nor
# waits for its share.


def rescaled(owed: Sequence[int], before: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Credits in 1/``before`` tokens as ones in 1/W tokens, where W is the sum of the new ``weights``.

    A child of weight 0 keeps its own, frozen. What those that have a weight are then owed together, or had in
    advance, is spread among them by weight, so that nothing is left over.
    """
    total = sum(weights)
    scaled = [credit * total // before for credit in owed]
    rest = -sum(credit for credit, weight in zip(scaled, weights, strict=True) if weight)
    return tuple(
        credit + rest * weight // total for credit, weight in zip(scaled, weights, strict=True)
    )


def carried(
    owed: Sequence[int], before: Sequence[int], after: Sequence[int], pick_tokens: int
) -> tuple[int, ...]:
    """The credits of a node's children once other weights are in force: shares follow at once.

    ``before`` and ``after`` are integer weights by child, 0 for one that gets nothing (paused, out, or new: a new
    child's credit is 0). Nobody is left more than one pick away from its share, whatever joined or left.
    """
    total, earlier = sum(after), sum(before)
    if not total:
        return tuple(owed)
    if not earlier:
        return (0,) * len(owed)
    scaled = rescaled(owed, earlier, after)
    most = max(abs(credit) for credit in scaled)
    pick = total * pick_tokens
    if most <= pick:
        return scaled
    # All in proportion, towards zero, so that what they have together stays nothing.
    return tuple((abs(credit) * pick // most) * (1 if credit > 0 else -1) for credit in scaled)


def begun(
    baseline: str, weights: Sequence[int], tokens: Sequence[int], known: Sequence[bool]
) -> list[int]:
    """The tokens that each child's balance begins with: its own, and for one that was not ``known`` as many for each
    unit of its weight as its siblings have (``baseline``: the min or mean of these, or zero). A weight of 0 takes no
    part."""
    siblings = [
        Fraction(own, weight)
        for own, weight, was in zip(tokens, weights, known, strict=True)
        if was and weight
    ]
    start = Fraction(0)
    if siblings and baseline != "zero":
        start = min(siblings) if baseline == "min" else sum(siblings, start) / len(siblings)
    return [
        own if was else int(start * weight)
        for own, weight, was in zip(tokens, weights, known, strict=True)
    ]


def balanced(weights: Sequence[int], tokens: Sequence[int]) -> tuple[int, ...]:
    """What each child is owed of all ``tokens``, in 1/W tokens, where W is the sum of the weights. A balance that is
    too far off to be counted keeps its proportions within what can be: it lasts as long as anyone will train."""
    whole, total = (
        sum(weights),
        sum(own for own, weight in zip(tokens, weights, strict=True) if weight),
    )
    owed = [
        weight * total - whole * own if weight else 0
        for weight, own in zip(weights, tokens, strict=True)
    ]
    most = max(map(abs, owed))
    return tuple(owed if most <= MAX_COUNTER else (credit * MAX_COUNTER // most for credit in owed))
