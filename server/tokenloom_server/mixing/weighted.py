"""``weighted``: seeded draws by weight."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from tokenloom_server.core.hashing import Purpose, draw, draws
from tokenloom_server.mixing.policy import Children, Choices, Chooser, NodeShape, NodeStart, Weighed

#: Choices that are drawn ahead; fewer at first, so that a new mixer answers at once.
_FIRST_AHEAD, _AHEAD = 64, 4096


class Weighted(Weighed):
    """The draw for a node's k-th pick is a hash of (seed, node id, k, retry), scaled to the sum of the live children's
    integer weights: exact proportions, nothing to save."""

    name = "weighted"
    options = ("unit",)

    def chooser(self, node: NodeStart) -> Chooser:
        return WeightedChooser(node.shape, node.children)


class WeightedChooser(Chooser):
    def __init__(self, shape: NodeShape, children: Children) -> None:
        self._shape = shape
        self._children = children
        self._picks = sum(children.picks)
        self._ahead = _FIRST_AHEAD
        self._drawn: Choices = np.empty(0, np.intp)
        self._at = 0
        self._rebuild()

    def upcoming(self, count: int) -> Choices:
        if len(self._drawn) - self._at < count:
            size = max(count, self._ahead)
            self._ahead = min(2 * self._ahead, _AHEAD)
            indices = np.arange(self._picks, self._picks + size, dtype=np.uint64)
            ids = np.full(size, self._shape.node_id, np.uint64)
            total = self._cumulative[-1]
            numbers = draws(self._shape.seed, Purpose.CHOICE, ids, indices)
            self._drawn = np.array([self._child_at(number * total >> 64) for number in numbers], np.intp)
            self._at = 0
        return self._drawn[self._at : self._at + count]

    def choose(self, retry: int) -> int:
        number = draw(self._shape.seed, Purpose.CHOICE, self._shape.node_id, self._picks, retry)
        return self._child_at(number * self._cumulative[-1] >> 64)

    def issued(self, count: int) -> None:
        self._picks += count
        self._at += count

    def lost(self, child: int) -> None:
        self._rebuild()

    def weights(self) -> Sequence[int]:
        return [0 if out else own for own, out in zip(self._shape.weights, self._children.out, strict=True)]

    def _child_at(self, point: int) -> int:
        return self._live[bisect_right(self._cumulative, point)]

    def _rebuild(self) -> None:
        self._live = self._children.live
        self._cumulative = list(accumulate(self._shape.weights[i] for i in self._live))
        self._drawn, self._at = self._drawn[:0], 0
