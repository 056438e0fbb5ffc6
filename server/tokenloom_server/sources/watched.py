"""A source of which it is seen how long is waited for its rows: also where the operating system does not come back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tokenloom_server.config.spec import Spec
from tokenloom_server.sources import files
from tokenloom_server.sources.base import Content, Rows, Shard, Source
from tokenloom_server.storage.io_stats import IoStats


class Watched:
    """Implements ``Source``: another one, whose reads are noted while they last."""

    def __init__(self, source: Source, io_stats: IoStats, spec: Spec) -> None:
        self._source = source
        self._io_stats = io_stats
        self._spec = spec

    @property
    def content(self) -> Content:
        return self._source.content

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self._source.shards

    def row_count(self, shard: int) -> int:
        with self._io_stats.waiting(self._where(shard), at_once=True):
            return self._source.row_count(shard)

    def blocks(self, shard: int) -> npt.NDArray[np.int64]:
        with self._io_stats.waiting(self._where(shard), at_once=True):
            return self._source.blocks(shard)

    def read(self, shard: int, row: int) -> Iterator[Rows]:
        where = self._where(shard)
        rows = self._source.read(shard, row)
        while True:
            with self._io_stats.waiting(where, at_once=True):
                found = next(rows, None)
            if found is None:
                return
            yield found

    def _where(self, shard: int) -> str:
        return files.where(self._spec, self._source.shards[shard])
