"""Files of lines, read in blocks of whole lines: the part that ``jsonl`` and ``txt`` share.

A line ends with ``\\n`` or ``\\r\\n``; the last may lack its end, and a final end begins no further
line. A UTF-8 byte order mark at the head of a file belongs to no line.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenloom_server.config.row_rules import RowRules
from tokenloom_server.errors import SourceError
from tokenloom_server.sources import row_index
from tokenloom_server.sources.base import BadRow, Content, Rows, Shard
from tokenloom_server.sources.compressed import Decompressed, text_stream
from tokenloom_server.sources.files import codec_of
from tokenloom_server.sources.row_index import IndexedSource, RowEnds, RowIndex
from tokenloom_server.sources.scheme import ReadRequest
from tokenloom_server.sources.sharded import no_rows
from tokenloom_server.storage.arrow_input import FileStream
from tokenloom_server.storage.file import File, LocalFile, Range

_log = logging.getLogger(__name__)

#: Bytes read at once. Twice as much was measured to cost twice the CPU time: the C library gives
#: buffers of that size back to the kernel, and each new one is faulted in again.
BLOCK_BYTES = 1 << 19

#: An index has one entry for each so many bytes of the file; also how much is read at once to make it.
STRIDE_BYTES = 1 << 20

#: Bytes of a file that are read at once where no more than its first rows are looked at.
HEAD_BYTES = 1 << 20

BOM = b"\xef\xbb\xbf"
#: An index of a file at least this large takes seconds, so the log says what is waited for.
LOGGED_INDEX_BYTES = 1 << 28


class Block(NamedTuple):
    """Consecutive whole lines of a file; ``ends`` are the positions of their ``\\n`` in ``data``.

    Where the file's last line has no end, ``ends`` has ``len(data)`` for it.
    """

    first_row: int
    data: bytes
    ends: np.ndarray[Any, np.dtype[np.int64]]

    def line(self, i: int) -> bytes:
        """The bytes of the i-th line, without its end."""
        start = int(self.ends[i - 1]) + 1 if i else 0
        end = int(self.ends[i])
        if end < len(self.data):
            end -= self.data[end - 1 : end] == b"\r" and end > start
        return self.data[start:end]

    def empty(self) -> npt.NDArray[np.bool_]:
        """[lines]: whether a line is nothing but its end."""
        starts = np.concatenate(([0], self.ends[:-1] + 1))
        is_return = np.frombuffer(self.data, np.uint8)[starts] == 0x0D
        return np.asarray(self.ends - starts <= is_return, np.bool_)

    def with_text(self, lines: npt.NDArray[np.bool_], text: bytes) -> Block:
        """The block with a text at the beginning of some lines."""
        starts = np.concatenate(([0], self.ends[:-1] + 1))[lines]
        added = np.tile(np.frombuffer(text, np.uint8), len(starts))
        data = np.insert(np.frombuffer(self.data, np.uint8), np.repeat(starts, len(text)), added)
        return Block(self.first_row, data.tobytes(), self.ends + len(text) * np.cumsum(lines))

    def cut(self, start: int, stop: int) -> Block:
        """The lines from ``start`` to ``stop`` as a block of their own."""
        if start == 0 and stop == len(self.ends):
            return self
        first = int(self.ends[start - 1]) + 1 if start else 0
        data = self.data[first : int(self.ends[stop - 1]) + 1]
        return Block(self.first_row + start, data, self.ends[start:stop] - first)


#: Turns a block into rows, the bad ones marked; the string begins an error and names source and file.
Decoder = Callable[[Block, str], Iterator[Rows]]


class LinesSource(IndexedSource):
    """A source whose shards are files of lines."""

    by_bytes = False
    """Whether ``row`` names a byte, and stands for the first line that begins there or after it, with which rows are
    counted from that number on: to look at a place without an index. Not in a compressed file. Bad rows are empty: who
    reads them by their numbers says which they are."""

    def __init__(self, request: ReadRequest, content: Content, decode: Decoder) -> None:
        super().__init__(request)
        self._content = content
        self._decode = decode

    def _read(self, shard: int, row: int) -> Iterator[Rows]:
        entry = self._shards[shard]
        where = self._where(entry)
        position = None
        if row > 0 and codec_of(entry.path) is None:
            # Only now: a corpus that is read from its beginning must not be scanned first.
            position = self._seek(shard, row)
        count = 0
        with self._open(entry) as file:
            file.plan([Range(position[1] if position is not None else 0, file.size)])
            for block in blocks_of(file, entry, self._rules, position):
                skipped = max(row - block.first_row, 0)
                if skipped < len(block.ends):
                    yield from self._decode(block.cut(skipped, len(block.ends)), where)
                count = block.first_row + len(block.ends)
        if position is None:
            self._check_row(shard, row, count)

    def read(self, shard: int, row: int) -> Iterator[Rows]:
        """See ``Source``."""
        return self._read(shard, row) if self.by_bytes else super().read(shard, row)

    def _seek(self, shard: int, row: int) -> tuple[int, int]:
        if not self.by_bytes:
            return super()._seek(shard, row)
        entry = self._shards[shard]
        with self._open(entry) as file:
            # A line that begins before that byte is passed over.
            return row, min(
                row + int(next(blocks_of(file, entry, self._rules, (0, row - 1))).ends[0]),
                entry.size,
            )

    def bytes_of(self, shard: int, row: int, rows: int) -> int:
        """Bytes of so many of a shard's lines from one on, with their ends, at the cost of reading them: no index is
        made, unless to find that one.

        Of a compressed file, about as many of its own bytes as they take.
        """
        size, entry = 0, self._shards[shard]
        position = self._seek(shard, row) if row else None
        with self._open(entry) as file:
            file.plan([Range(position[1] if position is not None else 0, file.size)])
            stream = text_stream(file, entry.path)
            for block in _blocks(stream, file.name, self._rules, position):
                if rows <= len(block.ends):
                    size += min(int(block.ends[rows - 1]) + 1, len(block.data))
                    break
                rows -= len(block.ends)
                size += len(block.data)
            return stream.position if isinstance(stream, Decompressed) else size

    def _load_index(self, shard: int) -> RowIndex:
        """Raises ``SourceError`` naming the file."""
        entry = self._shards[shard]
        with self._open(entry) as file:

            def build() -> RowIndex:
                level = logging.INFO if entry.size >= LOGGED_INDEX_BYTES else logging.DEBUG
                _log.log(level, "building the line index of %s (%d bytes)", entry.path, entry.size)
                file.plan([Range(0, file.size)])
                stream = text_stream(file, entry.path)
                head = _past_mark(stream)
                start = stream.position if isinstance(stream, FileStream) else 0
                return row_index.build(start, file.size, _line_ends(stream, head))

            # To read one back would take longer than to look through a file of one stride.
            is_short = (
                isinstance(file, LocalFile)
                and entry.size <= STRIDE_BYTES
                and codec_of(entry.path) is None
            )
            return row_index.cached(
                None if is_short else self._cache_path(shard, file, "lines"), entry.size, build
            )


def _line_ends(stream: FileStream | Decompressed, data: bytes) -> Iterator[RowEnds]:
    """Where lines end in a stream, of which ``data`` was read. Raises ``SourceError``.

    Of a compressed file they are only counted: none of its lines is reached but past all before it.
    """
    data += bytes(stream.read(STRIDE_BYTES))
    while data:
        newline = data.find(b"\n")
        is_reached = newline >= 0 and isinstance(stream, FileStream)
        first = stream.position - len(data) + newline + 1 if is_reached else None
        yield RowEnds(first, data.count(b"\n"), data.endswith(b"\n"))
        data = bytes(stream.read(STRIDE_BYTES))


def blocks_of(
    file: File, shard: Shard, rules: RowRules, position: tuple[int, int] | None = None
) -> Iterator[Block]:
    """Blocks of about ``BLOCK_BYTES`` from a known line ``(row, offset)`` on, or from the file's first line, as it
    must be of a compressed one. A line that is longer makes a block of its own. Raises ``SourceError``, also at one
    that is longer than the rules allow."""
    return _blocks(text_stream(file, shard.path), file.name, rules, position)


def _blocks(
    stream: FileStream | Decompressed, name: str, rules: RowRules, position: tuple[int, int] | None
) -> Iterator[Block]:
    row, line, size = 0, [], 0
    if position is not None and isinstance(stream, FileStream):
        row, offset = position
        stream.seek(offset)
    elif head := _past_mark(stream):
        line.append(head)
    while data := bytes(stream.read(BLOCK_BYTES)):
        whole = data.rfind(b"\n") + 1
        if size and size + (data.find(b"\n") if whole else len(data)) > rules.most_bytes:
            raise SourceError(f"{name}: line {row + 1} has {rules.too_long}")
        rest = _held(stream, data[whole:]) if whole else data
        if whole:
            data = b"".join(
                (*line, data[:whole])
            )  # first: the memory of what was read is used again at once
            block = _block(row, data)
            line, size = [], 0
            yield block
            row += len(block.ends)
        if rest:
            line.append(rest)
            size += len(rest)
    if line:
        yield _block(row, b"".join(line))


def _past_mark(stream: FileStream | Decompressed) -> bytes:
    """Goes past a byte order mark at the head of a file; returns what ``_held`` returns."""
    return _held(stream, bytes(stream.read(len(BOM))).removeprefix(BOM))


def _held(stream: FileStream | Decompressed, rest: bytes) -> bytes:
    """What was read too much, to be put before what is read next: none where it can be read again, for to put the two
    together is a copy of both."""
    if isinstance(stream, Decompressed):
        return rest
    stream.seek(-len(rest), io.SEEK_CUR)
    return b""


def _block(first_row: int, data: bytes) -> Block:
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == 0x0A)
    return Block(first_row, data, ends if data.endswith(b"\n") else np.append(ends, len(data)))


def head_of(request: ReadRequest, shard: Shard) -> Iterator[Block]:
    """Blocks of a file of which no more than the first ones are likely to be needed."""
    with request.open(shard) as file:
        file.plan([Range(0, HEAD_BYTES)])
        yield from blocks_of(file, shard, request.rules)


def require_rows(request: ReadRequest) -> None:
    """Raises ``SourceError`` when no shard has a line. Costs nothing but the first non-empty file's head."""
    for shard in request.shards:
        if not shard.size:
            continue
        if codec_of(shard.path) is None and shard.size > len(BOM):
            return
        if next(head_of(request, shard), None) is not None:
            return
    raise no_rows(request.spec, request.shards, "are empty")


def is_utf8(data: bytes) -> bool:
    """Whether bytes are UTF-8, by Arrow's validator: no Python string is made."""
    offsets = pa.py_buffer(np.array([0, len(data)], np.int64))
    try:
        pa.LargeStringArray.from_buffers(1, offsets, pa.py_buffer(data)).validate(full=True)
    except pa.ArrowException:
        return False
    return True


def not_utf8(block: Block, where: str) -> tuple[BadRow, ...]:
    """The lines of a block that are not UTF-8; of each, where the bad byte is, counted from 1."""
    if is_utf8(block.data):
        return ()
    bad_rows = []
    for i in range(len(block.ends)):
        try:
            block.line(i).decode()
        except UnicodeDecodeError as error:
            reason = f"{error.reason}: byte 0x{error.object[error.start]:02x} at column {error.start + 1}"
            line = f"{where}: line {block.first_row + i + 1} is not UTF-8 ({reason}); convert the file to UTF-8"
            bad_rows.append(BadRow(i, line))
    return tuple(bad_rows)
