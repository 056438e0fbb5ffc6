"""A source whose reads are registered while they last: a wait is visible even where a disk never answers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tokenloom_server.config.spec import Spec
from tokenloom_server.sources import files
from tokenloom_server.sources.base import Rows, Source
from tokenloom_server.sources.wrapped import WrappedSource
from tokenloom_server.storage.io_stats import IoStats


class TimedSource(WrappedSource):
    """Another source, whose reads are among the waits of ``IoStats`` while they last."""

    def __init__(self, source: Source, io_stats: IoStats, spec: Spec) -> None:
        super().__init__(source)
        self._io_stats = io_stats
        self._spec = spec

    def row_count(self, shard: int) -> int:
        with self._io_stats.waiting(self._where(shard), at_once=True):
            return super().row_count(shard)

    def blocks(self, shard: int) -> npt.NDArray[np.int64]:
        with self._io_stats.waiting(self._where(shard), at_once=True):
            return super().blocks(shard)

    def read(self, shard: int, row: int) -> Iterator[Rows]:
        where, iterator = self._where(shard), super().read(shard, row)
        while True:
            with self._io_stats.waiting(where, at_once=True):
                rows = next(iterator, None)
            if rows is None:
                return
            yield rows

    def _where(self, shard: int) -> str:
        return files.where(self._spec, self.shards[shard])
