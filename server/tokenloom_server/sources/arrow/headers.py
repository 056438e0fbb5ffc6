"""The headers of Arrow IPC messages: how many rows each record batch has, and where it lies.

An IPC stream is a chain of messages: a length, a small flatbuffer, and a body that the flatbuffer
gives the length of. A file in file format has a footer that says where each message lies; between them
may be anything, so the footer alone counts. Either way one page per batch is touched, and no body;
Arrow's own readers in Python would make arrays of every batch (and decompress them) to tell the same.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenloom_server.storage.file import File

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
