"""Two columns of one source, read side by side: the ids of its rows, and the loss mask of these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenloom_server.sources.base import Rows, Shard, Source


class PairedSource:
    """Implements ``Source``: the rows of one, whose column is a struct of its own and of another source's.

    Both are readers of the same files, so their rows are the same; each is read once.
    """

    def __init__(self, ids: Source, mask: Source) -> None:
        self._ids = ids
        self._mask = mask
        self.content = ids.content

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self._ids.shards

    def row_count(self, shard: int) -> int:
        return self._ids.row_count(shard)

    def blocks(self, shard: int) -> npt.NDArray[np.int64]:
        return self._ids.blocks(shard)

    def read(self, shard: int, row: int) -> Iterator[Rows]:
        masks = self._mask.read(shard, row)
        held: list[Any] = []
        count = 0
        for rows in self._ids.read(shard, row):
            wanted = len(rows.column)
            while count < wanted:
                column = next(masks).column
                held.append(column)
                count += len(column)
            mask = held[0] if len(held) == 1 else pa.concat_arrays(held)
            paired = pa.StructArray.from_arrays([rows.column, mask.slice(0, wanted)], ["ids", "mask"])
            yield rows._replace(column=paired)
            count -= wanted
            held = [mask.slice(wanted)] if count else []
