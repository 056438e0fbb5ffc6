"""How often a source is read: whole epochs, and the part of one more."""

from __future__ import annotations

import math
from fractions import Fraction


def whole_and_part(epochs: float) -> tuple[float, Fraction]:
    """Whole epochs (infinity: without end), and the part of the one after them, exactly as the number is written:
    2.1 - 2 is 0.10000000000000009 in doubles, and would round up."""
    if math.isinf(epochs):
        return math.inf, Fraction(0)
    return divmod(Fraction(repr(epochs)), 1)
