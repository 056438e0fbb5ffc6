"""In which order an epoch reads a source's rows: file by file, files in a drawn order, or blocks and rows in one.

An epoch is a sequence of *parts*, and a cursor's ``shard`` and ``row`` are a part and a place within it. Without a
shuffle, and with one of files, a part is a file, and the place the row in it. With one of rows it is a *window*: the
source's blocks (row groups, record batches, strides of lines) come in a drawn order, so many rows of them are a window,
and these come in a drawn order themselves. Everything is computed from the seed, the source's id and the epoch: nothing
is kept but the cursor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tokenloom_server.core.hashing import Permutation, Purpose, draw
from tokenloom_server.core.state import Cursor, FileCursor, WindowCursor, row_cursor
from tokenloom_server.packing.samples import Int64s
from tokenloom_server.sources.base import Source
from tokenloom_server.sources.row_index import row_counts


class RowRange(NamedTuple):
    """Consecutive rows of one file."""

    shard: int
    first_row: int
    rows: int


class FileOrder:
    """File by file as the manifest has them. Also what ``Documents`` asks of every order: which parts come in an epoch,
    and what is in one."""

    #: Whether every epoch has the same order.
    repeats = True

    def __init__(self, source: Source, counts: Sequence[int] | None = None) -> None:
        """``counts``: the rows of each file, where they are known."""
        self._source = source
        self._counts = counts

    def parts(self, epoch: int, first: int | None = None) -> Sequence[int]:
        """The parts of an epoch, from one of them on."""
        return range(first or 0, len(self._source.shards))

    def rows_in(self, part: int) -> int:
        """Rows of a part, before any is left out."""
        return self._source.row_count(part) if self._counts is None else self._counts[part]

    def rows_before(self, epoch: int, part: int) -> int:
        """Rows of an epoch in the parts before one."""
        before = self.parts(epoch)
        counts = self._all_counts()
        return sum(counts[each] for each in before[: before.index(part)])

    def ranges(self, epoch: int, part: int, row: int, end: int | None) -> list[RowRange]:
        """What is read of a part for its rows from one to before ``end`` (None: all that come), in that order."""
        rows = self.rows_in(part)
        return [RowRange(part, row, (rows if end is None else min(rows, end)) - row)]

    def near(self, rows: int) -> int:
        """So many rows of an epoch or somewhat less, where it is easier to begin."""
        return rows

    @property
    def rows(self) -> int:
        """Rows of an epoch."""
        return sum(self._all_counts())

    def _all_counts(self) -> Sequence[int]:
        if self._counts is None:
            self._counts = row_counts(self._source)
        return self._counts


@lru_cache(
    maxsize=8
)  # who reads and who shows how far that is ask again and again, of 10^5 files perhaps
def shuffled_files(count: int, seed: int, source_id: int, epoch: int) -> tuple[int, ...]:
    """So many files, sorted by a hash of each; by its number where two are equal."""
    key = draw(seed, Purpose.SHARDS, source_id, epoch)
    return tuple(
        sorted(range(count), key=lambda shard: (draw(key, Purpose.SHARDS, shard, 0), shard))
    )


class ShuffledFiles(FileOrder):
    """File by file, sorted by a hash of each. A file that a revision appends has its place
    among the others; where that is past already, its turn comes in the next epoch."""

    repeats = False

    def __init__(
        self, source: Source, seed: int, source_id: int, counts: Sequence[int] | None = None
    ) -> None:
        super().__init__(source, counts)
        self._seed = seed
        self._source_id = source_id

    def parts(self, epoch: int, first: int | None = None) -> Sequence[int]:
        order = shuffled_files(len(self._source.shards), self._seed, self._source_id, epoch)
        return order if first is None else order[order.index(first) :]


class Layout(NamedTuple):
    """A source's blocks that have rows, in file order: the ``shard``, the ``first_row`` there, the ``rows`` (int64, [n]
    each). What may be read by itself without reading what lies before."""

    shard: Int64s
    first_row: Int64s
    rows: Int64s

    @classmethod
    def of(cls, blocks: Iterable[Int64s]) -> Layout:
        """``blocks``: those of each file (``Source.blocks``)."""
        edges = list(blocks)
        counts = np.array([len(each) for each in edges])
        first_row = np.concatenate(edges).astype(np.int64)
        rows = np.diff(first_row, append=0)
        rows[np.cumsum(counts) - 1] = 0  # where a file ends, no block begins
        table = np.stack((np.repeat(np.arange(len(edges)), counts), first_row, rows))
        return cls(*table[:, rows > 0])

    def counts(self, shards: int) -> list[int]:
        """The rows of each of so many files."""
        counts: list[int] = np.bincount(self.shard, self.rows, shards).astype(np.int64).tolist()
        return counts


class Windows:
    """Blocks in a drawn order, cut into windows of ``window_rows`` rows, and the rows of each window in a drawn
    order."""

    repeats = False

    def __init__(self, layout: Layout, seed: int, source_id: int, window_rows: int) -> None:
        self._layout = layout
        self._seed = seed
        self._source_id = source_id
        self._window_rows = window_rows
        self.rows = int(layout.rows.sum())
        #: Epoch; its blocks in order; and the row of the epoch with which each begins, the last its end.
        self._epoch: tuple[int, Int64s, Int64s] | None = None

    def parts(self, epoch: int, first: int | None = None) -> Sequence[int]:
        return range(first or 0, -(-self.rows // self._window_rows))

    def rows_in(self, part: int) -> int:
        return max(0, min(self._window_rows, self.rows - part * self._window_rows))

    def rows_before(self, epoch: int, part: int) -> int:
        return part * self._window_rows

    def near(self, rows: int) -> int:
        # Who begins within a window has to read it from its beginning.
        return rows // self._window_rows * self._window_rows

    def ranges(self, epoch: int, part: int, row: int, end: int | None) -> list[RowRange]:
        # A window is always read as a whole.
        return self.row_ranges(epoch, part)

    def row_ranges(self, epoch: int, window: int) -> list[RowRange]:
        """What lies in a window, in the order of the epoch's blocks."""
        order, starts = self._blocks(epoch)
        begin = window * self._window_rows
        end = begin + self.rows_in(window)
        first, last = (
            np.searchsorted(starts, begin, "right") - 1,
            np.searchsorted(starts, end, "left") - 1,
        )
        blocks, block_starts = order[first : last + 1], starts[first : last + 1]
        skipped = np.maximum(begin - block_starts, 0)
        rows = np.minimum(starts[first + 1 : last + 2], end) - block_starts - skipped
        table = np.stack(
            (self._layout.shard[blocks], self._layout.first_row[blocks] + skipped, rows), axis=1
        )
        return [RowRange(*row) for row in table.tolist()]

    def permutation(self, epoch: int, window: int, portion: int, rows: int) -> Int64s:
        """In which order the rows of a window's ``portion``-th portion of ``rows`` rows come."""
        key = draw(self._seed, Purpose.ROWS, self._source_id, epoch)
        return Permutation(Purpose.ROWS, draw(key, Purpose.ROWS, window, portion), rows).all()

    def _blocks(self, epoch: int) -> tuple[Int64s, Int64s]:
        if self._epoch is None or self._epoch[0] != epoch:
            key = draw(self._seed, Purpose.BLOCKS, self._source_id, epoch)
            count = len(self._layout.rows)
            # Of many small sources most are a block.
            order = (
                Permutation(Purpose.BLOCKS, key, count).all()
                if count > 1
                else np.zeros(1, np.int64)
            )
            starts = np.concatenate(([0], np.cumsum(self._layout.rows[order])))
            self._epoch = epoch, order, starts
        return self._epoch[1:]


#: In which order an epoch's rows come.
Reading = FileOrder | Windows


def nth_row(reading: Reading, epoch: int, rows: int) -> tuple[int, int]:
    """The part, and the row there, before which so many rows of an epoch lie."""
    part = 0
    for part in reading.parts(epoch):
        if rows < reading.rows_in(part):
            break
        rows -= reading.rows_in(part)
    return part, rows


def begin_of(cursor: Cursor | None) -> tuple[int, int | None, int]:
    """Epoch, part (None: the epoch's first), and row in it."""
    match row_cursor(cursor):
        case None:
            return 0, None, 0
        case FileCursor(epoch, part, row) | WindowCursor(epoch, part, row):
            return epoch, part, row
    raise AssertionError("batches of rows are not read as documents")
