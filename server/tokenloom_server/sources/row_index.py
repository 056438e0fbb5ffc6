"""The index of a file's rows: where to begin reading for a given row, at the cost of about a mebibyte.

It holds, for each mebibyte of the file, the first row that begins in it. So its size follows the file's (16 bytes per
mebibyte), not the number of rows, and a seek passes over at most a mebibyte and the row that reaches into it.
"""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash
from tokenloom_proto.files import reason

from tokenloom_server.config.catalog import Spec
from tokenloom_server.sources.base import Shard, Source
from tokenloom_server.sources.files import in_threads, reported
from tokenloom_server.sources.scheme import ReadRequest, scheme_of
from tokenloom_server.sources.sharded import ShardedSource
from tokenloom_server.storage.file import File, LocalFile, replaced
from tokenloom_server.storage.urls import is_remote

_log = logging.getLogger(__name__)

#: Indexes of a source that are held in memory; the others are read from the cache again.
HELD_INDEXES = 1024

#: Version of the cached form; a part of the file's name, so that another one is not even opened.
FORMAT = 1


@dataclass(frozen=True, slots=True)
class RowIndex:
    """Entries ``(row, position)`` in ascending order; the first is the file's first row, the last its end.

    Positions are bytes of text, and ids of flat arrays.
    """

    entries: np.ndarray[Any, np.dtype[np.int64]]

    @property
    def row_count(self) -> int:
        return int(self.entries[-1, 0])

    def seek(self, row: int) -> tuple[int, int]:
        """The last known row at or before ``row``, and its position."""
        entry = int(np.searchsorted(self.entries[:, 0], row, "right")) - 1
        return int(self.entries[entry, 0]), int(self.entries[entry, 1])


class RowEnds(NamedTuple):
    """The rows that end in a part of a file."""

    first: int | None
    """The position after the first of these ends; None where none is there, or its position means nothing."""
    rows: int
    is_whole: bool
    """Whether the part ends where a row does."""


def build(start: int, end: int, parts: Iterable[RowEnds]) -> RowIndex:
    """The index of the positions from ``start`` to ``end``, which were looked through part by part."""
    entries, rows, is_whole = [(0, start)], 0, True
    for part in parts:
        if part.first is not None and part.first < end:
            entries.append((rows + 1, part.first))
        rows += part.rows
        is_whole = part.is_whole
    entries.append((rows + (not is_whole), end))
    return RowIndex(np.array(entries, np.int64))


class IndexedSource(ShardedSource):
    """A source whose files do not say where their rows lie, so that an index of each is made when it is needed."""

    def __init__(self, request: ReadRequest) -> None:
        super().__init__(request)
        self._index_dir = request.index_dir
        self._index = lru_cache(HELD_INDEXES)(self._load_index)
        self._row_counts: dict[int, int] = {}
        self._known: dict[int, tuple[int, int]] = {}

    @abstractmethod
    def _load_index(self, shard: int) -> RowIndex:
        """The index of a file, from the cache or made anew."""

    def row_count(self, shard: int) -> int:
        if shard not in self._row_counts:
            self._row_counts[shard] = self._index(shard).row_count
        return self._row_counts[shard]

    def blocks(self, shard: int) -> npt.NDArray[np.int64]:
        return self._index(shard).entries[:, 0]

    def _cache_path(self, shard: int, file: File, kind: str, detail: str = "") -> Path | None:
        """Where an opened shard's index of some kind is kept; None: nowhere."""
        if self._index_dir is None:
            return None
        return (
            self._index_dir
            / f"{kind}-v{FORMAT}-{_cache_key(self._shards[shard], file)}{detail}.npy"
        )

    def position(self, shard: int, row: int) -> tuple[int, int]:
        """``RowIndex.seek`` in a file. Raises ``SourceError`` where that has no such row."""
        return self._seek(shard, row)

    def know(self, shard: int, position: tuple[int, int]) -> None:
        """A position that another reader of the file knows by its index, so that none is made here to begin there."""
        self._known[shard] = position

    def _seek(self, shard: int, row: int) -> tuple[int, int]:
        if shard in self._known and self._known[shard][0] <= row:
            return self._known[shard]
        index = self._index(shard)
        self._check_row(shard, row, index.row_count)
        return index.seek(row)


def cached(path: Path | None, end: int, build: Callable[[], RowIndex]) -> RowIndex:
    """The index in a file of the cache (None: there is no cache). Where there is none that ends at the position
    ``end``, or a damaged one, it is built, and kept there."""
    index = _stored(path, end) if path is not None else None
    if index is None:
        index = build()
        if path is not None:
            _keep(path, index)
    return index


def _cache_key(shard: Shard, file: File) -> str:
    """The identity of a shard's content, for the name of its file in the cache.

    That of a local file has its modification time, too: the fingerprint does not see the middle of a file, and a wrong
    index would shift rows unseen; a needless scan is the lesser cost.
    """
    if isinstance(file, LocalFile):
        return f"{shard.fingerprint.replace(':', '-')}-{file.modified_ns:x}"
    # A signature is any text of the storage's; only together with the name it identifies an object.
    return xxhash.xxh3_128_hexdigest(f"{shard.path}\n{shard.fingerprint}".encode())


