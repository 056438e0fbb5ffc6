"""A source's documents as tokens, epoch after epoch, from any cursor."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenloom_server.core.state import Cursor, FileCursor, WindowCursor, row_cursor
from tokenloom_server.errors import SourceError, TokenizerError
from tokenloom_server.packing.fim import FillInMiddle
from tokenloom_server.packing.reading import FileOrder, Reading, Windows
from tokenloom_server.packing.window import Held, Reader, Tokens, stretches
from tokenloom_server.sources.base import Rows, Source
from tokenloom_server.tokenizer.documents import Encoder

_log = logging.getLogger(__name__)


class TokenizedRows(NamedTuple):
    """Consecutive rows of one part of an epoch (see ``reading``) as tokens; mostly a part is a file.

    ``ids`` [tokens] in the run's narrow dtype; ``ends`` [rows] int64, where each row's tokens end in
    ``ids`` (a row may have none); ``shard`` and ``first_row``: the part and the place within it, as a cursor has them.
    ``origins`` [2, rows] int64: the file and the row there of each, where that is something else. ``row_status`` [rows]
    uint8: ``BAD`` and ``FILTERED`` for rows that have no tokens because of that, else 0; None where no row is one.
    ``reasons``: of bad rows, by their origin. ``middles`` [rows] uint8: how a row was rearranged (see ``fim``); None
    where none was. ``mask`` [tokens] uint8: 0 for a token that no loss counts; None where all count. ``out`` [rows]:
    the rows that are left out though they have their tokens, where those were asked for; None where none is.
    """

    epoch: int
    shard: int
    first_row: int
    ids: npt.NDArray[np.unsignedinteger]
    ends: npt.NDArray[np.int64]
    origins: npt.NDArray[np.int64] | None = None
    row_status: npt.NDArray[np.uint8] | None = None
    reasons: Mapping[tuple[int, int], str] = MappingProxyType({})
    mask: npt.NDArray[np.uint8] | None = None
    out: npt.NDArray[np.bool_] | None = None
    middles: npt.NDArray[np.uint8] | None = None

    @property
    def given(self) -> int:
        """Tokens of rows that are not left out."""
        return len(self.ids) if self.out is None else int(np.diff(self.ends, prepend=0)[~self.out].sum())

    def origin(self, at: int) -> tuple[int, int]:
        """The file, and the row there, of a row of the piece."""
        if self.origins is None:
            return self.shard, self.first_row + at
        shard, row = self.origins[:, at].tolist()
        return shard, row

    def cut(self, behind: int, first: int = 0) -> TokenizedRows:
        """The rows from ``first`` to ``behind``, counted from the first."""
        begin = int(self.ends[first - 1]) if first else 0
        end = int(self.ends[behind - 1]) if behind > first else begin
        rows, tokens = slice(first, behind), slice(begin, end)
        return self._replace(
            first_row=self.first_row + first,
            ids=self.ids[tokens],
            ends=self.ends[rows] - begin,
            origins=None if self.origins is None else self.origins[:, rows],
            row_status=None if self.row_status is None else self.row_status[rows],
            mask=None if self.mask is None else self.mask[tokens],
            out=None if self.out is None else self.out[rows],
            middles=None if self.middles is None else self.middles[rows],
        )


#: What may become of a row beside tokens: it did not decode, or did not pass the source's filter.
BAD, FILTERED = _FATES = 1, 2

#: A source with at most this many tokens and rows is kept in memory once it was read, for its next epochs.
KEPT_TOKENS = 2**18
#: Epochs in a row without a token after which a lane is taken to have none at all, or it would be read for ever.
EMPTY_EPOCHS = 64


class Documents:
    """The rows of one source, ``epochs`` times over (a fraction: that part of the last pass's rows)."""

    def __init__(
        self,
        name: str,
        source: Source,
        encoder: Encoder,
        epochs: float,
        excluded: Mapping[int, npt.NDArray[np.int64]] | None = None,
        reading: Reading | None = None,
        lane: tuple[int, int] = (0, 1),
        *,
        bad_rows: int = 0,
        max_bad_rows: int | None = None,
        fim: FillInMiddle | None = None,
        may_be_empty: bool = False,
    ) -> None:
        """``excluded``: by shard, ascending, the rows that give no tokens. ``reading``: in which order rows come; None:
        as they lie in the files. ``lane``: (i, n): of each epoch the i-th of n equal parts is read, in rows.
        ``bad_rows``: how many the source, or this lane of it, had before the place that is read from;
        ``max_bad_rows``: how many it may have for each epoch, None for any number. ``may_be_empty``: an epoch without a
        token is no error, but the end."""
        self._name = name
        self._may_be_empty = may_be_empty
        self._bad_rows = bad_rows
        self._max_bad_rows = max_bad_rows
        self._fim = fim
        self._excluded = excluded or {}
        self._source = source
        self._encoder = encoder
        self._reading = reading or FileOrder(source)
        self._lane = lane
        # As the decimal that it is written as: 2.1 - 2 is 0.10000000000000009 in doubles, and would round up.
        exact = Fraction(0) if math.isinf(epochs) else Fraction(repr(epochs))
        self._whole = math.inf if math.isinf(epochs) else math.floor(exact)
        self._fraction = exact - math.floor(exact)

    def read(self, start: Cursor | None, *, mark_excluded: bool = False) -> Iterator[TokenizedRows]:
        """Pieces from the cursor's row on; tokens that were taken of the row are the caller's to skip.

        ``mark_excluded``: rows that are excluded have their tokens, and ``out`` says which these are.

        Raises ``SourceError`` when a whole epoch, or all that is read of the first, has no token at all:
        it would be read for ever, or for nothing; and after the rows before it at a bad row that is one too many.
        """
        bad = self._bad_rows
        for piece in self._pieces(start, mark_excluded):
            if piece.row_status is not None:
                found = np.flatnonzero(piece.row_status == BAD)
                if len(found) and bad == self._bad_rows:
                    _log.warning("%s; bad rows are skipped, and counted", piece.reasons[piece.origin(int(found[0]))])
                # Every pass meets the same bad rows again.
                allowed = math.inf if self._max_bad_rows is None else self._max_bad_rows * (piece.epoch + 1)
                if bad + len(found) > allowed:
                    at = int(found[max(0, int(allowed) - bad)])
                    if at:
                        yield self._in_the_middle(piece.cut(at))
                    raise SourceError(
                        f"{piece.reasons[piece.origin(at)]}; it is bad row number {max(bad, int(allowed)) + 1} of "
                        f"{self._name}, and max_bad_rows allows {allowed} up to epoch {piece.epoch}: repair the file, "
                        "or allow more"
                    )
                bad += len(found)
            yield self._in_the_middle(piece)

    def _in_the_middle(self, piece: TokenizedRows) -> TokenizedRows:
        if self._fim is None:
            return piece
        if piece.origins is None:
            rows = np.arange(piece.first_row, piece.first_row + len(piece.ends))
            shards = np.full(len(rows), piece.shard)
        else:
            shards, rows = piece.origins
        ids, ends, middles = self._fim.rearranged(piece.ids, piece.ends, piece.epoch, shards, rows)
        return piece._replace(ids=ids, ends=ends, middles=middles)

    def _pieces(self, start: Cursor | None, mark_excluded: bool) -> Iterator[TokenizedRows]:
        epoch, first, row, tokens = _begin(start)
        # A row that a sample has begun is read to its end, even if it was excluded since.
        begun = (epoch, first, row) if first is not None and tokens else None
        kept: list[TokenizedRows] | None = None
        #: Epochs in a row that were read as a whole and had no token.
        empty = 0
        reader = Reader(self._source)
        while True:
            begin, limit = self._rows_read(epoch)
            if limit == 0 and epoch:
                return
            if kept is not None and limit is None:
                for piece in kept:
                    yield piece._replace(epoch=epoch)
                epoch += 1
                continue
            found, out, whole = 0, [0, 0], first is None
            # What is kept for the next epochs must be the same in them.
            keep: list[TokenizedRows] | None = [] if whole and limit is None and self._reading.repeats else None
            size = 0
            if first is None and begin:
                first, row = self._place(epoch, begin)
            before = 0 if first is None or limit is None else self._reading.rows_before(epoch, first)
            for part in self._reading.parts(epoch, first):
                left = None if limit is None else limit - before - row
                for piece in self._part(epoch, part, row, left, begun, reader, mark_excluded):
                    found += piece.given
                    if piece.row_status is not None:
                        out = [
                            many + int(np.count_nonzero(piece.row_status == fate))
                            for many, fate in zip(out, _FATES, strict=True)
                        ]
                    size += len(piece.ids) + len(piece.ends)
                    if keep is not None:
                        keep = [*keep, piece] if size <= KEPT_TOKENS else None
                    yield piece
                row = 0
                before += self._reading.rows_in(part) if limit is not None else 0
                if limit is not None and before >= limit:
                    break
            empty = 0 if found or not whole else empty + 1
            if empty and self._may_be_empty:
                return
            if empty and (epoch < self._whole or not epoch) and not self._may_find_some(epoch, empty):
                raise SourceError(self._without_tokens(epoch, out))
            kept = keep
            epoch, first, row = epoch + 1, None, 0

    @property
    def name(self) -> str:
        return self._name

    @property
    def cursor_kind(self) -> type[FileCursor] | type[WindowCursor]:
        """What a cursor among the rows is."""
        return FileCursor if self._reading.windows is None else WindowCursor

    def path(self, shard: int) -> str:
        """Of a file, for people."""
        return self._source.shards[shard].path

    def part(self, part: int, row: int, rows: int) -> Iterator[TokenizedRows]:
        """Pieces of so many rows of one part of the first epoch, from a row of it on."""
        yield from self._part(0, part, row, rows, None, Reader(self._source), mark_excluded=False)

    def check_offset(self, piece: TokenizedRows, offset: int) -> None:
        """Whether a piece's first row has ``offset`` tokens and more: a cursor within a row stands there.

        Raises ``SourceError`` where it has not.
        """
        if offset >= piece.ends[0]:
            shard, row = piece.origin(0)
            raise SourceError(
                f"{self._name}: the state stands at token {offset} of row {row} of "
                f"{self._source.shards[shard].path}, but that row has {piece.ends[0]} tokens: the file or the "
                "tokeniser is not what the run began with; put it back, or begin a new run"
            )

    def _part(
        self,
        epoch: int,
        part: int,
        row: int,
        left: int | None,
        begun: tuple[int, int, int] | None,
        reader: Reader,
        mark_excluded: bool,
    ) -> Iterator[TokenizedRows]:
        """Pieces from a place of a part on; at most ``left`` rows. ``begun``: the place of a row that is read whatever
        became of it since."""
        if self._reading.windows is not None:
            is_begun = (epoch, part, row) == begun
            yield from self._window(self._reading.windows, epoch, part, row, left, is_begun, reader, mark_excluded)
            return
        for rows in self._source.read(part, row):
            if left is not None:
                if left <= 0:
                    return
                rows = rows.cut(0, min(left, len(rows.column)))
                left -= len(rows.column)
            fault = None
            try:
                piece = self._piece(epoch, part, rows)
            except TokenizerError as error:
                if not error.at:
                    raise
                # What lies before the row goes out, so that the run stops at one sample from wherever it is read.
                piece, fault = self._piece(epoch, part, rows.cut(0, error.at)), error
            if part in self._excluded:
                piece = self._marked(piece) if mark_excluded else self._without_excluded(piece, begun)
            yield piece
            if fault is not None:
                raise fault

    def _window(
        self,
        windows: Windows,
        epoch: int,
        window: int,
        row: int,
        left: int | None,
        is_begun: bool,
        reader: Reader,
        mark_excluded: bool,
    ) -> Iterator[TokenizedRows]:
        first = 0
        for number, held in enumerate(stretches(reader, windows.passages(epoch, window), self._lane[1])):
            count = sum(len(each.rows.column) for each in held)
            skipped = max(0, row - first)
            if skipped < count:
                if left is not None and left <= 0:
                    return
                order = windows.permutation(epoch, window, number, count)
                own = int(order[skipped]) if is_begun and first <= row else None
                tokens = self._held(held, own, mark_excluded)
                order = order[skipped:] if left is None else order[skipped : skipped + left]
                begin = first + skipped
                for part in tokens.taken(order):
                    yield TokenizedRows(epoch, window, begin, *part)
                    begin += len(part.ends)
                left = None if left is None else left - len(order)
            first += count

    def _held(self, held: deque[Held], begun: int | None, mark_excluded: bool) -> Tokens:
        """The tokens of rows that are held, which go meanwhile. ``begun``: which of them is read in any case."""
        found, before = [], 0
        while held:
            shard, rows = held.popleft()
            piece = self._piece(0, shard, rows)
            count = len(piece.ends)
            if shard in self._excluded and mark_excluded:
                piece = self._marked(piece)
            elif shard in self._excluded:
                at = -1 if begun is None else begun - before
                own = (0, shard, rows.first_row + at) if 0 <= at < count else None
                piece = self._without_excluded(piece, own)
            lies = np.stack((np.full(count, shard), np.arange(rows.first_row, rows.first_row + count)))
            found.append(Tokens(piece.ids, piece.ends, lies, piece.row_status, piece.reasons, piece.mask, piece.out))
            before += count
        return Tokens.joined(found)

    def _piece(self, epoch: int, shard: int, rows: Rows) -> TokenizedRows:
        where = f"{self._name}: {self._source.shards[shard].path}"
        try:
            documents = self._encoder.encode(rows.column, rows.first_row, shard)
        except TokenizerError as error:
            raise TokenizerError(f"{where}: {error}", error.at) from None
        piece = TokenizedRows(epoch, shard, rows.first_row, documents.values, documents.ends, mask=documents.mask)
        if not rows.bad and not documents.bad and rows.filtered is None:
            return piece
        reasons = {row.position: row.reason for row in rows.bad}
        reasons |= {row.position: f"{where}: {row.reason}" for row in documents.bad}
        row_status = np.zeros(len(rows.column), np.uint8)
        if rows.filtered is not None:
            row_status[rows.filtered] = FILTERED
        row_status[list(reasons)] = BAD
        return piece._replace(
            row_status=row_status, reasons={piece.origin(at): reason for at, reason in reasons.items()}
        )

    def _without_excluded(self, piece: TokenizedRows, begun: tuple[int, int, int] | None) -> TokenizedRows:
        rows = self._excluded[piece.shard]
        first, behind = np.searchsorted(rows, (piece.first_row, piece.first_row + len(piece.ends)))
        out = rows[first:behind] - piece.first_row
        if begun is not None and (piece.epoch, piece.shard) == begun[:2]:
            out = out[out != begun[2] - piece.first_row]
        if not len(out):
            return piece
        lengths = np.diff(piece.ends, prepend=0)
        keep = np.ones(len(lengths), np.bool_)
        keep[out] = False
        kept = np.repeat(keep, lengths)
        mask = piece.mask[kept] if piece.mask is not None else None
        if piece.row_status is not None:
            piece = piece._replace(
                row_status=piece.row_status * keep
            )  # nobody asks what became of a row that is left out
        return piece._replace(ids=piece.ids[kept], ends=np.cumsum(lengths * keep), mask=mask)

    def _marked(self, piece: TokenizedRows) -> TokenizedRows:
        rows = self._excluded[piece.shard]
        first, behind = np.searchsorted(rows, (piece.first_row, piece.first_row + len(piece.ends)))
        if first == behind:
            return piece
        out = np.zeros(len(piece.ends), np.bool_)
        out[rows[first:behind] - piece.first_row] = True
        row_status = piece.row_status * ~out if piece.row_status is not None else None
        return piece._replace(out=out, row_status=row_status)

    def _may_find_some(self, epoch: int, empty: int) -> bool:
        """Whether a lane may have tokens yet, although its rows of so many epochs had none: it has others in each
        epoch, and few of a source's rows may have any, by its filter say. At a run's beginning it is told still, when
        fewer lanes can be chosen."""
        return self._lane[1] > 1 and not self._reading.repeats and epoch > 0 and empty < EMPTY_EPOCHS

    def _without_tokens(self, epoch: int, out: Sequence[int]) -> str:
        """``out``: how many rows were bad, and how many filtered."""
        why = f" ({out[0]} of them are bad, and {out[1]} do not pass the filter)" if any(out) else ""
        lane, lanes = self._lane
        if lanes > 1:
            return (
                f"{self._name}: lane {lane} of {lanes} has no token in any of its rows of epoch {epoch}; read the "
                f"source in fewer lanes{why}"
            )
        return (
            f"{self._name}: epoch {epoch} has no token in any of its rows; "
            f"check that the column is the right one and is not empty{why}"
        )

    def _rows_read(self, epoch: int) -> tuple[int, int | None]:
        """Which rows of an epoch are read, counted in its order: from the one up to the other, or to its end."""
        limit = self._row_limit(epoch)
        lane, lanes = self._lane
        if lanes == 1 or limit == 0:
            return 0, limit
        rows = self._reading.rows if limit is None else limit
        begin, end = rows * lane // lanes, rows * (lane + 1) // lanes
        if limit is None:
            begin, end = self._reading.near(begin), end if lane == lanes - 1 else self._reading.near(end)
        return begin, end

    def _place(self, epoch: int, rows: int) -> tuple[int, int]:
        """The part, and the row there, before which so many rows of an epoch lie."""
        part = 0
        for part in self._reading.parts(epoch):
            if rows < self._reading.rows_in(part):
                break
            rows -= self._reading.rows_in(part)
        return part, rows

    def _row_limit(self, epoch: int) -> int | None:
        """Rows of this epoch that are read; None for all, 0 after the last epoch."""
        if epoch < self._whole:
            return None
        if epoch > self._whole or not self._fraction:
            return 0
        # Only a fraction needs the number of rows, and so every shard's index.
        return math.ceil(self._fraction * self._reading.rows)


def _begin(cursor: Cursor | None) -> tuple[int, int | None, int, int]:
    """Epoch, part (None: the epoch's first), row in it, and the tokens that were taken of that row."""
    match row_cursor(cursor):
        case None:
            return 0, None, 0, 0
        case FileCursor(epoch, part, row, tokens) | WindowCursor(epoch, part, row, tokens):
            return epoch, part, row, tokens
    raise AssertionError("batches of rows are not read as documents")
