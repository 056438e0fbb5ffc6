"""``round_robin``: one sample of each live child in turn, in the order of the file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenloom_server.mixing.policy import Children, Choices, NoCredits, NodeShape


class RoundRobin(NoCredits):
    """Implements ``Policy``. A child's turns are its samples; the live one with the fewest is next, the first in the
    file among several. So live children are never more than one sample apart, and there is nothing to save."""

    def __init__(self, shape: NodeShape, children: Children, owed: Sequence[int]) -> None:
        self._children = children
        self._ahead: Choices = np.empty(0, np.intp)

    def upcoming(self, count: int) -> Choices:
        if len(self._ahead) < count:
            live = [i for i, out in enumerate(self._children.exhausted) if not out]
            turns = [self._children.samples[i] for i in live]
            behind = [i for i, taken in zip(live, turns, strict=True) if taken < max(turns)]
            # Whoever has not had the present round comes first; then whole rounds.
            rounds = np.tile(np.array(live, np.intp), -(-count // len(live)))
            self._ahead = np.concatenate([np.array(behind, np.intp), rounds])
        return self._ahead[:count]

    def choose(self, retry: int) -> int:
        return int(self.upcoming(1)[0])

    def issued(self, count: int) -> None:
        self._ahead = self._ahead[count:]

    def exhausted(self, child: int) -> None:
        self._ahead = self._ahead[:0]
