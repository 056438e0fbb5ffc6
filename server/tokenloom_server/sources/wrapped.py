"""A source over another one, with the same files and the same rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tokenloom_server.sources.base import Content, Rows, Shard, Source


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
