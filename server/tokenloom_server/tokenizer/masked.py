"""Rows of ids with a loss mask beside them: a column of structs, as ``SourceWithLossMask`` reads it."""

from __future__ import annotations

from typing import Any

import numpy as np

from tokenloom_server.errors import TokenizerError
from tokenloom_server.sources import arrays
from tokenloom_server.tokenizer.documents import Documents, Encoder


class MaskedEncoder:
    """Encodes the ids with another encoder, and puts each one's mask beside it.

    A begin-of-text id that is added counts for no loss, and an end-of-text id does if the id before it does.
    """

    def __init__(self, encoder: Encoder, column: str, *, adds_bos: bool) -> None:
        """``column``: of the masks, for messages."""
        self._encoder = encoder
        self._column = column
        self._adds_bos = adds_bos

    def encode(self, column: Any, first_row: int, shard: int) -> Documents:
        """Raises ``TokenizerError``, naming the row, where a mask is not one 0 or 1 for each id, and what the other
        encoder raises."""
        ids, mask = column.field(0), column.field(1)
        documents = self._encoder.encode(ids, first_row, shard)
        lengths = np.diff(documents.ends, prepend=0)
        filled = lengths > 0
        own, masked = arrays.lengths(ids), arrays.lengths(mask)
        other = np.flatnonzero(filled & (own != masked))
        if len(other):
            index = int(other[0])
            raise TokenizerError(
                f"row {first_row + index}: {self._column!r} has {masked[index]} values for {own[index]} ids; "
                "expected one each"
            )
        flat = mask.flatten()
        if flat.null_count:
            raise TokenizerError(
                f"rows from {first_row} on: {self._column!r} has a null among its values; expected 0 or 1"
            )
        # Of rows that give no tokens, nobody asks for the mask.
        values = arrays.numbers(flat)[np.repeat(filled, masked)]
        if len(values) and not 0 <= int(values.min()) <= int(values.max()) <= 1:
            index = int(np.flatnonzero((values < 0) | (values > 1))[0])
            row = int(np.searchsorted(np.cumsum(own * filled), index, side="right"))
            raise TokenizerError(
                f"row {first_row + row}: {self._column!r} has {values[index]}; expected 0 or 1"
            )
        begins = (documents.ends - lengths)[filled]
        inside = np.ones(len(documents.values), np.bool_)
        if self._adds_bos:
            inside[begins] = False
        ended = documents.ends[filled & (lengths - self._adds_bos > own)] - 1
        inside[ended] = False
        full_mask = np.zeros(len(documents.values), np.uint8)
        full_mask[inside] = values
        full_mask[ended] = full_mask[ended - 1]
        return documents._replace(mask=full_mask)
