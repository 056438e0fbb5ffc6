"""A source's documents as tokens, epoch after epoch, from any cursor."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tokenloom_server.errors import SourceError, TokenizerError
from tokenloom_server.packing.reading import FileOrder, Reading, Windows
from tokenloom_server.packing.window import Held, Reader, Tokens, stretches
from tokenloom_server.sources.base import Rows, Source
from tokenloom_server.state import Cursor
from tokenloom_server.tokenizer import Documents as Encoded


class Piece(NamedTuple):
    """Consecutive rows of one part of an epoch (see ``reading``) as tokens; mostly a part is a file.

    ``ids`` [tokens] in the run's narrow dtype; ``ends`` [rows] int64, where each row's tokens end in
    ``ids`` (a row may have none); ``shard`` and ``first_row``: the part and the place within it, as a cursor has them.
    ``origins`` [2, rows] int64: the file and the row there of each, where that is something else. ``mask`` [tokens]
    uint8: 0 for a token that no loss counts; None where all count. ``out`` [rows]: the rows whose tokens are left out,
    where they were asked for; None where none is.
    """

    epoch: int
    shard: int
    first_row: int
    ids: npt.NDArray[np.unsignedinteger]
    ends: npt.NDArray[np.int64]
    origins: npt.NDArray[np.int64] | None = None
    mask: npt.NDArray[np.uint8] | None = None
    out: npt.NDArray[np.bool_] | None = None

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


class Encoder(Protocol):
    """How do a source's rows become ids? Told where they lie, since a row may be the end of the process."""

    def encode(self, column: Any, first_row: int, shard: int) -> Encoded:
        """Tokens of an Arrow column that begins at a shard's row. Raises ``TokenizerError``."""


