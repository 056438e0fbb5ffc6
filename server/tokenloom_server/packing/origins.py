"""From tokens of a source back to its rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenloom_server.core.state import Cursor, tokens_in_row
from tokenloom_server.packing import fim
from tokenloom_server.packing.documents import Documents, TokenizedRows


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
    ids: npt.NDArray[np.unsignedinteger]
    middle: Literal["psm", "spm"] | None = None

    def cut(self, begin: int, end: int) -> DocumentSpan:
        """Those of them from ``begin`` to ``end``, counted from the first."""
        return self._replace(begin=self.begin + begin, end=self.begin + end, ids=self.ids[begin:end])


def part_of(piece: TokenizedRows, row: int, begin: int, end: int) -> DocumentSpan:
    """Tokens of one row of a piece: those from ``begin`` to ``end`` of the piece's."""
    first = int(piece.ends[row - 1]) if row else 0
    tokens = int(piece.ends[row]) - first
    middle = None if piece.middles is None else fim.NAMES.get(int(piece.middles[row]))
    return DocumentSpan(
        piece.epoch, *piece.origin(row), begin - first, end - first, tokens, piece.ids[begin:end], middle
    )


def parts_behind(documents: Documents, cursor: Cursor | None, tokens: int) -> Iterator[DocumentSpan]:
    """The next ``tokens`` tokens after a cursor, row by row; fewer where the source ends. Rows without tokens have
    no part. Reads at most a piece more. Raises what ``Documents`` does."""
    skip = tokens_in_row(cursor)
    for piece in documents.read(cursor) if tokens else ():
        if skip:
            documents.check_offset(piece, skip)
        begin = 0
        for at, end in enumerate(piece.ends.tolist()):
            first, begin = begin, end
            taken = min(end - first - skip, tokens)
            if taken <= 0:
                continue
            yield part_of(piece, at, first + skip, first + skip + taken)
            tokens -= taken
            skip = 0
            if not tokens:
                return
