"""Which engine encodes a run's text: chosen when the run is created, and another in its place where that one is not
installed."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import pyarrow as pa

from tokenloom_server.config.run import RunConfig
from tokenloom_server.config.source import SourceConfig
from tokenloom_server.errors import ConfigError
from tokenloom_server.order.readers import row_rules
from tokenloom_server.order.record import end_of_text
from tokenloom_server.order.resources import RunResources
from tokenloom_server.sources.base import Content, Source
from tokenloom_server.sources.files import in_threads
from tokenloom_server.sources.manifest import Manifest
from tokenloom_server.tokenizer.choose import (
    EngineChoice,
    EngineRecord,
    choose_engine,
    serving_engine,
)
from tokenloom_server.tokenizer.definition import TokenizerDefinition
from tokenloom_server.tokenizer.engine_ids import EngineIds

_log = logging.getLogger(__name__)


class RecordedEngine(NamedTuple):
    """As a run's record has it: the fields of ``RunRecord``."""

    record: EngineRecord | None = None
    ids: EngineIds | None = None
    substitute: EngineRecord | None = None


def chosen_engine(
    config: RunConfig,
    resources: RunResources,
    manifest: Manifest,
    definition: TokenizerDefinition | None,
) -> EngineChoice | None:
    """What encodes the run's text; None where no source holds any."""
    texts = _text_sources(config, resources, manifest, definition)
    if not texts:
        return None
    if definition is None:
        raise ConfigError(
            f"tokenizer: is missing, but {texts[0][0].source!r} holds text; name a tokenizer.json, a folder with "
            "one, or 'bytes'"
        )
    choice = choose_engine(
        definition,
        config.special_tokens_in_text,
        in_threads(
            lambda text: _first_rows(text[1]),
            texts,
            remote=any(source.spec.is_remote for source, _ in texts),
        ),
        cpu_clock_s=time.thread_time,
        needs_offsets=any(source.is_rendered for source, _ in texts),
    )
    _log_engine(config, choice)
    return choice


def recorded_engine(
    recorded: Mapping[str, Any],
    config: RunConfig,
    resources: RunResources,
    manifest: Manifest,
    definition: TokenizerDefinition | None,
) -> RecordedEngine:
    """The engine of a run's record, and what encodes in its place where it is not installed.

    Raises ``TokenizerError`` where nothing that is installed gives the same ids, and ``ConfigError`` for a config
    without the tokeniser.
    """
    if recorded["tokenizer"]["engine"] == "none":
        return RecordedEngine()
    if definition is None:
        raise ConfigError("tokenizer: is missing, but the run's record has one; put it back")

    def first_rows(ids: EngineIds) -> list[tuple[str, list[str | None]]]:
        texts = _text_sources(config, resources, manifest, definition)
        pairs = list(zip(texts, ids.sources, strict=True))
        remote = any(source.spec.is_remote for source, _ in texts)
        return in_threads(
            lambda pair: (pair[0][0].source, _texts(pair[0][1], pair[1].rows)), pairs, remote=remote
        )

    engine = EngineRecord(**recorded["tokenizer"])
    ids = EngineIds.from_json(recorded["engine_ids"]) if "engine_ids" in recorded else None
    choice = serving_engine(definition, engine, ids, config.special_tokens_in_text, first_rows)
    if choice.record == engine:
        return RecordedEngine(engine, ids)
    _log_engine(config, choice)
    return RecordedEngine(engine, ids, choice.record)


def _text_sources(
    config: RunConfig,
    resources: RunResources,
    manifest: Manifest,
    definition: TokenizerDefinition | None,
) -> list[tuple[SourceConfig, Source]]:
    """The sources that hold text, each with a reader."""
    sources = [source for _, source in config.named_sources()]
    end_of_text_id = end_of_text(config, definition)
    readers = in_threads(
        lambda source: resources.open_source(
            source.spec, manifest.shards(source.source), row_rules(config, source), end_of_text_id
        ),
        sources,
        remote=any(source.spec.is_remote for source in sources),
    )
    return [
        (source, reader)
        for source, reader in zip(sources, readers, strict=True)
        if reader.content is Content.TEXT
    ]


def _log_engine(config: RunConfig, choice: EngineChoice) -> None:
    record, reason = choice.record, choice.reason
    level = logging.INFO if record.engine != "tokenizers" else logging.WARNING
    _log.log(
        level, "%s: tokeniser engine %s %s: %s", config.run, record.engine, record.version, reason
    )


def _texts(source: Source, count: int) -> list[str | None]:
    """The texts of the first rows."""
    texts: list[str | None] = []
    for shard in range(len(source.shards)):
        for rows in source.read(shard, 0):
            texts += rows.column[: count - len(texts)].to_pylist()
            if len(texts) >= count:
                return texts
    return texts


def _first_rows(source: Source) -> pa.Array:
    for shard in range(len(source.shards)):
        for rows in source.read(shard, 0):
            return rows.column
    return pa.array([], pa.large_string())
