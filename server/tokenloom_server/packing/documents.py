"""A source's documents as tokens, epoch after epoch, from any cursor."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from tokenloom_server.core.numbers import whole_and_part
from tokenloom_server.core.state import Cursor, FileCursor, WindowCursor, tokens_in_row
from tokenloom_server.errors import SourceError, TokenizerError
from tokenloom_server.packing.chunks import Chunks
from tokenloom_server.packing.fim import FillInMiddle
from tokenloom_server.packing.reading import (
    FileOrder,
    Reading,
    RowRange,
    Windows,
    begin_of,
    nth_row,
)
from tokenloom_server.packing.samples import Int64s
from tokenloom_server.packing.tokenized_rows import BAD, FILTERED, DocumentSpan, TokenizedRows
from tokenloom_server.packing.window import FileRows, RangeReader, portions
from tokenloom_server.sources import columns
from tokenloom_server.sources.base import Content, Rows, Source
from tokenloom_server.tokenizer.documents import DocumentEncoder, Encoder

_log = logging.getLogger(__name__)

#: A source with at most this many tokens and rows is kept in memory once it was read, for its next epochs.
KEPT_TOKENS = 2**18
#: Epochs in a row without a token after which a lane is taken to have none at all, or it would be read for ever.
EMPTY_EPOCHS = 64


class _Part(NamedTuple):
    """Rows of a part of an epoch, from one on to before ``end``. ``begun``: that one is read whatever became of it
    since. ``mark_excluded``: see ``Documents.read``."""

    epoch: int
    number: int
    row: int
    end: int | None
    begun: bool = False
    mark_excluded: bool = False


class Documents:
    """The rows of one source, ``epochs`` times over (a fraction: that part of the last pass's rows)."""

    def __init__(
        self,
        name: str,
        source: Source,
        encoder: Encoder,
        epochs: float,
        excluded: Mapping[int, Int64s] | None = None,
        reading: Reading | None = None,
        lane: tuple[int, int] = (0, 1),
        *,
        bad_rows: int = 0,
        max_bad_rows: int | None = None,
        fim: FillInMiddle | None = None,
        may_be_empty: bool = False,
        left_out_first: Mapping[int, Int64s] | None = None,
        joined_bytes: int = 0,
        joins_at_once: bool = False,
        chunk_tokens: int = columns.PIECE_IDS,
        announce: Callable[[Iterator[RowRange]], None] | None = None,
    ) -> None:
        """``excluded``: by shard, ascending, the rows without tokens. ``reading``: in which order rows come; None: as
        they lie in the files. ``lane``: (i, n): of each epoch the i-th of n equal parts is read, in rows. ``bad_rows``:
        how many the source, or this lane of it, had before the place that is read from; ``max_bad_rows``: how many it
        may have for each epoch, None for any number. ``may_be_empty``: an epoch without a token is no error, but the
        end. ``left_out_first``: the rows that give none in the first epoch, where these are not the ``excluded`` alone.
        ``joined_bytes``: texts of consecutive rows are encoded together until they have so many, from one piece on
        twice as much each time, or ``joins_at_once``. ``chunk_tokens``: ids are given so many at once, at most, but at
        least a row. ``announce`` gets, at its beginning, the rows of an epoch."""
        self.name = name
        self._may_be_empty = may_be_empty
        self._bad_rows = bad_rows
        self._max_bad_rows = max_bad_rows
        self._fim = fim
        self._excluded = excluded or {}
        self._left_out_first = left_out_first
        self._joined_bytes = joined_bytes
        self._first_joined_bytes = joined_bytes if joins_at_once else 1
        self._chunk_tokens = chunk_tokens
        self._announce = announce
        self._source = source
        self._encoder = encoder
        #: What puts begin- and end-of-text ids around documents of ids, once these are in their order and cut into
        #: chunks: these ids alone are copied.
        self._late = (
            encoder
            if isinstance(encoder, DocumentEncoder) and source.content is Content.IDS
            else None
        )
        self._reading = reading or FileOrder(source)
        self._lane = lane
        self._whole, self._fraction = whole_and_part(epochs)

    @property
    def cursor_kind(self) -> type[FileCursor] | type[WindowCursor]:
        """What a cursor among the rows is."""
        return WindowCursor if isinstance(self._reading, Windows) else FileCursor

    def path(self, shard: int) -> str:
        """The path of a file, for messages."""
        return self._source.shards[shard].path

    def read(self, start: Cursor | None, *, mark_excluded: bool = False) -> Iterator[TokenizedRows]:
        """Rows from the cursor's on, some at a time; tokens that were taken of its row are the caller's to skip.

        ``mark_excluded``: rows that are excluded have their tokens, and ``excluded`` says which these are.

        Raises ``SourceError`` when a whole epoch, or all that is read of the first, has no token at all:
        it would be read for ever, or for nothing; and after the rows before it at a bad row that is one too many.
        """
        bad = self._bad_rows
        for rows in self._epochs(start, mark_excluded):
            if rows.row_status is not None:
                bad_here = np.flatnonzero(rows.row_status == BAD)
                if len(bad_here) and bad == self._bad_rows:
                    _log.warning(
                        "%s; bad rows are skipped, and counted",
                        rows.reasons[rows.origin(int(bad_here[0]))],
                    )
                # Every pass meets the same bad rows again.
                allowed = (
                    math.inf
                    if self._max_bad_rows is None
                    else self._max_bad_rows * (rows.epoch + 1)
                )
                if bad + len(bad_here) > allowed:
                    first_over = int(bad_here[max(0, int(allowed) - bad)])
                    if first_over:
                        yield self._with_fill_in_middle(rows.cut(first_over))
                    raise SourceError(
                        f"{rows.reasons[rows.origin(first_over)]}; it is bad row number {max(bad, int(allowed)) + 1} "
                        f"of {self.name}, and max_bad_rows allows {allowed} up to epoch {rows.epoch}: repair the file, "
                        "or allow more"
                    )
                bad += len(bad_here)
            yield self._with_fill_in_middle(rows)

    def read_from(self, start: Cursor | None) -> Iterator[tuple[TokenizedRows, int]]:
        """As ``read``, with how many tokens of the first row were taken before; 0 of all rows after it. Raises
        ``SourceError`` where the row has fewer."""
        taken = tokens_in_row(start)
        for rows in self.read(start):
            if taken and taken >= rows.ends[0]:
                shard, row = rows.origin(0)
                raise SourceError(
                    f"{self.name}: the state stands at token {taken} of row {row} of {self.path(shard)}, but that row "
                    f"has {rows.ends[0]} tokens: the file or the tokeniser is not what the run began with; put it "
                    "back, or begin a new run"
                )
            yield rows, taken
            taken = 0

    def spans(self, start: Cursor | None, tokens: int) -> Iterator[DocumentSpan]:
        """The next ``tokens`` tokens after a cursor, row by row; fewer where the source ends. Rows without tokens have
        no span. Reads hardly more than that. Raises as ``read_from`` does."""
        for rows, skipped in self.read_from(start) if tokens else ():
            begin = skipped
            for row, end in enumerate(rows.ends.tolist()):
                span_end = min(end, begin + tokens)
                if span_end > begin:
                    yield rows.span(row, begin, span_end)
                    tokens -= span_end - begin
                if not tokens:
                    return
                begin = end

    def read_part(self, part: int, row: int, rows: int) -> Iterator[TokenizedRows]:
        """So many rows of one part of the first epoch, from a row of it on."""
        yield from self._part(_Part(0, part, row, row + rows), RangeReader(self._source))

    def _with_fill_in_middle(self, rows: TokenizedRows) -> TokenizedRows:
        """Some of the rows rearranged, where the source is for fill-in-the-middle."""
        if self._fim is None:
            return rows
        ids, ends, middles = self._fim.rearranged(
            rows.ids, rows.ends, rows.epoch, *rows.row_origins
        )
        return rows._replace(ids=ids, ends=ends, middles=middles)

    def _epochs(self, start: Cursor | None, mark_excluded: bool) -> Iterator[TokenizedRows]:
        epoch, first, row = begin_of(start)
        # A row that a sample has begun is read to its end, even if it was excluded since.
        begun = tokens_in_row(start) > 0
        kept: list[TokenizedRows] | None = None
        #: How many epochs in a row were read as a whole and had no token.
        empty_epochs = 0
        reason = ""
        reader = RangeReader(self._source)
        while True:
            begin, end_row = self._row_bounds(epoch)
            if end_row == 0 and epoch:
                return
            if kept is not None and end_row is None:
                for rows in kept:
                    yield rows._replace(epoch=epoch)
                epoch += 1
                continue
            tokens, size, bad_and_filtered, is_whole = 0, 0, np.zeros(2, np.int64), first is None
            # What is kept for the next epochs must be the same in them.
            repeats = self._reading.repeats and (epoch > 0 or self._left_out_first is None)
            kept = [] if is_whole and end_row is None and repeats else None
            if first is None and begin:
                first, row = nth_row(self._reading, epoch, begin)
            if self._announce is not None:
                self._announce(self._ranges(epoch, self._parts(epoch, first, row, end_row)))
            for part, first_row, end in self._parts(epoch, first, row, end_row):
                for rows in self._part(
                    _Part(epoch, part, first_row, end, begun, mark_excluded), reader
                ):
                    tokens += rows.given_tokens
                    bad_and_filtered += rows.bad_and_filtered
                    reason = reason or next(iter(rows.reasons.values()), "")
                    size += len(rows.ids) + len(rows.ends)
                    if kept is not None:
                        kept = [*kept, rows] if size <= KEPT_TOKENS else None
                    yield rows
                begun = False
            empty_epochs = 0 if tokens or not is_whole else empty_epochs + 1
            if empty_epochs > 0 and self._may_be_empty:
                return
            is_required = epoch < self._whole if epoch else self._left_out_first is None
            if (
                empty_epochs > 0
                and is_required
                and not self._may_have_tokens_later(epoch, empty_epochs)
            ):
                raise SourceError(self._without_tokens(epoch, reason, *bad_and_filtered.tolist()))
            epoch, first, row = epoch + 1, None, 0

    def _parts(
        self, epoch: int, first: int | None, row: int, end_row: int | None
    ) -> Iterator[tuple[int, int, int | None]]:
        """The parts of an epoch that are read, from a row of the ``first`` of them on; of each the row that is read
        first, and the one before which reading ends."""
        before = 0 if first is None or end_row is None else self._reading.rows_before(epoch, first)
        for part in self._reading.parts(epoch, first):
            yield part, row, None if end_row is None else end_row - before
            row = 0
            before += self._reading.rows_in(part) if end_row is not None else 0
            if end_row is not None and before >= end_row:
                return

    def _ranges(
        self, epoch: int, parts: Iterator[tuple[int, int, int | None]]
    ) -> Iterator[RowRange]:
        for part, row, end in parts:
            yield from self._reading.ranges(epoch, part, row, end)

    def _part(self, part: _Part, reader: RangeReader) -> Iterator[TokenizedRows]:
        if isinstance(self._reading, Windows):
            yield from self._window(self._reading, part, reader)
            return
        for rows in self._rows(part.number, part.row, part.end):
            fault = None
            try:
                tokenized = self.tokenized(part.epoch, part.number, rows)
            except TokenizerError as error:
                if not error.at:
                    raise
                # What lies before the row goes out, so that the run stops at one sample from wherever it is read.
                before = rows.cut(0, error.at)
                tokenized, fault = self.tokenized(part.epoch, part.number, before), error
            del rows
            tokenized = self._leave_out_excluded(
                tokenized, part.mark_excluded, part.row if part.begun else None
            )
            chunks = columns.let_go(
                [tokenized] if self._late is None else tokenized.chunks(self._chunk_tokens)
            )
            del tokenized
            yield from map(self._bounded, chunks)
            if fault is not None:
                raise fault

    def _rows(self, shard: int, row: int, end: int | None) -> Iterator[Rows]:
        """Rows of a file from one on to before ``end``; texts as many together as ``joined_bytes`` says."""
        read = self._source.read(shard, row) if end is None or row < end else iter(())
        return columns.joined_texts(read, end, self._first_joined_bytes, self._joined_bytes)

    def _window(
        self, windows: Windows, part: _Part, reader: RangeReader
    ) -> Iterator[TokenizedRows]:
        epoch, window, row, end, begun, mark_excluded = part
        first, check = 0, partial(self._tokenize_portion, epoch, mark_excluded, None)
        for number, portion in enumerate(
            portions(reader, windows.row_ranges(epoch, window), self._lane[1], check)
        ):
            count = sum(len(each.rows.column) for each in portion)
            skipped = max(0, row - first)
            if end is not None and first + skipped >= end:
                return
            if skipped < count:
                order = windows.permutation(epoch, window, number, count)
                begun_row = int(order[skipped]) if begun and first <= row else None
                tokenized = self._tokenize_portion(epoch, mark_excluded, begun_row, portion)
                ids = Chunks([(each.ids, each.ends) for each in tokenized])
                listed = TokenizedRows.listed(tokenized)._replace(part=window)
                del tokenized
                order = order[skipped:] if end is None else order[skipped : end - first]
                # The window's ids are held beside them.
                yield from map(
                    self._bounded,
                    listed.reordered(order, first + skipped, ids, self._chunk_tokens // 4),
                )
            first += count

    def _bounded(self, rows: TokenizedRows) -> TokenizedRows:
        """Rows with their begin- and end-of-text ids, where those are not there yet."""
        if self._late is None:
            return rows
        ids, ends = self._late.bounded(rows.ids, rows.ends)
        return rows._replace(ids=ids, ends=ends)

    def _tokenize_portion(
        self, epoch: int, mark_excluded: bool, begun: int | None, portion: deque[FileRows]
    ) -> list[TokenizedRows]:
        """The tokens of a window's portion; ids as they lie in files (``_late``): these are copied once, into their
        order. Empties it on the way, so that rows and tokens are not held both. ``begun``: the position of the row that
        is read even if it is excluded."""
        tokenized, before = [], 0
        while portion:
            shard, rows = portion.popleft()
            begun_row = None if begun is None else rows.first_row + begun - before
            tokens = self.tokenized(epoch, shard, rows)
            tokenized.append(self._leave_out_excluded(tokens, mark_excluded, begun_row))
            before += len(rows.column)
        return tokenized

    def tokenized(self, epoch: int, shard: int, rows: Rows) -> TokenizedRows:
        """The tokens of rows; ids as they lie in files where they are bounded later."""
        where = f"{self.name}: {self.path(shard)}"
        try:
            encode = self._encoder.encode if self._late is None else self._late.unbounded
            documents = encode(rows.column, rows.first_row, shard)
        except TokenizerError as error:
            raise TokenizerError(f"{where}: {error}", error.at) from None
        tokenized = TokenizedRows(
            epoch, shard, rows.first_row, documents.values, documents.ends, mask=documents.mask
        )
        if not rows.bad and not documents.bad and rows.filtered is None:
            return tokenized
        reasons = {row.position: row.reason for row in rows.bad}
        reasons |= {row.position: f"{where}: {row.reason}" for row in documents.bad}
        row_status = np.zeros(len(rows.column), np.uint8)
        if rows.filtered is not None:
            row_status[rows.filtered] = FILTERED
        row_status[list(reasons)] = BAD
        reasons_by_origin = {tokenized.origin(row): reason for row, reason in reasons.items()}
        return tokenized._replace(row_status=row_status, reasons=reasons_by_origin)

    def _leave_out_excluded(
        self, rows: TokenizedRows, mark: bool, begun: int | None
    ) -> TokenizedRows:
        """Rows of a file without the tokens of those that are excluded; with ``mark`` all have their tokens, and
        ``excluded`` says which these are. ``begun``: the row of the file that is read even if it is excluded."""
        by_shard = (
            self._excluded if rows.epoch or self._left_out_first is None else self._left_out_first
        )
        if rows.part not in by_shard:
            return rows
        numbers = by_shard[rows.part]
        first, end = np.searchsorted(numbers, (rows.first_row, rows.first_row + len(rows.ends)))
        excluded = np.zeros(len(rows.ends), np.bool_)
        excluded[numbers[first:end] - rows.first_row] = True
        if begun is not None and 0 <= begun - rows.first_row < len(excluded):
            excluded[begun - rows.first_row] = False
        if not excluded.any():
            return rows
        # An excluded row counts neither as bad nor as filtered.
        row_status = rows.row_status * ~excluded if rows.row_status is not None else None
        rows = rows._replace(row_status=row_status)
        return rows._replace(excluded=excluded) if mark else rows.without(excluded)

    def _may_have_tokens_later(self, epoch: int, empty_epochs: int) -> bool:
        """Whether a lane may still have tokens, although its rows of the last ``empty_epochs`` epochs had none: a
        shuffle gives it other rows in each epoch, and where a filter takes most of them, some epochs have none. Not in
        the run's first epoch: there an error tells at once, while fewer lanes can still be chosen."""
        return (
            self._lane[1] > 1
            and not self._reading.repeats
            and epoch > 0
            and empty_epochs < EMPTY_EPOCHS
        )

    def _without_tokens(self, epoch: int, reason: str, bad: int, filtered: int) -> str:
        why = (
            f" ({bad} of them are bad, and {filtered} are left out by the filter or blank)"
            if bad or filtered
            else ""
        )
        why += reason and f"; the first bad one: {reason}"
        lane, lanes = self._lane
        if lanes > 1:
            return (
                f"{self.name}: lane {lane} of {lanes} has no token in any of its rows of epoch {epoch}; read the "
                f"source in fewer lanes{why}"
            )
        return (
            f"{self.name}: epoch {epoch} has no token in any of its rows; "
            f"check that the column is the right one and is not empty{why}"
        )

    def _row_bounds(self, epoch: int) -> tuple[int, int | None]:
        """(begin, end) of the rows that this lane reads of an epoch, counted in the epoch's order; end is None for the
        epoch's own, 0 after the last epoch."""
        row_count = self._rows_of_epoch(epoch)
        lane, lanes = self._lane
        if lanes == 1 or row_count == 0:
            return 0, row_count
        rows = self._reading.rows if row_count is None else row_count
        begin, end = rows * lane // lanes, rows * (lane + 1) // lanes
        if row_count is None:
            begin, end = (
                self._reading.near(begin),
                end if lane == lanes - 1 else self._reading.near(end),
            )
        return begin, end

    def _rows_of_epoch(self, epoch: int) -> int | None:
        """How many rows of this epoch all lanes read; None for all, 0 after the last epoch."""
        if epoch < self._whole:
            return None
        if epoch > self._whole or not self._fraction:
            return 0
        # Only a fraction needs the number of rows, and so every shard's index.
        return math.ceil(self._fraction * self._reading.rows)
