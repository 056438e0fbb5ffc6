"""Rows of LitData's chunks, of which there are three forms.

Samples, in which the sizes of all values stand before the values, or in a stream of ids none; the same in frames, each
compressed by itself; record batches of Arrow, as the end of a file.

Source of the formats: ``litdata/streaming`` of Lightning-AI/litData (``writer.py``, ``framed_zstd.py``,
``item_loader.py``).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenloom_server.errors import SourceError
from tokenloom_server.sources import samples as sample_files
from tokenloom_server.sources.arrow import ArrowSource
from tokenloom_server.sources.base import Rows, Shard, Source
from tokenloom_server.sources.compressed import FREE_BYTES, MAX_RATIO
from tokenloom_server.sources.indexed_folder import (
    BOOLEANS,
    ListedFile,
    LitdataChunk,
    LitdataIndex,
    id_type,
)
from tokenloom_server.sources.samples import DAMAGED, Column, ReadAt, Samples, SampleSource, Spans
from tokenloom_server.sources.scheme import ReadRequest
from tokenloom_server.storage.file import File, LocalFile, Range

#: How a file of frames begins, and one with record batches ends.
FRAMES, BATCHES = b"LDFZ01\0\0", b"LDARW01\0"
#: Of frames: magic, version, flags, samples, samples of a frame, frames.
HEADER = struct.Struct("<8sHHIII")
FRAME = np.dtype(
    [
        ("first", "<u4"),
        ("samples", "<u4"),
        ("begin", "<u8"),
        ("size", "<u4"),
        ("decompressed", "<u4"),
    ]
)
#: Arrow's types of other values, by how they are written.
KINDS = {"str": "large_string", "int": "int64", "float": "float64"}


def open_chunks(request: ReadRequest, index: LitdataIndex, listed: Sequence[ListedFile]) -> Source:
    """Opens a source of the ``listed`` files. Raises ``SourceError``."""
    with request.open(request.shards[1]) as file:
        has_batches = bytes(file.read_at(file.size - len(BATCHES), len(BATCHES))) == BATCHES
    return BatchesSource(request, listed) if has_batches else ChunksSource(request, index, listed)


class ChunksSource(SampleSource):
    """A source of samples."""

    remedy = (
        "expected str, or ids: a tensor or an array of integers in one dimension; write it anew as one of these "
        "(nothing is unpickled)"
    )

    def __init__(
        self, request: ReadRequest, index: LitdataIndex, listed: Sequence[ListedFile]
    ) -> None:
        self._index = index
        super().__init__(request, listed)

    def _columns(self, shard: int) -> Sequence[Column]:
        config, columns = self._index.config, []
        for name, written in zip(config.fields, config.data_format, strict=False):
            ids = id_type(written) or (
                "uint8" if self._rules.is_mask and written in BOOLEANS else ""
            )
            kind = pa.type_for_alias(ids or KINDS.get(written, "large_binary"))
            columns.append(Column(name, written, None, pa.large_list(kind) if ids else kind))
        return columns

    def _is_read_from_begin(self, shard: int) -> bool:
        return self._listed[shard].sizes is None

    def _spans(self, samples: Samples, columns: Sequence[Column]) -> Sequence[Spans]:
        if not self._index.is_stream:
            return super()._spans(samples, columns)
        return [Spans(samples.offsets[:-1], np.diff(samples.offsets))]  # a stream of ids

    def _samples(self, file: File, shard: int, row: int) -> Iterator[Samples]:
        chunk: LitdataChunk = self._listed[shard].entry
        where = self._where(self._shards[shard])
        if bytes(file.read_at(0, len(FRAMES))) == FRAMES:
            yield from _framed(file, chunk, row, where)
            return
        is_compressed = self._is_read_from_begin(shard)
        sizes = chunk.sizes if is_compressed else [file.size]
        read_at: ReadAt = (
            sample_files.read_compressed(file, "zstd", max(sizes))
            if is_compressed
            else file.read_at
        )
        offsets = sample_files.offsets_of(read_at, sizes, chunk.chunk_size, where)
        size = int(offsets[-1] - offsets[0])
        ids = id_type(self._index.config.data_format[0]) or "uint8"
        if chunk.dim is not None and chunk.dim * np.dtype(ids).itemsize != size:
            raise SourceError(
                f"{where}: its {size} bytes are not the {chunk.dim} ids that its index says; {DAMAGED}"
            )
        if not is_compressed:
            file.plan([Range(int(offsets[row]), file.size)])
        yield from sample_files.read_samples(read_at, offsets, row, where, self._rules)


def _framed(file: File, chunk: LitdataChunk, row: int, where: str) -> Iterator[Samples]:
    """The samples from ``row`` on of a file whose frames, of some samples each, are compressed by themselves."""
    header = bytes(file.read_at(0, HEADER.size)).ljust(HEADER.size)
    _, version, _, rows, _, count = HEADER.unpack(header)
    begin = HEADER.size + 4 * (rows + 1)
    end = begin + FRAME.itemsize * count
    tables = bytes(file.read_at(HEADER.size, end - HEADER.size)) if end <= file.size else b""
    if version != 1 or rows != chunk.chunk_size or not tables:
        fault = (
            f"has frames in version {version} of {rows} samples, expected 1 of {chunk.chunk_size}"
        )
        raise SourceError(f"{where} {fault}; {DAMAGED}")
    offsets = np.frombuffer(tables, "<u4", rows + 1).astype(np.int64)
    frames = np.frombuffer(tables, FRAME, count, begin - HEADER.size)
    firsts = np.append(frames["first"], rows).astype(np.int64)
    sizes, most = (
        frames["decompressed"].astype(np.int64),
        FREE_BYTES + MAX_RATIO * frames["size"].astype(np.int64),
    )
    is_whole = (
        firsts[0] == 0
        and np.array_equal(np.diff(firsts), frames["samples"])
        and bool((sizes <= most).all())
    )
    if (
        not is_whole
        or (np.diff(offsets) < 0).any()
        or not np.array_equal(np.diff(offsets[firsts]), sizes)
    ):
        raise SourceError(f"{where}: its frames do not lie one after the other; {DAMAGED}")
    codec = pa.Codec("zstd")
    for number in range(int(np.searchsorted(firsts, row, "right")) - 1, count):
        first, stop = int(firsts[number]), int(firsts[number + 1])
        compressed = file.read_at(int(frames["begin"][number]), int(frames["size"][number]))
        try:
            data = np.frombuffer(codec.decompress(compressed, int(sizes[number])), np.uint8)
        except (pa.ArrowException, OSError) as error:
            raise SourceError(
                f"{where}: frame {number} cannot be decompressed ({error}); {DAMAGED}"
            ) from None
        row = max(row, first)
        yield Samples(row, data, offsets[row : stop + 1] - offsets[first], where)


class BatchesSource(ArrowSource):
    """A source of files that end with an Arrow file, before which stands an empty table of samples."""

    def __init__(self, request: ReadRequest, listed: Sequence[ListedFile]) -> None:
        self._listed = listed
        super().__init__(request)

    def row_count(self, shard: int) -> int:
        return self._checked(shard, super().row_count(shard) if shard else 0)

    def check(self, shard: int) -> object:
        return super().check(shard) if shard else None

    def blocks(self, shard: int) -> npt.NDArray[np.int64]:
        return super().blocks(shard) if shard else np.zeros(1, np.int64)

    def _has_rows(self, shard: int) -> bool:
        return shard > 0 and super()._has_rows(shard)

    def _open(self, shard: Shard, *, again: bool = False) -> File:
        file, mark = super()._open(shard, again=again), len(BATCHES) + 4
        end = bytes(file.read_at(max(file.size - mark, 0), mark))
        begin = file.size - mark - int.from_bytes(end[:4], "little")
        read_at: ReadAt = file.read_at
        if isinstance(file, LocalFile):
            content = memoryview(file.mapped())  # unmapped with its last view
            read_at = lambda offset, length: content[offset : offset + length]  # noqa: E731
            file.close()
        if not end.endswith(BATCHES) or begin < 0:
            raise SourceError(
                f"{self._where(shard)} does not end with record batches, as others do; {DAMAGED}"
            )
        return _Part(file, Range(begin, file.size - mark), read_at)

    def _read(self, shard: int, row: int) -> Iterator[Rows]:
        for rows in super()._read(shard, row) if shard else ():
            row = rows.first_row + len(rows.column)
            yield rows
        self._checked(shard, row)

    def _checked(self, shard: int, rows: int) -> int:
        where, expected = self._where(self._shards[shard]), self._listed[shard].rows
        if rows != expected:
            raise SourceError(
                f"{where} has {rows} samples, but its index says {expected}; {DAMAGED}"
            )
        return rows


class _Part(File):
    """A range of a file, as a file."""

    def __init__(self, file: File, part: Range, read_at: ReadAt) -> None:
        self.name, self.size = file.name, part.end - part.begin
        self._file, self._part, self._read_at = file, part, read_at

    def read_at(self, offset: int, length: int) -> bytes | memoryview:
        return self._read_at(self._part.begin + offset, max(0, min(length, self.size - offset)))

    def plan(self, ranges: Iterable[Range]) -> None:
        begin = self._part.begin
        self._file.plan(Range(begin + each.begin, begin + each.end) for each in ranges)

    def close(self) -> None:
        self._file.close()
