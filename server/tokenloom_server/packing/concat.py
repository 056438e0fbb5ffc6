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
from tokenloom_server.packing.base import Block, FormattedPacker
from tokenloom_server.packing.documents import Documents
from tokenloom_server.packing.samples import Ids, Int64s, Sample, SampleFormat, views, wire
from tokenloom_server.packing.tokenized_rows import DocumentSpan, RowCounter, TokenizedRows, added


class ConcatPacker(FormattedPacker):
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
        super().__init__(documents, state, source_id=source_id, form=form)
        self._pads = pads
        self._overlaps = label_starts and form.width > form.length
        self._length = form.length
        self._width = form.width
        self._row_counter = RowCounter(state.row_counts)

    def blocks(self) -> Iterator[Block]:
        cursor = self._state.cursor
        # Positions count the source's tokens since the run began, so that position = samples × length.
        position = self._state.samples * self._length
        table = _RowTable(position - tokens_in_row(cursor), self._state.rows)
        # Tokens that wait for the rest of their sample, which may take many small rows; at most one sample's.
        waiting: list[Ids] = []
        kept = 0
        for rows, skipped in self._documents.read_from(cursor):
            self._row_counter.add(rows, table.rows)
            table.add(rows)
            ids = rows.ids[skipped:]
            count = (kept + len(ids) - (self._width - self._length)) // self._length
            if count <= 0:
                waiting.append(ids)
                kept += len(ids)
                continue
            yield self._cut(waiting, kept, ids, count, position, table)
            position += count * self._length
            waiting = [ids[count * self._length - kept :].copy()]
            kept = len(waiting[0])
            table.forget(position)
        if self._pads and kept > self._width - self._length:
            yield self._padded(np.concatenate(waiting), position, table)
            kept = 0
        self.dropped_tokens = kept

    def spans(self, count: int) -> Iterator[list[DocumentSpan]]:
        lookahead = self._width - self._length
        spans = self._documents.spans(
            self._state.cursor, count * self._length + lookahead if count else 0
        )
        yield from _by_sample(spans, count, self._length, self._width, self._pads)

    def _cut(
        self, waiting: list[Ids], kept: int, ids: Ids, count: int, position: int, table: _RowTable
    ) -> Block:
        """The ``count`` samples that begin with the ``kept`` tokens that waited and go on in ``ids``.

        Only the one that begins with those is joined; all others are where the rows have them.
        """
        samples = []
        reach = self._width * ids.itemsize
        if kept:
            samples = views(
                wire(np.concatenate([*waiting, ids[: self._width - kept]])), 1, reach, reach
            )
        advance = self._length * ids.itemsize
        begin = (self._length - kept) * ids.itemsize if kept else 0
        samples += views(wire(ids), count - len(samples), reach, advance, begin)
        if self.form.trailer_bytes:
            trailer, size = (
                self.form.trailers(np.array([self._width])).tobytes(),
                self.form.sample_bytes,
            )
            joined = b"".join(part for sample in samples for part in (sample, trailer))
            samples = views(memoryview(joined), count, size, size)
        edges = np.arange(count + 1, dtype=np.int64) * self._length
        starts = table.starts(position, int(edges[-1]) + self._overlaps)
        bounds = np.searchsorted(starts, edges)
        return self._counted(samples, position, table.cursors(edges[1:] + position), starts, bounds)

    def _padded(self, ids: Ids, position: int, table: _RowTable) -> Block:
        """The tail as a sample of its own."""
        count = np.array([len(ids)])
        samples = self.form.assemble(
            ids, np.zeros(1, np.int64), count, np.zeros(1, np.int64), np.ones(1, np.int64)
        )
        starts = table.starts(position, len(ids)) + self.form.begin(len(ids))
        bounds = np.array([0, len(starts)])
        padding = self._length - int(self.form.real_tokens(count)[0])
        return self._counted(
            samples, position, table.cursors(count + position), starts, bounds, padding
        )

    def _counted(
        self,
        samples: list[Sample],
        position: int,
        cursors: Int64s,
        starts: Int64s,
        bounds: Int64s,
        padding: int = 0,
    ) -> Block:
        row_counts = self._row_counter.after(cursors[:, 4])
        if padding:
            row_counts = row_counts + added(padding_tokens=padding)
        self._row_counter.forget(int(cursors[-1, 4]))
        first_sample = position // self._length
        return self._block(
            samples, first_sample, cursors, starts, bounds, row_counts, overlaps=self._overlaps
        )


def _by_sample(
    spans: Iterator[DocumentSpan], count: int, length: int, width: int, pads: bool
) -> Iterator[list[DocumentSpan]]:
    """What ``count`` consecutive samples have of the spans, which advance by ``length`` tokens and read ``width``;
    ``pads``: the last of them may be shorter."""
    held, held_from, end = deque[DocumentSpan](), 0, 0
    for begin in range(0, count * length, length):
        while end < begin + width and (span := next(spans, None)) is not None:
            held.append(span)
            end += len(span.ids)
        if end < begin + width and not (pads and end > begin + width - length):
            return
        while held_from + len(held[0].ids) <= begin:
            held_from += len(held.popleft().ids)
        own, position = [], held_from
        for span in held:
            first, last = max(0, begin - position), min(len(span.ids), begin + width - position)
            if last <= first:
                break
            own.append(span.cut(first, last))
            position += len(span.ids)
        yield own


class _RowTable:
    """Where the rows whose tokens are held lie, by position."""

    def __init__(self, position: int, rows: int) -> None:
        """``position`` is where the next row begins, ``rows`` its number since the run began."""
        self._position = position
        #: The number of the next row.
        self.rows = rows
        # One column a row: first position, end position, epoch, part of it, row there, number.
        self._tables: list[Int64s] = []

    def add(self, rows: TokenizedRows) -> None:
        count = len(rows.ends)
        table = np.empty((6, count), np.int64)
        table[1] = rows.ends + self._position
        table[0, :1] = self._position
        table[0, 1:] = table[1, :-1]
        table[2] = rows.epoch
        table[3] = rows.part
        table[4] = np.arange(rows.first_row, rows.first_row + count)
        table[5] = np.arange(self.rows, self.rows + count)
        self._tables.append(table)
        self._position += len(rows.ids)
        self.rows += count

    def cursors(self, positions: Int64s) -> Int64s:
        """[n, 5]: epoch, part of it, row, tokens of that, rows counter after the token before each position."""
        first, end, epoch, part, row, number = self._table()
        # The first row that ends at or after the position holds the last token taken: rows without
        # tokens after it are not passed yet, however the rows were read.
        last = np.searchsorted(end, positions, side="left")
        whole = end[last] == positions
        tokens = np.where(whole, 0, positions - first[last])
        return np.stack(
            (epoch[last], part[last], row[last] + whole, tokens, number[last] + whole), axis=1
        )

    def starts(self, position: int, length: int) -> Int64s:
        """Where documents begin in [position, position + length), relative to it, ascending."""
        first, end, *_ = self._table()
        rows = slice(*np.searchsorted(first, (position, position + length)))
        begins: Int64s = first[rows][end[rows] > first[rows]] - position
        return begins

    def forget(self, position: int) -> None:
        """Drops the rows that end at or before a position."""
        table = self._table()
        self._tables = [table[:, np.searchsorted(table[1], position, side="right") :]]

    def _table(self) -> Int64s:
        if len(self._tables) > 1:
            self._tables = [np.concatenate(self._tables, axis=1)]
        return self._tables[0]
