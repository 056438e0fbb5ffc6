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
import pyarrow as pa
import xxhash

from tokenloom_server.errors import SourceError
from tokenloom_server.sources import samples as sample_files
from tokenloom_server.sources.indexed_folder import MDS_CODECS, MDS_ID_TYPES, MDS_IDS, MdsShard
from tokenloom_server.sources.samples import DAMAGED, Column, ReadAt, Samples, SampleSource, Spans
from tokenloom_server.storage.file import File, Range

#: The description of its columns that a shard has after its offsets.
MAX_HEADER_BYTES = 1 << 20
#: Encodings of text and of one number, and Arrow's types of them.
KINDS = {"str": "large_string", "int": "int64"} | {
    name: name for name in (*MDS_ID_TYPES, "float16", "float32", "float64")
}
#: By the type of an array's numbers, the byte with which a value of ``ndarray`` begins.
TYPE_CODES = {
    "uint8": 8,
    "int8": 9,
    "uint16": 16,
    "int16": 17,
    "uint32": 32,
    "int32": 33,
    "uint64": 64,
    "int64": 65,
}
#: Hashes that an index may have, the fastest first.
HASHES = (
    "xxh3_64",
    "xxh3_128",
    "xxh128",
    "xxh64",
    "xxh32",
    "sha1",
    "sha256",
    "sha512",
    "md5",
    "blake2b",
    "blake2s",
)


class MdsSource(SampleSource):
    """A source of shards."""

    remedy = (
        "expected str, or ids: ndarray in one dimension, or bytes, where the spec says their type, as in "
        f"'mds:DIR:FIELD:uint16' (one of {', '.join(MDS_ID_TYPES)}); write it anew as one of these (nothing is "
        "unpickled)"
    )

    def _is_read_from_begin(self, shard: int) -> bool:
        entry: MdsShard | None = self._listed[shard].entry
        return entry is not None and self._listed[shard].name != entry.raw_data.basename

    def _columns(self, shard: int) -> Sequence[Column]:
        entry: MdsShard = self._listed[shard].entry
        parts = zip(entry.column_names, entry.column_encodings, entry.column_sizes, strict=False)
        return [self._column(*part) for part in parts]

    def _column(self, name: str, encoding: str, size: int | None) -> Column:
        field, _, id_type = self._spec.column.rpartition(":")
        typed = f"{encoding}:{id_type}" if field == name else encoding
        name = self._spec.column if field == name else name
        ids = MDS_IDS.fullmatch(typed)
        if ids is None:
            return Column(name, encoding, size, pa.type_for_alias(KINDS.get(typed, "large_binary")))
        has_shape = encoding.startswith("ndarray") and encoding.count(":") < 2
        past_shape = partial(_past_shape, ids[1], encoding == "ndarray") if has_shape else None
        return Column(name, encoding, size, pa.large_list(pa.type_for_alias(ids[1])), past_shape)

    def _samples(self, file: File, shard: int, row: int) -> Iterator[Samples]:
        entry: MdsShard = self._listed[shard].entry
        size, where = entry.raw_data.bytes, self._where(self._shards[shard])
        read_at: ReadAt = file.read_at
        if self._is_read_from_begin(shard):
            codec = MDS_CODECS[str(entry.compression).partition(":")[0]]
            read_at = sample_files.read_compressed(file, codec, size)
        if row == 0:
            read_at = _hashed(read_at, entry, where)
        offsets = sample_files.offsets_of(read_at, [size], entry.samples, where)
        _check_header(read_at, int(offsets[0]), entry, where)
        if not self._is_read_from_begin(shard):
            file.plan([Range(int(offsets[row]), size)])
        yield from sample_files.read_samples(read_at, offsets, row, where, self._rules)


def _past_shape(kind: str, has_type: bool, samples: Samples, spans: Spans) -> Spans:
    """Where the numbers of arrays of a ``kind`` lie. Before them stand its code, if ``has_type``; four times the number
    of dimensions plus the exponent of a width, in a byte; and each dimension in 2 ** exponent bytes."""
    samples.refuse(spans.lengths <= has_type, "is too short for an array")
    if has_type:
        is_other = samples.data[spans.begins] != TYPE_CODES[kind]
        samples.refuse(
            is_other, f"is no array of {kind}, as the spec says; name the type that it has"
        )
    shapes = spans.begins + has_type
    byte = samples.data[shapes].astype(np.int64)
    samples.refuse(byte >> 2 != 1, "is an array of several dimensions, or of none; expected one")
    widths = 1 << (byte & 3)
    lengths = spans.lengths - (has_type + 1 + widths)
    digits = np.arange(8)
    places = np.minimum(shapes[:, None] + 1 + digits, len(samples.data) - 1)
    counts = (
        np.where(digits < widths[:, None], samples.data[places], 0)
        .astype(np.uint8)
        .view("<u8")[:, 0]
    )
    is_other = (lengths < 0) | (counts != (lengths // np.dtype(kind).itemsize).astype(np.uint64))
    samples.refuse(is_other, "is not as long as its shape says")
    return Spans(shapes + 1 + widths, lengths)


def _hashed(read_at: ReadAt, entry: MdsShard, where: str) -> ReadAt:
    """Compares a shard that is read from its first byte to its last with one of its hashes, before its last rows are
    given."""
    hashes = entry.raw_data.hashes
    name = next((name for name in HASHES if name in hashes), None)
    if name is None:
        return read_at
    digest: Any = getattr(xxhash if name.startswith("xxh") else hashlib, name)()

    def read(offset: int, length: int) -> bytes | memoryview:
        data = read_at(offset, length)
        digest.update(data)
        if (
            offset + len(data) == entry.raw_data.bytes
            and digest.hexdigest() != hashes[name].lower()
        ):
            raise SourceError(
                f"{where} has the {name} {digest.hexdigest()}, its index says {hashes[name]}; {DAMAGED}"
            )
        return data

    return read


def _check_header(read_at: ReadAt, end: int, entry: MdsShard, where: str) -> None:
    """Raises ``SourceError`` unless a shard says of its columns what the index says."""
    begin = 4 * (entry.samples + 2)
    text = bytes(read_at(begin, min(end - begin, MAX_HEADER_BYTES)))
    expected = {
        name: getattr(entry, name) for name in ("column_names", "column_encodings", "column_sizes")
    }
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
