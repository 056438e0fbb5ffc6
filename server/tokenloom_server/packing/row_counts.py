"""What a source's rows add to its tally: those that are bad, and those that its filter took out."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tokenloom_server.core.state import RowCounts
from tokenloom_server.packing.documents import BAD, FILTERED, TokenizedRows

_Int64s = npt.NDArray[np.int64]


class RowTallies:
    """Counts such rows of one source by their numbers since the run began, so that each sample's tally follows from the
    rows counter after it."""

    def __init__(self, tally: RowCounts) -> None:
        """``tally``: where the source stands."""
        self._base = np.array([tally], np.int64)
        # By column of the tally, the numbers of rows, ascending.
        self._rows: list[_Int64s] = [np.empty(0, np.int64)] * 2

    def add(self, piece: TokenizedRows, first: int) -> None:
        """The rows of a piece, the first of which has the number ``first``."""
        if piece.row_status is None:
            return
        for column, fate in enumerate((BAD, FILTERED)):
            found = np.flatnonzero(piece.row_status == fate)
            if len(found):
                self._rows[column] = np.append(self._rows[column], found + first)

    def behind(self, rows: npt.NDArray[np.integer[Any]]) -> _Int64s:
        """[n, 5]: the tally where the rows counter is ``rows`` [n], ascending; [1, 5] where all are equal."""
        if not any(map(len, self._rows)):
            return self._base
        found = np.repeat(self._base, len(rows), axis=0)
        for column, numbers in enumerate(self._rows):
            found[:, column] += np.searchsorted(numbers, rows)
        return found

    def forget(self, rows: int) -> None:
        """Counts the rows before the number ``rows`` for good: nobody asks for a place before them again."""
        for column, numbers in enumerate(self._rows):
            done = int(np.searchsorted(numbers, rows))
            if done:
                self._base = self._base.copy()
                self._base[0, column] += done
                self._rows[column] = numbers[done:].copy()
