"""Rows of flat arrays of ids, in which an end-of-text id ends each document; mapped and not converted.

Three kinds of files. ``.npy`` files of numpy, one-dimensional, of any integer type. The ``.bin`` shards of llm.c and
modded-nanogpt: 256 int32, which begin with a magic number, the version and the number of ids, then the ids. Raw ids, as
nanoGPT writes its ``.bin``: these do not say their type, so that the spec has to, ``npy:GLOB:uint16``.

A row is a document with its end-of-text id; what follows the last of them in a file is a row, too. Where rows lie is
known from an index, as of files of lines: for each mebibyte, the first row that begins in it.

Sources of the formats: ``numpy.lib.format``; ``dev/data/data_common.py`` of karpathy/llm.c.
"""

from __future__ import annotations

import io
import logging
import struct
import tokenize
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenloom_server.config.catalog import Spec
from tokenloom_server.errors import SourceError
from tokenloom_server.sources import columns, files, row_index
from tokenloom_server.sources.base import Content, Rows
from tokenloom_server.sources.flat_ids import FlatIds
from tokenloom_server.sources.row_index import IndexedSource, RowEnds, RowIndex
from tokenloom_server.sources.scheme import IDS, RAW_TYPES, ReadRequest
from tokenloom_server.storage.file import File

_log = logging.getLogger(__name__)

MAGIC = b"\x93NUMPY"
#: Of llm.c's shards: by magic number and version, the type of the ids.
LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
LLM_C_HEADER_BYTES = 256 * 4

#: Of a .npy file of one dimension; numpy itself reads no longer one.
MAX_HEADER_BYTES = 1 << 14
#: What is looked through at once.
CHUNK_BYTES = 1 << 20
#: Without an end-of-text id for so long, it is more likely another one.
MAX_ROW_IDS = 1 << 27