def _checksum(entries: np.ndarray[Any, np.dtype[np.int64]]) -> int:
    # The cache is read back on the same kind of machine; np.save records the byte order anyway.
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(entries, "<i8").data) >> 1


def _stored(path: Path, end: int) -> RowIndex | None:
    """The index in a file of the cache; None, with a line in the log, for one that is not usable."""
    try:
        table = np.load(path, allow_pickle=False)
        if table.dtype != np.int64 or table.ndim != 2 or table.shape[0] < 3 or table.shape[1] != 2:
            raise ValueError(f"an array of {table.dtype} {table.shape} is no index")
        entries, trailer = table[:-1], table[-1]
        if int(trailer[1]) != _checksum(entries):
            raise ValueError("its checksum differs")
        if int(entries[-1, 1]) != end:
            raise ValueError(f"it ends at {int(entries[-1, 1])}, the file at {end}")
        return RowIndex(entries)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:
        _log.warning(
            "the cached index %s is not usable and is built again: %s", path, reason(error)
        )
        return None


def _keep(path: Path, index: RowIndex) -> None:
    """Writes an index to a file of the cache, whole or not at all; where that fails, a line is logged."""
    content = np.vstack([index.entries, np.array([[FORMAT, _checksum(index.entries)]], np.int64)])
    try:
        with replaced(path) as file:
            np.save(file, content, allow_pickle=False)
    except OSError as error:
        # Without its cache the index still serves; only the next start has to scan again.
        _log.warning("the index %s cannot be kept: %s", path, reason(error))


# Where the blocks of all files of a source begin: looked up many files at once, and kept under their signatures.
#
# A shuffle of rows, lanes and fractions of an epoch need to know how many rows lie before any row; of 10,000 files
# beyond a network, one after the other, that would take minutes at each start.


_Int64s = npt.NDArray[np.int64]
_Out = TypeVar("_Out")

#: Version of the cached form.
BLOCKS_FORMAT = 1
#: Sources with fewer files are looked up anew.
KEPT_FILES = 16
#: A line in the log after so long, and again after each further, seconds.
PROGRESS_S = 10.0


def row_counts(source: Source) -> list[int]:
    """The rows of each file, many files at once. Raises ``SourceError``."""
    return _of_each(source, source.row_count)


def blocks(source: Source, spec: Spec, base_dir: Path, index_dir: Path | None) -> list[_Int64s]:
    """``source.blocks`` of each file: from ``index_dir`` where they are kept there, else many files at once.

    What is kept is known by the spec and by path, size, fingerprint and (of local files) time of modification of each
    file; one that is damaged is made again, with a line in the log. Raises ``SourceError``.
    """
    files = len(source.shards)
    # Rows of flat arrays end where the run's end-of-text id is, which is not among what the key knows; each file of
    # theirs has an index of its own.
    key = (
        _key(spec, source.shards, base_dir)
        if files >= KEPT_FILES and not scheme_of(spec).splits_at_end_of_text
        else None
    )
    path = (
        index_dir / f"blocks-v{BLOCKS_FORMAT}-{key}.npy"
        if index_dir is not None and key is not None
        else None
    )

    def build() -> RowIndex:
        edges_by_file = _of_each(source, source.blocks)
        owners = np.repeat(np.arange(files), [len(each) for each in edges_by_file])
        rows = sum(int(each[-1]) for each in edges_by_file)
        table = np.stack((np.concatenate(edges_by_file), owners), axis=1)
        # The last entry holds the totals (rows, files), as that of an index of rows holds its own.
        return RowIndex(np.vstack((table, np.array([[rows, files]], np.int64))))

    kept = cached(path, files, build)
    edges, owners = kept.entries[:-1, 0], kept.entries[:-1, 1]
    return np.split(edges, np.searchsorted(owners, np.arange(1, files)))


def _of_each(source: Source, ask: Callable[[int], _Out]) -> list[_Out]:
    files = len(source.shards)

    def report(done: int) -> None:
        first = source.shards[0].path
        _log.info("looking up where rows lie: %d of %d files (the first is %s)", done, files, first)

    ask = reported(ask, report, PROGRESS_S)
    if files < KEPT_FILES:
        return list(map(ask, range(files)))
    return in_threads(
        ask, range(files), remote=any(is_remote(shard.path) for shard in source.shards)
    )


def _key(spec: Spec, shards: tuple[Shard, ...], base_dir: Path) -> str | None:
    """None where a file is missing: the reader of its rows raises the error."""

    def described(shard: Shard) -> str:
        place = os.path.join(base_dir, shard.path)  # noqa: PTH118
        modified = "" if is_remote(shard.path) else os.stat(place).st_mtime_ns  # noqa: PTH116
        return f"{shard.path}\n{shard.size}\n{shard.fingerprint}\n{modified}\n"

    try:
        lines = in_threads(described, shards)
    except OSError:
        return None
    return xxhash.xxh3_128_hexdigest("\n".join([str(spec), *lines]).encode())