#: A source with at most this many tokens and rows is kept in memory once it was read, for its next epochs.
KEPT_TOKENS = 2**18


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
    ) -> None:
        """``excluded``: by shard, ascending, the rows that give no tokens. ``reading``: in which order rows come; None:
        as they lie in the files. ``lane``: (i, n): of each epoch the i-th of n equal parts is read, in rows."""
        self._name = name
        self._excluded = excluded or {}
        self._source = source
        self._encoder = encoder
        self._reading = reading or FileOrder(source)
        self._lane = lane
        # As the decimal that it is written as: 2.1 - 2 is 0.10000000000000009 in doubles, and would round up.
        exact = Fraction(0) if math.isinf(epochs) else Fraction(repr(epochs))
        self._whole = math.inf if math.isinf(epochs) else math.floor(exact)
        self._fraction = exact - math.floor(exact)

    def read(self, start: Cursor, *, mark_excluded: bool = False) -> Iterator[Piece]:
        """Pieces from the cursor's row on; the row's first ``offset`` tokens are the caller's to skip.

        ``mark_excluded``: rows that are excluded have their tokens, and ``out`` says which these are.

        Raises ``SourceError`` when a whole epoch, or all that is read of the first, has no token at all:
        it would be read for ever, or for nothing.
        """
        epoch, row = start.epoch, start.row
        # A cursor stands behind what was taken, so only the one before all has nothing of a part behind it.
        first = None if (start.shard, row, start.offset) == (0, 0, 0) else start.shard
        # A row that a sample has begun is read to its end, even if it was excluded since.
        begun = (epoch, start.shard, row) if start.offset else None
        kept: list[Piece] | None = None
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
            found, whole = 0, first is None
            # What is kept for the next epochs must be the same in them.
            keep: list[Piece] | None = [] if whole and limit is None and self._reading.repeats else None
            size = 0
            if first is None and begin:
                first, row = self._place(epoch, begin)
            before = 0 if first is None or limit is None else self._reading.rows_before(epoch, first)
            for part in self._reading.parts(epoch, first):
                left = None if limit is None else limit - before - row
                for piece in self._part(Cursor(epoch, part, row), left, begun, reader, mark_excluded):
                    found += piece.given
                    size += len(piece.ids) + len(piece.ends)
                    if keep is not None:
                        keep = [*keep, piece] if size <= KEPT_TOKENS else None
                    yield piece
                row = 0
                before += self._reading.rows_in(part) if limit is not None else 0
                if limit is not None and before >= limit:
                    break
            if whole and not found and (epoch < self._whole or not epoch):
                raise SourceError(self._without_tokens(epoch))
            kept = keep
            epoch, first, row = epoch + 1, None, 0

    @property
    def name(self) -> str:
        return self._name

    def path(self, shard: int) -> str:
        """Of a file, for people."""
        return self._source.shards[shard].path

    def check_offset(self, piece: Piece, offset: int) -> None:
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
        at: Cursor,
        left: int | None,
        begun: tuple[int, int, int] | None,
        reader: Reader,
        mark_excluded: bool,
    ) -> Iterator[Piece]:
        """Pieces from a place of a part on; at most ``left`` rows. ``begun``: the place of a row that is read whatever
        became of it since."""
        if self._reading.windows is not None:
            is_begun = (at.epoch, at.shard, at.row) == begun
            yield from self._window(self._reading.windows, at, left, is_begun, reader, mark_excluded)
            return
        for rows in self._source.read(at.shard, at.row):
            if left is not None:
                if left <= 0:
                    return
                rows = rows.cut(0, min(left, len(rows.column)))
                left -= len(rows.column)
            documents = self._encoded(at.shard, rows)
            piece = Piece(at.epoch, at.shard, rows.first_row, documents.values, documents.ends, mask=documents.mask)
            if at.shard in self._excluded:
                piece = self._marked(piece) if mark_excluded else self._without_excluded(piece, begun)
            yield piece

    def _window(
        self,
        windows: Windows,
        at: Cursor,
        left: int | None,
        is_begun: bool,
        reader: Reader,
        mark_excluded: bool,
    ) -> Iterator[Piece]:
        first = 0
        for number, held in enumerate(stretches(reader, windows.passages(at.epoch, at.shard))):
            count = sum(len(each.rows.column) for each in held)
            skipped = max(0, at.row - first)
            if skipped < count:
                if left is not None and left <= 0:
                    return
                order = windows.permutation(at.epoch, at.shard, number, count)
                own = int(order[skipped]) if is_begun and first <= at.row else None
                tokens = self._held(held, own, mark_excluded)
                order = order[skipped:] if left is None else order[skipped : skipped + left]
                row = first + skipped
                for part in tokens.taken(order):
                    yield Piece(at.epoch, at.shard, row, *part)
                    row += len(part.ends)
                left = None if left is None else left - len(order)
            first += count

    def _held(self, held: deque[Held], begun: int | None, mark_excluded: bool) -> Tokens:
        """The tokens of rows that are held, which go meanwhile. ``begun``: which of them is read in any case."""
        found, before = [], 0
        while held:
            shard, rows = held.popleft()
            documents = self._encoded(shard, rows)
            piece = Piece(0, shard, rows.first_row, documents.values, documents.ends, mask=documents.mask)
            count = len(piece.ends)
            if shard in self._excluded and mark_excluded:
                piece = self._marked(piece)
            elif shard in self._excluded:
                at = -1 if begun is None else begun - before
                own = (0, shard, rows.first_row + at) if 0 <= at < count else None
                piece = self._without_excluded(piece, own)
            lies = np.stack((np.full(count, shard), np.arange(rows.first_row, rows.first_row + count)))
            found.append(Tokens(piece.ids, piece.ends, lies, piece.mask, piece.out))
            before += count
        return Tokens.joined(found)

    def _encoded(self, shard: int, rows: Rows) -> Encoded:
        try:
            return self._encoder.encode(rows.column, rows.first_row, shard)
        except TokenizerError as error:
            raise TokenizerError(f"{self._name}: {self._source.shards[shard].path}: {error}") from None

    def _without_excluded(self, piece: Piece, begun: tuple[int, int, int] | None) -> Piece:
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
        return piece._replace(ids=piece.ids[kept], ends=np.cumsum(lengths * keep), mask=mask)

    def _marked(self, piece: Piece) -> Piece:
        rows = self._excluded[piece.shard]
        first, behind = np.searchsorted(rows, (piece.first_row, piece.first_row + len(piece.ends)))
        if first == behind:
            return piece
        out = np.zeros(len(piece.ends), np.bool_)
        out[rows[first:behind] - piece.first_row] = True
        return piece._replace(out=out)

    def _without_tokens(self, epoch: int) -> str:
        lane, lanes = self._lane
        if lanes > 1:
            return (
                f"{self._name}: lane {lane} of {lanes} has no token in any of its rows of epoch {epoch}; read the "
                "source in fewer lanes"
            )
        return (
            f"{self._name}: epoch {epoch} has no token in any of its rows; "
            "check that the column is the right one and is not empty"
        )

    def _rows_read(self, epoch: int) -> tuple[int, int | None]:
        """Which rows of an epoch are read, counted in its order: from the one up to the other, or to its end."""
        limit = self._row_limit(epoch)
        lane, lanes = self._lane
        if lanes == 1 or limit == 0:
            return 0, limit
        rows = self._reading.rows if limit is None else limit
        return rows * lane // lanes, rows * (lane + 1) // lanes

    def _place(self, epoch: int, rows: int) -> tuple[int, int]:
        """The part, and the row there, before which so many rows of an epoch lie."""
        part = 0
        for part in self._reading.parts(epoch):
            if rows < self._reading.rows_in(part):
                break
            rows -= self._reading.rows_in(part)
        return part, rows

    def _row_limit(self, epoch: int) -> int | None:
        """Rows of this epoch that are read; None for all, 0 behind the last epoch."""
        if epoch < self._whole:
            return None
        if epoch > self._whole or not self._fraction:
            return 0
        # Only a fraction needs the number of rows, and so every shard's index.
        return math.ceil(self._fraction * self._reading.rows)
