"""Conversations become documents: rendered by the tokeniser's chat template, with the assistant's loss mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from tokenloom_server.errors import TokenizerError
from tokenloom_server.sources import arrays
from tokenloom_server.sources.base import BadRow
from tokenloom_server.tokenizer.documents import Documents, Encoder

if TYPE_CHECKING:  # processes
    from tokenloom_server.tokenizer.chat_processes import ChatProcesses


class ChatEncoder:
    """Implements ``Encoder`` for a column of conversations as text: each the JSON of its messages, and of its tools."""

    def __init__(self, chats: ChatProcesses, encoder: Encoder, *, skip_bad: bool) -> None:
        """``encoder`` takes ids with each id's loss mask beside them, as ``MaskedEncoder`` does."""
        self._chats = chats
        self._encoder = encoder
        self._skip_bad = skip_bad

    def encode(self, column: Any, first_row: int, shard: int) -> Documents:
        """Raises ``TokenizerError``, naming the row, for one that cannot be rendered, unless bad rows are skipped."""
        column = arrays.filled(arrays.plain(column).cast(pa.large_string()))
        texts, spans, bad = list[str](), list[list[tuple[int, int]]](), list[BadRow]()
        for row, (text, said) in enumerate(self._chats.rendered(column, first_row)):
            if isinstance(said, TokenizerError):
                raise said
            if isinstance(said, str):
                bad.append(BadRow(row, f"row {first_row + row}: {said}"))
                if not self._skip_bad:
                    raise TokenizerError(bad[0].reason, row)
            texts.append(text)
            spans.append([] if isinstance(said, str) else said)
        encoded, mask = self._chats.engine.encode_spans(texts, spans)
        begins = np.append(np.int64(0), encoded.ends)
        lists = [arrays.lists(begins, arrays.from_numbers(values)) for values in (encoded.values, mask)]
        ids = pa.StructArray.from_arrays(lists, ["ids", "mask"])
        documents = self._encoder.encode(ids, first_row, shard)
        return documents._replace(bad=tuple(sorted((*documents.bad, *bad))))
