"""The rows of a window of a shuffled source: held, and given in another order.

A window is read block by block. Its rows are held until they have ``WINDOW_BYTES`` of text or ids; those are given in
their drawn order, and what is left of the window is a *stretch* of its own. So memory is bounded by rows and by bytes,
and where a stretch ends depends on the rows alone: not on where reading began, nor on what was left out since.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tokenloom_server.errors import SourceError
from tokenloom_server.packing.reading import RowRange
from tokenloom_server.sources import arrays, columns
from tokenloom_server.sources.base import Rows, Source

#: Bytes of text or ids that are held of a window (of all lanes together), and the row that reaches them. In tokens that
#: is up to twice as much (of bytes as ids), and up to twice that while they are joined.
WINDOW_BYTES = 1 << 25

#: Tokens and rows of a piece.
PIECE_TOKENS = 1 << 18
PIECE_ROWS = 1 << 16

_Int64s = npt.NDArray[np.int64]
_Ids = npt.NDArray[np.unsignedinteger]


class Reader:
    """Reads passages of one source. One that goes on where the one before it ended is read on, not opened again: a
    window may end within a row group that takes long to begin."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._rows: Iterator[Rows] = iter(())
        #: Where ``_rows`` stand: the file, and the row there; and of those that are read already what was not given.
        self._at: tuple[int, int] | None = None
        self._left: Rows | None = None

    def read(self, passage: RowRange) -> Iterator[Rows]:
        """The rows of a passage. Raises ``SourceError``."""
        shard, row, end = passage.shard, passage.first_row, passage.first_row + passage.rows
        if self._at != (shard, row):
            self._rows, self._left = self._source.read(shard, row), None
        self._at = None
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
        self._at = shard, end


class Held(NamedTuple):
    """Rows of a file that are held."""

    shard: int
    rows: Rows


def stretches(reader: Reader, passages: Iterable[RowRange], lanes: int) -> Iterator[deque[Held]]:
    """A window's rows in its stretches; ``lanes``: so many windows are held at once. Raises ``SourceError``."""
    held: deque[Held] = deque()
    room = most = max(1, WINDOW_BYTES // lanes)
    for passage in passages:
        for rows in reader.read(passage):
            begin = 0
            while begin < len(rows.column):
                reach = columns.reach(rows.column[begin:], room)
                held.append(Held(passage.shard, rows.cut(begin, begin + reach.rows)))
                begin += reach.rows
                room -= reach.bytes
                if room <= 0:
                    yield held
                    held, room = deque(), most
    if held:
        yield held


class Tokens(NamedTuple):
    """Rows as tokens: row i has those up to ``ends[i]``, from where the one before it ends, and lies at ``origins``
    [2, rows]: its shard and its row there. ``row_status``, ``reasons``, ``mask`` and ``out`` as a ``TokenizedRows``
    has them."""

    ids: _Ids
    ends: _Int64s
    origins: _Int64s
    row_status: npt.NDArray[np.uint8] | None
    reasons: Mapping[tuple[int, int], str]
    mask: npt.NDArray[np.uint8] | None = None
    out: npt.NDArray[np.bool_] | None = None

    @classmethod
    def joined(cls, parts: Sequence[Tokens]) -> Tokens:
        """All of them, one after the other."""
        ids = np.concatenate([part.ids for part in parts])
        before = np.cumsum([0, *(len(part.ids) for part in parts)])
        ends = np.concatenate([part.ends + begin for part, begin in zip(parts, before, strict=False)])
        row_status, reasons, mask, out = None, {}, None, None
        if any(part.row_status is not None for part in parts):
            none = [
                np.zeros(len(part.ends), np.uint8) if part.row_status is None else part.row_status for part in parts
            ]
            row_status = np.concatenate(none)
            reasons = {origin: reason for part in parts for origin, reason in part.reasons.items()}
        if parts[0].mask is not None:
            mask = np.concatenate([part.mask for part in parts if part.mask is not None])
        if any(part.out is not None for part in parts):
            out = np.concatenate(
                [part.out if part.out is not None else np.zeros(len(part.ends), np.bool_) for part in parts]
            )
        return cls(ids, ends, np.concatenate([part.origins for part in parts], axis=1), row_status, reasons, mask, out)

    def taken(self, order: _Int64s) -> Iterator[Tokens]:
        """The rows at some places, in that order, in pieces."""
        starts = np.concatenate(([0], self.ends))
        ends = np.cumsum(np.diff(starts)[order])
        blobs = _blobs(self.ids, starts)
        masks = _blobs(self.mask, starts) if self.mask is not None else None
        first = 0
        while first < len(order):
            begin = int(ends[first - 1]) if first else 0
            fits = int(np.searchsorted(ends, begin + PIECE_TOKENS, "right"))
            behind = min(max(fits, first + 1), first + PIECE_ROWS, len(order))
            part = order[first:behind]
            count = int(ends[behind - 1]) - begin
            ids = _taken(blobs, part, self.ids.dtype, count)
            mask = _taken(masks, part, np.dtype(np.uint8), count) if masks is not None else None
            row_status = None if self.row_status is None else self.row_status[part]
            out = None if self.out is None else self.out[part]
            yield Tokens(ids, ends[first:behind] - begin, self.origins[:, part], row_status, self.reasons, mask, out)
            first = behind


def _taken(
    blobs: pa.LargeBinaryArray, rows: _Int64s, kind: np.dtype[np.unsignedinteger[Any]], count: int
) -> npt.NDArray[Any]:
    """Some rows of ``_blobs``, of ``count`` values in all."""
    found = pc.take(blobs, arrays.from_numbers(rows), boundscheck=False).buffers()[2]
    return np.frombuffer(found, kind, count) if count else np.empty(0, kind)


def _blobs(ids: _Ids, starts: _Int64s) -> pa.LargeBinaryArray:
    """Each row's tokens as bytes. Arrow takes those by copying rows as a whole: measured at ten times the speed of
    indexing with numpy."""
    offsets = np.ascontiguousarray(starts * ids.itemsize)
    return pa.Array.from_buffers(
        pa.large_binary(), len(starts) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(ids)], 0
    )
