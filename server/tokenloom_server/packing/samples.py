"""How a sample travels: its ids, and after them, where samples are padded or masked, a trailer that says so."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from tokenloom_server.packing.chunks import take_chunks

Ids = npt.NDArray[np.unsignedinteger[Any]]
Int64s = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Mask = npt.NDArray[np.uint8]
#: A sample as it travels: an array, uint8, [bytes], read only. Through memoryviews garbage collection would have to go.
#: (That arrays are buffers, numpy's types say from Python 3.12 on.)
Sample = Any

#: Size of the integers of a sample's trailer: its real length, and the words that the bits of its mask fill.
_WORD_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFormat:
    """The bytes of a sample, the same for all of a generation: what is hashed, and what the client gets.

    First ``width`` ids of ``dtype``, little-endian. With ``lengths`` a uint32 follows: how many of them are of
    documents; the others are ``pad_id``, on the side of ``padding``. With ``masked`` the loss mask follows, a bit for
    each id, the first in the lowest bit of the first byte, filled up to whole uint32s; 0 at padding.
    """

    length: int
    """Tokens that a sample counts: ``sequence_length``."""
    width: int
    """Ids of a sample: one more where labels are shifted."""
    dtype: np.dtype[np.unsignedinteger[Any]]
    lengths: bool = False
    masked: bool = False
    padding: Literal["right", "left"] = "right"
    pad_id: int = 0

    @property
    def id_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def mask_bytes(self) -> int:
        return -(-self.width // (8 * _WORD_BYTES)) * _WORD_BYTES if self.masked else 0

    @property
    def trailer_bytes(self) -> int:
        return _WORD_BYTES * self.lengths + self.mask_bytes

    @property
    def sample_bytes(self) -> int:
        return self.id_bytes + self.trailer_bytes

    def begin(self, filled: int) -> int:
        """Where the documents of a sample begin that fill so many of its ids."""
        return self.width - filled if self.padding == "left" else 0

    def real_tokens(self, filled: Int64s) -> Int64s:
        """Of samples whose documents fill so many ids: the positions of ``input_ids`` that hold one of those."""
        over = self.width - self.length  # the last of L + 1 ids is only a label
        return (
            np.maximum(filled - over, 0)
            if self.padding == "left"
            else np.minimum(filled, self.length)
        )

    def ids(self, sample: Sample) -> Ids:
        """The ids of a sample without its padding."""
        ids: Ids = np.frombuffer(sample, self.dtype.newbyteorder("<"), self.width)
        if not self.lengths:
            return ids
        filled = int.from_bytes(sample[self.id_bytes : self.id_bytes + _WORD_BYTES], "little")
        begin = self.begin(filled)
        return ids[begin : begin + filled]

    def loss_mask(self, sample: Sample) -> Mask:
        """Which of ``ids`` the loss mask counts: 0 or 1 for each of them."""
        count = len(self.ids(sample))
        if not self.masked:
            return np.ones(count, np.uint8)
        bits = np.unpackbits(
            sample[self.id_bytes + _WORD_BYTES * self.lengths :], bitorder="little"
        )
        return bits[self.begin(count) :][:count]

    def trailers(
        self, filled: Int64s, mask: npt.NDArray[np.uint8] | None = None
    ) -> npt.NDArray[np.uint8]:
        """[n, trailer_bytes] of samples that documents fill so far; ``mask`` [n, width] of 0 and 1, None for 1 at
        every id of a document."""
        trailers = np.zeros((len(filled), self.trailer_bytes), np.uint8)
        if self.lengths:
            trailers[:, :_WORD_BYTES] = filled.astype("<u4").view(np.uint8).reshape(-1, _WORD_BYTES)
        if self.masked:
            if mask is None:
                where = np.arange(self.width)
                begins = (self.width - filled if self.padding == "left" else np.zeros_like(filled))[
                    :, None
                ]
                mask = ((where >= begins) & (where < begins + filled[:, None])).view(np.uint8)
            bits = np.packbits(mask, axis=1, bitorder="little")
            mask_begin = _WORD_BYTES * self.lengths
            trailers[:, mask_begin : mask_begin + bits.shape[1]] = bits
        return trailers

    def assemble(
        self,
        ids: Ids,
        begins: Int64s,
        ends: Int64s,
        order: Int64s,
        counts: Int64s,
        mask: Mask | None = None,
    ) -> list[Sample]:
        """The bytes of each sample, made of chunks of ``ids``; views of one buffer, one after the other.

        Chunk i is ``ids[begins[i] : ends[i]]``; they ascend and do not overlap. ``order`` names them in the order
        of the samples, each of which takes the next ``counts[k]``, at least one, of at most ``width`` ids in all.
        ``mask``: 0 or 1 for each of ``ids``; None for all 1.
        """
        lengths = (ends - begins)[order]
        filled: Int64s = np.add.reduceat(lengths, np.cumsum(counts) - counts)
        padding = np.full(int((self.width - filled).sum()), self.pad_id, self.dtype)
        trailers = bits = None
        if mask is not None and self.masked:
            nothing = np.zeros(len(padding), np.uint8)
            bits = self._joined(mask, nothing, None, begins, ends, order, counts, filled).reshape(
                -1, self.width
            )
        if self.trailer_bytes:
            trailers = self.trailers(filled, bits)
        joined = self._joined(
            _little(ids), _little(padding), trailers, begins, ends, order, counts, filled
        )
        size = self.sample_bytes
        return views(joined.view(np.uint8).data.toreadonly(), len(counts), size, size)

    def _joined(
        self,
        values: npt.NDArray[Any],
        padding: npt.NDArray[Any],
        trailers: npt.NDArray[np.uint8] | None,
        begins: Int64s,
        ends: Int64s,
        order: Int64s,
        counts: Int64s,
        filled: Int64s,
    ) -> npt.NDArray[Any]:
        size, samples, known = values.itemsize, len(counts), 2 * len(begins)
        parts = [values, padding]
        # Every other part lies between two chunks, and belongs to no sample.
        edges = np.empty(known + 1, np.int64)
        edges[0:-1:2], edges[1::2] = begins, ends
        edges[-1] = len(values)
        all_edges = [edges, len(values) + np.cumsum(self.width - filled)]
        added = 1
        if trailers is not None:
            parts.append(trailers.reshape(-1).view(values.dtype))
            all_edges.append(
                all_edges[-1][-1] + np.arange(1, samples + 1) * (trailers.shape[1] // size)
            )
            added = 2
        # Where the chunks of each sample stand among what is taken: with its padding, and its trailer at the end.
        number = np.arange(samples)
        first = np.cumsum(counts) - counts + added * number
        taken = np.empty(len(order) + added * samples, np.int64)
        taken[
            np.arange(len(order)) + np.repeat(added * number + (self.padding == "left"), counts)
        ] = 2 * order
        taken[first + (0 if self.padding == "left" else counts)] = known + number
        if trailers is not None:
            taken[first + counts + 1] = known + samples + number
        total = samples * self.width + (trailers.size // size if trailers is not None else 0)
        return take_chunks(np.concatenate(parts), np.concatenate(all_edges), taken, total)


def wire(ids: Ids) -> memoryview:
    """Ids as they travel, and are hashed: little-endian everywhere."""
    return _little(ids).view(np.uint8).data.toreadonly()


def views(buffer: memoryview, count: int, size: int, advance: int, begin: int = 0) -> list[Sample]:
    """So many samples of ``size`` bytes within a read-only buffer of bytes: the first at ``begin``, each ``advance``
    bytes after the one before."""
    return list(np.ndarray((count, size), np.uint8, buffer, begin, (advance, 1)))


def hashed(samples: Sequence[Sample], source_id: int) -> list[int]:
    """XXH3-128 of each sample, seeded with its source's id."""
    return list(map(xxhash.xxh3_128_intdigest, samples, repeat(source_id)))


def _little(ids: Ids) -> Ids:
    return np.ascontiguousarray(ids) if sys.byteorder == "little" else ids.byteswap()
