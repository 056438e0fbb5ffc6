"""Weights as integers: every decision about the order is exact."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

#: Credits are below (sum of weights) × (tokens per pick); with 2^24 tokens they stay below 2^53.
MAX_SUM = 2**28


def integer_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest integers in the proportion of ``weights`` (taken as the decimals they are written as).

    Where those add up to more than ``MAX_SUM``, they are rounded to that resolution, never to 0.
    """
    return reduced(whole(weights))


def whole(weights: Sequence[float]) -> list[int]:
    """Integers in the exact proportion of ``weights`` (taken as the decimals they are written as)."""
    exact = [Fraction(repr(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    return [int(weight * scale) for weight in exact]


def reduced(weights: Sequence[int]) -> tuple[int, ...]:
    """The smallest integers in the proportion of these, of which one is above 0; rounded, but to 0 only where it
    was 0, where they would add up to more than ``MAX_SUM``."""
    divisor = math.gcd(*weights)
    smallest = [weight // divisor for weight in weights]
    total = sum(smallest)
    if total <= MAX_SUM:
        return tuple(smallest)
    room = MAX_SUM - len(smallest)
    return tuple(max(1, weight * room // total) if weight else 0 for weight in smallest)
