"""``none``: each row is a sample of its own, padded; what is longer is truncated, or split into several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tokenloom_server.core.state import SourceState
from tokenloom_server.packing.base import Block, FormattedPacker
from tokenloom_server.packing.documents import Documents
from tokenloom_server.packing.samples import Flags, Int64s, SampleFormat
from tokenloom_server.packing.tokenized_rows import DocumentSpan, RowCounter, TokenizedRows, added

#: Samples are made in blocks of so many bytes: short rows in long samples would take some times as much.
BLOCK_BYTES = 1 << 22


class UnpackedPacker(FormattedPacker):
    """Implements ``DocumentPacker``. Every row is in a sample; what is cut off is counted in ``lost_tokens``."""

    def __init__(
        self,
        documents: Documents,
        state: SourceState,
        *,
        source_id: int,
        form: SampleFormat,
        splits: bool,
    ) -> None:
        """``splits``: a row that is longer than a sample becomes several; else its end is lost."""
        super().__init__(documents, state, source_id=source_id, form=form)
        self._splits = splits

    def blocks(self) -> Iterator[Block]:
        first_sample, rows_before = self._state.samples, self._state.rows
        added_before = added()
        row_counter = RowCounter(self._state.row_counts)
        most = max(1, BLOCK_BYTES // self.form.sample_bytes)
        for rows, chunks in self._chunks():
            row_counter.add(rows, rows_before)
            for first in range(0, len(chunks.row), most):
                some = _Chunks._make(column[first : first + most] for column in chunks)
                cursors = self._cursors(rows, some, rows_before)
                added_after = added_before + np.cumsum(self._added(some), axis=0)
                added_before = added_after[-1]
                row_counts = added_after + row_counter.after(cursors[:, 4])
                row_counter.forget(int(cursors[-1, 4]))
                yield self._block_of(rows, some, first_sample, cursors, row_counts)
                first_sample += len(some.row)
            rows_before += len(rows.ends)

    def spans(self, count: int) -> Iterator[list[DocumentSpan]]:
        for rows, chunks in self._chunks():
            for row, begin, end in zip(
                chunks.row.tolist(), chunks.begins.tolist(), chunks.ends.tolist(), strict=True
            ):
                if not count:
                    return
                count -= 1
                yield [rows.span(row, begin, end)]
            if not count:
                return

    def _chunks(self) -> Iterator[tuple[TokenizedRows, _Chunks]]:
        """Rows, and what of them their samples have."""
        width = self.form.width
        for rows, skipped in self._documents.read_from(self._state.cursor):
            firsts = rows.ends - rows.lengths
            begins = firsts.copy()
            begins[:1] += skipped
            row = np.flatnonzero(rows.ends > firsts)
            count = (
                -(-(rows.ends - begins)[row] // width)
                if self._splits
                else np.ones(len(row), np.int64)
            )
            nth = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
            row = np.repeat(row, count)
            begin, row_end = begins[row] + nth * width, rows.ends[row]
            end = np.minimum(begin + width, row_end)
            lost = np.zeros_like(begin) if self._splits else row_end - end
            is_cut = (begin == firsts[row]) & (end < row_end)
            yield (
                rows,
                _Chunks(row, begin, end, lost, is_cut, (end == row_end) | (not self._splits)),
            )

    def _cursors(self, rows: TokenizedRows, chunks: _Chunks, rows_before: int) -> Int64s:
        """[n, 5], as ``SampleOrigins`` has them; ``rows_before``: the number of the first of the rows."""
        cursors = np.empty((len(chunks.row), 5), np.int64)
        cursors[:, 0] = rows.epoch
        cursors[:, 1] = rows.part
        cursors[:, 2] = rows.first_row + chunks.row + chunks.whole
        first = np.concatenate(([0], rows.ends[:-1]))
        cursors[:, 3] = np.where(chunks.whole, 0, chunks.ends - first[chunks.row])
        cursors[:, 4] = rows_before + chunks.row + chunks.whole
        return cursors

    def _added(self, chunks: _Chunks) -> Int64s:
        """[n, 5]: what each sample adds to the source's ``RowCounts``."""
        filled = self.form.real_tokens(chunks.ends - chunks.begins)
        return added(
            padding_tokens=self.form.length - filled,
            cut_documents=chunks.cut,
            lost_tokens=chunks.lost,
        )

    def _block_of(
        self,
        rows: TokenizedRows,
        chunks: _Chunks,
        first_sample: int,
        cursors: Int64s,
        row_counts: Int64s,
    ) -> Block:
        """``first_sample``: its number since the run began."""
        form, count = self.form, len(chunks.row)
        base, end = int(chunks.begins[0]), int(chunks.ends[-1])
        mask = rows.mask[base:end] if rows.mask is not None else None
        every, one = np.arange(count), np.ones(count, np.int64)
        samples = form.assemble(
            rows.ids[base:end], chunks.begins - base, chunks.ends - base, every, one, mask
        )
        filled = chunks.ends - chunks.begins
        starts = every * form.length + (form.width - filled if form.padding == "left" else 0)
        return self._block(
            samples, first_sample, cursors, starts, np.arange(count + 1), row_counts, filled=filled
        )


def unpacked_samples(lengths: Int64s, form: SampleFormat, *, splits: bool) -> Int64s:
    """How many ids rows fill of each sample that they make; ``lengths``: the rows', in tokens."""
    if not splits:
        return np.minimum(lengths[lengths > 0], form.width)
    full, rest = np.divmod(lengths, form.width)
    return np.append(np.full(int(full.sum()), form.width), rest[rest > 0])


class _Chunks(NamedTuple):
    """What of rows becomes a sample each: of row ``row[i]`` the tokens ``begins[i]`` to ``ends[i]`` of the rows' ids,
    with how many are lost after them, whether a document begins there that is cut, and whether the row is at its
    end."""

    row: Int64s
    begins: Int64s
    ends: Int64s
    lost: Int64s
    cut: Flags
    whole: Flags
