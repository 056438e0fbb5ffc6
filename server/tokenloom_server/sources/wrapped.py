"""Sources over other ones, with the same files and the same rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import islice, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from tokenloom_server.config.catalog import Spec
from tokenloom_server.core.hashing import Purpose, draw
from tokenloom_server.sources import arrays, columns, files
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


# Which documents of a source are kept out of training.
#
# The draw is a hash of a document's content (text as UTF-8, ids in the type that they are stored in): it depends
# neither on where a document lies nor on what lies around it. So it stays through files that are added, moved, renamed,
# cut or compressed anew, through other weights and shuffles, and all copies of a document, in whichever source that
# holds out as much, are on one side: nothing that is trained on is evaluated on.


class HoldoutSource(WrappedSource):
    """Another source, in which the rows of one side are empty.

    Bad and filtered rows count as trained on, since nobody knows what they hold.
    """

    def __init__(self, source: Source, share: float, seed: int, *, gives_held: bool) -> None:
        """``share`` of the documents are held out; ``gives_held``: these are given, and not the others."""
        super().__init__(source)
        # As the decimal that it is written as, so that the same rows are held out on every machine.
        self._limit = math.floor(Fraction(repr(share)) * 2**64)
        self._key = draw(seed, Purpose.HOLDOUT, 0, 0)
        self._gives_held = gives_held

    def read(self, shard: int, row: int) -> Iterator[Rows]:
        for rows in super().read(shard, row):
            held = self._held(rows.column)
            if self._gives_held:
                yield Rows(rows.first_row, _blanked(rows.column, held))
            else:
                yield rows._replace(column=_blanked(rows.column, ~held)) if held.any() else rows

    def _held(self, column: pa.Array) -> npt.NDArray[np.bool_]:
        if pa.types.is_struct(column.type):
            column = column.field(0)  # ids, and their loss mask beside them
        if columns.is_text(column):
            width, content = 1, column.buffers()[2]
            offsets = arrays.offsets(column)
        else:
            # The items of a slice may themselves be one of a longer buffer.
            items = column.values
            width, content = items.type.bit_width // 8, items.buffers()[1]
            offsets = arrays.offsets(column) + items.offset
        data = memoryview(content) if content is not None else memoryview(b"")
        digest, key, limit = xxhash.xxh3_64_intdigest, self._key, self._limit
        edges = (offsets.astype(np.int64) * width).tolist()
        held = (digest(data[begin:end], key) < limit for begin, end in pairwise(edges))
        return np.fromiter(held, np.bool_, len(edges) - 1)


def _blanked(column: pa.Array, keep: npt.NDArray[np.bool_]) -> pa.Array:
    if pa.types.is_struct(column.type):
        parts = [_blanked(column.field(i), keep) for i in range(column.type.num_fields)]
        return pa.StructArray.from_arrays(parts, [field.name for field in column.type])
    return columns.without_nulls(arrays.blanked(column, keep))
