"""``best_fit``: whole documents, as many to a sample as fit best; only those longer than a sample are cut.

The rows of a source are taken in closed windows, each packed for itself (see ``fit``): a window ends with the row that
makes it ``window_rows`` rows or ``window_tokens`` tokens, and with its epoch. A document longer than a sample is cut
into full ones and the rest, and the rest is packed like any other. The samples of a window come in an order drawn for
it, or the long documents would all be first; the documents in a sample are in the order of their rows.

A cursor within a window names the window's first row and how many samples it has given: a restore packs the window once
more. What a window's samples are follows from its rows alone: rows that are excluded are packed, too,
and then left out, so that it stays true when a revision excludes more while the window is under way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from tokenloom_server.core.hashing import Purpose, draw, draws
from tokenloom_server.core.state import FileCursor, PackedCursor, SourceState, WindowCursor
from tokenloom_server.errors import SourceError
from tokenloom_server.packing.base import Block, SampleOrigins
from tokenloom_server.packing.documents import BAD, FILTERED, Documents, TokenizedRows
from tokenloom_server.packing.fit import best_fit
from tokenloom_server.packing.origins import DocumentSpan, part_of
from tokenloom_server.packing.samples import Flags, Ids, Int64s, Mask, SampleFormat, hashed


class Window(NamedTuple):
    """How far a window reaches: it ends with the row that makes it so many rows, or so many tokens."""

    rows: int
    tokens: int


class BestFitPacker:
    """Implements ``DocumentPacker``."""

    #: Every document is in a sample.
    dropped_tokens = 0

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
        self._documents = documents
        self._state = state
        self._source_id = source_id
        #: How its samples travel.
        self.form = form
        self._window = window
        self._seed = seed
        self._closed_before = sorted(closed_before)

    def blocks(self) -> Iterator[Block]:
        number, rows = self._state.samples, self._state.rows
        tally = np.array(self._state.tally, np.int64)
        for window, packed, emitted in self._windows():
            every = packed.bins
            # Rows pass with the samples, in proportion: those of a window come mixed.
            passed = window.rows * np.arange(every + 1) // max(1, every)
            here = packed.rank >= emitted
            count = int(here.sum())
            tallies = tally + np.cumsum(packed.tallies(self.form)[here], axis=0)
            # Bad and filtered rows count with the window's last sample: a state within it is one before all its rows.
            tally = (tallies[-1] if count else tally) + window.row_status
            if count:
                if here[-1]:
                    tallies[-1] = tally
                yield self._block(window, packed, here, number, rows + passed - passed[emitted], tallies)
            number += count
            rows += int(passed[-1] - passed[emitted]) if every else window.rows
            del window, packed

    def parts(self, count: int) -> Iterator[list[DocumentSpan]]:
        """What each of the next ``count`` samples is made of."""
        for window, packed, emitted in self._windows():
            first = np.cumsum(packed.counts) - packed.counts
            for at in np.flatnonzero(packed.rank >= emitted).tolist():
                if not count:
                    return
                count -= 1
                own = packed.order[first[at] : first[at] + packed.counts[at]]
                yield [
                    window.part(*stretch)
                    for stretch in zip(
                        packed.row[own].tolist(), packed.begins[own].tolist(), packed.ends[own].tolist(), strict=True
                    )
                ]
            if not count:
                return

    def _windows(self) -> Iterator[tuple[_Rows, _Packed, int]]:
        """The windows from the cursor on, and how many samples of each are emitted already."""
        emitted = self._state.cursor.samples if isinstance(self._state.cursor, PackedCursor) else 0
        for window in self._rows():
            packed = self._packed(window)
            if emitted >= max(1, packed.bins):
                shard, row = window.pieces[0].origin(0)
                raise SourceError(
                    f"{self._documents.name}: the state stands behind {emitted} samples of the window that begins "
                    f"with row {row} of {self._documents.path(shard)}, but that has {packed.bins}: the files or the "
                    "tokeniser are not what the run began with; put them back, or begin a new run"
                )
            yield window, packed, emitted
            # Not to be held while the next one is read.
            del window, packed
            emitted = 0

    def _rows(self) -> Iterator[_Rows]:
        """The rows of each window, from the cursor's on."""
        held: list[TokenizedRows] = []
        rows = tokens = 0
        for piece in self._documents.read(self._state.cursor, mark_excluded=True):
            if held and (piece.epoch != held[-1].epoch or self._closes(held[-1].shard, piece.shard)):
                yield _joined(held)
                held, rows, tokens = [], 0, 0
            at = 0
            while at < len(piece.ends):
                before = int(piece.ends[at - 1]) if at else 0
                reach = int(np.searchsorted(piece.ends, before + self._window.tokens - tokens)) + 1
                end = min(len(piece.ends), at + self._window.rows - rows, reach)
                held.append(piece.cut(end, at))
                rows += end - at
                tokens += int(piece.ends[end - 1]) - before
                at = end
                if rows >= self._window.rows or tokens >= self._window.tokens:
                    yield _joined(held)
                    held, rows, tokens = [], 0, 0
        if held:
            yield _joined(held)

    def _closes(self, before: int, shard: int) -> bool:
        return any(before < closed <= shard for closed in self._closed_before)

    def _packed(self, window: _Rows) -> _Packed:
        width = self.form.width
        lengths = np.diff(window.ends, prepend=0)
        chunks = -(-lengths // width)
        row = np.repeat(np.arange(len(lengths)), chunks)
        # The number of each chunk within its document.
        nth = np.arange(len(row)) - np.repeat(np.cumsum(chunks) - chunks, chunks)
        begins = (window.ends - lengths)[row] + nth * width
        ends = np.minimum(begins + width, window.ends[row])
        placed, bins = best_fit(ends - begins, width)
        # By the window's own name: which its samples are depends on nothing else.
        epoch, part, row_number = window.begin
        key = draw(self._seed, Purpose.PACK, self._source_id, epoch)
        key = draw(key, Purpose.PACK, part, row_number)
        drawn = np.array(draws(key, Purpose.PACK, np.zeros(bins, np.uint64), np.arange(bins, dtype=np.uint64)))
        rank = np.empty(bins, np.int64)
        rank[np.argsort(drawn, kind="stable")] = np.arange(bins)
        own = rank[placed]
        order = np.argsort(own, kind="stable")
        if window.out is not None:
            order = order[~window.out[row[order]]]
        counts = np.bincount(own[order], minlength=bins)
        kept = np.flatnonzero(counts)
        return _Packed(
            begins=begins,
            ends=ends,
            row=row,
            order=order,
            counts=counts[kept],
            rank=kept,
            bins=bins,
            cut=(nth == 0) & (chunks[row] > 1),
        )

    def _block(
        self, window: _Rows, packed: _Packed, here: Flags, number: int, passed: Int64s, tallies: Int64s
    ) -> Block:
        """``here``: which samples of the window; ``passed`` [bins + 1]: the rows counter before each."""
        form = self.form
        first = int(packed.counts[~here].sum())
        order, counts, rank = packed.order[first:], packed.counts[here], packed.rank[here]
        whole = form.assemble(window.ids, packed.begins, packed.ends, order, counts, window.mask)
        size = form.sample_bytes
        samples = [whole[at : at + size] for at in range(0, len(counts) * size, size)]
        lengths = (packed.ends - packed.begins)[order]
        bounds = np.concatenate(([0], np.cumsum(counts)))
        edges = np.concatenate(([0], np.cumsum(lengths)))
        sample_of = np.repeat(np.arange(len(counts)), counts)
        filled = np.diff(edges[bounds])
        starts = edges[:-1] - edges[bounds[:-1]][sample_of] + sample_of * form.length
        if form.padding == "left":
            starts += (form.width - filled)[sample_of]
        cursors = np.empty((len(counts), 5), np.int64)
        cursors[:, :3] = window.begin
        cursors[:, 3] = rank + 1
        cursors[:, 4] = passed[rank + 1]
        # Behind the window's last sample stands its last row, at its end.
        if here[-1]:
            cursors[-1] = *window.end, 0, passed[-1]
        return Block(
            samples,
            hashed(samples, self._source_id),
            SampleOrigins(
                length=form.length,
                first_sample=number,
                cursors=cursors,
                starts=starts.astype(np.uint32),
                bounds=bounds,
                tallies=tallies,
                make_cursor=partial(_cursor, self._documents.cursor_kind),
            ),
        )


def _cursor(
    kind: type[FileCursor] | type[WindowCursor], epoch: int, part: int, row: int, samples: int
) -> FileCursor | WindowCursor | PackedCursor:
    """The cursor after so many samples of a window that begins with a row, or before all of them."""
    first = kind(epoch, part, row)
    return PackedCursor(first, samples) if samples else first


def windowed_samples(lengths: Int64s, form: SampleFormat, window: Window) -> int:
    """How many samples consecutive rows make, of which these are the lengths in tokens."""
    ends, first, found = np.cumsum(lengths), 0, 0
    while first < len(lengths):
        before = int(ends[first - 1]) if first else 0
        behind = min(first + window.rows, int(np.searchsorted(ends, before + window.tokens)) + 1)
        full, rest = np.divmod(lengths[first:behind], form.width)
        found += int(full.sum()) + best_fit(rest[rest > 0], form.width)[1]
        first = behind
    return found


class _Rows(NamedTuple):
    """A window: ``ids`` [tokens], ``ends`` [rows] in them, and the ``pieces`` that they are of."""

    ids: Ids
    ends: Int64s
    mask: Mask | None
    out: Flags | None
    pieces: Sequence[TokenizedRows]

    @property
    def rows(self) -> int:
        return len(self.ends)

    @property
    def begin(self) -> tuple[int, int, int]:
        """Its first row: epoch, shard or window of shuffled rows, row there."""
        first = self.pieces[0]
        return first.epoch, first.shard, first.first_row

    @property
    def end(self) -> tuple[int, int, int]:
        """The row after its last one."""
        last = self.pieces[-1]
        return last.epoch, last.shard, last.first_row + len(last.ends)

    @property
    def row_status(self) -> Int64s:
        """[5]: its bad and its filtered rows, as a ``RowCounts`` counts them."""
        found = np.zeros(5, np.int64)
        for piece in self.pieces:
            if piece.row_status is not None:
                found[:2] += [np.count_nonzero(piece.row_status == fate) for fate in (BAD, FILTERED)]
        return found

    def part(self, row: int, begin: int, end: int) -> DocumentSpan:
        """Tokens ``begin`` to ``end`` of the window's, which are of its row."""
        for piece in self.pieces:
            if row < len(piece.ends):
                return part_of(piece, row, begin, end)
            row, begin, end = row - len(piece.ends), begin - len(piece.ids), end - len(piece.ids)
        raise AssertionError("unreachable: the row is one of the window's")


class _Packed(NamedTuple):
    """The samples of a window. Stretch i of its ids, ``begins[i]`` to ``ends[i]``, is of its row ``row[i]``, and
    ``cut`` where a document begins that is cut.

    ``order``: the stretches in the order of the samples that have any, of which sample k takes ``counts[k]`` and is
    the ``rank[k]``-th of all ``bins``: a bin in which all is excluded is no sample.
    """

    begins: Int64s
    ends: Int64s
    row: Int64s
    order: Int64s
    counts: Int64s
    rank: Int64s
    bins: int
    cut: Flags

    def tallies(self, form: SampleFormat) -> Int64s:
        """[n, 5]: what each sample adds to the source's ``RowCounts``."""
        found = np.zeros((len(self.counts), 5), np.int64)
        if len(self.counts):
            first = np.cumsum(self.counts) - self.counts
            found[:, 2] = form.width - np.add.reduceat((self.ends - self.begins)[self.order], first)
            found[:, 3] = np.add.reduceat(self.cut[self.order].astype(np.int64), first)
        return found


def _joined(pieces: list[TokenizedRows]) -> _Rows:
    before = np.cumsum([0, *(len(piece.ids) for piece in pieces)]).tolist()
    out = mask = None
    if any(piece.out is not None for piece in pieces):
        out = np.concatenate(
            [piece.out if piece.out is not None else np.zeros(len(piece.ends), np.bool_) for piece in pieces]
        )
    if pieces[0].mask is not None:
        mask = np.concatenate([piece.mask for piece in pieces if piece.mask is not None])
    return _Rows(
        ids=np.concatenate([piece.ids for piece in pieces]),
        ends=np.concatenate([piece.ends + begin for piece, begin in zip(pieces, before, strict=False)]),
        mask=mask,
        out=out,
        pieces=pieces,
    )
