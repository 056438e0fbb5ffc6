"""Rows of which a part counts for the loss become documents: conversations, rendered by the tokeniser's chat template,
and texts with a completion at their end.

A chat template is at work in processes that are bounded in time and memory, as users' functions are.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from tokenloom_server.errors import TokenizerError
from tokenloom_server.sources import arrays
from tokenloom_server.sources.base import BadRow
from tokenloom_server.tokenizer.choose import EngineRecord
from tokenloom_server.tokenizer.definition import TokenizerDefinition
from tokenloom_server.tokenizer.documents import Documents, Encoder
from tokenloom_server.tokenizer.engine import SpecialTokensInText, TokenizersEngine
from tokenloom_server.workers.transforms import Transform, TransformFailed

#: For about a MiB of conversations, which takes a tenth of a second, and for a single one.
SECONDS = 60.0
#: Of each process, in 10^6 bytes, private and writable.
MEMORY_MB = 4096
_REMEDY = (
    f"a conversation has {SECONDS:g} s, and {MEMORY_MB} MB of memory: mend the template, or take the row out of the "
    "file, and begin a new run (on_bad_row: skip does not skip it, since a faster machine may render it)"
)


class RenderedEncoder:
    """Implements ``Encoder`` for a column of JSON of which texts are made."""

    def __init__(self, renderer: Chats | Completions, encoder: Encoder, *, skip_bad: bool) -> None:
        """``encoder`` takes ids with each id's loss mask beside them, as ``MaskedEncoder`` does."""
        self._renderer = renderer
        self._encoder = encoder
        self._skip_bad = skip_bad

    def encode(self, column: Any, first_row: int, shard: int) -> Documents:
        """Raises ``TokenizerError``, naming the row, for one that cannot be rendered, unless bad rows are skipped."""
        column = arrays.filled(arrays.plain(column).cast(pa.large_string()))
        texts, spans, bad = list[str](), list[list[tuple[int, int]]](), list[BadRow]()
        for row, (text, said) in enumerate(self._renderer.rendered(column, first_row)):
            if isinstance(said, str):
                bad.append(BadRow(row, f"row {first_row + row}: {said}"))
                if not self._skip_bad:
                    raise TokenizerError(bad[0].reason, row)
            texts.append(text)
            spans.append([] if isinstance(said, str) else said)
        encoded, mask = self._renderer.engine.encode_spans(texts, spans)
        begins = np.append(np.int64(0), encoded.ends)
        lists = [
            arrays.lists(begins, arrays.from_numbers(values)) for values in (encoded.values, mask)
        ]
        ids = pa.StructArray.from_arrays(lists, ["ids", "mask"])
        documents = self._encoder.encode(ids, first_row, shard)
        return documents._replace(bad=tuple(sorted((*documents.bad, *bad))))


class Completions:
    """Joins texts of their parts, each the JSON of a list, of which the one before the last and what follows count."""

    def __init__(
        self,
        definition: TokenizerDefinition,
        engine: EngineRecord | None,
        special: SpecialTokensInText,
    ) -> None:
        """``engine``: the run's. Raises ``TokenizerError`` where it gives no offsets."""
        if engine is None or engine.engine != TokenizersEngine.name:
            raise TokenizerError(
                "loss_on: completion needs the engine tokenizers, whose offsets say which tokens count, and the run "
                f"has {engine.engine if engine else 'none'}; begin a new run, with a tokenizer.json"
            )
        self.engine = TokenizersEngine(definition, special)

    def rendered(self, column: Any, first_row: int) -> Iterator[tuple[str, Any]]:
        """As of ``Chats``."""
        for row in column.to_pylist():
            values = json.loads(row or "[]")
            parts = ["" if value is None else str(value) for value in values]
            text = "".join(parts)
            other = [value for value in values if not isinstance(value, str | int | None)]
            fault = f"the template has {reprlib.repr(other)}; expected text or integers"
            yield text, fault if other else [(len("".join(parts[:-2])), len(text))]

    def close(self) -> None:
        """There is nothing to end."""


class Chats:
    """Renders a run's conversations, for the engine beside it. Thread-safe."""

    def __init__(
        self, definition: TokenizerDefinition, *, loss_on: str | None, chat_format: str
    ) -> None:
        """``definition``: with its chat template. Raises ``TokenizerError`` for one that is no Jinja, or does not say
        where the assistant speaks, though ``loss_on`` is answers."""
        # A template writes special tokens as text.
        self.engine = TokenizersEngine(definition, "parse")
        special_tokens = dict(definition.special_tokens)
        of_source = [loss_on, chat_format]
        renderer = [definition.name, definition.chat_template, special_tokens, *of_source]
        self._renderer = arrays.strings([json.dumps(renderer)])
        self._processes = Transform(
            "tokenloom_server.tokenizer.chat_renderer:rendered",
            seconds=SECONDS,
            memory_mb=MEMORY_MB,
        )
        self._is_closed = False
        try:
            fault = self._answers(arrays.strings([]))[0]
        except TransformFailed as error:
            fault = f"tokenizer {definition.name!r}: its chat template cannot be compiled ({error})"
        if fault:
            raise TokenizerError(fault)

    def close(self) -> None:
        """Ends them. Whoever waits for one gets ``TokenizerError``."""
        self._is_closed = True
        self._processes.close()

    def rendered(self, column: Any, first_row: int) -> Iterator[tuple[str, Any]]:
        """Of each text of a column of large strings that begins at a row: the conversation as text, and where the
        assistant speaks, or why it is a bad row. Raises ``TokenizerError``, after the rows before, where the template
        takes too much time or memory."""
        try:
            answers = iter(self._answers(column)[1:])
        except TransformFailed:
            # Each by itself, up to the one that takes too long.
            answers = (self._answers(column.slice(row, 1))[1] for row in range(len(column)))
        for row in range(len(column)):
            fault = "it took too much memory"
            try:
                said, _, text = next(answers).partition("\n")
            except TransformFailed as error:
                said, text, fault = "null", "", str(error)
            spans = json.loads(said)
            if spans is None:
                raise TokenizerError(
                    f"row {first_row + row}: the chat template: {fault}; {_REMEDY}", row
                )
            yield text, spans

    def _answers(self, column: Any) -> list[str]:
        """Raises ``TransformFailed``."""
        if self._is_closed:
            raise TokenizerError("the run ends, and its chat template with it")
        answers: list[str] = self._processes.made_of(
            pa.concat_arrays([self._renderer, column])
        ).to_pylist()
        return answers
