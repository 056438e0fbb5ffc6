"""Conversations become documents: rendered by the tokeniser's chat template, with the assistant's loss mask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from tokenloom_server.errors import TokenizerError
from tokenloom_server.sources import arrays
from tokenloom_server.sources.base import BadRow
from tokenloom_server.tokenizer.documents import Documents, Encoder
from tokenloom_server.tokenizer.engine import TokenizersEngine

Spans: TypeAlias = list[tuple[int, int]]
"""From which character to before which the assistant speaks, each time."""


class Chats(Protocol):
    """What renders conversations, and the engine for their texts."""

    engine: TokenizersEngine

    def rendered(self, column: Any, first_row: int) -> Iterator[tuple[str, Spans | str | TokenizerError]]:
        """Of each text of a column of large strings that begins at a row: the conversation as text, and where the
        assistant speaks; or why it is a bad row, or the error, with which it ends, where the template takes too much
        time or memory."""


class ChatEncoder:
    """Implements ``Encoder`` for a column of conversations as text: each the JSON of its messages, and of its tools."""

    def __init__(self, chats: Chats, encoder: Encoder, *, skip_bad: bool) -> None:
        """``encoder`` takes ids with each id's loss mask beside them, as ``MaskedEncoder`` does."""
        self._chats = chats
        self._encoder = encoder
        self._skip_bad = skip_bad

    def encode(self, column: Any, first_row: int, shard: int) -> Documents:
        """Raises ``TokenizerError``, naming the row, for one that cannot be rendered, unless bad rows are skipped."""
        column = arrays.filled(arrays.plain(column).cast(pa.large_string()))
        texts, spans, bad = list[str](), list[Spans](), list[BadRow]()
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
