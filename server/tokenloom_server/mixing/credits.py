"""Credits in owed tokens: converted when weights change, and taken over from an older data loader's balances.

A source that is new to those balances gets one, no counters: it begins as if it had consumed as much for each unit of
its weight as the mixture file's ``new_source_baseline`` says of its siblings, so that it neither starves them nor waits
for its share.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from tokenloom_server.core.state import MAX_COUNTER


def rescaled(owed: Sequence[int], before: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Credits in 1/``before`` tokens as ones in 1/W tokens, where W is the sum of the new ``weights``.

    A child of weight 0 keeps its own, frozen. What those that have a weight are then owed together, or had in
    advance, is spread among them by weight, so that nothing is left over.
    """
    total = sum(weights)
    scaled = [credit * total // before for credit in owed]
    rest = -sum(credit for credit, weight in zip(scaled, weights, strict=True) if weight)
    return tuple(
        credit + rest * weight // total for credit, weight in zip(scaled, weights, strict=True)
    )


def carried(
    owed: Sequence[int], before: Sequence[int], after: Sequence[int], pick_tokens: int
) -> tuple[int, ...]:
    """The credits of a node's children once other weights are in force: shares follow at once.

    ``before`` and ``after`` are integer weights by child, 0 for one that gets nothing (paused, out, or new: a new
    child's credit is 0). Nobody is left more than one pick away from its share, whatever joined or left.
    """
    total, earlier = sum(after), sum(before)
    if not total:
        return tuple(owed)
    if not earlier:
        return (0,) * len(owed)
    scaled = rescaled(owed, earlier, after)
    most = max(abs(credit) for credit in scaled)
    pick = total * pick_tokens
    if most <= pick:
        return scaled
    # All in proportion, towards zero, so that what they have together stays nothing.
    return tuple((abs(credit) * pick // most) * (1 if credit > 0 else -1) for credit in scaled)


def begun(
    baseline: str, weights: Sequence[int], tokens: Sequence[int], known: Sequence[bool]
) -> list[int]:
    """The tokens that each child's balance begins with: its own, and for one that was not ``known`` as many for each
    unit of its weight as its siblings have (``baseline``: the min or mean of these, or zero). A weight of 0 takes no
    part."""
    siblings = [
        Fraction(own, weight)
        for own, weight, was in zip(tokens, weights, known, strict=True)
        if was and weight
    ]
    start = Fraction(0)
    if siblings and baseline != "zero":
        start = min(siblings) if baseline == "min" else sum(siblings, start) / len(siblings)
    return [
        own if was else int(start * weight)
        for own, weight, was in zip(tokens, weights, known, strict=True)
    ]


def balanced(weights: Sequence[int], tokens: Sequence[int]) -> tuple[int, ...]:
    """What each child is owed of all ``tokens``, in 1/W tokens, where W is the sum of the weights. A balance that is
    too far off to be counted keeps its proportions within what can be: it lasts as long as anyone will train."""
    whole, total = (
        sum(weights),
        sum(own for own, weight in zip(tokens, weights, strict=True) if weight),
    )
    owed = [
        weight * total - whole * own if weight else 0
        for weight, own in zip(weights, tokens, strict=True)
    ]
    most = max(map(abs, owed))
    return tuple(owed if most <= MAX_COUNTER else (credit * MAX_COUNTER // most for credit in owed))
