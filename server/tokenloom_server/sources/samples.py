"""Files of samples, which Mosaic streaming and LitData write alike.

First the number of samples (uint32), then where each begins and the last one ends (samples + 1 × uint32, from the
begin of the file), then the samples. A sample is the sizes of its values (uint32 each; of those that have no fixed
size), and then the values, one after the other.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenloom_server.config.row_rules import RowRules
from tokenloom_server.errors import SourceError
from tokenloom_server.sources import arrays
from tokenloom_server.sources.base import Rows
from tokenloom_server.sources.compressed import FREE_BYTES, MAX_RATIO, Decompressed
from tokenloom_server.sources.indexed_folder import ListedFile
from tokenloom_server.sources.scheme import ReadRequest
from tokenloom_server.sources.selection import Selection
from tokenloom_server.sources.sharded import ShardedSource
from tokenloom_server.storage.file import File, Range

#: What is read and decoded at once: about so many bytes, and so many samples at most.
CHUNK_BYTES = 7 << 17
CHUNK_SAMPLES = 1 << 16
#: A block of a shuffle: about so many bytes, by the mean of the samples.
BLOCK_BYTES = 1 << 20
#: Of a compressed file: so much is passed over at once on the way to a sample.
PASSED_BYTES = 1 << 20

DAMAGED = "it is truncated or damaged: write or copy it again"

_Int64s = npt.NDArray[np.int64]
ReadAt = Callable[[int, int], bytes | memoryview]
"""Bytes by offset and length, fewer only at the end."""


class Spans(NamedTuple):
    """Of one value in each sample: where it begins, and its length, in bytes of the samples' data."""

    begins: _Int64s
    lengths: _Int64s


class Samples(NamedTuple):
    """Consecutive samples of a file: the first one's number, their bytes, and [samples + 1]: where each begins in
    those, and the last one ends. ``where`` begins messages."""

    first: int
    data: npt.NDArray[np.uint8]
    offsets: _Int64s
    where: str

    def spans(self, sizes: Sequence[int | None]) -> list[Spans]:
        """Where the values lie, by column; ``sizes``: bytes of each value, None where they differ.

        Raises ``SourceError`` where the values of a sample are not as long as the sample.
        """
        varying = [i for i, size in enumerate(sizes) if size is None]
        begins, head = self.offsets[:-1], 4 * len(varying)
        self.refuse(np.diff(self.offsets) < head, "is too short for the sizes of its values")
        lengths = np.tile([np.int64(size or 0) for size in sizes], (len(begins), 1))
        lengths[:, varying] = self.data[begins[:, None] + np.arange(head)].view("<u4")
        ends = np.cumsum(lengths, axis=1) + (begins[:, None] + head)
        self.refuse(ends[:, -1] != self.offsets[1:], "is not as long as its values together")
        return [Spans(ends[:, i] - lengths[:, i], lengths[:, i]) for i in range(len(sizes))]

    def values(self, spans: Spans, kind: pa.DataType) -> pa.Array:
        """Values as an array of large text or bytes; of text it is not looked at whether it is UTF-8."""
        edges = np.stack((spans.begins, spans.begins + spans.lengths), axis=1)
        # Values and what lies between them; every other one is copied.
        buffers = [None, pa.py_buffer(edges), pa.py_buffer(self.data)]
        mixed = pa.Array.from_buffers(kind, edges.size - 1, buffers)
        return mixed.take(arrays.from_numbers(np.arange(0, edges.size, 2)))

    def lists(self, spans: Spans, kind: pa.DataType) -> pa.Array:
        """Values that are numbers of an Arrow type, one after the other, as large lists. Raises ``SourceError``."""
        size = kind.bit_width // 8
        self.refuse(
            spans.lengths % size != 0,
            f"is no whole number of {kind} long; its ids are of another type",
        )
        together = self.values(spans, pa.large_binary())
        begins = arrays.offsets(together) // size
        numbers = [None, together.buffers()[2] or pa.py_buffer(b"")]
        return arrays.lists(begins, pa.Array.from_buffers(kind, int(begins[-1]), numbers))

    def refuse(self, bad: npt.NDArray[np.bool_], fault: str) -> None:
        """Raises ``SourceError`` for the first of the samples that are ``bad``."""
        if bad.any():
            row = self.first + int(bad.argmax())
            raise SourceError(f"{self.where}: row {row} {fault}; write or copy the file again")


class Column(NamedTuple):
    """A value of each sample."""

    name: str
    encoding: str
    """How the index names it."""
    size: int | None
    """Bytes of each value; None where they differ."""
    kind: pa.DataType
    """As Arrow has it: large text, a number, a large list of numbers; large binary for what is not read."""
    past_head: Callable[[Samples, Spans], Spans] | None = None
    """From where values lie to where their numbers do; None where values have no head."""

    def decode(self, samples: Samples, spans: Spans) -> pa.Array:
        """The values as an array. Raises ``SourceError``."""
        if pa.types.is_large_string(self.kind) or pa.types.is_large_binary(self.kind):
            return samples.values(spans, self.kind)
        if pa.types.is_large_list(self.kind):
            spans = spans if self.past_head is None else self.past_head(samples, spans)
            return samples.lists(spans, self.kind.value_type)
        samples.refuse(
            spans.lengths != self.kind.bit_width // 8, f"has no {self.kind} under {self.name!r}"
        )
        return samples.lists(spans, self.kind).values


