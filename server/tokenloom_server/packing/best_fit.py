"""``best_fit``: whole documents, as many to a sample as fit best; only those longer than a sample are cut.

The rows of a source are taken in closed windows, each packed for itself (see ``fit``): a window ends with the row that
makes it ``window_rows`` rows or ``window_tokens`` tokens, and with its epoch. A document longer than a sample is cut
into full ones and the rest, and the rest is packed like any other. The samples of a window come in an order drawn for
it, or the long documents would all be first; the documents in a sample are in the order of their rows.

A *bin* is what is packed into one sample. A cursor within a window names the window's first row and how many of its
bins are done: a resume packs the window once more. What a window's bins are follows from its rows alone: excluded rows
are packed, too, and then left out, so that the cursor stays true when a revision excludes more of them while the window
is under way. A bin in which all is left out is no sample.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from tokenloom_server.core.hashing import Purpose, draw, draws
from tokenloom_server.core.state import FileCursor, PackedCursor, SourceState, WindowCursor
from tokenloom_server.errors import SourceError
from tokenloom_server.packing.base import Block, FormattedPacker
from tokenloom_server.packing.documents import Documents
from tokenloom_server.packing.samples import Flags, Int64s, SampleFormat
from tokenloom_server.packing.tokenized_rows import DocumentSpan, TokenizedRows, added

# Best-fit decreasing: lengths into bins of one capacity.
#
# Longest first, each goes into the bin in which it leaves the least room; one that fits nowhere opens a bin. Of bins
# with the same room the one that came to it last is taken. (Ding et al., "Fewer Truncations Improve Language Modeling",
# ICML 2024, where this packs documents; the bound, 11/9 of the best number of bins, is Johnson's, 1973.)


def best_fit(lengths: Int64s, capacity: int) -> tuple[Int64s, int]:
    """The bin of each length (from 1 to ``capacity``), numbered as they were opened, and how many bins there are.

    Equal lengths come in their order. Rooms, not bins, are searched: there are never more different ones than bins or
    than ``capacity``, so a step takes a search of a sorted list, whatever the number of bins.
    """
    order = np.argsort(-lengths, kind="stable")
    falling = lengths[order]
    full = int(np.searchsorted(-falling, -capacity, side="right"))
    bin_of_falling = list(range(full))
    opened = full
    rooms: list[int] = []  # ascending, each once
    bins: dict[int, list[int]] = {}  # by room
    for length in falling[full:].tolist():
        least = bisect_left(rooms, length)
        if least == len(rooms):
            chosen, room = opened, capacity
            opened += 1
        else:
            room = rooms[least]
            same = bins[room]
            chosen = same.pop()
            if not same:
                del rooms[least], bins[room]
        bin_of_falling.append(chosen)
        room -= length
        if room in bins:
            bins[room].append(chosen)
        elif room:
            insort(rooms, room)
            bins[room] = [chosen]
    bin_of_length = np.empty(len(lengths), np.int64)
    bin_of_length[order] = bin_of_falling
    return bin_of_length, opened


class Window(NamedTuple):
    """How far a window reaches: it ends with the row that makes it so many rows, or so many tokens."""

    rows: int
    tokens: int


class BestFitPacker(FormattedPacker):
    """Implements ``DocumentPacker``. No document is dropped but those of excluded rows, which are in no sample."""

    def __init__(
        self,
        documents: Documents,
        state: SourceState,
        *,
        source_id: int,
        form: SampleFormat,
        window: Window,
        seed: int,
        closed_before: Collection[int] = (),
    ) -> None:
        """``closed_before``: shards before which a window ends, because the source ended there once."""
        super().__init__(documents, state, source_id=source_id, form=form)
        self._window = window
        self._seed = seed
        self._closed_before = sorted(closed_before)

    def blocks(self) -> Iterator[Block]:
        first_sample, rows_before = self._state.samples, self._state.rows
        counts_before = np.array(self._state.row_counts, np.int64)
        for window, done_bins in self._packed_windows():
            # Rows pass with the samples, in proportion: those of a window come mixed.
            row_count = len(window.rows.ends)
            passed = row_count * np.arange(window.bins + 1) // max(1, window.bins)
            in_block = window.bin_positions >= done_bins
            count = int(in_block.sum())
            row_counts = counts_before + np.cumsum(window.row_counts(self.form)[in_block], axis=0)
            if count:
                counts_before = row_counts[-1].copy()
            # Bad and filtered rows count with the window's last sample: a state within it is one before all its rows.
            counts_before[:2] += window.rows.bad_and_filtered
            if count:
                if in_block[-1]:
                    row_counts[-1] = counts_before
                passed_rows = rows_before + passed - passed[done_bins]
                yield self._block_of(window, in_block, first_sample, passed_rows, row_counts)
            first_sample += count
            rows_before += int(passed[-1] - passed[done_bins]) if window.bins else row_count
            del window

    def spans(self, count: int) -> Iterator[list[DocumentSpan]]:
        for window, done_bins in self._packed_windows():
            first = np.cumsum(window.chunk_counts) - window.chunk_counts
            for sample in np.flatnonzero(window.bin_positions >= done_bins).tolist():
                if not count:
                    return
                count -= 1
                own = window.order[first[sample] : first[sample] + window.chunk_counts[sample]]
                bounds = (
                    window.row[own].tolist(),
                    window.begins[own].tolist(),
                    window.ends[own].tolist(),
                )
                yield [window.rows.span(*chunk) for chunk in zip(*bounds, strict=True)]
            if not count:
                return

    def _packed_windows(self) -> Iterator[tuple[_PackedWindow, int]]:
        """The windows from the cursor on, and how many bins of each are done: 0 but for the first."""
        done_bins = (
            self._state.cursor.samples if isinstance(self._state.cursor, PackedCursor) else 0
        )
        for chunks in self._windows():
            window = self._packed(chunks)
            if done_bins >= max(1, window.bins):
                shard, row = window.rows.origin(0)
                raise SourceError(
                    f"{self._documents.name}: the state stands after {done_bins} samples of the window that begins "
                    f"with row {row} of {self._documents.path(shard)}, but that has {window.bins}: the files or the "
                    "tokeniser are not what the run began with; put them back, or begin a new run"
                )
            yield window, done_bins
            # Not to be held while the next one is read.
            del chunks, window
            done_bins = 0

    def _windows(self) -> Iterator[list[TokenizedRows]]:
        """The rows of each window, from the cursor's on."""
        window: list[TokenizedRows] = []
        row_count = token_count = 0
        for rows in self._documents.read(self._state.cursor, mark_excluded=True):
            if window and (
                rows.epoch != window[-1].epoch or self._closes(window[-1].part, rows.part)
            ):
                yield window
                window, row_count, token_count = [], 0, 0
            first = 0
            while first < len(rows.ends):
                tokens_before = int(rows.ends[first - 1]) if first else 0
                reach = (
                    int(
                        np.searchsorted(
                            rows.ends, tokens_before + self._window.tokens - token_count
                        )
                    )
                    + 1
                )
                end = min(len(rows.ends), first + self._window.rows - row_count, reach)
                window.append(rows.cut(end, first))
                row_count += end - first
                token_count += int(rows.ends[end - 1]) - tokens_before
                first = end
                if row_count >= self._window.rows or token_count >= self._window.tokens:
                    yield window
                    window, row_count, token_count = [], 0, 0
        if window:
            yield window

    def _closes(self, before: int, shard: int) -> bool:
        return any(before < closed <= shard for closed in self._closed_before)

    def _packed(self, window: Sequence[TokenizedRows]) -> _PackedWindow:
        rows, last, width = TokenizedRows.joined(window), window[-1], self.form.width
        lengths = rows.lengths
        chunks = -(-lengths // width)
        row = np.repeat(np.arange(len(lengths)), chunks)
        # The number of each chunk within its document.
        nth = np.arange(len(row)) - np.repeat(np.cumsum(chunks) - chunks, chunks)
        begins = (rows.ends - lengths)[row] + nth * width
        ends = np.minimum(begins + width, rows.ends[row])
        bin_of_chunk, bins = best_fit(ends - begins, width)
        # By the window's own name: which its samples are depends on nothing else.
        key = draw(self._seed, Purpose.PACK, self._source_id, rows.epoch)
        key = draw(key, Purpose.PACK, rows.part, rows.first_row)
        drawn = np.array(
            draws(key, Purpose.PACK, np.zeros(bins, np.uint64), np.arange(bins, dtype=np.uint64))
        )
        position_of_bin = np.empty(bins, np.int64)
        position_of_bin[np.argsort(drawn, kind="stable")] = np.arange(bins)
        position_of_chunk = position_of_bin[bin_of_chunk]
        order = np.argsort(position_of_chunk, kind="stable")
        if rows.excluded is not None:
            order = order[~rows.excluded[row[order]]]
        chunk_counts = np.bincount(position_of_chunk[order], minlength=bins)
        bin_positions = np.flatnonzero(chunk_counts)
        return _PackedWindow(
            rows=rows,
            end=(last.epoch, last.part, last.first_row + len(last.ends)),
            begins=begins,
            ends=ends,
            row=row,
            order=order,
            chunk_counts=chunk_counts[bin_positions],
            bin_positions=bin_positions,
            bins=bins,
            cut=(nth == 0) & (chunks[row] > 1),
        )

    def _block_of(
        self,
        window: _PackedWindow,
        in_block: Flags,
        first_sample: int,
        passed_rows: Int64s,
        row_counts: Int64s,
    ) -> Block:
        """``in_block`` [samples]: mask of the window's samples that the block gives; ``passed_rows`` [bins + 1]: the
        rows counter before each bin, and after the last; ``row_counts`` [samples given, 5]: after each of them."""
        form, rows = self.form, window.rows
        order = window.order[int(window.chunk_counts[~in_block].sum()) :]
        counts, bin_positions = window.chunk_counts[in_block], window.bin_positions[in_block]
        samples = form.assemble(rows.ids, window.begins, window.ends, order, counts, rows.mask)
        lengths = (window.ends - window.begins)[order]
        bounds = np.concatenate(([0], np.cumsum(counts)))
        edges = np.concatenate(([0], np.cumsum(lengths)))
        sample_of = np.repeat(np.arange(len(counts)), counts)
        filled = np.diff(edges[bounds])
        starts = edges[:-1] - edges[bounds[:-1]][sample_of] + sample_of * form.length
        if form.padding == "left":
            starts += (form.width - filled)[sample_of]
        cursors = np.empty((len(counts), 5), np.int64)
        cursors[:, :3] = rows.epoch, rows.part, rows.first_row
        cursors[:, 3] = bin_positions + 1
        cursors[:, 4] = passed_rows[bin_positions + 1]
        # After the window's last sample stands its last row, at its end.
        if in_block[-1]:
            cursors[-1] = *window.end, 0, passed_rows[-1]
        make_cursor = partial(_cursor, self._documents.cursor_kind)
        return self._block(
            samples,
            first_sample,
            cursors,
            starts,
            bounds,
            row_counts,
            filled=filled,
            make_cursor=make_cursor,
        )


def _cursor(
    kind: type[FileCursor] | type[WindowCursor], epoch: int, part: int, row: int, done_bins: int
) -> FileCursor | WindowCursor | PackedCursor:
    """The cursor after so many bins of a window that begins with a row, or before all of them."""
    first = kind(epoch, part, row)
    return PackedCursor(first, done_bins) if done_bins else first


def windowed_samples(lengths: Int64s, form: SampleFormat, window: Window) -> Int64s:
    """How many ids consecutive rows fill of each sample that they make; ``lengths``: the rows', in tokens."""
    ends, first, filled = np.cumsum(lengths), 0, [np.zeros(0, np.int64)]
    while first < len(lengths):
        before = int(ends[first - 1]) if first else 0
        end = min(first + window.rows, int(np.searchsorted(ends, before + window.tokens)) + 1)
        full, rest = np.divmod(lengths[first:end], form.width)
        rest = rest[rest > 0]
        bin_of_rest, bins = best_fit(rest, form.width)
        filled += [
            np.full(int(full.sum()), form.width),
            np.bincount(bin_of_rest, rest, bins).astype(np.int64),
        ]
        first = end
    return np.concatenate(filled)


class _PackedWindow(NamedTuple):
    """The samples of a window. Documents are packed in chunks: one, or several where a document is cut."""

    rows: TokenizedRows
    #: The place after the last row: epoch, part of it, row there.
    end: tuple[int, int, int]
    #: [chunks]: where each begins and ends among the ids of ``rows``, and which of the rows it is of.
    begins: Int64s
    ends: Int64s
    row: Int64s
    #: [chunks]: whether it is the first of a document that is cut.
    cut: Flags
    #: How many bins the chunks were packed into, with those that are no samples.
    bins: int
    #: [chunks that are not excluded]: their numbers, sample after sample.
    order: Int64s
    #: [samples]: how many chunks each has, 1 or more.
    chunk_counts: Int64s
    #: [samples]: its position among all bins, in their drawn order; ascending.
    bin_positions: Int64s

    def row_counts(self, form: SampleFormat) -> Int64s:
        """[samples, 5]: what each sample adds to the source's ``RowCounts``."""
        first = np.cumsum(self.chunk_counts) - self.chunk_counts
        filled = np.add.reduceat((self.ends - self.begins)[self.order], first)
        cut = np.add.reduceat(self.cut[self.order].astype(np.int64), first)
        return added(padding_tokens=form.length - form.real_tokens(filled), cut_documents=cut)
