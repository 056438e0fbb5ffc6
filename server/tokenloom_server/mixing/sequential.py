"""``sequential``: the first child until it is out, then the second, and so on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenloom_server.config.node import NodeConfig
from tokenloom_server.core.state import ChildState
from tokenloom_server.mixing.policy import Children, Choices, Chooser, ChooserBase, NodeShape, Policy, SavedChild


class Sequential(Policy):
    """The first live child in the order of the file is next; there is nothing to save."""

    name = "sequential"
    follows_progress = True

    def chooser(
        self, shape: NodeShape, config: NodeConfig, children: Children, states: Sequence[ChildState]
    ) -> Chooser:
        return SequentialChooser(children)

    def saved_weights(self, children: Sequence[SavedChild], run_tokens: int, interpolate: str) -> Sequence[float]:
        return _first([not child.live for child in children])


class SequentialChooser(ChooserBase):
    """Implements ``Chooser``."""

    def __init__(self, children: Children) -> None:
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
        return _first(self._children.out)


def _first(out: Sequence[bool]) -> list[int]:
    """1 for the first child that is not out, 0 for the others."""
    weights = [0] * len(out)
    if not all(out):
        weights[out.index(False)] = 1
    return weights
