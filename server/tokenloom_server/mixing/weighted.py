"""``weighted``: seeded draws by weight."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from tokenloom_server.hashing import Purpose, draw
from tokenloom_server.mixing.policy import Children, NodeShape


class Weighted:
    """Implements ``Policy``. The draw for a node's k-th sample is a hash of (seed, node id, k, retry),
    scaled to the sum of the live children's integer weights: exact proportions, nothing to save."""

    def __init__(self, shape: NodeShape, children: Children, owed: Sequence[int]) -> None:
        self._shape = shape
        self._children = children
        self._picks = sum(children.samples)
        self._rebuild()

    def choose(self, retry: int) -> int:
        drawn = draw(self._shape.seed, Purpose.CHOICE, self._shape.node_id, self._picks, retry)
        return self._live[bisect_right(self._cumulative, drawn * self._cumulative[-1] >> 64)]

    def issued(self, child: int, tokens: int) -> None:
        self._picks += 1

    def exhausted(self, child: int) -> None:
        self._rebuild()

    def mark(self) -> None:
        return None

    def credits(self, mark: object, tokens: Sequence[int]) -> tuple[int, ...]:
        return (0,) * len(tokens)

    def _rebuild(self) -> None:
        self._live = [i for i, out in enumerate(self._children.exhausted) if not out]
        self._cumulative = list(accumulate(self._shape.weights[i] for i in self._live))
