"""``least_consumed``: every child stays within one sample of its share.

Tijdeman's rule for the chairman assignment problem (R. Tijdeman, *The chairman assignment problem*,
Discrete Mathematics 32, 1980): among the children that are due, the one with the earliest deadline.
With n live children, shares s and samples of L tokens, a child whose credit after the next sample
would be at least L / (2n − 2) is due, and its deadline is when its credit reaches L (1 − 1 / (2n − 2)).
Every child then stays within 1 − 1 / (2n − 2) samples of its share. With equal weights this is the
child with the fewest tokens. Ties go by a seeded hash.

Due times and deadlines do not move while a child is not picked, so two heaps (waiting by due time,
due by deadline) make a choice O(log n). They are integers, and shift with the node's token count as a
whole, so that a policy built from credits alone, at any time, continues identically.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from tokenloom_server.hashing import Purpose, draw
from tokenloom_server.mixing.policy import Children, NodeShape

#: Deadlines are kept in 2^-20 tokens.
_DEADLINE_BITS = 20


@dataclass(frozen=True, slots=True)
class _Anchor:
    """Credits, tokens and the sum of live weights when the set of live children last changed."""

    credits: tuple[int, ...]
    tokens: tuple[int, ...]
    weights: tuple[int, ...]
    live_weight: int


class LeastConsumed:
    """Implements ``Policy``. Credits are in 1/W tokens, W being the sum of the live children's weights."""

    def __init__(self, shape: NodeShape, children: Children, owed: Sequence[int]) -> None:
        self._shape = shape
        self._children = children
        self._issued = 0
        self._only: int | None = None
        # (due at, deadline, tie, child) by due time; (deadline, tie, child) by deadline.
        self._waiting: list[tuple[int, int, int, int]] = []
        self._due: list[tuple[int, int, int]] = []
        self._rebuild(tuple(owed))

    def choose(self, retry: int) -> int:
        if self._only is not None:
            return self._only
        waiting, due = self._waiting, self._due
        while waiting and waiting[0][0] <= self._issued:
            _, deadline, tie, child = heapq.heappop(waiting)
            heapq.heappush(due, (deadline, tie, child))
        if due:
            return due[0][2]
        # Only when rounding left the credits' sum a hair below zero: nobody is due, the next one goes.
        return min(entry[1:] for entry in waiting)[2]

    def issued(self, child: int, tokens: int) -> None:
        self._issued += tokens
        if self._only is not None:
            return
        if self._due and self._due[0][2] == child:
            heapq.heappop(self._due)
        else:
            self._waiting = [entry for entry in self._waiting if entry[3] != child]
            heapq.heapify(self._waiting)
        self._enqueue(child)

    def exhausted(self, child: int) -> None:
        """Leaves the remaining children in their proportions: credits are rescaled to the new sum of
        weights, and what the exhausted child was owed or had in advance is spread by weight."""
        anchor = self._anchor
        before = self.credits(self._anchor, self._children.tokens)
        live = [i for i, out in enumerate(self._children.exhausted) if not out]
        total = sum(self._shape.weights[i] for i in live)
        scaled = [credit * total // anchor.live_weight for credit in before]
        rest = -sum(scaled[i] for i in live)
        for i in live:
            scaled[i] += rest * self._shape.weights[i] // total
        self._rebuild(tuple(scaled))

    def mark(self) -> _Anchor:
        return self._anchor

    def credits(self, mark: object, tokens: Sequence[int]) -> tuple[int, ...]:
        assert isinstance(mark, _Anchor)
        given = [now - then for now, then in zip(tokens, mark.tokens, strict=True)]
        issued = sum(given)
        return tuple(
            credit + weight * issued - mark.live_weight * own if weight else credit
            for credit, weight, own in zip(mark.credits, mark.weights, given, strict=True)
        )

    def _rebuild(self, owed: tuple[int, ...]) -> None:
        out = self._children.exhausted
        # An exhausted child's weight is 0 here, which freezes its credit.
        weights = tuple(0 if out[i] else weight for i, weight in enumerate(self._shape.weights))
        self._anchor = _Anchor(owed, tuple(self._children.tokens), weights, sum(weights))
        self._issued = 0
        self._waiting, self._due = [], []
        live = [i for i, weight in enumerate(weights) if weight]
        self._only = live[0] if len(live) == 1 else None
        self._pairs = 2 * len(live) - 2
        if self._only is None:
            for child in live:
                self._enqueue(child)

    def _enqueue(self, child: int) -> None:
        anchor, issued, pairs = self._anchor, self._issued, self._pairs
        weight = anchor.weights[child]
        given = self._children.tokens[child] - anchor.tokens[child]
        credit = anchor.credits[child] + weight * issued - anchor.live_weight * given
        sample = anchor.live_weight * self._shape.sample_tokens
        # Smallest token count t with pairs × (credit + weight × (t − issued + L)) ≥ sample, rounded up.
        due_at = issued - self._shape.sample_tokens - (pairs * credit - sample) // (pairs * weight)
        numerator = (pairs - 1) * sample - pairs * credit
        deadline = (issued << _DEADLINE_BITS) + (numerator << _DEADLINE_BITS) // (pairs * weight)
        shape = self._shape
        tie = draw(shape.seed, Purpose.TIE, shape.child_ids[child], self._children.samples[child])
        heapq.heappush(self._waiting, (due_at, deadline, tie, child))
