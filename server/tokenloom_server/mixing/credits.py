"""Credits, when the weights that they are kept in change."""

from __future__ import annotations

from collections.abc import Sequence


def rescaled(owed: Sequence[int], before: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Credits in 1/``before`` tokens as ones in 1/W tokens, where W is the sum of the new ``weights``.

    A child of weight 0 keeps its own, frozen. What those that have a weight are then owed together, or had in
    advance, is spread among them by weight, so that nothing is left over.
    """
    total = sum(weights)
    scaled = [credit * total // before for credit in owed]
    rest = -sum(credit for credit, weight in zip(scaled, weights, strict=True) if weight)
    return tuple(credit + rest * weight // total for credit, weight in zip(scaled, weights, strict=True))


def carried(owed: Sequence[int], before: Sequence[int], after: Sequence[int], sample_tokens: int) -> tuple[int, ...]:
    """The credits of a node's children once other weights are in force: shares follow at once.

    ``before`` and ``after`` are integer weights by child, 0 for one that gets nothing (paused, out, or new: a new
    child's credit is 0). Nobody is left more than one sample away from its share, whatever joined or left.
    """
    total, earlier = sum(after), sum(before)
    if not total:
        return tuple(owed)
    if not earlier:
        return (0,) * len(owed)
    found = rescaled(owed, earlier, after)
    most = max(abs(credit) for credit in found)
    sample = total * sample_tokens
    if most <= sample:
        return found
    # All in proportion, towards zero, so that what they have together stays nothing.
    return tuple((abs(credit) * sample // most) * (1 if credit > 0 else -1) for credit in found)
