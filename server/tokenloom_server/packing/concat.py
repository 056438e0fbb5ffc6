"""``concat``: documents joined and cut into samples of equal length; nothing is dropped but the last tail.

The source is one endless row of tokens, its documents epoch after epoch; sample k covers tokens
[k·L, (k + 1)·L). The part of a document that did not fit opens the next sample. With shifted labels a
sample reads one token more than it advances. The last tail may be padded instead of dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from tokenloom_server.core.state import SourceState, tokens_in_row
from tokenloom_server.packing.base import Block, SampleOrigins
from tokenloom_server.packing.documents import Documents, TokenizedRows
from tokenloom_server.packing.origins import DocumentSpan, parts_behind
from tokenloom_server.packing.row_counts import RowTallies
from tokenloom_server.packing.samples import Ids, Int64s, SampleFormat, hashed, wire


class ConcatPacker:
    """Implements ``DocumentPacker``."""

    def __init__(
        self,
        documents: Documents,
        state: SourceState,
        *,
        source_id: int,
        form: SampleFormat,
        pads: bool = False,
        label_starts: bool = False,
    ) -> None:
        """``pads``: the tail becomes a sample; where ``form`` has lengths. ``label_starts``: a document that begins
        with the id which a sample has only as a label is among its starts, too."""
        self._documents = documents
        self._state = state
        self._source_id = source_id
        #: How its samples travel.
        self.form = form
        self._pads = pads
        self._overlaps = label_starts and form.width > form.length
        self._length = form.length
        self._width = form.width
        self._tallies = RowTallies(state.tally)
        self.dropped_tokens = 0

    def blocks(self) -> Iterator[Block]:
        cursor = self._state.cursor
        # Positions count the source's tokens since the run began, so that position = samples × length.
        position = self._state.samples * self._length
        skip = tokens_in_row(cursor)
        held = _Held(position - skip, self._state.rows)
        # Tokens that wait for the rest of their sample, which may take many small pieces; at most one sample's.
        waiting: list[Ids] = []
        kept = 0
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
        if self._pads and kept > self._width - self._length:
            yield self._padded(np.concatenate(waiting), position, held)
            kept = 0
        self.dropped_tokens = kept

    def parts(self, count: int) -> Iterator[list[DocumentSpan]]:
        cursor = self._state.cursor
        lookahead = self._width - self._length
        parts = parts_behind(self._documents, cursor, count * self._length + lookahead)
        yield from _shared_out(parts, count, self._length, self._width, self._pads)

    def _cut(self, waiting: list[Ids], kept: int, ids: Ids, count: int, position: int, held: _Held) -> Block:
        """The ``count`` samples that begin with the ``kept`` tokens that waited and go on in ``ids``.

        Only the one that begins with those is joined; all others are where the piece has them.
        """
        samples = []
        if kept:
            samples.append(wire(np.concatenate([*waiting, ids[: self._width - kept]])))
        whole, size = wire(ids), ids.itemsize
        begin = (self._length - kept) * size if kept else 0
        advance, reach = self._length * size, self._width * size
        samples += [whole[at : at + reach] for at in range(begin, begin + (count - len(samples)) * advance, advance)]
        if self.form.trailer_bytes:
            trailer = self.form.trailers(np.array([self._width])).tobytes()
            samples = [memoryview(b"".join((sample, trailer))) for sample in samples]
        edges = np.arange(count + 1, dtype=np.int64) * self._length
        starts = held.starts(position, int(edges[-1]) + self._overlaps)
        bounds = np.searchsorted(starts, edges)
        return self._block(samples, position, held.cursors(edges[1:] + position), starts, bounds)

    def _padded(self, ids: Ids, position: int, held: _Held) -> Block:
        """The tail as a sample of its own."""
        count = np.array([len(ids)])
        sample = self.form.assemble(ids, np.zeros(1, np.int64), count, np.zeros(1, np.int64), np.ones(1, np.int64))
        starts = held.starts(position, len(ids)) + self.form.begin(len(ids))
        bounds = np.array([0, len(starts)])
        padding = self._width - len(ids)
        return self._block([sample], position, held.cursors(count + position), starts, bounds, padding)

    def _block(
        self,
        samples: list[memoryview],
        position: int,
        cursors: Int64s,
        starts: Int64s,
        bounds: Int64s,
        padding: int = 0,
    ) -> Block:
        tallies = self._tallies.behind(cursors[:, 4])
        if padding:
            tallies = tallies + np.array([0, 0, padding, 0, 0])
        self._tallies.forget(int(cursors[-1, 4]))
        return Block(
            samples,
            hashed(samples, self._source_id),
            SampleOrigins(
                length=self._length,
                first_sample=position // self._length,
                cursors=cursors,
                starts=starts.astype(np.uint32),
                bounds=bounds,
                tallies=tallies,
                overlaps=self._overlaps,
                make_cursor=self._documents.cursor_kind,
            ),
        )


def _shared_out(
    parts: Iterator[DocumentSpan], count: int, length: int, width: int, pads: bool
) -> Iterator[list[DocumentSpan]]:
    """The parts of ``count`` consecutive samples, which advance by ``length`` tokens and read ``width``; ``pads``: the
    last of them may be shorter."""
    held, at, end = deque[DocumentSpan](), 0, 0
    for begin in range(0, count * length, length):
        while end < begin + width and (part := next(parts, None)) is not None:
            held.append(part)
            end += len(part.ids)
        if end < begin + width and not (pads and end > begin + width - length):
            return
        while at + len(held[0].ids) <= begin:
            at += len(held.popleft().ids)
        own, position = [], at
        for part in held:
            first, last = max(0, begin - position), min(len(part.ids), begin + width - position)
            if last <= first:
                break
            own.append(part.cut(first, last))
            position += len(part.ids)
        yield own


class _Held:
    """Where the rows whose tokens are held lie, by position."""

    def __init__(self, position: int, rows: int) -> None:
        """``position`` is where the next row begins, ``rows`` its number since the run began."""
        self._position = position
        #: The number of the next row.
        self.rows = rows
        # One column a row: first position, end position, epoch, shard, row in shard, number.
        self._tables: list[Int64s] = []

    def add(self, piece: TokenizedRows) -> None:
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

    def cursors(self, positions: Int64s) -> Int64s:
        """[n, 5]: epoch, shard, row, tokens of it, rows counter after the token before each position."""
        first, end, epoch, shard, row, number = self._table()
        # The first row that ends at or after the position holds the last token taken: rows without
        # tokens after it are not passed yet, whatever piece they come in.
        at = np.searchsorted(end, positions, side="left")
        whole = end[at] == positions
        offset = np.where(whole, 0, positions - first[at])
        return np.stack((epoch[at], shard[at], row[at] + whole, offset, number[at] + whole), axis=1)

    def starts(self, position: int, length: int) -> Int64s:
        """Where documents begin in [position, position + length), relative to it, ascending."""
        first, end, *_ = self._table()
        lo, hi = np.searchsorted(first, (position, position + length))
        begins: Int64s = first[lo:hi][end[lo:hi] > first[lo:hi]] - position
        return begins

    def forget(self, position: int) -> None:
        """Drops the rows that end at or before a position."""
        table = self._table()
        self._tables = [table[:, np.searchsorted(table[1], position, side="right") :]]

    def _table(self) -> Int64s:
        if len(self._tables) > 1:
            self._tables = [np.concatenate(self._tables, axis=1)]
        return self._tables[0]
