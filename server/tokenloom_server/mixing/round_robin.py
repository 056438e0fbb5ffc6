"""``round_robin``: one sample of each live child in turn, in the order of the file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenloom_server.mixing.policy import Children, Choices, NoCredits, NodeShape


class RoundRobin(NoCredits):
    """Implements ``Policy``. A child's turns are its samples, and for one that joined later those that went by before
    (its credit); the live one with the fewest is next, the first in the file among several. So live children are
    never more than one turn apart."""

    def __init__(self, shape: NodeShape, children: Children, owed: Sequence[int]) -> None:
        self._children = children
        self._joined = tuple(owed)
        self._ahead: Choices = np.empty(0, np.intp)

    def upcoming(self, count: int) -> Choices:
        if len(self._ahead) < count:
            live = self._children.live
            turns = [self._children.samples[i] + self._joined[i] for i in live]
            behind = [i for i, taken in zip(live, turns, strict=True) if taken < max(turns)]
            # Whoever has not had the present round comes first; then whole rounds.
            rounds = np.tile(np.array(live, np.intp), -(-count // len(live)))
            self._ahead = np.concatenate([np.array(behind, np.intp), rounds])
        return self._ahead[:count]

    def choose(self, retry: int) -> int:
        return int(self.upcoming(1)[0])

    def issued(self, count: int) -> None:
        self._ahead = self._ahead[count:]

    def lost(self, child: int) -> None:
        self._ahead = self._ahead[:0]

    def weights(self) -> Sequence[int]:
        return [0 if out else 1 for out in self._children.out]

    def credits(self, mark: object, tokens: Sequence[int]) -> tuple[int, ...]:
        return self._joined


def levelled(
    samples: Sequence[int], joined: Sequence[int], before: Sequence[bool], after: Sequence[bool]
) -> tuple[int, ...]:
    """The credits of a node whose live children change from ``before`` to ``after``: who joins has its first turn in
    the next round, and catches up with nothing."""
    turns = [taken + credit for taken, credit in zip(samples, joined, strict=True)]
    joins = [now and not was for was, now in zip(before, after, strict=True)]
    there = [turn for turn, was, now in zip(turns, before, after, strict=True) if was and now]
    level = max(there or [turn for turn, new in zip(turns, joins, strict=True) if new], default=0)
    return tuple(level - taken if new else credit for taken, credit, new in zip(samples, joined, joins, strict=True))