class NpySource(IndexedSource):
    """A source of flat arrays."""

    def __init__(self, request: ReadRequest) -> None:
        """Reads headers up to the first file that has ids.

        Raises ``SourceError`` naming a file that is none of the three kinds, of another type, or truncated, and when
        no file has an id, or no end-of-text id is known.
        """
        super().__init__(request)
        if request.end_of_text_id is None:
            raise SourceError(
                f"source {str(self._spec)!r}: documents of flat arrays end with the end-of-text id, which is not "
                "known; set end_of_text_id in the mixture file"
            )
        self._content = Content.IDS
        self._end_of_text_id = request.end_of_text_id
        self._refuse_empty_files("an array of ids")
        self._refuse_without_rows(lambda shard: self._mapped(shard).count)

    def _read(self, shard: int, row: int) -> Iterator[Rows]:
        where = self._where(self._shards[shard])
        ids = self._mapped(shard)
        first = position = 0
        if row > 0:
            # Only now: a corpus that is read from its beginning must not be scanned first.
            first, position = self._seek(shard, row)
        while position < ids.count:
            edges = self._edges(ids, position, where)
            skipped = max(row - first, 0)
            if skipped < len(edges) - 1:
                yield from columns.rows(
                    ids.rows(edges[skipped:]), first + skipped, where, valid=True
                )
            first += len(edges) - 1
            position = int(edges[-1])

    def _edges(self, ids: FlatIds, position: int, where: str) -> npt.NDArray[np.int64]:
        """Where the rows begin that end in the next chunk, and where the last of them ends: [rows + 1]."""
        wanted = CHUNK_BYTES // ids.kind.itemsize
        while True:
            end = min(position + wanted, ids.count)
            ends = np.flatnonzero(self._is_end(ids.numbers(position, end))) + (position + 1)
            if end == ids.count and (not len(ends) or ends[-1] < ids.count):
                ends = np.append(ends, ids.count)
            if len(ends):
                return np.concatenate(([position], ends))
            if wanted > MAX_ROW_IDS:
                break
            wanted *= 2  # doubling: a long row is looked through twice at most, whatever its length
        raise SourceError(
            f"{where}: the end-of-text id {self._end_of_text_id} does not occur in {MAX_ROW_IDS} ids from position "
            f"{position} on; set end_of_text_id to the one that these files were written with"
        )

    def _is_end(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        if self._end_of_text_id > np.iinfo(ids.dtype).max:
            return np.zeros(len(ids), np.bool_)
        is_end: npt.NDArray[np.bool_] = ids == ids.dtype.type(self._end_of_text_id)
        return is_end

    def _mapped(self, shard: int) -> FlatIds:
        entry = self._shards[shard]
        with self._open(entry) as file:
            layout = _layout(file, self._spec, self._where(entry))
            return FlatIds(file, layout.kind, layout.begin, layout.ids)

    def _load_index(self, shard: int) -> RowIndex:
        entry, ids = self._shards[shard], self._mapped(shard)

        def build() -> RowIndex:
            _log.info("building the index of %s (%d ids)", entry.path, ids.count)
            return row_index.build(0, ids.count, self._row_ends(ids))

        with self._open(entry) as file:
            path = self._cache_path(shard, file, "ids", f"-{ids.kind.name}-{self._end_of_text_id}")
        return row_index.cached(path, ids.count, build)

    def _row_ends(self, ids: FlatIds) -> Iterator[RowEnds]:
        step = CHUNK_BYTES // ids.kind.itemsize
        for begin in range(0, ids.count, step):
            ends = self._is_end(ids.numbers(begin, min(begin + step, ids.count)))
            first = int(ends.argmax())
            yield RowEnds(
                begin + first + 1 if ends[first] else None,
                int(np.count_nonzero(ends)),
                bool(ends[-1]),
            )


class _Layout(NamedTuple):
    """The ids of a file: their type, the byte at which they begin, and how many there are."""

    kind: np.dtype[Any]
    begin: int
    ids: int


def _layout(file: File, spec: Spec, where: str) -> _Layout:
    size = file.size
    head = bytes(file.read_at(0, 12))
    llm_c = _llm_c(head, size, where)
    if spec.column == IDS:
        if head.startswith(MAGIC):
            return _of_numpy(file, where)
        if llm_c is None:
            types = ", ".join(f"'{spec}:{name}'" for name in RAW_TYPES)
            raise SourceError(
                f"{where} begins with {head[:6]!r}, expected {MAGIC!r} of a .npy file, or the header of an llm.c "
                f"shard; where it holds bare ids, say of which type: {types}"
            )
        return llm_c
    if head.startswith(MAGIC) or llm_c is not None:
        described_as = "an llm.c shard" if llm_c is not None else "a .npy file"
        raise SourceError(
            f"{where} is {described_as}, which says itself what it holds; leave ':{spec.column}' out of the spec"
        )
    kind = np.dtype(spec.column).newbyteorder("<")
    if size % kind.itemsize:
        raise SourceError(
            f"{where} has {size} bytes, which is no whole number of {spec.column}: it is truncated, or its ids are of "
            "another type; copy it again, or name their type"
        )
    return _Layout(kind, 0, size // kind.itemsize)


def _llm_c(head: bytes, size: int, where: str) -> _Layout | None:
    """The layout that the header of an llm.c shard gives, if the file is one. Raises ``SourceError`` where it is not as
    long as it says."""
    magic, version, count = struct.unpack("<iii", head.ljust(12, b"\0"))
    if (magic, version) not in LLM_C:
        return None
    kind = np.dtype(LLM_C[magic, version])
    if size != LLM_C_HEADER_BYTES + count * kind.itemsize:
        raise SourceError(
            f"{where} has the header of an llm.c shard ({magic}, version {version}) of {count} ids of {kind.name}, but "
            f"the file has {max(size - LLM_C_HEADER_BYTES, 0) / kind.itemsize:g} after it: it is truncated or damaged; "
            "write or copy it again"
        )
    return _Layout(kind, LLM_C_HEADER_BYTES, count)


def _of_numpy(file: File, where: str) -> _Layout:
    head = io.BytesIO(file.read_at(0, MAX_HEADER_BYTES))
    read = np.lib.format.read_array_header_1_0, np.lib.format.read_array_header_2_0
    try:
        major, minor = np.lib.format.read_magic(head)
        if (major, minor) not in ((1, 0), (2, 0)):
            raise ValueError(f"version {major}.{minor}, expected 1.0 or 2.0")
        shape, _, kind = read[major - 1](head)
    # The header is text that Python's parser reads: whatever that finds wrong with it comes up.
    except (
        ValueError,
        SyntaxError,
        TypeError,
        KeyError,
        RecursionError,
        MemoryError,
        tokenize.TokenError,
    ) as error:
        raise files.unreadable(where, ".npy", error) from None
    begin, size = head.tell(), file.size
    if len(shape) != 1:
        raise SourceError(
            f"{where} is an array of {len(shape)} dimensions, expected one; save array.reshape(-1)"
        )
    if kind.kind not in "iu" or kind.newbyteorder("<") != kind:
        raise SourceError(
            f"{where} is an array of {kind}, expected little-endian integers; save array.astype(numpy.uint16) or uint32"
        )
    if begin + shape[0] * kind.itemsize != size or shape[0] < 0:
        raise SourceError(
            f"{where} has {size} bytes, but its header and {shape[0]} ids of {kind.name} take "
            f"{begin + shape[0] * kind.itemsize}: it is truncated or damaged; write or copy it again"
        )
    return _Layout(kind, begin, shape[0])
