"""Consecutive rows as tokens, and what of one row stands in a sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenloom_server.core.state import RowCounts
from tokenloom_server.packing import fim
from tokenloom_server.packing.chunks import Chunks, take_chunks
from tokenloom_server.packing.samples import Flags, Ids, Int64s, Mask

#: What may become of a row beside tokens: it did not decode, or did not pass the source's filter or is a blank line.
BAD, FILTERED = 1, 2

#: Tokens of ``reordered`` rows, and rows, that come at once.
CHUNK_TOKENS = 1 << 18
CHUNK_ROWS = 1 << 16


class DocumentSpan(NamedTuple):
    """Consecutive tokens of one row: those from ``begin`` to ``end`` of the ``row_tokens`` that it has.

    ``middle``: where the row was rearranged to fill in its middle, in which order (``psm`` or ``spm``); tokens are
    counted as they are then.
    """

    epoch: int
    shard: int
    row: int
    begin: int
    end: int
    row_tokens: int
    ids: Ids
    middle: Literal["psm", "spm"] | None = None

    def cut(self, begin: int, end: int) -> DocumentSpan:
        """Those of them from ``begin`` to ``end``, counted from the first."""
        return self._replace(
            begin=self.begin + begin, end=self.begin + end, ids=self.ids[begin:end]
        )


class TokenizedRows(NamedTuple):
    """Consecutive rows of one part of an epoch (see ``reading``) as tokens; mostly a part is a file.

    ``ids`` [tokens] in the run's narrow dtype; ``ends`` [rows] int64, where each row's tokens end in
    ``ids`` (a row may have none); ``part`` and ``first_row``: the part and the row within it, as a cursor has them.
    ``origins`` [2, rows] int64: the file and the row there of each, where that is something else. ``row_status`` [rows]
    uint8: ``BAD`` and ``FILTERED`` for rows that have no tokens because of that, else 0; None where no row is one.
    ``reasons``: of bad rows, by their origin. ``mask`` [tokens] uint8: 0 for a token that no loss counts; None where
    all count. ``excluded`` [rows]: the rows that are left out though they have their tokens, where those were asked
    for; None where none is. ``middles`` [rows] uint8: how a row was rearranged (see ``fim``); None where none was.
    """

    epoch: int
    part: int
    first_row: int
    ids: Ids
    ends: Int64s
    origins: Int64s | None = None
    row_status: npt.NDArray[np.uint8] | None = None
    reasons: Mapping[tuple[int, int], str] = MappingProxyType({})
    mask: Mask | None = None
    excluded: Flags | None = None
    middles: npt.NDArray[np.uint8] | None = None

    @classmethod
    def joined(cls, rows: Sequence[TokenizedRows]) -> TokenizedRows:
        """All of them, one after the other; ``part`` and ``first_row`` are the first one's."""
        return cls.listed(rows)._replace(ids=np.concatenate([each.ids for each in rows]))

    @classmethod
    def listed(cls, rows: Sequence[TokenizedRows]) -> TokenizedRows:
        """As ``joined``, but for the ids, of which it has none."""
        first = rows[0]
        before = np.cumsum([0, *(len(each.ids) for each in rows)])
        return cls(
            first.epoch,
            first.part,
            first.first_row,
            first.ids[:0],
            np.concatenate([each.ends + begin for each, begin in zip(rows, before, strict=False)]),
            np.concatenate([each.row_origins for each in rows], axis=1),
            _joined_flags([(each.row_status, len(each.ends)) for each in rows], np.dtype(np.uint8)),
            {origin: reason for each in rows for origin, reason in each.reasons.items()},
            np.concatenate([each.mask for each in rows if each.mask is not None])
            if first.mask is not None
            else None,
            _joined_flags([(each.excluded, len(each.ends)) for each in rows], np.dtype(np.bool_)),
            _joined_flags([(each.middles, len(each.ends)) for each in rows], np.dtype(np.uint8)),
        )

    @property
    def lengths(self) -> Int64s:
        """[rows]: the tokens of each."""
        return np.diff(self.ends, prepend=0)

    @property
    def given_tokens(self) -> int:
        """Tokens of rows that are not left out."""
        return len(self.ids) if self.excluded is None else int(self.lengths[~self.excluded].sum())

    @property
    def bad_and_filtered(self) -> Int64s:
        """[2]: how many of the rows are bad, and how many filtered."""
        if self.row_status is None:
            return np.zeros(2, np.int64)
        return np.bincount(self.row_status, minlength=3)[1:]

    @property
    def row_origins(self) -> Int64s:
        """[2, rows]: the file, and the row there, of each."""
        if self.origins is not None:
            return self.origins
        rows = np.arange(self.first_row, self.first_row + len(self.ends))
        return np.stack((np.full(len(rows), self.part), rows))

    def origin(self, row: int) -> tuple[int, int]:
        """The file, and the row there, of the ``row``-th of them."""
        if self.origins is None:
            return self.part, self.first_row + row
        shard, row_in_shard = self.origins[:, row].tolist()
        return shard, row_in_shard

    def span(self, row: int, begin: int, end: int) -> DocumentSpan:
        """Tokens ``begin`` to ``end`` of ``ids``, which are of the ``row``-th row."""
        first = int(self.ends[row - 1]) if row else 0
        middle = None if self.middles is None else fim.NAMES.get(int(self.middles[row]))
        return DocumentSpan(
            self.epoch,
            *self.origin(row),
            begin - first,
            end - first,
            int(self.ends[row]) - first,
            self.ids[begin:end],
            middle,
        )

    def cut(self, end: int, first: int = 0) -> TokenizedRows:
        """The rows from ``first`` to before ``end``, counted from the first."""
        begin_token = int(self.ends[first - 1]) if first else 0
        end_token = int(self.ends[end - 1]) if end > first else begin_token
        rows, tokens = slice(first, end), slice(begin_token, end_token)
        return self._replace(
            first_row=self.first_row + first,
            ids=self.ids[tokens],
            ends=self.ends[rows] - begin_token,
            origins=None if self.origins is None else self.origins[:, rows],
            row_status=None if self.row_status is None else self.row_status[rows],
            mask=None if self.mask is None else self.mask[tokens],
            excluded=None if self.excluded is None else self.excluded[rows],
            middles=None if self.middles is None else self.middles[rows],
        )

    def without(self, excluded: Flags) -> TokenizedRows:
        """The same rows; those that are excluded have no tokens."""
        lengths, kept = self.lengths, ~excluded
        tokens = np.repeat(kept, lengths)
        mask = self.mask[tokens] if self.mask is not None else None
        return self._replace(ids=self.ids[tokens], ends=np.cumsum(lengths * kept), mask=mask)

    def chunks(self, tokens: int) -> Iterator[TokenizedRows]:
        """The same rows, about so many tokens at a time at most; where they are more, half as many."""
        if len(self.ids) <= tokens:
            yield self
            return
        for first, end in _cuts(self.ends, tokens // 2):
            yield self.cut(end, first)

    def reordered(
        self, order: Int64s, first_row: int, ids: Chunks, tokens: int
    ) -> Iterator[TokenizedRows]:
        """The rows whose numbers ``order`` has, in that order, some at a time, of at most about so many ``tokens``.
        ``first_row``: of the first one; ``ids``: those of all rows."""
        starts = np.concatenate(([0], self.ends))
        ends = np.cumsum(np.diff(starts)[order])
        origins = self.row_origins
        for first, end in _cuts(ends, min(tokens, CHUNK_TOKENS)):
            begin = int(ends[first - 1]) if first else 0
            rows, count = order[first:end], int(ends[end - 1]) - begin
            yield self._replace(
                first_row=first_row + first,
                ids=ids.take(rows, count),
                ends=ends[first:end] - begin,
                origins=origins[:, rows],
                row_status=None if self.row_status is None else self.row_status[rows],
                mask=None if self.mask is None else take_chunks(self.mask, starts, rows, count),
                excluded=None if self.excluded is None else self.excluded[rows],
            )


def _cuts(ends: Int64s, tokens: int) -> Iterator[tuple[int, int]]:
    """Of rows that end at these tokens, the first and the one after the last of each chunk of at most so many tokens,
    or of one row."""
    first = 0
    while first < len(ends):
        begin = int(ends[first - 1]) if first else 0
        fitting = int(np.searchsorted(ends, begin + tokens, "right"))
        end = min(max(fitting, first + 1), first + CHUNK_ROWS, len(ends))
        yield first, end
        first = end


def _joined_flags(
    columns: Sequence[tuple[npt.NDArray[Any] | None, int]], dtype: np.dtype[Any]
) -> npt.NDArray[Any] | None:
    """Values of rows, one after the other: of each column, and how many there are of it; 0 where a column has none.
    None where all have none."""
    if all(values is None for values, _ in columns):
        return None
    return np.concatenate(
        [np.zeros(count, dtype) if values is None else values for values, count in columns]
    )


def added(**counts: Any) -> Int64s:
    """[n, 5]: what samples add to their source's ``RowCounts``, of which ``counts`` [n] are named; [5] for numbers."""
    return np.stack(np.broadcast_arrays(*RowCounts(**counts)), axis=-1, dtype=np.int64)


class RowCounter:
    """Counts bad and filtered rows of one source by their numbers since the run began, so that the ``RowCounts`` after
    a sample follow from the rows counter there."""

    def __init__(self, start: RowCounts) -> None:
        """``start``: where the source stands."""
        self._base = np.array([start], np.int64)
        # By column, the numbers of rows, ascending.
        self._rows: list[Int64s] = [np.empty(0, np.int64)] * 2

    def add(self, rows: TokenizedRows, first: int) -> None:
        """More rows, the first of which has the number ``first``."""
        if rows.row_status is None:
            return
        for column, status in enumerate((BAD, FILTERED)):
            positions = np.flatnonzero(rows.row_status == status)
            if len(positions):
                self._rows[column] = np.append(self._rows[column], positions + first)

    def after(self, rows: npt.NDArray[np.integer[Any]]) -> Int64s:
        """[n, 5]: the counts where the rows counter is ``rows`` [n], ascending; [1, 5] where all are equal."""
        if not any(map(len, self._rows)):
            return self._base
        counts = np.repeat(self._base, len(rows), axis=0)
        for column, numbers in enumerate(self._rows):
            counts[:, column] += np.searchsorted(numbers, rows)
        return counts

    def forget(self, rows: int) -> None:
        """Counts the rows before the number ``rows`` for good: nobody asks for what is before them again."""
        for column, numbers in enumerate(self._rows):
            done = int(np.searchsorted(numbers, rows))
            if done:
                self._base = self._base.copy()
                self._base[0, column] += done
                self._rows[column] = numbers[done:].copy()
