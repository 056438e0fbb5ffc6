"""Variable-length integers, as protocol buffers and Thrift write them."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(4096)  # a message has two for each micro-step, mostly the same ones
def varint(value: int) -> bytes:
    """An integer that is not negative: seven bits a byte, the lowest first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
