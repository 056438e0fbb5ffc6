"""Counter-based randomness: every draw is a hash of what it is for, so there is no generator to save.

The hash is XXH3-64 of five little-endian 64-bit words. Purposes are never reused; a new kind of draw
gets a new number, a changed one a new ``ORDER_VERSION``.
"""

from __future__ import annotations

import struct
from enum import IntEnum, unique
from math import isqrt

import numpy as np
import numpy.typing as npt
import xxhash

_WORDS = struct.Struct("<5Q")


@unique
class Purpose(IntEnum):
    """What a draw decides."""

    TIE = 1
    CHOICE = 2
    SLICE = 3
    BUCKET = 8
    #: Of a shuffled source: which file comes when, which block, and which row within a window.
    SHARDS = 16
    BLOCKS = 17
    ROWS = 18
    #: Whether and how a row is rearranged to fill in its middle.
    FIM = 24
    #: Of a window of best-fit packing: in which order its samples come.
    PACK = 32
    #: Which documents are kept out of training.
    HOLDOUT = 40


def draw(seed: int, purpose: Purpose, stable_id: int, index: int, retry: int = 0) -> int:
    """A uniform integer in [0, 2^64), a pure function of its arguments (each in [0, 2^64))."""
    return xxhash.xxh3_64_intdigest(_WORDS.pack(seed, purpose, stable_id, index, retry))


def draws(
    seed: int, purpose: Purpose, stable_ids: npt.NDArray[np.uint64], indices: npt.NDArray[np.uint64]
) -> list[int]:
    """``draw`` for each pair of stable id and index (uint64, [n] both), without retries."""
    words = np.zeros((len(indices), 5), "<u8")
    words[:, 0], words[:, 1] = seed, purpose
    words[:, 2], words[:, 3] = stable_ids, indices
    text, size = words.tobytes(), _WORDS.size
    digest = xxhash.xxh3_64_intdigest
    return [digest(text[begin : begin + size]) for begin in range(0, len(text), size)]


def stream(
    key: int | npt.NDArray[np.uint64], counters: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """A uniform integer in [0, 2^64) for each counter, from a key that was drawn (or one for each): for draws by the
    thousand.

    The ``counter + 1``-th output of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
    Generators", 2014) seeded with the key.
    """
    mixed = np.asarray(key, np.uint64) + (counters + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    drawn: npt.NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return drawn


def slice_rotation(seed: int, sample_index: int, world_size: int) -> int:
    """By how many slots a micro-step that begins at ``sample_index`` is rotated: rank r gets slice
    ``(r + rotation) mod world_size``. Without it a deterministic mixture would alias with the ranks."""
    return draw(seed, Purpose.SLICE, 0, sample_index) * world_size >> 64


#: Four rounds would do for large domains (Luby and Rackoff, 1988). With these even the 720 permutations of six places
#: are equally likely, which the tests look at.
ROUNDS = 16

_Int64s = npt.NDArray[np.int64]
_Uint64s = npt.NDArray[np.uint64]


class Permutation:
    """One permutation of 0 … ``count`` − 1, whose every value is computed by itself: nothing is shuffled, and nothing
    kept. Immutable.

    A Feistel network over a × b places, a and b near the root of n, so that hardly more than n of them have to be
    permuted; what comes to lie beyond n is permuted again until it does not (Black and Rogaway, "Ciphers with Arbitrary
    Finite Domains", 2002: the generalised Feistel cipher and cycle walking). The round function is the finaliser of
    SplitMix64 (see ``stream``) over the half and the round's key. This is for an even order, not for secrets.
    """

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
