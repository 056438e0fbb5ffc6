"""The index of a file of lines: where to begin reading for a given row, at the cost of about a mebibyte.

It holds, for each mebibyte of the file, the first line that begins in it. So its size follows the
file's (16 bytes per mebibyte), not the number of lines, and a seek passes over at most a mebibyte
and the line that reaches into it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tokenloom_server.sources.base import Shard
from tokenloom_server.sources.compressed import Decompressed
from tokenloom_server.sources.endings import codec_of
from tokenloom_server.storage.file import File, Range
from tokenloom_server.storage.local import LocalFile, replaced

_log = logging.getLogger(__name__)

#: One entry for each so many bytes of the file; also how much is read at once.
STRIDE_BYTES = 1 << 20

BOM = b"\xef\xbb\xbf"

#: Version of the cached form; a part of the file's name, so that another one is not even opened.
FORMAT = 1


@dataclass(frozen=True, slots=True)
class LineIndex:
    """Entries ``(row, offset)`` in ascending order; the first is the file's first line, the last its end."""

    entries: np.ndarray[Any, np.dtype[np.int64]]

    @property
    def row_count(self) -> int:
        return int(self.entries[-1, 0])

    def seek(self, row: int) -> tuple[int, int]:
        """The last known line at or before ``row``: its row and its byte offset."""
        entry = int(np.searchsorted(self.entries[:, 0], row, "right")) - 1
        return int(self.entries[entry, 0]), int(self.entries[entry, 1])


def first_offset(file: File) -> int:
    """Where a file's first line begins: after a UTF-8 byte order mark, where there is one."""
    return len(BOM) if bytes(file.read_at(0, len(BOM))) == BOM else 0


def build(file: File) -> LineIndex:
    """Scans a file. Raises ``SourceError``."""
    start, size = first_offset(file), file.size
    entries = [(0, start)]
    newlines, position, ends_line = 0, start, True
    while position < size:
        data = file.read_at(position, STRIDE_BYTES)
        if not isinstance(data, bytes):
            data = bytes(data)
        newline = data.find(b"\n")
        if newline >= 0 and position + newline + 1 < size:
            entries.append((newlines + 1, position + newline + 1))
        newlines += data.count(b"\n")
        ends_line = data[-1] == 0x0A
        position += len(data)
    entries.append((newlines + (not ends_line), size))
    return LineIndex(np.array(entries, np.int64))


def _count(stream: Decompressed, size: int) -> LineIndex:
    """Of a compressed file: how many lines it has, but for the beginning of none of them but the first."""
    start, newlines, last = True, 0, b"\n"
    while data := stream.read(STRIDE_BYTES):
        if start:
            data, start = data.removeprefix(BOM), False
        newlines += data.count(b"\n")
        last = data[-1:] or last
    return LineIndex(np.array([(0, 0), (newlines + (last != b"\n"), size)], np.int64))


def load_or_build(shard: Shard, file: File, index_dir: Path | None) -> LineIndex:
    """The index of a shard, from ``index_dir`` where it is cached there, else by one scan of the file.

    The cache is keyed by fingerprint, and that of a local file by its modification time, too: the fingerprint does not
    see the middle of a file, and a wrong index would shift rows unseen; a needless scan is the lesser cost.
    Raises ``SourceError`` naming the file.
    """
    cache = index_dir / f"lines-v{FORMAT}-{key(shard, file)}.npy" if index_dir is not None else None
    index = stored(cache, shard.size) if cache is not None else None
    if index is None:
        _log.info("building the line index of %s (%d bytes)", shard.path, shard.size)
        file.plan([Range(0, file.size)])
        codec = codec_of(shard.path)
        index = build(file) if codec is None else _count(Decompressed(file, codec), file.size)
        if cache is not None:
            keep(cache, index)
    return index


def key(shard: Shard, file: File) -> str:
    """The identity of a shard's content, for the name of its file in the cache."""
    if isinstance(file, LocalFile):
        return f"{shard.fingerprint.replace(':', '-')}-{file.modified_ns:x}"
    # A signature is any text of the storage's; only together with the name it identifies an object.
    return xxhash.xxh3_128_hexdigest(f"{shard.path}\n{shard.fingerprint}".encode())


def _checksum(entries: np.ndarray[Any, np.dtype[np.int64]]) -> int:
    # The cache is read back on the same kind of machine; np.save records the byte order anyway.
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(entries, "<i8").data) >> 1


def stored(cache: Path, size: int) -> LineIndex | None:
    """The index in a file of the cache; None where there is none, or one that is damaged or does not end at ``size``:
    then a line is logged."""
    try:
        table = np.load(cache, allow_pickle=False)
        if table.dtype != np.int64 or table.ndim != 2 or table.shape[0] < 3 or table.shape[1] != 2:
            raise ValueError(f"an array of {table.dtype} {table.shape} is no index")
        entries, trailer = table[:-1], table[-1]
        if int(trailer[1]) != _checksum(entries):
            raise ValueError("its checksum differs")
        if int(entries[-1, 1]) != size:
            raise ValueError(f"it ends at {int(entries[-1, 1])}, the file at {size}")
        return LineIndex(entries)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:
        _log.warning("the cached index %s is not usable and is built again: %s", cache, error)
        return None


def keep(cache: Path, index: LineIndex) -> None:
    """Writes an index to a file of the cache, whole or not at all; where that fails, a line is logged."""
    content = np.vstack([index.entries, np.array([[FORMAT, _checksum(index.entries)]], np.int64)])
    try:
        with replaced(cache) as file:
            np.save(file, content, allow_pickle=False)
    except OSError as error:
        # Without its cache the index still serves; only the next start has to scan again.
        _log.warning("the index %s cannot be kept: %s", cache, error)
