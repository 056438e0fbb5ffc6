"""The rolling digest by the rule in the wire contract, written down a second time: what a server says is held to it."""

from __future__ import annotations

import xxhash

MULTIPLIER = 0x5BD1E995CC9E2D51A3C59AC72E1B6F4D
MODULUS = 2**127 - 1


def digest_after(digest: int, source: int, ids: bytes | memoryview) -> int:
    """The digest after a sample of these ids, as they travel, from the one before it."""
    return (digest * MULTIPLIER + xxhash.xxh3_128_intdigest(ids, seed=source)) % MODULUS
