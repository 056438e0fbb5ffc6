"""``soft_sequential``: one child after the other, but each begins while the one before it comes to its end."""

from __future__ import annotations

from collections.abc import Sequence

from tokenloom_server.mixing.varying import Estimating, Left
from tokenloom_server.mixing.weights import MAX_SUM


class SoftSequential(Estimating):
    """With left = 1, each child in order gets left × remaining/total, and left is multiplied by
    1 − remaining/total."""

    name = "soft_sequential"

    def rule(self, children: Sequence[Left]) -> Sequence[int]:
        # Shares are in 2^-60, each rounded down, and what they leave is exact: they and the rest are 2^60.
        left, shares = 1 << 60, []
        for child in children:
            share = left * child.remaining // child.total
            shares.append(share)
            left -= share
        total, room = sum(shares), MAX_SUM - len(shares)
        # Whoever has a share, however small, has a weight.
        return [max(1, share * room // total) if share else 0 for share in shares]
