"""A source's documents as tokens, epoch after epoch, from any cursor."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tokenloom_server.errors import SourceError, TokenizerError
from tokenloom_server.packing.fim import FillInMiddle
from tokenloom_server.sources.base import Rows, Source
from tokenloom_server.state import Cursor
from tokenloom_server.tokenizer import Documents as Encoded

_log = logging.getLogger(__name__)


class Piece(NamedTuple):
    """Consecutive rows of one shard as tokens.

    ``ids`` [tokens] in the run's narrow dtype; ``ends`` [rows] int64, where each row's tokens end in
    ``ids`` (a row may have none); ``first_row`` within the shard. ``fates`` [rows] uint8: ``BAD`` and ``FILTERED`` for
    rows that have no tokens because of that, else 0; None where no row is one. ``reasons``: of bad rows, by their place
    in the piece. ``middles`` [rows] uint8: how a row was rearranged (see ``fim``); None where none was.
    """

    epoch: int
    shard: int
    first_row: int
    ids: npt.NDArray[np.unsignedinteger]
    ends: npt.NDArray[np.int64]
    fates: npt.NDArray[np.uint8] | None = None
    reasons: Mapping[int, str] = MappingProxyType({})
    middles: npt.NDArray[np.uint8] | None = None

    def cut(self, rows: int) -> Piece:
        """The first rows."""
        ends = self.ends[:rows]
        return self._replace(
            ids=self.ids[: ends[-1] if rows else 0],
            ends=ends,
            fates=None if self.fates is None else self.fates[:rows],
            middles=None if self.middles is None else self.middles[:rows],
        )


class Encoder(Protocol):
    """How do a source's rows become ids? Told where they lie, since a row may be the end of the process."""

    def encode(self, column: Any, first_row: int, shard: int) -> Encoded:
        """Tokens of an Arrow column that begins at a shard's row. Raises ``TokenizerError``."""


#: What may become of a row beside tokens: it did not decode, or did not pass the source's filter.
BAD, FILTERED = _FATES = 1, 2

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
        *,
        bad_rows: int = 0,
        max_bad_rows: int | None = None,
        fim: FillInMiddle | None = None,
    ) -> None:
        """``excluded``: by shard, ascending, the rows that give no tokens. ``bad_rows``: how many the source had before
        the place that is read from; ``max_bad_rows``: how many it may have for each epoch, None for any number."""
        self._name = name
        self._bad_rows = bad_rows
        self._max_bad_rows = max_bad_rows
        self._fim = fim
        self._excluded = excluded or {}
        self._source = source
        self._encoder = encoder
        # As the decimal that it is written as: 2.1 - 2 is 0.10000000000000009 in doubles, and would round up.
        exact = Fraction(0) if math.isinf(epochs) else Fraction(repr(epochs))
        self._whole = math.inf if math.isinf(epochs) else math.floor(exact)
        self._fraction = exact - math.floor(exact)

    def read(self, start: Cursor) -> Iterator[Piece]:
        """Pieces from the cursor's row on; the row's first ``offset`` tokens are the caller's to skip.

        Raises ``SourceError`` when a whole epoch, or all that is read of the first, has no token at all:
        it would be read for ever, or for nothing; and behind the rows before it at a bad row that is one too many.
        """
        bad = self._bad_rows
        for piece in self._pieces(start):
            if piece.fates is not None:
                found = np.flatnonzero(piece.fates == BAD)
                if len(found) and bad == self._bad_rows:
                    _log.warning("%s; bad rows are skipped, and counted", piece.reasons[int(found[0])])
                # Every pass meets the same bad rows again.
                allowed = math.inf if self._max_bad_rows is None else self._max_bad_rows * (piece.epoch + 1)
                if bad + len(found) > allowed:
                    at = int(found[max(0, int(allowed) - bad)])
                    if at:
                        yield self._in_the_middle(piece.cut(at))
                    raise SourceError(
                        f"{piece.reasons[at]}; it is bad row number {max(bad, int(allowed)) + 1} of {self._name}, and "
                        f"max_bad_rows allows {allowed} up to epoch {piece.epoch}: repair the file, or allow more"
                    )
                bad += len(found)
            yield self._in_the_middle(piece)

    def _in_the_middle(self, piece: Piece) -> Piece:
        if self._fim is None:
            return piece
        ids, ends, middles = self._fim.rearranged(piece.ids, piece.ends, piece.epoch, piece.shard, piece.first_row)
        return piece._replace(ids=ids, ends=ends, middles=middles)

    def _pieces(self, start: Cursor) -> Iterator[Piece]:
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
            found, out, whole = 0, [0, 0], (shard, row) == (0, 0) and (epoch, shard, row) != begun
            keep: list[Piece] | None = [] if whole and limit is None else None
            size = 0
            before = self._rows_before(shard) if limit is not None else 0
            while shard < len(self._source.shards):
                left = None if limit is None else limit - before - row
                for piece in self._shard(epoch, shard, row, left):
                    if shard in self._excluded:
                        piece = self._without_excluded(piece, begun)
                    found += len(piece.ids)
                    if piece.fates is not None:
                        out = [
                            many + int(np.count_nonzero(piece.fates == fate))
                            for many, fate in zip(out, _FATES, strict=True)
                        ]
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
                    + (f" ({out[0]} of them are bad, and {out[1]} do not pass the filter)" if any(out) else "")
                )
            kept = keep
            epoch, shard, row = epoch + 1, 0, 0

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
        # Nobody asks what became of a row that is left out.
        fates = piece.fates * keep if piece.fates is not None else None
        piece = piece._replace(fates=fates)
        return piece._replace(ids=piece.ids[np.repeat(keep, lengths)], ends=np.cumsum(lengths * keep))

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
            if left is not None:
                if left <= 0:
                    return
                rows = rows.cut(0, min(left, len(rows.column)))
                left -= len(rows.column)
            where = f"{self._name}: {self._source.shards[shard].path}"
            try:
                documents = self._encoder.encode(rows.column, rows.first_row, shard)
            except TokenizerError as error:
                raise TokenizerError(f"{where}: {error}") from None
            fates, reasons = _fates(rows, documents, where)
            yield Piece(epoch, shard, rows.first_row, documents.values, documents.ends, fates, reasons)


def _fates(rows: Rows, documents: Encoded, where: str) -> tuple[npt.NDArray[np.uint8] | None, Mapping[int, str]]:
    """What became of rows beside tokens, and why those are bad that are."""
    if not rows.bad and not documents.bad and rows.filtered is None:
        return None, {}
    reasons = {row.at: row.reason for row in rows.bad}
    reasons |= {row.at: f"{where}: {row.reason}" for row in documents.bad}
    fates = np.zeros(len(rows.column), np.uint8)
    if rows.filtered is not None:
        fates[rows.filtered] = FILTERED
    fates[list(reasons)] = BAD
    return fates, dict(sorted(reasons.items()))
