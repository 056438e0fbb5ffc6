"""``weighted``: seeded draws by weight."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from tokenloom_server.core.hashing import Purpose, draw, draws
from tokenloom_server.mixing.policy import Choices, Chooser, NodeStart, Policy


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
