"""A source's documents as tokens, epoch after epoch, from any cursor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tokenloom_server.errors import SourceError, TokenizerError
from tokenloom_server.sources.base import Source
from tokenloom_server.state import Cursor
from tokenloom_server.tokenizer import Documents as Encoded


class Piece(NamedTuple):
    """Consecutive rows of one shard as tokens.

    ``ids`` [tokens] in the run's narrow dtype; ``ends`` [rows] int64, where each row's tokens end in
    ``ids`` (a row may have none); ``first_row`` within the shard. ``mask`` [tokens] uint8: 0 for a token that no loss
    counts; None where all count. ``out`` [rows]: the rows whose tokens are left out, where they were asked for.
    """

    epoch: int
    shard: int
    first_row: int
    ids: npt.NDArray[np.unsignedinteger]
    ends: npt.NDArray[np.int64]
    mask: npt.NDArray[np.uint8] | None = None
    out: npt.NDArray[np.bool_] | None = None

    @property
    def given(self) -> int:
        """Tokens of rows that are not left out."""
        return len(self.ids) if self.out is None else int(np.diff(self.ends, prepend=0)[~self.out].sum())


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
    ) -> None:
        """``excluded``: by shard, ascending, the rows that give no tokens."""
        self._name = name
        self._excluded = excluded or {}
        self._source = source
        self._encoder = encoder
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
        epoch, shard, row = start.epoch, start.shard, start.row
        # A row that a sample has begun is read to its end, even if it was excluded since.
        begun = (epoch, shard, row) if start.offset else None
        kept: list[Piece] | None = None
        while True:
            limit = self._row_limit(epoch)
            if limit == 0 and epoch:
                return
            if kept is not None and limit is None:
                for piece in kept:
                    yield piece._replace(epoch=epoch)
                epoch += 1
                continue
            # What is kept for the next epochs must be the same in them.
            found, whole = 0, (shard, row) == (0, 0) and (epoch, shard, row) != begun
            keep: list[Piece] | None = [] if whole and limit is None else None
            size = 0
            before = self._rows_before(shard) if limit is not None else 0
            while shard < len(self._source.shards):
                left = None if limit is None else limit - before - row
                for piece in self._shard(epoch, shard, row, left):
                    if shard in self._excluded:
                        piece = self._marked(piece) if mark_excluded else self._without_excluded(piece, begun)
                    found += piece.given
                    size += len(piece.ids) + len(piece.ends)
                    if keep is not None:
                        keep = [*keep, piece] if size <= KEPT_TOKENS else None
                    yield piece
                before += self._source.row_count(shard) if limit is not None else 0
                if limit is not None and before >= limit:
                    break
                shard, row = shard + 1, 0
            if whole and not found and (limit is None or not epoch):
                raise SourceError(
                    f"{self._name}: epoch {epoch} has no token in any of its rows; "
                    "check that the column is the right one and is not empty"
                )
            kept = keep
            epoch, shard, row = epoch + 1, 0, 0

    @property
    def name(self) -> str:
        return self._name

    def place(self, cursor: Cursor) -> str:
        """A cursor's row, for people."""
        return f"row {cursor.row} of {self._source.shards[cursor.shard].path}"

    def check_offset(self, piece: Piece, offset: int) -> None:
        """Whether a piece's first row has ``offset`` tokens and more: a cursor within a row stands there.

        Raises ``SourceError`` where it has not.
        """
        if offset >= piece.ends[0]:
            raise SourceError(
                f"{self._name}: the state stands at token {offset} of row {piece.first_row} of "
                f"{self._source.shards[piece.shard].path}, but that row has {piece.ends[0]} tokens: the file or the "
                "tokeniser is not what the run began with; put it back, or begin a new run"
            )

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

    def _row_limit(self, epoch: int) -> int | None:
        """Rows of this epoch that are read; None for all, 0 behind the last epoch."""
        if epoch < self._whole:
            return None
        if epoch > self._whole or not self._fraction:
            return 0
        # Only a fraction needs the number of rows, and so every shard's index.
        return math.ceil(self._fraction * self._rows_before(len(self._source.shards)))

    def _rows_before(self, shard: int) -> int:
        return sum(self._source.row_count(i) for i in range(shard))

    def _shard(self, epoch: int, shard: int, row: int, left: int | None) -> Iterator[Piece]:
        for rows in self._source.read(shard, row):
            column = rows.column
            if left is not None:
                if left <= 0:
                    return
                column = column[:left]
                left -= len(column)
            try:
                documents = self._encoder.encode(column, rows.first_row, shard)
            except TokenizerError as error:
                raise TokenizerError(f"{self._name}: {self._source.shards[shard].path}: {error}") from None
            yield Piece(epoch, shard, rows.first_row, *documents)
