"""Rows of Arrow IPC files, mapped and not copied: the headers of messages, an opened file, and a source of them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc

from tokenloom_server.errors import TokenloomError
from tokenloom_server.sources import files
from tokenloom_server.sources.base import Rows, TensorFile
from tokenloom_server.sources.scheme import ReadRequest
from tokenloom_server.sources.selection import Selection
from tokenloom_server.sources.sharded import ShardedSource
from tokenloom_server.storage.arrow_input import for_arrow
from tokenloom_server.storage.file import File, LocalFile, Range
from tokenloom_server.storage.urls import is_remote

# The headers of Arrow IPC messages: how many rows each record batch has, and where it lies.
#
# An IPC stream is a chain of messages: a length, a small flatbuffer, and a body that the flatbuffer
# gives the length of. A file in file format has a footer that says where each message lies; between them
# may be anything, so the footer alone counts. Either way one page per batch is touched, and no body;
# Arrow's own readers in Python would make arrays of every batch (and decompress them) to tell the same.


#: A file (not a stream) begins with this, padded to eight bytes, and then goes on like a stream.
FILE_MAGIC = b"ARROW1"

#: A key of a file's metadata, its value in decimal digits: of so many rows a block has at most, where a
#: record batch of a mapped file is shuffled as several. ``prepare`` writes it.
BLOCK_ROWS = b"tokenloom.block_rows"

#: What a file ends with: the footer's length and the magic.
_TAIL = struct.Struct(f"<i{len(FILE_MAGIC)}s")
#: Of a message, in the footer: its offset, the length of its flatbuffer with what stands before it, that of its body.
_BLOCK = struct.Struct("<qi4xq")
_CONTINUATION = 0xFFFFFFFF
_SCHEMA, _DICTIONARY_BATCH, _RECORD_BATCH = 1, 2, 3


class Batches(NamedTuple):
    """The record batches of a file: entry i of ``ends`` is the row where batch i begins, the last the row count."""

    ends: np.ndarray[Any, np.dtype[np.int64]]
    offsets: list[int]
    plain: bool
    """Whether a batch can be read by itself: no dictionaries before it, and nothing compressed."""
    block_rows: int = 0
    """Rows of a block at most, 0 for whole batches."""

    def blocks(self) -> npt.NDArray[np.int64]:
        """[blocks + 1]: the rows with which the blocks of a mapped file begin, and the row count."""
        if not (self.block_rows and self.plain):
            return self.ends
        starts = [
            np.arange(begin, end, self.block_rows) for begin, end in pairwise(self.ends.tolist())
        ]
        return np.concatenate([*starts, self.ends[-1:]])


def is_file_format(head: bytes | memoryview) -> bool:
    """Whether an Arrow file that begins like this has the file format (with a footer), not the stream format."""
    return bytes(head[: len(FILE_MAGIC)]) == FILE_MAGIC


def is_compressed(file: File) -> bool:
    """Whether the first record batch of a file is. Raises ``ValueError`` when it cannot be reached."""
    return next(
        (header.compressed for _, header in _messages(file) if header.kind == _RECORD_BATCH), False
    )


def block_rows(metadata: Mapping[bytes, bytes]) -> int:
    """What a file's metadata says of the rows of a block; 0 where it says nothing that is a number."""
    text = metadata.get(BLOCK_ROWS, b"")
    return int(text) if len(text) < 10 and text.isdigit() else 0


def scan(file: File) -> Batches:
    """Looks at the messages of a file. Raises ``ValueError`` when one cannot be reached, or is cut off."""
    counts, offsets, plain = [0], [], True
    for offset, header in _messages(file):
        if header.kind == _DICTIONARY_BATCH:
            plain = False
        elif header.kind == _RECORD_BATCH:
            counts.append(header.rows)
            offsets.append(offset)
            plain = plain and not header.compressed
        elif header.kind != _SCHEMA:
            raise ValueError(f"the message at byte {offset} is neither a schema nor a batch")
    return Batches(np.cumsum(counts, dtype=np.int64), offsets, plain)


class _Header(NamedTuple):
    kind: int
    body_bytes: int
    rows: int
    compressed: bool


def _messages(file: File) -> Iterator[tuple[int, _Header]]:
    """Each message with the byte that it begins at: of a stream all, of a file in file format its batches, dictionaries
    first."""
    if not is_file_format(file.read_at(0, 8)):
        position = 0
        while position < file.size and (message := _message(file, position)):
            yield position, message[0]
            position = message[1]
        return
    for position in _footer(file):
        message = _message(file, position)
        if message is None:
            raise ValueError(f"the footer names a message at byte {position}, where none is")
        yield position, message[0]


