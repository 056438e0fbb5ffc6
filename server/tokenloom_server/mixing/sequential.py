"""``sequential``: the first child until it is out, then the second, and so on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenloom_server.mixing.policy import Choices, Chooser, NodeStart, Policy


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
