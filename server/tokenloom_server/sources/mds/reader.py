"""Rows of Mosaic streaming's shards: a sample each, found by the shard's own table of offsets.

Source of the format: ``streaming/base/format/mds`` of mosaicml/streaming.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from tokenloom_server.errors import SourceError
from tokenloom_server.sources import samples as sample_files
from tokenloom_server.sources.mds.index import CODECS, ID_TYPES, IDS, MdsShard
from tokenloom_server.sources.samples import DAMAGED, Column, ReadAt, Samples, SampleSource, Spans
from tokenloom_server.storage.file import File, Range

#: A block of a shuffle: about so many bytes of a raw shard, by the mean of its samples.
BLOCK_BYTES = 1 << 20
#: The description of its columns that a shard has after its offsets.
MAX_HEADER_BYTES = 1 << 20
#: Encodings of one number, and its type.
NUMBERS = {"int": "int64"} | {name: name for name in (*ID_TYPES, "float16", "float32", "float64")}
#: By the type of an array's numbers, the byte with which a value of ``ndarray`` begins.
TYPE_CODES = {"uint8": 8, "int8": 9, "uint16": 16, "int16": 17, "uint32": 32, "int32": 33, "uint64": 64, "int64": 65}
#: Hashes that an index may have, the fastest first.
HASHES = ("xxh3_64", "xxh3_128", "xxh128", "xxh64", "xxh32", "sha1", "sha256", "sha512", "md5", "blake2b", "blake2s")


class MdsSource(SampleSource):
    """A source of shards."""

    remedy = (
        "expected str, or ids: ndarray in one dimension, or bytes, where the spec says their type, as in "
        f"'mds:DIR:FIELD:uint16' (one of {', '.join(ID_TYPES)}); write it anew as one of these (nothing is unpickled)"
    )

    def blocks(self, shard: int) -> npt.NDArray[np.int64]:
        rows, size = self.row_count(shard), self._shards[shard].size
        # A compressed shard is read from its begin.
        step = rows if self._is_compressed(shard) else rows * BLOCK_BYTES // max(size, 1)
        return np.append(np.arange(0, rows, max(step, 1)), rows)

    def _is_compressed(self, shard: int) -> bool:
        listed = self._listed[shard]
        return bool(listed.name != listed.entry.raw_data.basename)

    def _columns(self, shard: int) -> Sequence[Column]:
        entry: MdsShard = self._listed[shard].entry
        parts = zip(entry.column_names, entry.column_encodings, entry.column_sizes, strict=False)
        return [self._column(*part) for part in parts]

    def _column(self, name: str, encoding: str, size: int | None) -> Column:
        own, id_type = self._spec.column, ""
        if own.rpartition(":")[0] == name:
            name, id_type = own, own.rpartition(":")[2]
        ids = IDS.fullmatch(f"{encoding}:{id_type}" if id_type else encoding)
        if ids is None:
            return Column(
                name, encoding, size, "text" if encoding == "str" and not id_type else NUMBERS.get(encoding, ""), False
            )
        has_shape = encoding.startswith("ndarray") and encoding.count(":") < 2
        return Column(
            name, encoding, size, ids[1], True, partial(_past_shape, encoding == "ndarray") if has_shape else None
        )

    def _samples(self, file: File, shard: int, row: int) -> Iterator[Samples]:
        entry: MdsShard = self._listed[shard].entry
        size, where = entry.raw_data.bytes, self._where(self._shards[shard])
        read_at: ReadAt = file.read_at
        if self._is_compressed(shard):
            assert entry.compression, "the index has a compressed form"
            read_at = sample_files.read_compressed(file, CODECS[entry.compression.partition(":")[0]], size)
        read_at = _hashed(read_at, entry, where)
        offsets = sample_files.offsets_of(read_at, size, entry.samples, where)
        _check_header(read_at, int(offsets[0]), entry, where)
        if not self._is_compressed(shard):
            file.plan([Range(int(offsets[row]), size)])
        yield from sample_files.read_samples(read_at, offsets, row, where)


def _past_shape(has_type: bool, samples: Samples, spans: Spans, kind: np.dtype[Any]) -> Spans:
    """Where the numbers of arrays lie. Before them stand the code of their type, if ``has_type``; four times the number
    of dimensions plus the exponent of a width, in a byte; and each dimension in 2 ** exponent bytes."""
    samples.refuse(spans.lengths <= has_type, "is too short for an array")
    if has_type:
        is_other = samples.data[spans.begins] != TYPE_CODES[kind.name]
        samples.refuse(is_other, f"is no array of {kind.name}, as the spec says; name the type that it has")
    shapes = spans.begins + has_type
    byte = samples.data[shapes].astype(np.int64)
    samples.refuse(byte >> 2 != 1, "is an array of several dimensions, or of none; expected one")
    widths = 1 << (byte & 3)
    lengths = spans.lengths - (has_type + 1 + widths)
    digits = np.arange(8)
    places = np.minimum(shapes[:, None] + 1 + digits, len(samples.data) - 1)
    counts = np.where(digits < widths[:, None], samples.data[places], 0).astype(np.uint8).view("<u8")[:, 0]
    is_other = (lengths < 0) | (counts != (lengths // kind.itemsize).astype(np.uint64))
    samples.refuse(is_other, "is not as long as its shape says")
    return Spans(shapes + 1 + widths, lengths)


def _hashed(read_at: ReadAt, entry: MdsShard, where: str) -> ReadAt:
    """Compares what is read, where that is a shard from its first byte to its last, with one of its hashes: before its
    last rows are given."""
    hashes, size = entry.raw_data.hashes, entry.raw_data.bytes
    name = next((name for name in HASHES if name in hashes), None)
    if name is None:
        return read_at
    digest: Any = getattr(xxhash if name.startswith("xxh") else hashlib, name)()
    position = 0

    def read(offset: int, length: int) -> bytes | memoryview:
        nonlocal position
        data = read_at(offset, length)
        if offset == position:
            digest.update(data)
            position += len(data)
            if position == size and digest.hexdigest() != hashes[name].lower():
                raise SourceError(
                    f"{where} has the {name} {digest.hexdigest()}, but its index says {hashes[name]}; {DAMAGED}"
                )
        return data

    return read


def _check_header(read_at: ReadAt, end: int, entry: MdsShard, where: str) -> None:
    """Raises ``SourceError`` unless a shard says of its columns what the index says."""
    begin = 4 * (entry.samples + 2)
    text = bytes(read_at(begin, min(end - begin, MAX_HEADER_BYTES)))
    expected = {name: getattr(entry, name) for name in ("column_names", "column_encodings", "column_sizes")}
    try:
        header = json.loads(text)
        is_same = header.items() >= expected.items()
    except (ValueError, TypeError, AttributeError, RecursionError):
        is_same = False
    if not is_same:
        raise SourceError(
            f"{where} has the header {text[:200]!r}, but its index says {expected}: the two do not belong together, or "
            "one is damaged; write or copy the folder again"
        )