def _message(file: File, start: int) -> tuple[_Header, int] | None:
    """A message, and the byte after it; ``None`` at the mark that ends a stream."""
    position = start
    try:
        head = file.read_at(position, 8)
        (length,) = struct.unpack_from("<I", head)
        position += 4
        if length == _CONTINUATION:  # files from before 2019 do not have it
            (length,) = struct.unpack_from("<I", head, 4)
            position += 4
        if length == 0:
            return None
        if position + length > file.size:
            raise ValueError(f"it ends within the header of the message at byte {start}")
        header = _header(file.read_at(position, length))
    except struct.error:
        raise ValueError(f"the message at byte {start} is cut off or damaged") from None
    position += length + header.body_bytes
    if header.body_bytes < 0 or header.rows < 0 or position > file.size:
        raise ValueError(f"it ends within the message at byte {start}")
    return header, position


def _footer(file: File) -> list[int]:
    """The bytes at which dictionaries, then record batches begin: Footer {version, schema, dictionaries,
    recordBatches} of File.fbs."""
    end = file.size - _TAIL.size
    try:
        length, magic = _TAIL.unpack(file.read_at(end, _TAIL.size) if end > 0 else b"")
        if magic != FILE_MAGIC or not 0 < length <= end:
            raise struct.error
        buffer = file.read_at(end - length, length)
        (footer,) = struct.unpack_from("<I", buffer, 0)
        offsets = [offset for number in (2, 3) for offset in _blocks(buffer, footer, number)]
    except struct.error:
        raise ValueError("its footer is cut off or damaged") from None
    if any(not 0 <= offset < end for offset in offsets):
        raise ValueError("its footer names a message beyond its end")
    return offsets


def _blocks(buffer: bytes | memoryview, table: int, number: int) -> list[int]:
    """The offsets in a vector of blocks."""
    field = _field(buffer, table, number)
    if not field:
        return []
    vector = field + struct.unpack_from("<I", buffer, field)[0]
    (count,) = struct.unpack_from("<I", buffer, vector)
    if vector + 4 + count * _BLOCK.size > len(buffer):
        raise struct.error("a vector of blocks ends outside of its buffer")
    return [_BLOCK.unpack_from(buffer, vector + 4 + i * _BLOCK.size)[0] for i in range(count)]


def _header(buffer: bytes | memoryview) -> _Header:
    # Field numbers are those of Message.fbs: Message {version, header_type, header, bodyLength},
    # RecordBatch {length, nodes, buffers, compression}.
    (message,) = struct.unpack_from("<I", buffer, 0)
    kind_at, header_at, body_at = (_field(buffer, message, number) for number in (1, 2, 3))
    kind = buffer[kind_at] if kind_at and kind_at < len(buffer) else 0
    body_bytes = struct.unpack_from("<q", buffer, body_at)[0] if body_at else 0
    if kind != _RECORD_BATCH or not header_at:
        return _Header(kind, body_bytes, 0, False)
    batch = header_at + struct.unpack_from("<I", buffer, header_at)[0]
    rows_at = _field(buffer, batch, 0)
    rows = struct.unpack_from("<q", buffer, rows_at)[0] if rows_at else 0
    return _Header(kind, body_bytes, rows, _field(buffer, batch, 3) != 0)


def _field(buffer: bytes | memoryview, table: int, number: int) -> int:
    """Where a table's field lies, or 0 where it has its default."""
    vtable = table - struct.unpack_from("<i", buffer, table)[0]
    if vtable < 0:
        raise struct.error("a vtable lies before its buffer")
    (vtable_bytes,) = struct.unpack_from("<H", buffer, vtable)
    entry = 4 + 2 * number
    if entry + 2 > vtable_bytes:
        return 0
    (offset,) = struct.unpack_from("<H", buffer, vtable + entry)
    return table + offset if offset else 0


# An opened Arrow IPC file: mapped where it is local, read range by range where it is remote.


class ArrowFile(NamedTuple):
    """``reader``: a ``RecordBatchFileReader`` of the file format (with a footer), else a ``RecordBatchStreamReader``.

    ``stream`` is what the reader reads; a mapped one stays mapped while an array that came from it is alive.
    """

    file: File
    stream: Any
    reader: Any
    is_file_format: bool

    @property
    def schema(self) -> pa.Schema:
        return self.reader.schema

    def batch(self, number: int, offset: int) -> pa.RecordBatch:
        """The ``number``-th record batch, which lies at the byte ``offset`` and can be read by itself."""
        if self.is_file_format:
            return self.reader.get_batch(number)
        self.stream.seek(offset)
        return pa.ipc.read_record_batch(pa.ipc.read_message(self.stream), self.schema)


