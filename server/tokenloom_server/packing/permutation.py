"""A keyed permutation of 0 … n − 1 whose every value is computed by itself: nothing is shuffled, and nothing kept.

A Feistel network over a × b places, a and b near the root of n, so that hardly more than n of them have to be permuted;
what comes to lie beyond n is permuted again until it does not (Black and Rogaway, "Ciphers with Arbitrary Finite
Domains", 2002: the generalised Feistel cipher and cycle walking). The round function is the finaliser of SplitMix64
(Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014) over the half and the round's key. This
is for an even order, not for secrets.
"""

from __future__ import annotations

from math import isqrt

import numpy as np
import numpy.typing as npt

from tokenloom_server.core.hashing import Purpose, draw

#: Four rounds would do for large domains (Luby and Rackoff, 1988). With these even the 720 permutations of six places
#: are equally likely, which the tests look at.
ROUNDS = 16

_Int64s = npt.NDArray[np.int64]
_Uint64s = npt.NDArray[np.uint64]


class Permutation:
    """One permutation of 0 … ``count`` − 1. Immutable."""

    def __init__(self, purpose: Purpose, key: int, count: int) -> None:
        """``key`` in [0, 2^64) and ``purpose`` choose it; ``count`` is at least 1 and below 2^62."""
        self._count = count
        self._left = np.uint64(isqrt(count - 1) + 1)
        self._right = np.uint64(-(-count // int(self._left)))
        self._keys = [np.uint64(draw(key, purpose, count, i)) for i in range(ROUNDS)]

    def __call__(self, indices: _Int64s) -> _Int64s:
        """The values at some indices, int64 like these."""
        values = self._walk(indices.astype(np.uint64))
        while len(beyond := np.flatnonzero(values >= self._count)):
            values[beyond] = self._walk(values[beyond])
        return values.astype(np.int64)

    def all(self) -> _Int64s:
        """The values at all indices."""
        return self(np.arange(self._count))

    def _walk(self, places: _Uint64s) -> _Uint64s:
        left, right = places % self._left, places // self._left
        for i in range(0, ROUNDS, 2):
            left = (left + _mixed(right + self._keys[i])) % self._left
            right = (right + _mixed(left + self._keys[i + 1])) % self._right
        return left + right * self._left


def _mixed(values: _Uint64s) -> _Uint64s:
    """SplitMix64's finaliser; the upper half, so that what is added to it does not overflow."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (values ^ (values >> np.uint64(31))) >> np.uint64(32)
