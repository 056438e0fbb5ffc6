"""Numbers as they are written: 500M, 10B and 1.5T by people, 2.1 epochs in a mixture file, those of a package's
release, and integers of variable length in protocol buffers and Thrift."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

from tokenloom_server.core.state import MAX_COUNTER
from tokenloom_server.errors import ConfigError

_UNITS = {"": 0, "K": 3, "M": 6, "B": 9, "T": 12}
_FORM = re.compile(r"(\d[\d_,]*(?:\.\d+)?)\s*([KMBT]?)", re.IGNORECASE | re.ASCII)


def parse_amount(text: str, field: str) -> int:
    """A whole number of at least 1: digits, with a decimal point if wanted, and K, M, B or T for 10^3 to 10^12.

    Raises ``ConfigError`` naming the field, what was found and what was expected.
    """
    match = _FORM.fullmatch(text.strip())
    expected = (
        "expected a number such as 500M, 10B, 1.5T or 2_000_000 (K, M, B, T: thousand to trillion)"
    )
    if match is None:
        raise ConfigError(f"{field}: {text!r} is no number of tokens; {expected}")
    exact = Decimal(re.sub("[_,]", "", match[1])).scaleb(_UNITS[match[2].upper()])
    if exact != int(exact) or not 1 <= exact <= MAX_COUNTER:
        raise ConfigError(
            f"{field}: {text!r} is {exact:f}, expected a whole number from 1 to 2^53 − 1; {expected}"
        )
    return int(exact)


def short(amount: float) -> str:
    """Three digits and a unit: 812, 12.3K, 1.50T."""
    for unit, power in _UNITS.items():
        scaled = amount / 10**power
        if scaled < 999.5 or unit == "T":
            break
    if not unit:
        return f"{amount:,.0f}"
    digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
    return f"{scaled:,.{digits}f}{unit}"


def whole_and_part(epochs: float) -> tuple[float, Fraction]:
    """Whole epochs (infinity: without end), and the part of the one after them, exactly as the number is written:
    2.1 - 2 is 0.10000000000000009 in doubles, and would round up."""
    if math.isinf(epochs):
        return math.inf, Fraction(0)
    return divmod(Fraction(repr(epochs)), 1)


def release_of(version: str) -> tuple[int, ...]:
    """The first two numbers of a package's version, of ``2.10.0+cpu`` (2, 10), to be compared."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


@lru_cache(4096)  # a message has two for each micro-step, mostly the same ones
def varint(value: int) -> bytes:
    """An integer that is not negative: seven bits a byte, the lowest first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
