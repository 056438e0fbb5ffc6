"""Where the blocks of all files of a source begin: looked up many files at once, and kept under their signatures.

A shuffle of rows, lanes and fractions of an epoch need to know how many rows lie before any row; of 10,000 files beyond
a network, one after the other, that would take minutes at each start.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from tokenloom_server.config.spec import Spec
from tokenloom_server.sources import row_index
from tokenloom_server.sources.base import Shard, Source
from tokenloom_server.sources.files import in_threads
from tokenloom_server.sources.progress import reported
from tokenloom_server.sources.row_index import RowIndex
from tokenloom_server.sources.scheme import scheme_of
from tokenloom_server.storage.urls import is_remote

_log = logging.getLogger(__name__)
_Int64s = npt.NDArray[np.int64]
_Out = TypeVar("_Out")

#: Version of the cached form.
FORMAT = 1
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
        index_dir / f"blocks-v{FORMAT}-{key}.npy"
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

    kept = row_index.cached(path, files, build)
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