def open_arrow(file: File) -> ArrowFile:
    """Opens a file; a local one is closed, since its mapping stays. Raises what Arrow raises."""
    if isinstance(file, LocalFile):
        file.close()
        stream = pa.BufferReader(_mapped(file.path))
    else:
        stream = for_arrow(file)
    has_footer = is_file_format(memoryview(stream.read_buffer(8)))
    stream.seek(0)
    reader = pa.ipc.open_file(stream) if has_footer else pa.ipc.open_stream(stream)
    return ArrowFile(file, stream, reader, has_footer)


def _mapped(path: str) -> Any:
    """A file as memory. It needs no descriptor, and the kernel fetches what is looked at and not all of it."""
    with pa.memory_map(path) as file:
        begin = file.read_buffer(8)
        return pa.foreign_buffer(begin.address, file.size(), begin)


def open_tensors(file: File) -> TensorFile:
    """Opens a file whose parts are its record batches. Raises ``ValueError`` for one that has no way to a batch but
    past all before it, unless all of it can be held."""
    batches, compressed, is_local = (
        scan(file),
        is_compressed(file),
        isinstance(file, LocalFile),
    )
    opened = open_arrow(file)
    if opened.is_file_format or batches.plain or compressed:
        has_dictionaries = any(pa.types.is_dictionary(field.type) for field in opened.schema)
        if not opened.is_file_format and not batches.plain and has_dictionaries:
            raise ValueError(
                "a compressed stream with dictionaries is read from its begin only; write it uncompressed"
            )
        return _Batches(opened, batches, mapped=is_local and not compressed)
    if not is_local:
        raise ValueError(
            "a stream with dictionaries is read from its begin only; keep it locally, or write parquet"
        )
    return _Batches(opened, batches, mapped=True, held=list(opened.reader))


class _Batches:
    """Implements ``TensorFile``: batches are read one by one. Those of a stream with dictionaries, which stand before
    the batches that need them, are ``held``: it is followed once, and they are mapped."""

    def __init__(
        self,
        opened: ArrowFile,
        batches: Batches,
        *,
        mapped: bool,
        held: Sequence[Any] | None = None,
    ) -> None:
        self._opened = opened
        self._offsets = batches.offsets
        self._held = held
        self.schema = opened.schema
        self.ends: npt.NDArray[np.int64] = batches.ends
        self.mapped = mapped
        self.decoded_bytes = opened.file.size

    def read(self, part: int, names: Sequence[str]) -> list[pa.Array]:
        batch = (
            self._held[part]
            if self._held is not None
            else self._opened.batch(part, self._offsets[part])
        )
        return [batch.column(name) for name in names]


_Out = TypeVar("_Out")

#: Files that a source keeps mapped at most: a process has 65,530 mappings on Linux, for thousands of sources.
MAPPED_FILES = 16


