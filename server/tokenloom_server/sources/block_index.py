"""The index of a source: which blocks each of its files has, and so how many rows.

A footer or the headers of a file tell its blocks, at the cost of opening it. To shuffle rows, to read a part of an
epoch or to read in lanes, those of all files have to be known first: they are looked up side by side, once, and kept.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from tokenloom_server.sources import files, line_index
from tokenloom_server.sources.arrow import ArrowSource
from tokenloom_server.sources.base import Source
from tokenloom_server.sources.line_index import LineIndex
from tokenloom_server.sources.parquet import ParquetSource
from tokenloom_server.spec import Spec
from tokenloom_server.storage.urls import is_remote

_log = logging.getLogger(__name__)

#: How often somebody who waits is told how far it is, seconds.
PROGRESS_S = 5.0

_Int64s = npt.NDArray[np.int64]


def load_or_build(spec: Spec, source: Source, base_dir: Path, index_dir: Path | None) -> list[_Int64s]:
    """``Source.blocks`` of each shard, from ``index_dir`` where they are cached there.

    The cache is keyed by the shards' names and fingerprints, and by the modification times of local ones: a fingerprint
    does not see the middle of a file. Text and flat arrays have an index of each file instead, made by scanning it.
    Raises ``SourceError`` naming a file that cannot be read.
    """
    if not isinstance(source, ParquetSource | ArrowSource):
        progress = _Progress(spec, len(source.shards))
        return [progress.done(source.blocks(shard)) for shard in range(len(source.shards))]
    size = sum(shard.size for shard in source.shards)
    cache = index_dir / f"blocks-v{line_index.FORMAT}-{_key(spec, source, base_dir)}.npy" if index_dir else None
    found = line_index.stored(cache, size) if cache is not None else None
    if found is None:
        progress = _Progress(spec, len(source.shards))
        remote = any(is_remote(shard.path) for shard in source.shards)
        edges = files.in_threads(
            lambda shard: progress.done(source.blocks(shard)), range(len(source.shards)), remote=remote
        )
        if cache is not None:
            line_index.keep(cache, LineIndex(_table(edges, size)))
        return edges
    shards, rows = found.entries[:-1, 0], found.entries[:-1, 1]
    return np.split(rows, np.searchsorted(shards, np.arange(1, len(source.shards))))


def _key(spec: Spec, source: Source, base_dir: Path) -> str:
    def written(path: str) -> int:
        return 0 if is_remote(path) else (base_dir / path).stat().st_mtime_ns

    times = files.in_threads(written, [shard.path for shard in source.shards])
    lines = [f"{one.path}\t{one.fingerprint}\t{at}" for one, at in zip(source.shards, times, strict=True)]
    return xxhash.xxh3_128_hexdigest("\n".join([spec.scheme, *lines]).encode())


def _table(edges: Sequence[_Int64s], size: int) -> _Int64s:
    """[n, 2]: each edge with its shard before it; and behind all the number of shards and their bytes."""
    shards = np.repeat(np.arange(len(edges)), [len(some) for some in edges])
    return np.vstack((np.stack((shards, np.concatenate(edges)), axis=1), [[len(edges), size]])).astype(np.int64)


class _Progress:
    """Says now and then how many files are done."""

    def __init__(self, spec: Spec, files: int) -> None:
        self._spec = spec
        self._files = files
        self._done = 0
        self._said_at = time.monotonic()
        self._lock = threading.Lock()

    def done(self, edges: _Int64s) -> _Int64s:
        with self._lock:
            self._done += 1
            if time.monotonic() - self._said_at >= PROGRESS_S:
                self._said_at = time.monotonic()
                _log.info("source %s: the index of %d of %d files is there", self._spec, self._done, self._files)
        return edges
