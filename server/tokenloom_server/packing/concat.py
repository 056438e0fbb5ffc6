"""``concat``: documents joined and cut into samples of equal length; nothing is dropped but the last tail.

The source is one endless row of tokens, its documents epoch after epoch; sample k covers tokens
[k·L, (k + 1)·L). The part of a document that did not fit opens the next sample. With shifted labels a
sample reads one token more than it advances.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

import numpy as np
import numpy.typing as npt
import xxhash

from tokenloom_server.packing.base import Block, Places
from tokenloom_server.packing.documents import Documents, Piece
from tokenloom_server.packing.tallies import RowTallies
from tokenloom_server.state import SourceState

_Int64s = npt.NDArray[np.int64]
_Ids = npt.NDArray[np.unsignedinteger]


class ConcatPacker:
    """Implements ``Packer``."""

    def __init__(
        self,
        documents: Documents,
        state: SourceState,
        *,
        source_id: int,
        length: int,
        lookahead: int,
    ) -> None:
        """``lookahead``: how many tokens a sample reads beyond ``length`` (1 for shifted labels)."""
        self._documents = documents
        self._state = state
        self._source_id = source_id
        self._length = length
        self._width = length + lookahead
        self._tallies = RowTallies(state.tally)
        self.dropped_tokens = 0

    def blocks(self) -> Iterator[Block]:
        cursor = self._state.cursor
        # Positions count the source's tokens since the run began, so that position = samples × length.
        position = self._state.samples * self._length
        held = _Held(position - cursor.offset, self._state.rows)
        # Tokens that wait for the rest of their sample, which may take many small pieces; at most one sample's.
        waiting: list[_Ids] = []
        kept = 0
        skip = cursor.offset
        for piece in self._documents.read(cursor):
            self._tallies.add(piece, held.rows)
            held.add(piece)
            ids = piece.ids
            if skip:
                self._documents.check_offset(piece, skip)
                ids, skip = ids[skip:], 0
            count = (kept + len(ids) - (self._width - self._length)) // self._length
            if count <= 0:
                waiting.append(ids)
                kept += len(ids)
                continue
            yield self._cut(waiting, kept, ids, count, position, held)
            position += count * self._length
            waiting = [ids[count * self._length - kept :].copy()]
            kept = len(waiting[0])
            held.forget(position)
        self.dropped_tokens = kept

    def _cut(self, waiting: list[_Ids], kept: int, ids: _Ids, count: int, position: int, held: _Held) -> Block:
        """The ``count`` samples that begin with the ``kept`` tokens that waited and go on in ``ids``.

        Only the one that begins with those is joined; all others are where the piece has them.
        """
        samples = []
        if kept:
            samples.append(_wire(np.concatenate([*waiting, ids[: self._width - kept]])))
        wire, size = _wire(ids), ids.itemsize
        begin = (self._length - kept) * size if kept else 0
        advance, reach = self._length * size, self._width * size
        samples += [wire[at : at + reach] for at in range(begin, begin + (count - len(samples)) * advance, advance)]
        edges = np.arange(count + 1, dtype=np.int64) * self._length
        starts = held.starts(position, int(edges[-1]))
        cursors = held.cursors(edges[1:] + position)
        tallies = self._tallies.behind(cursors[:, 4])
        self._tallies.forget(int(cursors[-1, 4]))
        return Block(
            samples,
            list(map(xxhash.xxh3_128_intdigest, samples, repeat(self._source_id))),
            Places(
                length=self._length,
                first_sample=position // self._length,
                cursors=cursors,
                starts=starts.astype(np.uint32),
                bounds=np.searchsorted(starts, edges),
                tallies=tallies,
            ),
        )


def _wire(ids: _Ids) -> memoryview:
    """Ids as they travel, and are hashed: little-endian everywhere."""
    return np.ascontiguousarray(ids, ids.dtype.newbyteorder("<")).view(np.uint8).data.toreadonly()


class _Held:
    """Where the rows whose tokens are held lie, by position."""

    def __init__(self, position: int, rows: int) -> None:
        """``position`` is where the next row begins, ``rows`` its number since the run began."""
        self._position = position
        #: The number of the next row.
        self.rows = rows
        # One column a row: first position, end position, epoch, shard, row in shard, number.
        self._tables: list[_Int64s] = []

    def add(self, piece: Piece) -> None:
        count = len(piece.ends)
        table = np.empty((6, count), np.int64)
        table[1] = piece.ends + self._position
        table[0, :1] = self._position
        table[0, 1:] = table[1, :-1]
        table[2] = piece.epoch
        table[3] = piece.shard
        table[4] = np.arange(piece.first_row, piece.first_row + count)
        table[5] = np.arange(self.rows, self.rows + count)
        self._tables.append(table)
        self._position += len(piece.ids)
        self.rows += count

    def cursors(self, positions: _Int64s) -> _Int64s:
        """[n, 5]: epoch, shard, row, offset, rows counter behind the token before each position."""
        first, end, epoch, shard, row, number = self._table()
        # The first row that ends at or behind the position holds the last token taken: rows without
        # tokens behind it are not passed yet, whatever piece they come in.
        at = np.searchsorted(end, positions, side="left")
        whole = end[at] == positions
        offset = np.where(whole, 0, positions - first[at])
        return np.stack((epoch[at], shard[at], row[at] + whole, offset, number[at] + whole), axis=1)

    def starts(self, position: int, length: int) -> _Int64s:
        """Where documents begin in [position, position + length), relative to it, ascending."""
        first, end, *_ = self._table()
        lo, hi = np.searchsorted(first, (position, position + length))
        begins: _Int64s = first[lo:hi][end[lo:hi] > first[lo:hi]] - position
        return begins

    def forget(self, position: int) -> None:
        """Drops the rows that end at or before a position."""
        table = self._table()
        self._tables = [table[:, np.searchsorted(table[1], position, side="right") :]]

    def _table(self) -> _Int64s:
        if len(self._tables) > 1:
            self._tables = [np.concatenate(self._tables, axis=1)]
        return self._tables[0]
