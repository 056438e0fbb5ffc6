"""``none``: each row is a sample of its own, padded; what is longer is truncated, or split into several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tokenloom_server.core.state import SourceState, tokens_in_row
from tokenloom_server.packing.base import Block, SampleOrigins
from tokenloom_server.packing.documents import Documents, TokenizedRows
from tokenloom_server.packing.origins import DocumentSpan, part_of
from tokenloom_server.packing.row_counts import RowTallies
from tokenloom_server.packing.samples import Flags, Int64s, SampleFormat, hashed

#: Samples of a piece are made in blocks of so many bytes: short rows in long samples would take some times as much.
BLOCK_BYTES = 1 << 22


class UnpackedPacker:
    """Implements ``DocumentPacker``."""

    #: Every row is in a sample; what is cut off is told by the tally.
    dropped_tokens = 0

    def __init__(
        self, documents: Documents, state: SourceState, *, source_id: int, form: SampleFormat, splits: bool
    ) -> None:
        """``splits``: a row that is longer than a sample becomes several; else its end is lost."""
        self._documents = documents
        self._state = state
        self._source_id = source_id
        #: How its samples travel.
        self.form = form
        self._splits = splits

    def blocks(self) -> Iterator[Block]:
        number, rows = self._state.samples, self._state.rows
        given = np.zeros(5, np.int64)
        rows_tallied = RowTallies(self._state.tally)
        most = max(1, BLOCK_BYTES // self.form.sample_bytes)
        for piece, chunks in self._chunks():
            rows_tallied.add(piece, rows)
            for first in range(0, len(chunks.row), most):
                some = chunks.some(first, first + most)
                cursors = self._cursors(piece, some, rows)
                tallies = given + np.cumsum(self._tallied(some), axis=0)
                given = tallies[-1]
                tallies = tallies + rows_tallied.behind(cursors[:, 4])
                rows_tallied.forget(int(cursors[-1, 4]))
                yield self._block(piece, some, number, cursors, tallies)
                number += len(some.row)
            rows += len(piece.ends)

    def parts(self, count: int) -> Iterator[list[DocumentSpan]]:
        for piece, chunks in self._chunks():
            for i in range(len(chunks.row)):
                if not count:
                    return
                count -= 1
                yield [part_of(piece, int(chunks.row[i]), int(chunks.begins[i]), int(chunks.ends[i]))]
            if not count:
                return

    def _chunks(self) -> Iterator[tuple[TokenizedRows, _Chunks]]:
        """Each piece, and what of it its samples have."""
        skip, width = tokens_in_row(self._state.cursor), self.form.width
        for piece in self._documents.read(self._state.cursor):
            lengths = np.diff(piece.ends, prepend=0)
            begins = piece.ends - lengths
            row = np.flatnonzero(lengths)
            if skip:
                self._documents.check_offset(piece, skip)
                begins[0] += skip
            if not self._splits:
                begin, behind = begins[row], piece.ends[row]
                end = np.minimum(begin + width, behind)
                over = (begin == (piece.ends - lengths)[row]) & (end < behind)
                yield piece, _Chunks(row, begin, end, behind - end, over, np.ones(len(row), np.bool_))
            else:
                count = -(-(piece.ends - begins)[row] // width)
                nth = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
                row = np.repeat(row, count)
                begin = begins[row] + nth * width
                end = np.minimum(begin + width, piece.ends[row])
                over = (begin == (piece.ends - lengths)[row]) & (end < piece.ends[row])
                yield piece, _Chunks(row, begin, end, np.zeros_like(begin), over, end == piece.ends[row])
            skip = 0

    def _cursors(self, piece: TokenizedRows, chunks: _Chunks, rows: int) -> Int64s:
        """[n, 5], as ``SampleOrigins`` has them; ``rows``: the number of the piece's first row."""
        cursors = np.empty((len(chunks.row), 5), np.int64)
        cursors[:, 0] = piece.epoch
        cursors[:, 1] = piece.shard
        cursors[:, 2] = piece.first_row + chunks.row + chunks.whole
        first = np.concatenate(([0], piece.ends[:-1]))
        cursors[:, 3] = np.where(chunks.whole, 0, chunks.ends - first[chunks.row])
        cursors[:, 4] = rows + chunks.row + chunks.whole
        return cursors

    def _tallied(self, chunks: _Chunks) -> Int64s:
        """[n, 5]: what each sample adds to the source's ``RowCounts``."""
        tallies = np.zeros((len(chunks.row), 5), np.int64)
        tallies[:, 2] = self.form.width - (chunks.ends - chunks.begins)
        tallies[:, 3] = chunks.cut
        tallies[:, 4] = chunks.lost
        return tallies

    def _block(self, piece: TokenizedRows, chunks: _Chunks, number: int, cursors: Int64s, tallies: Int64s) -> Block:
        """``number``: of the first sample since the run began."""
        form, count = self.form, len(chunks.row)
        base, end = int(chunks.begins[0]), int(chunks.ends[-1])
        mask = piece.mask[base:end] if piece.mask is not None else None
        every, one = np.arange(count), np.ones(count, np.int64)
        whole = form.assemble(piece.ids[base:end], chunks.begins - base, chunks.ends - base, every, one, mask)
        size = form.sample_bytes
        samples = [whole[at : at + size] for at in range(0, count * size, size)]
        filled = chunks.ends - chunks.begins
        starts = every * form.length + (form.width - filled if form.padding == "left" else 0)
        return Block(
            samples,
            hashed(samples, self._source_id),
            SampleOrigins(
                length=form.length,
                first_sample=number,
                cursors=cursors,
                starts=starts.astype(np.uint32),
                bounds=np.arange(count + 1),
                tallies=tallies,
                make_cursor=self._documents.cursor_kind,
            ),
        )


def unpacked_samples(lengths: Int64s, form: SampleFormat, *, splits: bool) -> int:
    """How many samples rows make, of which these are the lengths in tokens."""
    return int((-(-lengths // form.width)).sum()) if splits else int(np.count_nonzero(lengths))


class _Chunks(NamedTuple):
    """What of a piece becomes a sample each: of its row ``row[i]`` the tokens ``begins[i]`` to ``ends[i]`` of the
    piece's, with how many are lost after them, whether a document begins there that is cut, and whether the row is at
    its end."""

    row: Int64s
    begins: Int64s
    ends: Int64s
    lost: Int64s
    cut: Flags
    whole: Flags

    def some(self, first: int, behind: int) -> _Chunks:
        at = slice(first, behind)
        return _Chunks(self.row[at], self.begins[at], self.ends[at], self.lost[at], self.cut[at], self.whole[at])
