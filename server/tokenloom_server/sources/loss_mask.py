"""The ids of a source's rows, and in another column the loss mask of each, read side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from tokenloom_server.sources.base import Rows, Source
from tokenloom_server.sources.wrapped import WrappedSource


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
                column=pa.StructArray.from_arrays([rows.column, mask.slice(0, wanted)], ["ids", "mask"])
            )
            count -= wanted
            held = [mask.slice(wanted)] if count else []
