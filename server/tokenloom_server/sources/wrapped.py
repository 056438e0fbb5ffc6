"""Sources over other ones, with the same files and the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenloom_server.config.spec import Spec
from tokenloom_server.sources import files
from tokenloom_server.sources.base import Content, Rows, Shard, Source
from tokenloom_server.storage.io_stats import IoStats


class WrappedSource:
    """Implements ``Source`` by asking another one; a subclass says what is different."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @property
    def content(self) -> Content:
        return self._source.content

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self._source.shards

    def row_count(self, shard: int) -> int:
        return self._source.row_count(shard)

    def blocks(self, shard: int) -> npt.NDArray[np.int64]:
        return self._source.blocks(shard)

    def read(self, shard: int, row: int) -> Iterator[Rows]:
        return self._source.read(shard, row)


class TimedSource(WrappedSource):
    """Another source, whose reads are among the waits of ``IoStats`` while they last: a wait is visible even where a
    disk never answers."""

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
                taken = list(islice(iterator, 1))
            if not taken:
                return
            yield taken.pop()

    def _where(self, shard: int) -> str:
        return files.where(self._spec, self.shards[shard])


class SourceWithLossMask(WrappedSource):
    """The rows of a source, whose column is a struct of its own (``ids``) and of another source's (``mask``).

    Both are readers of the same files, so their rows are the same; each is read once.
    """

    def __init__(self, ids: Source, mask: Source) -> None:
        super().__init__(ids)
        self._mask = mask

    def read(self, shard: int, row: int) -> Iterator[Rows]:
        masks = self._mask.read(shard, row)
        held: list[Any] = []
        count = 0
        for rows in super().read(shard, row):
            wanted = len(rows.column)
            while count < wanted:
                column = next(masks).column
                held.append(column)
                count += len(column)
            mask = held[0] if len(held) == 1 else pa.concat_arrays(held)
            yield rows._replace(
                column=pa.StructArray.from_arrays(
                    [rows.column, mask.slice(0, wanted)], ["ids", "mask"]
                )
            )
            count -= wanted
            held = [mask.slice(wanted)] if count else []
