"""Weights as integers: every decision about the order is exact."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

#: Credits are below (sum of weights) × (tokens per sample); with 2^24 tokens they stay below 2^53.
MAX_SUM = 2**28


def integer_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest integers in the proportion of ``weights`` (taken as the decimals they are written as).

    Where those add up to more than ``MAX_SUM``, they are rounded to that resolution, never to 0.
    """
    exact = [Fraction(repr(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = math.gcd(*whole)
    whole = [weight // divisor for weight in whole]
    total = sum(whole)
    if total <= MAX_SUM:
        return tuple(whole)
    room = MAX_SUM - len(whole)
    return tuple(max(1, weight * room // total) for weight in whole)
