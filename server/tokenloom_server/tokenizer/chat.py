"""Conversations become documents: rendered by the tokeniser's chat template, with the assistant's loss mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from tokenloom_server.errors import TokenizerError
from tokenloom_server.sources import arrays
from tokenloom_server.sources.base import BadRow
from tokenloom_server.tokenizer.definition import TokenizerDefinition
from tokenloom_server.tokenizer.documents import Documents, Encoder
from tokenloom_server.tokenizer.engine import TokenizersEngine


class Chat:
    """What a run's conversations are rendered and encoded with; for several threads."""

    def __init__(self, definition: TokenizerDefinition) -> None:
        """``definition``: with its chat template. Raises ``TokenizerError`` for one that is no Jinja."""
        assert definition.chat is not None, "a record with chats has their template"
        from tokenloom_server.tokenizer.chat_renderer import ChatRenderer

        self.name = definition.name
        self.renderer = ChatRenderer(definition.name, definition.chat)
        # A template writes special tokens as text.
        self.engine = TokenizersEngine(definition, "parse")


class ChatEncoder:
    """Implements ``Encoder`` for a column of conversations as text: each the JSON of its messages, and of its tools."""

    def __init__(self, chat: Chat, encoder: Encoder, *, masks: bool, skip_bad: bool) -> None:
        """``encoder`` takes ids, and with ``masks`` each id's loss mask beside them, as ``MaskedEncoder`` does.

        Raises ``TokenizerError`` where the template does not say what the assistant's tokens are.
        """
        if masks and not chat.renderer.marks_assistant:
            raise TokenizerError(
                f"tokenizer {chat.name!r}: its chat template has no {{% generation %}} block, so it does not say which "
                "tokens are the assistant's; put {% generation %} and {% endgeneration %} around them in "
                "chat_template.jinja, or set chat_loss: all on the source"
            )
        self._chat = chat
        self._encoder = encoder
        self._masks = masks
        self._skip_bad = skip_bad

    def encode(self, column: Any, first_row: int, shard: int) -> Documents:
        """Raises ``TokenizerError``, naming the row, for one that cannot be rendered, unless bad rows are skipped."""
        texts, bad = [""] * len(column), list[BadRow]()
        spans: list[list[tuple[int, int]]] = [[]] * len(column)
        for row, chat in enumerate(column.to_pylist()):
            try:
                texts[row], spans[row] = self._chat.renderer.render(chat) if chat else ("", [])
            except (ValueError, RecursionError) as error:
                bad.append(BadRow(row, f"row {first_row + row}: {error}"))
                if not self._skip_bad:
                    raise TokenizerError(bad[0].reason, row) from None
        encoded, mask = self._chat.engine.encode_spans(texts, spans)
        begins = np.append(np.int64(0), encoded.ends)
        ids = arrays.lists(begins, arrays.from_numbers(encoded.values))
        if self._masks:
            masks = arrays.lists(begins, arrays.from_numbers(mask))
            ids = pa.StructArray.from_arrays([ids, masks], ["ids", "mask"])
        documents = self._encoder.encode(ids, first_row, shard)
        return documents._replace(bad=tuple(sorted((*documents.bad, *bad))))