class ArrowSource(ShardedSource):
    """A source of Arrow IPC files, in stream format (as `datasets` writes them) or in file format.

    A local file stays mapped as long as an iterator, or an array that came from it, is alive; of a remote one a record
    batch is read at a time.
    """

    def __init__(self, request: ReadRequest) -> None:
        """Walks the batch headers up to the first shard that has rows.

        Raises ``SourceError`` for an empty file, a missing column, a type that is not supported, and
        when no shard has a row.
        """
        super().__init__(request)
        self._batches: dict[int, Batches] = {}
        #: Mapped files by shard and time of modification: of shuffled blocks the next one of a file is soon wanted.
        self._mapped: dict[tuple[int, int], ArrowFile] = {}
        self._refuse_empty_files("an Arrow file")
        self._refuse_without_rows(self._has_rows)

    def row_count(self, shard: int) -> int:
        if shard not in self._batches:
            schema = self._open_arrow(shard, again=True).schema
            self._selection(shard, schema)
            self._scan(shard, schema)
        return int(self._batches[shard].ends[-1])

    def check(self, shard: int) -> object:
        opened = self._open_arrow(shard)
        opened.file.close()
        return self._selection(shard, opened.schema)

    def blocks(self, shard: int) -> npt.NDArray[np.int64]:
        rows = self.row_count(shard)
        # Other streams are followed from their beginning.
        by_itself = self._batches[shard].plain or self._open_arrow(shard).is_file_format
        if not by_itself:
            return np.array([0, rows], np.int64)
        # Of a remote file, what is read by itself is a record batch.
        is_local = not is_remote(self._shards[shard].path)
        return self._batches[shard].blocks() if is_local else self._batches[shard].ends

    def _read(self, shard: int, row: int) -> Iterator[Rows]:
        opened = self._open_arrow(shard, again=True)
        file, schema = opened.file, opened.schema
        selection = self._selection(shard, schema)
        first_batch, first_row = 0, 0
        if row > 0:
            ends = self._scan(shard, schema).ends
            self._check_row(shard, row, int(ends[-1]))
            first_batch = int(np.searchsorted(ends, row, "right")) - 1
            first_row = int(ends[first_batch])
        known = self._batches.get(shard)
        begin = 0
        if first_batch and known is not None and known.plain:
            begin = [*known.offsets, file.size][first_batch]
        fields = [schema.get_field_index(name) for name in selection.fields]
        with file:
            file.plan([Range(begin, file.size)])
            batches = self._read_batches(shard, opened, fields, first_batch)
            yield from self._read_from(shard, batches, selection, first_row, row)

    def _read_from(
        self, shard: int, batches: Iterator[Any], selection: Selection, first_row: int, row: int
    ) -> Iterator[Rows]:
        where = self._where(self._shards[shard])
        while True:
            try:
                batch = next(batches, None)
            except (pa.ArrowException, OSError) as error:
                raise self._damaged(shard, error, f"after row {first_row}: ") from None
            if batch is None:
                return
            yield from selection.rows_from(row, batch, first_row, where)
            first_row += len(batch)

    def _read_batches(
        self, shard: int, opened: ArrowFile, fields: list[int], first: int
    ) -> Iterator[Any]:
        """These fields, and perhaps others, of each record batch from the ``first`` on."""
        options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
        if opened.is_file_format:
            # Of a file, though not of a stream, Arrow copies the fields that are included; that only pays where it
            # spares decompressing the others.
            known = self._batches.get(shard)
            packed = not (known is not None and known.plain) and self._headers(shard, is_compressed)
            reader = pa.ipc.open_file(opened.stream, options=options) if packed else opened.reader
            for i in range(first, reader.num_record_batches):
                yield reader.get_batch(i)
            return
        batches = self._batches.get(shard)
        if first and batches is not None and batches.plain:
            for i, offset in enumerate(batches.offsets[first:], first):
                yield opened.batch(i, offset)
            return
        # Dictionaries come before the batches that need them: the stream has to be followed.
        opened.stream.seek(0)
        for i, batch in enumerate(pa.ipc.open_stream(opened.stream, options=options)):
            if i >= first:
                yield batch

    def _has_rows(self, shard: int) -> bool:
        """Whether a shard has a row, by its first batch that is not empty: no walk over all headers."""
        opened = self._open_arrow(shard, again=True)
        selection = self._selection(shard, opened.schema)
        try:
            fields = [opened.schema.get_field_index(name) for name in selection.fields[:1]]
            return any(len(batch) for batch in self._read_batches(shard, opened, fields, 0))
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(shard, error) from None
        finally:
            opened.file.close()

    def _scan(self, shard: int, schema: pa.Schema) -> Batches:
        if shard not in self._batches:
            self._batches[shard] = self._headers(shard, scan)._replace(
                block_rows=block_rows(schema.metadata or {})
            )
        return self._batches[shard]

    def _headers(self, shard: int, read: Callable[[File], _Out]) -> _Out:
        """What the headers of a file say. Not by its mapping: Arrow has the kernel fetch all that is looked at."""
        try:
            with self._open(self._shards[shard]) as file:
                return read(file)
        except (ValueError, OSError) as error:
            raise self._damaged(shard, error) from None

    def _open_arrow(self, shard: int, *, again: bool = False) -> ArrowFile:
        """``again``: see ``_open``."""
        file = self._open(self._shards[shard], again=again)
        key = (shard, file.modified_ns) if isinstance(file, LocalFile) else None
        opened = self._mapped.get(key) if key is not None else None
        if opened is not None:
            file.close()
            return opened
        try:
            opened = open_arrow(file)
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(shard, error) from None
        # A stream's reader has a position, so each iterator has its own.
        if key is not None and opened.is_file_format:
            if len(self._mapped) >= MAPPED_FILES:
                self._mapped.clear()
            self._mapped[key] = opened
        return opened

    def _damaged(self, shard: int, error: Exception, place: str = "") -> TokenloomError:
        return files.unreadable(self._where(self._shards[shard]), "Arrow", error, place)
