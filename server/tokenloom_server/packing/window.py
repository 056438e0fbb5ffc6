"""The rows of a window of a shuffled source, held to be given in another order.

A window is read block by block. Its rows are held until they have ``WINDOW_BYTES`` of text or ids; those are given in
their drawn order, and what is left of the window is a *portion* of its own. So memory is bounded by rows and by bytes,
and where a portion ends depends on the rows alone: not on where reading began, nor on what was left out since.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from tokenloom_server.errors import SourceError
from tokenloom_server.packing.reading import RowRange
from tokenloom_server.sources import columns
from tokenloom_server.sources.base import Rows, Source

#: Bytes of text or ids that are held of a window (of all lanes together), and the row that reaches them. In tokens that
#: is up to twice as much (of bytes as ids), and up to twice that while they are joined.
WINDOW_BYTES = 1 << 25


class RangeReader:
    """Reads ranges of rows of one source. One that goes on where the one before it ended is read on, not opened again:
    a window may end within a row group that takes long to begin."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._rows: Iterator[Rows] = iter(())
        #: Where ``_rows`` stand: the file, and the row there; and of those that are read already what was not given.
        self._next: tuple[int, int] | None = None
        self._left: Rows | None = None

    def read(self, shard: int, row: int, end: int) -> Iterator[Rows]:
        """The rows of a file from ``row`` to before ``end``. Raises ``SourceError``."""
        if self._next != (shard, row):
            self._rows, self._left = self._source.read(shard, row), None
        self._next = None
        while row < end:
            some = self._left or next(self._rows, None)
            if some is None:
                raise SourceError(
                    f"{self._source.shards[shard].path} ends at row {row}, where its index has {end} and more; "
                    "it was changed while it was read: put it back as it was"
                )
            taken = min(end - row, len(some.column))
            self._left = some.cut(taken, len(some.column)) if taken < len(some.column) else None
            yield some.cut(0, taken)
            row += taken
        self._next = shard, end


class FileRows(NamedTuple):
    """Consecutive rows of a file."""

    shard: int
    rows: Rows


def portions(
    reader: RangeReader,
    ranges: Iterable[RowRange],
    lanes: int,
    check: Callable[[deque[FileRows]], object],
) -> Iterator[deque[FileRows]]:
    """A window's rows, portion by portion; ``lanes``: so many windows are held at once. Raises ``SourceError``; before
    that ``check`` is called with the rows of the portion, since the error of an earlier row comes first."""
    held: deque[FileRows] = deque()
    room = most = max(1, WINDOW_BYTES // lanes)
    try:
        for shard, first_row, count in ranges:
            for rows in reader.read(shard, first_row, first_row + count):
                begin = 0
                while begin < len(rows.column):
                    reach = columns.reach(
                        rows.column[begin:],
                        room,
                        None if rows.sizes is None else rows.sizes[begin:],
                    )
                    held.append(FileRows(shard, rows.cut(begin, begin + reach.rows)))
                    begin += reach.rows
                    room -= reach.bytes
                    if room <= 0:
                        yield held
                        held, room = deque(), most
                # What was given is not held: it may be a whole row group, and sources many.
                del rows
    except SourceError:
        if held:
            check(held)
        raise
    if held:
        yield held
