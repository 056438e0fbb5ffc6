"""What rows and samples add to their source's ``RowCounts``."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tokenloom_server.core.state import RowCounts
from tokenloom_server.packing.samples import Int64s
from tokenloom_server.packing.tokenized_rows import BAD, FILTERED, TokenizedRows


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
