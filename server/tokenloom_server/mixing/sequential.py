"""``sequential``: the first child until it is out, then the second, and so on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenloom_server.mixing.policy import Children, Choices, NoCredits, NodeShape


class Sequential(NoCredits):
    """Implements ``Policy``. The first live child in the order of the file is next; there is nothing to save."""

    def __init__(self, shape: NodeShape, children: Children, owed: Sequence[int]) -> None:
        self._children = children

    def upcoming(self, count: int) -> Choices:
        return np.full(count, self.choose(0), np.intp)

    def choose(self, retry: int) -> int:
        return self._children.out.index(False)

    def issued(self, count: int) -> None:
        """Nothing changes: the child goes on."""

    def lost(self, child: int) -> None:
        """Nothing is kept."""

    def weights(self) -> Sequence[int]:
        found = [0] * len(self._children.out)
        if not all(self._children.out):
            found[self.choose(0)] = 1
        return found
