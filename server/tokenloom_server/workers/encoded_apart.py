"""Ids of texts in a process that may die of them: at work in the processes of ``crash_guard``."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from tokenloom_server.sources import arrays
from tokenloom_server.tokenizer.choose import EngineRecord, load_engine, other_engine
from tokenloom_server.tokenizer.definition import find_tokenizer
from tokenloom_server.tokenizer.engine import Engine, SpecialTokensInText


class EngineDescription(NamedTuple):
    """What another process needs to load a run's engine, or the other one. ``chat``: whether the tokeniser has its chat
    template."""

    tokenizer: str
    base_dir: str
    chat: bool
    special_tokens_in_text: SpecialTokensInText
    record: tuple[str, str, str]
    other: bool = False


def encoded(batch: Any) -> Any:
    """What the worker calls: of each text and ``EngineDescription``, as JSON, the ids as JSON."""
    return arrays.strings([_ids(*json.loads(each)) for each in batch.column(0).to_pylist()])


def _ids(text: str, engine: list[Any]) -> str:
    return json.dumps(_loaded(json.dumps(engine)).encode(arrays.strings([text])).values.tolist())


@lru_cache(maxsize=2)
def _loaded(text: str) -> Engine:
    engine = EngineDescription(*json.loads(text))
    definition = find_tokenizer(engine.tokenizer, Path(engine.base_dir), chat=engine.chat)
    record = EngineRecord(*engine.record)
    if engine.other:
        return other_engine(definition, record, engine.special_tokens_in_text)
    return load_engine(definition, record, engine.special_tokens_in_text, check_one_in=0)
