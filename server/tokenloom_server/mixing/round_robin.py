"""``round_robin``: one pick of each live child in turn, in the order of the file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenloom_server.mixing.policy import (
    Choices,
    Chooser,
    Elsewhere,
    NodeChange,
    NodeStart,
    Policy,
)


class RoundRobin(Policy):
    """A child's turns are its picks, and for one that joined later those that went by before (its credit); the live
    one with the fewest is next, the first in the file among several. So live children are never more than one turn
    apart."""

    name = "round_robin"
    credit = "turns"

    def chooser(self, node: NodeStart) -> Chooser:
        return RoundRobinChooser(node)

    def revised(self, change: NodeChange) -> Sequence[int]:
        picks = [child.samples // change.pick_samples for child in change.new]
        live = [weight > 0 for weight in change.new_weights]
        if not isinstance(change.old_policy, RoundRobin):
            return first_round(picks, live)
        # A node that sources joined or left counts other picks than before; its turns are what they were.
        turns = [
            was.samples // change.pick_samples + was.credit - now if was is not None else 0
            for was, now in zip(change.old, picks, strict=True)
        ]
        return levelled(picks, turns, [weight > 0 for weight in change.old_weights], live)

    def forked(self, node: Elsewhere) -> Sequence[int]:
        # None has turns to make up for that others had elsewhere.
        return first_round(node.picks, node.live)


class RoundRobinChooser(Chooser):
    def work_out(self, count: int) -> Choices:
        live = self._children.live
        turns = [self._children.picks[i] + self._mark.credits[i] for i in live]
        most = max(turns)
        late = [i for i, taken in zip(live, turns, strict=True) if taken < most]
        # Whoever has not had the present round comes first; then whole rounds.
        rounds = np.tile(np.array(live, np.intp), -(-count // len(live)))
        return np.concatenate([np.array(late, np.intp), rounds])

    def weights(self) -> Sequence[int]:
        return [0 if out else 1 for out in self._children.out]


def first_round(picks: Sequence[int], live: Sequence[bool]) -> tuple[int, ...]:
    """The credits under which the next round is the first for all that are live."""
    return levelled(picks, [0] * len(picks), [False] * len(picks), live)


def levelled(
    picks: Sequence[int], joined: Sequence[int], before: Sequence[bool], after: Sequence[bool]
) -> tuple[int, ...]:
    """The credits of a node whose live children change from ``before`` to ``after``: who joins has its first turn in
    the next round, and catches up with nothing."""
    turns = [taken + credit for taken, credit in zip(picks, joined, strict=True)]
    joins = [now and not was for was, now in zip(before, after, strict=True)]
    stay = [turn for turn, was, now in zip(turns, before, after, strict=True) if was and now]
    level = max(stay or [turn for turn, new in zip(turns, joins, strict=True) if new], default=0)
    return tuple(
        level - taken if new else credit
        for taken, credit, new in zip(picks, joined, joins, strict=True)
    )
