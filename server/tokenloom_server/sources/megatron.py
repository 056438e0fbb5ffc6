"""Rows of the indexed datasets of Megatron-LM, mapped and not converted.

A dataset is two files. ``PREFIX.bin`` is the ids of all sequences, one after the other. ``PREFIX.idx`` is, in
little-endian order: nine bytes of magic, the version (uint64, 1), a code for the type of the ids (uint8), the numbers
of sequences S and of document edges D (uint64 each), then of each sequence its length in ids (S × int32) and where it
begins in the ``.bin``, in bytes (S × int64), and the sequences at which documents begin and the last one ends (D ×
int64). So a document is found by two look-ups, and a row is a document.

Source of the format: ``megatron/core/datasets/indexed_dataset.py`` of NVIDIA/Megatron-LM.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenloom_server.errors import SourceError
from tokenloom_server.sources import arrays, columns, flat_ids
from tokenloom_server.sources.base import Content, Rows, Shard
from tokenloom_server.sources.flat_ids import FlatIds
from tokenloom_server.sources.scheme import ReadRequest
from tokenloom_server.sources.sharded import ShardedSource

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
#: Magic, version, type, sequences, document edges.
HEADER = struct.Struct("<9sQBQQ")
#: What a type's code stands for. 6 and 7 are floating-point numbers.
TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}

#: What is looked up and mapped at once: so many documents, and about so many ids.
CHUNK_DOCUMENTS = 1 << 13
CHUNK_IDS = 1 << 22
#: Any document can be read by itself; a block of a shuffle has so many, so that a disk still reads them together.
BLOCK_DOCUMENTS = 1 << 10

_Int64s = npt.NDArray[np.int64]


class MegatronSource(ShardedSource):
    """A source of indexed datasets. Both files of each are shards, so that a manifest freezes both; the ``.idx`` has
    no rows of its own."""

    def __init__(self, request: ReadRequest) -> None:
        """Reads headers up to the first that has documents.

        Raises ``SourceError`` naming a file that is not one of the format, or not what its other half says, and when
        no dataset has a document.
        """
        super().__init__(request)
        self._content = Content.IDS
        self._by_path = {shard.path: shard for shard in self._shards}
        self._counts: dict[int, int] = {}
        self._refuse_without_rows(self.row_count)

    def row_count(self, shard: int) -> int:
        if self._shards[shard].path.endswith(".idx"):
            return 0
        if shard not in self._counts:
            self._counts[shard] = self._index(shard).documents
        return self._counts[shard]

    def blocks(self, shard: int) -> _Int64s:
        rows = self.row_count(shard)
        return np.append(np.arange(0, rows, BLOCK_DOCUMENTS), rows)

    def _read(self, shard: int, row: int) -> Iterator[Rows]:
        entry = self._shards[shard]
        where = self._where(entry)
        count = self.row_count(shard)
        self._check_row(shard, row, count)
        if row == count:
            return
        index = self._index(shard)
        with self._open(entry) as file:
            ids = FlatIds(file, index.kind, 0, index.ids)
        while row < count:
            edges = index.edges(row, min(row + CHUNK_DOCUMENTS, count))
            taken = max(1, int(np.searchsorted(edges, edges[0] + CHUNK_IDS, "right")) - 1)
            yield from columns.rows(ids.rows(edges[: taken + 1]), row, where, valid=True)
            row += taken

    def _index(self, shard: int) -> _Index:
        entry = self._shards[shard]
        path = entry.path.removesuffix(".bin") + ".idx"
        where = f"source {str(self._spec)!r}: {path!r}"
        index = self._by_path.get(path)
        if index is None:
            raise SourceError(
                f"{where} is not among the run's files, and {entry.path!r} cannot be read without it"
            )
        with self._open(index) as file:
            # Unmapped with its last view. A mapping of 0 bytes there is none.
            content = memoryview(flat_ids.local(file).mapped() if index.size else b"")
        return _Index.of(content, entry, where)


class _Index(NamedTuple):
    """An ``.idx``: views of it, none of which is looked through."""

    where: str
    kind: np.dtype[Any]
    ids: int
    """In the whole ``.bin``."""
    lengths: npt.NDArray[np.int32]
    pointers: _Int64s
    document_starts: _Int64s

    @property
    def documents(self) -> int:
        return len(self.document_starts) - 1

    @classmethod
    def of(cls, content: memoryview, data: Shard, where: str) -> _Index:
        """The index of the file ``data``. Raises ``SourceError`` unless header, sizes and ends fit together."""
        if len(content) < HEADER.size:
            raise SourceError(
                f"{where} has {len(content)} bytes, expected at least the {HEADER.size} of a Megatron index's header; "
                "write or copy it again"
            )
        magic, version, code, sequences, edges = HEADER.unpack_from(content)
        if magic != MAGIC:
            raise SourceError(
                f"{where} begins with {magic!r}, expected {MAGIC!r}: it is no index of Megatron-LM's indexed datasets; "
                "make it with Megatron-LM's tools/preprocess_data.py (older formats, 'lazy' and 'cached', too)"
            )
        if version != VERSION:
            raise SourceError(
                f"{where} has version {version}, expected {VERSION}; write it again as version {VERSION}"
            )
        if code not in TYPES:
            known = ", ".join(f"{key} ({np.dtype(kind).name})" for key, kind in TYPES.items())
            raise SourceError(
                f"{where} has ids of type code {code}, expected one of {known}; write integers"
            )
        kind = np.dtype(TYPES[code])
        expected = HEADER.size + 12 * sequences + 8 * edges
        if len(content) == expected + sequences and sequences:
            raise SourceError(
                f"{where} has a mode for each of its {sequences} sequences: it is a multimodal dataset, which holds "
                "more than ids; expected one of text"
            )
        if len(content) != expected:
            raise SourceError(
                f"{where} has {len(content)} bytes, but {sequences} sequences and {edges} document edges take "
                f"{expected}: it is truncated or damaged; write or copy it again"
            )
        if edges == 0:
            raise SourceError(
                f"{where} has no document edges, expected at least one; write it again"
            )
        lengths = np.frombuffer(content, "<i4", sequences, HEADER.size)
        pointers = np.frombuffer(content, "<i8", sequences, HEADER.size + 4 * sequences)
        document_starts = np.frombuffer(content, "<i8", edges, HEADER.size + 12 * sequences)
        if document_starts[0] != 0 or document_starts[-1] != sequences:
            raise SourceError(
                f"{where}: its documents reach from sequence {document_starts[0]} to {document_starts[-1]}, expected 0 "
                f"to {sequences}, all there are: end the last document (end_document()) before finalize(), or "
                "write the file again"
            )
        end = int(pointers[-1]) + int(lengths[-1]) * kind.itemsize if sequences else 0
        if end != data.size:
            raise SourceError(
                f"{where} says that {data.path!r} has {end} bytes of {kind.name}, but it has {data.size}: the two do "
                "not belong together, or one is truncated; write or copy both again"
            )
        return cls(where, kind, data.size // kind.itemsize, lengths, pointers, document_starts)

    def edges(self, first: int, stop: int) -> _Int64s:
        """Where the documents from ``first`` up to ``stop`` (exclusive) begin, in ids, and where the last of them ends:
        [documents + 1].

        Raises ``SourceError`` unless each of their sequences ends where the next one begins.
        """
        starts = self.document_starts[first : stop + 1].astype(np.int64)
        begin, end = int(starts[0]), int(starts[-1])
        if begin < 0 or end > len(self.lengths) or bool((np.diff(starts) < 0).any()):
            raise self._damaged("document edges", first, stop)
        size = self.kind.itemsize
        # The last sequence of all ends where the file does.
        pointers = np.append(
            self.pointers[begin : end + 1], self.ids * size if end == len(self.pointers) else []
        )
        pointers = pointers.astype(np.int64, copy=False)
        lengths = self.lengths[begin:end]
        if (
            bool((lengths < 0).any())
            or pointers[0] < 0
            or pointers[0] % size
            or pointers[-1] > self.ids * size
        ):
            raise self._damaged("sequences", first, stop)
        if not np.array_equal(np.diff(pointers), lengths.astype(np.int64) * size):
            raise self._damaged("sequences", first, stop)
        edges: _Int64s = pointers[starts - begin] // size
        return edges

    def _damaged(self, part: str, first: int, stop: int) -> SourceError:
        return SourceError(
            f"{self.where}: the {part} of documents {first} to {stop - 1} do not lie one after the other: it is "
            "damaged, or no file that Megatron-LM wrote; write or copy it again"
        )


# Samples as Megatron-LM's ``GPTDataset`` cuts and orders them, by the arrays that it caches.
#
# Sample ``i`` is number ``s = shuffle_index[i]`` of one stream of ids: the sequences ``document_index``, one after the
# other, from ``sample_index[s]`` (a position in that order, and an offset in the sequence there) to ``sample_index[s +
# 1]``, and the id after it, which is also the next one's first.
#
# Source of the rule: ``megatron/core/datasets/gpt_dataset.py`` of NVIDIA/Megatron-LM.


#: The places of the arrays among a source's files, and of the ids.
DOCUMENTS, BOUNDS, ORDER, DATA = 1, 2, 3, 4
#: Gathered at once.
CHUNK_SAMPLES = 1 << 8


class MegatronSamples(MegatronSource):
    """A source of samples; they are rows of the array of their order."""

    def row_count(self, shard: int) -> int:
        return len(self._array(ORDER)) if shard == ORDER else 0

    def _read(self, shard: int, row: int) -> Iterator[Rows]:
        where, count = self._where(self._shards[shard]), self.row_count(shard)
        self._check_row(shard, row, count)
        for first in range(row, count, CHUNK_SAMPLES):
            try:
                samples = self._samples(
                    self._array(ORDER)[first : first + CHUNK_SAMPLES].astype(np.int64)
                )
            except (IndexError, ValueError) as error:
                raise SourceError(
                    f"{where}: samples {first} and following are not of the dataset that the description names "
                    f"({error}): it was made anew, or the cache is damaged; put back what the job read"
                ) from None
            yield from columns.rows(samples, first, where, valid=True)

    def _samples(self, numbers: npt.NDArray[np.int64]) -> pa.Array:
        """Lists of ids. Raises ``IndexError`` and ``ValueError`` where the arrays do not fit the dataset."""
        index = self._index(DATA)
        with self._open(self._shards[DATA]) as file:
            ids = FlatIds(file, index.kind, 0, index.ids)
        bounds = self._array(BOUNDS)
        begins, ends = bounds[numbers].astype(np.int64), bounds[numbers + 1].astype(np.int64)
        # Each sample's parts, one of each sequence that it touches.
        counts = ends[:, 0] - begins[:, 0] + 1
        lasts = np.cumsum(counts)
        firsts = lasts - counts
        sequences = self._array(DOCUMENTS)[_ranges(begins[:, 0], counts)]
        starts, lengths = (
            index.pointers[sequences] // index.kind.itemsize,
            index.lengths[sequences].astype(np.int64),
        )
        lengths[lasts - 1] = np.minimum(ends[:, 1] + 1, lengths[lasts - 1])
        lengths[firsts] -= begins[:, 1]
        starts[firsts] += begins[:, 1]
        values = ids.numbers(0, ids.count)[_ranges(starts, lengths)]
        return arrays.lists(
            np.append(0, np.cumsum(lengths))[np.append(firsts, lasts[-1])], pa.array(values)
        )

    def _array(self, place: int) -> npt.NDArray[np.int64]:
        """A cached array, mapped."""
        shard = self._shards[place]
        with self._open(shard) as file:
            try:
                array: npt.NDArray[np.int64] = np.load(
                    flat_ids.local(file).path, mmap_mode="r", allow_pickle=False
                )
                return array
            except (ValueError, EOFError) as error:
                raise SourceError(
                    f"{self._where(shard)} is no array of numpy: {error}; copy it again"
                ) from None


def _ranges(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The numbers from each start on, so many each, one after the other."""
    if (lengths < 0).any():
        raise ValueError("a sample ends before it begins")
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) + np.repeat(starts - ends + lengths, lengths)
