"""``round_robin``: one pick of each live child in turn, in the order of the file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenloom_server.mixing.policy import (
    Children,
    Choices,
    Chooser,
    Elsewhere,
    NodeChange,
    NodeStart,
    Policy,
    SavedNode,
)


class RoundRobin(Policy):
    """A child's turns are its picks, and for one that joined later those that went by before (its credit); the live
    one with the fewest is next, the first in the file among several. So live children are never more than one turn
    apart."""

    name = "round_robin"
    credit = "turns"

    def chooser(self, node: NodeStart) -> Chooser:
        return RoundRobinChooser(node.children, [child.credit for child in node.states])

    def saved_weights(self, node: SavedNode) -> Sequence[float]:
        return [float(child.live) for child in node.children]

    def revised(self, change: NodeChange) -> Sequence[int]:
        picks = [child.samples // change.pick_samples for child in change.new]
        if not isinstance(change.old_policy, RoundRobin):
            nobody = [False] * len(picks)
            return levelled(picks, [0] * len(picks), nobody, [weight > 0 for weight in change.new_weights])
        # A node that sources joined or left counts other picks than before; its turns are what they were.
        turns = [
            was.samples // change.pick_samples + was.credit - now if was is not None else 0
            for was, now in zip(change.old, picks, strict=True)
        ]
        before, after = ([weight > 0 for weight in weights] for weights in (change.old_weights, change.new_weights))
        return levelled(picks, turns, before, after)

    def forked(self, node: Elsewhere) -> Sequence[int]:
        # The next round is the first for all of them: none has those to make up for that others had elsewhere.
        nobody = [False] * len(node.picks)
        return levelled(node.picks, [0] * len(node.picks), nobody, node.live)


class RoundRobinChooser(Chooser):
    def __init__(self, children: Children, joined: Sequence[int]) -> None:
        self._children = children
        self._joined = tuple(joined)
        self._ahead: Choices = np.empty(0, np.intp)

    def upcoming(self, count: int) -> Choices:
        if len(self._ahead) < count:
            live = self._children.live
            turns = [self._children.picks[i] + self._joined[i] for i in live]
            late = [i for i, taken in zip(live, turns, strict=True) if taken < max(turns)]
            # Whoever has not had the present round comes first; then whole rounds.
            rounds = np.tile(np.array(live, np.intp), -(-count // len(live)))
            self._ahead = np.concatenate([np.array(late, np.intp), rounds])
        return self._ahead[:count]

    def issued(self, count: int) -> None:
        self._ahead = self._ahead[count:]

    def lost(self, child: int) -> None:
        self._ahead = self._ahead[:0]

    def weights(self) -> Sequence[int]:
        return [0 if out else 1 for out in self._children.out]

    def credits(self, mark: object, tokens: Sequence[int]) -> tuple[int, ...]:
        return self._joined


def levelled(
    picks: Sequence[int], joined: Sequence[int], before: Sequence[bool], after: Sequence[bool]
) -> tuple[int, ...]:
    """The credits of a node whose live children change from ``before`` to ``after``: who joins has its first turn in
    the next round, and catches up with nothing."""
    turns = [taken + credit for taken, credit in zip(picks, joined, strict=True)]
    joins = [now and not was for was, now in zip(before, after, strict=True)]
    stay = [turn for turn, was, now in zip(turns, before, after, strict=True) if was and now]
    level = max(stay or [turn for turn, new in zip(turns, joins, strict=True) if new], default=0)
    return tuple(level - taken if new else credit for taken, credit, new in zip(picks, joined, joins, strict=True))
