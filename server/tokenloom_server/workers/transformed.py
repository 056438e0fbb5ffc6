"""Texts that a user's function makes other texts of, before they are tokenised."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from tokenloom_server.errors import TokenizerError
from tokenloom_server.sources import arrays
from tokenloom_server.tokenizer.documents import Documents, Encoder
from tokenloom_server.workers.processes import Transform, TransformFailed, rows_named


class TransformEncoder:
    """Implements ``Encoder``: a function makes one text of each, and another encoder takes these. As thread-safe as
    that one."""

    def __init__(self, transform: Transform, encoder: Encoder) -> None:
        self._transform = transform
        self._encoder = encoder

    def encode(self, column: Any, first_row: int, shard: int) -> Documents:
        """Rows without text, also bad and filtered ones, do not reach the function, and stay without tokens.

        Raises ``TokenizerError``, naming the rows, where the function fails, ``ConfigError`` where its code has
        changed, and what the other encoder raises.
        """
        texts = arrays.filled(arrays.plain(column).cast(pa.large_string()))
        filled = np.diff(arrays.offsets(texts)) > 0
        positions = np.flatnonzero(filled)
        if not len(positions):
            return self._encoder.encode(texts, first_row, shard)
        try:
            made = self._transform.made_of(texts.take(arrays.from_numbers(positions)))
        except TransformFailed as error:
            begin, last = int(positions[error.begin]), int(positions[error.end - 1])
            raise TokenizerError(
                f"{rows_named(first_row + begin, first_row + last)}: transform {self._transform.name} failed: {error}; "
                "mend it, and begin a new run: a run goes on with its own code alone",
                begin,
            ) from None
        if len(positions) < len(texts):
            # Each row's place among the texts; that of a row without one is the empty text after them.
            index = np.where(filled, np.cumsum(filled) - 1, len(positions))
            made = pa.concat_arrays([made, arrays.strings([""])]).take(arrays.from_numbers(index))
        return self._encoder.encode(made, first_row, shard)