class SampleSource(ShardedSource):
    """A source of such files; a row is a sample."""

    remedy = ""
    """What to do about a column that is not read."""

    def __init__(self, request: ReadRequest, listed: Sequence[ListedFile]) -> None:
        """``listed``: the files by their index, which is the first. Raises ``SourceError`` naming a column that is not
        there or holds neither text nor ids, and when no file has a sample."""
        super().__init__(request)
        self._listed = listed
        self._refuse_without_rows(self.check)

    def check(self, shard: int) -> object:
        return self.row_count(shard) and self._selected(shard)

    @abstractmethod
    def _columns(self, shard: int) -> Sequence[Column]:
        """The values of a file's samples, in their order; the source's own has the name in the spec."""

    @abstractmethod
    def _samples(self, file: File, shard: int, row: int) -> Iterator[Samples]:
        """The samples of an opened file from ``row`` on. Raises ``SourceError``."""

    @abstractmethod
    def _is_read_from_begin(self, shard: int) -> bool:
        """Whether a row is only reached past all before it."""

    def _spans(self, samples: Samples, columns: Sequence[Column]) -> Sequence[Spans]:
        """Where the values of each column lie. Raises ``SourceError``."""
        return samples.spans([column.size for column in columns])

    def row_count(self, shard: int) -> int:
        return self._listed[shard].rows

    def blocks(self, shard: int) -> _Int64s:
        rows, size = self.row_count(shard), self._shards[shard].size
        step = rows if self._is_read_from_begin(shard) else rows * BLOCK_BYTES // max(size, 1)
        return np.append(np.arange(0, rows, max(step, 1)), rows)

    def _selected(self, shard: int) -> Selection:
        where = self._where(self._shards[shard])
        for column in self._columns(shard):
            if column.name == self._spec.column and pa.types.is_large_binary(column.kind):
                raise SourceError(
                    f"{where}: column {column.name!r} is of {column.encoding!r}, {self.remedy}"
                )
        return self._selection(
            shard, pa.schema([(column.name, column.kind) for column in self._columns(shard)])
        )

    def _read(self, shard: int, row: int) -> Iterator[Rows]:
        self._check_row(shard, row, self.row_count(shard))
        if row == self.row_count(shard):
            return
        columns, where, selection = (
            self._columns(shard),
            self._where(self._shards[shard]),
            self._selected(shard),
        )
        with self._open(self._shards[shard]) as file:
            for samples in self._samples(file, shard, row):
                spans = zip(columns, self._spans(samples, columns), strict=True)
                read = {
                    one.name: one.decode(samples, own)
                    for one, own in spans
                    if one.name in selection.fields
                }
                yield from selection.rows(pa.RecordBatch.from_pydict(read), samples.first, where)


def read_compressed(file: File, codec: str, size: int) -> ReadAt:
    """Reads what a compressed file of ``size`` decompressed bytes holds, at offsets that ascend.

    Raises ``SourceError`` where no such file becomes so large.
    """
    if size > FREE_BYTES + MAX_RATIO * file.size:
        raise SourceError(
            f"{file.name} has {file.size} bytes, which cannot become the {size} that its index.json says"
        )
    file.plan([Range(0, file.size)])
    stream, position = Decompressed(file, codec), 0

    def read_at(offset: int, length: int) -> bytes:
        nonlocal position
        while position < offset and (
            passed := len(stream.read(min(offset - position, PASSED_BYTES)))
        ):
            position += passed
        data = stream.read(length)
        position += len(data)
        return data

    return read_at


def offsets_of(read_at: ReadAt, sizes: Sequence[int], samples: int, where: str) -> _Int64s:
    """[samples + 1]: where each sample of a file begins, and where the last one ends.

    ``sizes``, ``samples``: the bytes that the file may have, and its number of samples by its index. Raises
    ``SourceError``, beginning with ``where``, unless the offsets ascend within the file up to its end.
    """
    count = int.from_bytes(read_at(0, 4), "little")
    if count != samples:
        raise SourceError(
            f"{where} begins with a number of {count} samples, but its index.json says {samples}: the two do not "
            "belong together, or one is damaged; write or copy both again"
        )
    begin = 4 * (samples + 2)
    table = read_at(4, begin - 4) if begin <= max(sizes) else b""
    offsets = np.frombuffer(table, "<u4", len(table) // 4).astype(np.int64)
    is_whole = len(offsets) == samples + 1 and offsets[0] >= begin and offsets[-1] in sizes
    if not is_whole or bool((np.diff(offsets) < 0).any()):
        raise SourceError(
            f"{where}: the offsets of its {samples} samples do not ascend within its {max(sizes)} bytes; {DAMAGED}"
        )
    return offsets


def read_samples(
    read_at: ReadAt, offsets: _Int64s, row: int, where: str, rules: RowRules
) -> Iterator[Samples]:
    """The samples of a file from ``row`` on, about ``CHUNK_BYTES`` at a time. Raises ``SourceError``."""
    while row < len(offsets) - 1:
        fits = int(np.searchsorted(offsets, offsets[row] + CHUNK_BYTES, "right")) - 1
        stop = min(max(fits, row + 1), row + CHUNK_SAMPLES)
        begin, size = int(offsets[row]), int(offsets[stop] - offsets[row])
        if stop == row + 1 and size > rules.most_bytes:
            raise SourceError(f"{where}: row {row} has {size:,} bytes, {rules.too_long}")
        data = read_at(begin, size)
        if len(data) < size:
            raise SourceError(
                f"{where} ends at byte {begin + len(data)}, expected {int(offsets[-1])} bytes; {DAMAGED}"
            )
        yield Samples(row, np.frombuffer(data, np.uint8), offsets[row : stop + 1] - begin, where)
        row = stop
