"""Files of lines, read in blocks of whole lines: the part that ``jsonl`` and ``txt`` share.

A line ends with ``\\n`` or ``\\r\\n``; the last may lack its end, and a final end begins no further
line. A UTF-8 byte order mark at the head of a file belongs to no line.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenloom_server.errors import SourceError
from tokenloom_server.sources import line_index
from tokenloom_server.sources.base import BadRow, Content, Rows, Shard
from tokenloom_server.sources.compressed import Decompressed
from tokenloom_server.sources.endings import codec_of
from tokenloom_server.sources.line_index import LineIndex
from tokenloom_server.sources.scheme import ReadRequest
from tokenloom_server.sources.sharded import ShardedSource
from tokenloom_server.storage.file import File, Range

#: Bytes read at once. Twice as much was measured to cost twice the CPU time: the C library gives
#: buffers of that size back to the kernel, and each new one is faulted in again.
BLOCK_BYTES = 1 << 19

#: Bytes of a line in a compressed file at most: a line is held as a whole, and its size is not known before.
MAX_LINE_BYTES = 1 << 28

#: Indexes held in memory (16 bytes per mebibyte of text each); the others are read from the cache again.
HELD_INDEXES = 1024


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

    def cut(self, start: int, stop: int) -> Block:
        """The lines from ``start`` to ``stop`` as a block of their own."""
        if start == 0 and stop == len(self.ends):
            return self
        first = int(self.ends[start - 1]) + 1 if start else 0
        data = self.data[first : int(self.ends[stop - 1]) + 1]
        return Block(self.first_row + start, data, self.ends[start:stop] - first)


#: Turns a block into rows, the bad ones marked; the string begins an error and names source and file.
Decoder = Callable[[Block, str], Iterator[Rows]]


class LinesSource(ShardedSource):
    """A source whose shards are files of lines."""

    def __init__(self, request: ReadRequest, content: Content, decode: Decoder) -> None:
        super().__init__(request)
        self._index_dir = request.index_dir
        self._content = content
        self._decode = decode
        self._row_counts: dict[int, int] = {}
        self._indexes: dict[int, LineIndex] = {}
        self._indexes_lock = threading.Lock()

    def row_count(self, shard: int) -> int:
        if shard not in self._row_counts:
            self._index(shard)
        return self._row_counts[shard]

    def blocks(self, shard: int) -> npt.NDArray[np.int64]:
        return self._index(shard).entries[:, 0]

    def _read(self, shard: int, row: int) -> Iterator[Rows]:
        entry = self._shards[shard]
        where = self._where(entry)
        position = None
        if row > 0 and codec_of(entry.path) is None:
            # Only now: a corpus that is read from its beginning must not be scanned first.
            index = self._index(shard)
            self._check_row(shard, row, index.row_count)
            position = index.seek(row)
        count = 0
        with self._open(entry) as file:
            file.plan([Range(position[1] if position is not None else 0, file.size)])
            for block in blocks_of(file, entry, position):
                skipped = max(row - block.first_row, 0)
                if skipped < len(block.ends):
                    yield from self._decode(block.cut(skipped, len(block.ends)), where)
                count = block.first_row + len(block.ends)
        if position is None:
            self._check_row(shard, row, count)

    def head_bytes(self, shard: int, rows: int) -> int:
        """Bytes of a shard's first lines with their ends, at the cost of reading them: no index is made.

        Of a compressed file, about as many of its own bytes as they take.
        """
        size, entry = 0, self._shards[shard]
        with self._open(entry) as file:
            codec = codec_of(entry.path)
            if codec is not None:
                stream = Decompressed(file, codec)
                for block in _streamed(stream, file.name):
                    if rows < block.first_row + len(block.ends):
                        break
                return stream.read_bytes
            for block in read_blocks(file, None):
                if rows <= len(block.ends):
                    return size + min(int(block.ends[rows - 1]) + 1, len(block.data))
                rows -= len(block.ends)
                size += len(block.data)
        return size

    def _index(self, shard: int) -> LineIndex:
        index = self._indexes.get(shard)
        if index is None:
            entry = self._shards[shard]
            with self._open(entry) as file:
                index = line_index.load_or_build(entry, file, self._index_dir)
            with self._indexes_lock:
                if len(self._indexes) >= HELD_INDEXES:
                    self._indexes.pop(next(iter(self._indexes)))
                self._indexes[shard] = index
                self._row_counts[shard] = index.row_count
        return index


def blocks_of(file: File, shard: Shard, position: tuple[int, int] | None = None) -> Iterator[Block]:
    """``read_blocks`` of a file that may be compressed, where ``position`` is None. Raises ``SourceError``."""
    codec = codec_of(shard.path)
    return read_blocks(file, position) if codec is None else _streamed(Decompressed(file, codec), file.name)


def _streamed(stream: Decompressed, name: str) -> Iterator[Block]:
    row, held, size = 0, [stream.read(BLOCK_BYTES).removeprefix(line_index.BOM)], 0
    while True:
        size += len(held[-1])
        if size > MAX_LINE_BYTES:
            raise SourceError(
                f"{name}: line {row + 1} has more than {MAX_LINE_BYTES} bytes; that is no line of text: decompress the "
                "file and look"
            )
        data = stream.read(BLOCK_BYTES)
        whole = data.rfind(b"\n") + 1 if data else 0
        if whole or not data:
            block = b"".join((*held, data[:whole]))
            if block:
                yield (made := Block(row, block, _line_ends(block)))
                row += len(made.ends)
            held, size = [data[whole:]], 0
        else:
            held.append(data)
        if not data:
            return


def read_blocks(file: File, position: tuple[int, int] | None) -> Iterator[Block]:
    """Blocks of about ``BLOCK_BYTES`` from a known line ``(row, offset)`` on, or from the file's first line.

    A line that is longer than a block makes a block of its own. Raises ``SourceError``.
    """
    row, offset = position or (0, line_index.first_offset(file))
    wanted, size = BLOCK_BYTES, file.size
    while offset < size:
        data = file.read_at(offset, wanted)
        if not isinstance(data, bytes):
            data = bytes(data)
        at_end = offset + len(data) == size
        whole = len(data) if at_end else data.rfind(b"\n") + 1
        if whole == 0:
            wanted *= 2  # doubling: a long line is read twice at most, whatever its length
            continue
        data, wanted = data[:whole], BLOCK_BYTES
        block = Block(row, data, _line_ends(data))
        yield block
        row += len(block.ends)
        offset += whole


def _line_ends(data: bytes) -> np.ndarray[Any, np.dtype[np.int64]]:
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == 0x0A)
    return ends if data.endswith(b"\n") else np.append(ends, len(data))


def require_rows(request: ReadRequest) -> None:
    """Raises ``SourceError`` when no shard has a line. Costs nothing but the first non-empty file's head."""
    for shard in request.shards:
        if codec_of(shard.path) is not None:
            with request.open(shard) as file:
                if next(blocks_of(file, shard), None) is not None:
                    return
        elif shard.size > len(line_index.BOM):
            return
        elif shard.size:
            with request.open(shard) as file:
                if line_index.first_offset(file) < shard.size:
                    return
    raise SourceError(
        f"source {str(request.spec)!r} has no rows: its {len(request.shards)} files are empty (the first is "
        f"{request.shards[0].path!r}); give it files with content, or take it out of the mixture"
    )


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
