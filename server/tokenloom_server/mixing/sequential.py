"""``sequential``: the first child until it is out, then the second, and so on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenloom_server.mixing.policy import Choices, Chooser, NodeStart, Policy, SavedNode


class Sequential(Policy):
    """The first live child in the order of the file is next; there is nothing to save."""

    name = "sequential"
    follows_progress = True

    def chooser(self, node: NodeStart) -> Chooser:
        return SequentialChooser(node)

    def saved_weights(self, node: SavedNode) -> Sequence[float]:
        return _first([not child.live for child in node.children])


class SequentialChooser(Chooser):
    def work_out(self, count: int) -> Choices:
        return np.full(count, self._children.out.index(False), np.intp)

    def weights(self) -> Sequence[int]:
        return _first(self._children.out)


def _first(out: Sequence[bool]) -> list[int]:
    """1 for the first child that is not out, 0 for the others."""
    weights = [0] * len(out)
    if not all(out):
        weights[out.index(False)] = 1
    return weights
