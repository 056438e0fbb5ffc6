"""Many picks decided at once, by mean shares: for plans of runs that are too long to be gone through pick by pick."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tokenloom_server.core.state import MAX_COUNTER
from tokenloom_server.mixing.node import Node, RealLengths
from tokenloom_server.mixing.policy import Floats, Span


class _Failure(NamedTuple):
    """The next turn of a leaf that has nothing to give: after so many of the run's picks."""

    picks: float
    node: Node
    position: int


#: By node, the picks that each child has.
_Rooms = Mapping[Node, Sequence[int]]


class Leaps:
    """Leaps of a tree. Its counters move as they do in a run, and stay within a pick of the shares; a child goes out
    when its turn comes and it has nothing."""

    def __init__(self, upwards: Sequence[Node], lengths: Sequence[RealLengths] | None) -> None:
        """``upwards``: all nodes, children before parents; ``lengths`` as for the ``Mixer``."""
        self._upwards = upwards
        self._lengths = lengths
        #: Where picks differ in length: by node, the mean length of what each child has left.
        self._means: dict[Node, Floats] = {}
        #: What each child did not get of its mean share yet, in parts of a pick.
        self._fractions = {node: np.zeros(len(node.children)) for node in upwards}

    def leap(self, most: int, left: Sequence[int], run_tokens: int) -> dict[int, int] | None:
        """See ``Mixer.leap``."""
        self._lose_nodes_that_are_over()
        root = self._upwards[-1]
        if root.is_over:
            return {}
        rooms = self._rooms(left)
        most = min(most, root.room(), sum(rooms[root]))
        self._measure(rooms, run_tokens)
        length, shares, failure = self._length(most, rooms, run_tokens)
        if length > MAX_COUNTER / 2:
            return None
        by_source: dict[int, int] = {}
        if picks := min(most, int(length + 1e-6)):
            self._give(root, picks, shares, rooms, by_source)
        else:
            self._lose(failure.node, failure.position, waits=False)
        return by_source

    def _lose_nodes_that_are_over(self) -> None:
        for node in self._upwards:
            for position, child in node.inner:
                if child.is_over and not node.counters.out[position]:
                    self._lose(node, position, waits=child.waits)

    def _rooms(self, left: Sequence[int]) -> dict[Node, list[int]]:
        """By node, the picks that each child has, where each source has ``left``."""
        rooms: dict[Node, list[int]] = {}
        for node in self._upwards:
            rooms[node] = [
                min(child.room(), sum(rooms[child]))
                if isinstance(child, Node)
                else min(node.leaf_room(position), left[child])
                for position, child in enumerate(node.children)
            ]
            for position in np.flatnonzero(node.counters.out).tolist():
                rooms[node][position] = 0
        return rooms

    def _measure(self, rooms: _Rooms, run_tokens: int) -> None:
        """Finds the mean lengths of what is left, where picks differ."""
        if self._lengths is None:
            return
        below: dict[int | Node, float] = {}
        for node in self._upwards:
            for child, room in zip(node.children, rooms[node], strict=True):
                if not isinstance(child, Node):
                    below[child] = max(1, self._lengths[child].real_of(room)) / max(1, room)
            self._means[node] = np.array([below[child] for child in node.children])
            shares = 0.0 if node.is_over else self._pick_shares(node, Span(run_tokens, 0.0, 0.0))
            below[node] = float(np.sum(shares * self._means[node])) or 1.0

    def _pick_shares(self, node: Node, span: Span) -> Floats:
        """The children's mean shares of a node's picks: where those of tokens are balanced, by how long picks are."""
        shares = node.chooser.mean_shares(span)
        if node in self._means and node.policy.credit == "owed tokens":
            shares = shares / self._means[node]
            shares /= shares.sum()
        return shares

    def _length(
        self, most: int, rooms: _Rooms, run_tokens: int
    ) -> tuple[float, dict[Node, Floats], _Failure]:
        """How many picks go by the same means, up to ``most``; the shares over these, and what fails after them."""
        rates, shares = self._shares(0.0, run_tokens)
        horizon = min(node.chooser.horizon(run_tokens, rates[node]) for node in shares)
        length = min(float(most), max(1.0, horizon / self._upwards[-1].pick_tokens))
        while True:
            rates, shares = self._shares(length, run_tokens)
            failure = self._next_failure(rates, shares, rooms)
            limits = [
                child.room() / rates[child]
                for node in shares
                for _, child in node.inner
                if child in shares
            ]
            limit = min([failure.picks, *limits])
            if limit >= length * (1 - 1e-9):
                return length, shares, failure
            length = limit

    def _shares(
        self, length: float, run_tokens: int
    ) -> tuple[dict[Node, float], dict[Node, Floats]]:
        """By node that gets any: its part of the run's next picks, and its children's mean shares of its own."""
        rates, shares = {self._upwards[-1]: 1.0}, {}
        for node in reversed(self._upwards):
            rate = rates.get(node, 0.0)
            if rate:
                span = Span(run_tokens, length * node.pick_tokens, length * rate)
                shares[node] = self._pick_shares(node, span)
                rates |= {
                    child: rate * float(shares[node][position]) for position, child in node.inner
                }
        return rates, shares

    def _next_failure(
        self, rates: Mapping[Node, float], shares: Mapping[Node, Floats], rooms: _Rooms
    ) -> _Failure:
        first = _Failure(math.inf, self._upwards[-1], 0)
        for node, share in shares.items():
            room = np.array(rooms[node], np.float64)
            room[[position for position, _ in node.inner]] = math.inf
            room[room >= MAX_COUNTER] = math.inf
            turns = np.full(len(share), math.inf)
            flows = share > 0
            turns[flows] = (room + 1 - share - self._fractions[node])[flows] / share[flows]
            position = int(turns.argmin())
            first = min(
                first,
                _Failure(max(0.0, turns[position] / rates[node]), node, position),
                key=lambda f: f.picks,
            )
        return first

    def _give(
        self,
        node: Node,
        picks: int,
        shares: Mapping[Node, Floats],
        rooms: _Rooms,
        by_source: dict[int, int],
    ) -> None:
        """Counts so many picks of a node, here and below."""
        exact = shares[node] * picks + self._fractions[node]
        room = np.array([min(own, MAX_COUNTER) for own in rooms[node]], np.int64)
        counts = np.clip(np.floor(exact).astype(np.int64), 0, room)
        while missing := picks - int(counts.sum()):
            # Whole picks go to whom most of one is due, or come from whom least is.
            step = 1 if missing > 0 else -1
            may = np.flatnonzero((counts < room) if step > 0 else (counts > 0))
            by_due = may[np.argsort(-step * (exact - counts)[may], kind="stable")]
            counts[by_due[: abs(missing)]] += step
        self._fractions[node] = exact - counts
        for position in np.flatnonzero(counts).tolist():
            child, count = node.children[position], int(counts[position])
            if isinstance(child, Node):
                self._give(child, count, shares, rooms, by_source)
            else:
                by_source[child] = count
            node.count(position, count)

    def _lose(self, node: Node, position: int, *, waits: bool) -> None:
        node.lose(position, waits)
        self._fractions[node] = np.zeros(len(node.children))
