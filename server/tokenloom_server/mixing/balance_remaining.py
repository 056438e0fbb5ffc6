"""``balance_remaining``: each child's weight is what it has to give, so that all end together."""

from __future__ import annotations

from collections.abc import Sequence

from tokenloom_server.mixing.varying import Estimating, Left


class BalanceRemaining(Estimating):
    """Weights are what the remaining picks have, in tokens."""

    name = "balance_remaining"

    def rule(self, children: Sequence[Left]) -> Sequence[int]:
        return [child.tokens for child in children]
