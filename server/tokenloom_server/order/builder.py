"""Makes run records, each with the factory of its pipelines: of a new run, of a known one, under another config, and of
a stream beside training; with the engine that encodes a run's text, and another one where that is not installed."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pyarrow as pa

from tokenloom_server.config.data_roots import DataRoots
from tokenloom_server.config.node import NodeConfig
from tokenloom_server.config.order_fields import changed_beside, differences, refuse
from tokenloom_server.config.run import RunConfig
from tokenloom_server.config.source import SourceConfig
from tokenloom_server.core.token_curve import TokenCurve
from tokenloom_server.errors import ConfigError, TokenizerError
from tokenloom_server.order.exclusions import Exclusions
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.readers import row_rules
from tokenloom_server.order.record import (
    RunRecord,
    end_of_text,
    estimates_by_name,
    estimates_from_json,
    recorded_fields,
)
from tokenloom_server.order.resources import RunResources
from tokenloom_server.order.size_estimates import measure
from tokenloom_server.sources.base import Content, Source
from tokenloom_server.sources.files import gap_warning, in_threads
from tokenloom_server.sources.manifest import (
    Listings,
    Manifest,
    SourceFiles,
    appeared,
    build,
    verify,
)
from tokenloom_server.sources.scheme import order_warning
from tokenloom_server.tokenizer.choose import (
    EngineChoice,
    EngineRecord,
    choose_engine,
    serving_engine,
)
from tokenloom_server.tokenizer.definition import TokenizerDefinition, find_tokenizer
from tokenloom_server.tokenizer.engine_ids import EngineIds
from tokenloom_server.tokenizer.files import tokenizer_files

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


def create(
    config: RunConfig,
    base_dir: Path,
    index_dir: Path | None,
    roots: DataRoots | None = None,
    *,
    encoders: int = 0,
) -> PipelineFactory:
    """A new run: freezes its files, reads the tokeniser, chooses its engine. ``encoders``: see ``RunResources``.

    Raises ``SourceError``, ``TokenizerError`` and ``ConfigError``, naming the file or field.
    """
    resources = RunResources(base_dir, index_dir, roots, encoders=encoders)
    check_named(config, resources)
    manifest = build([source.spec for _, source in config.named_sources()], base_dir)
    resources.check_files(manifest)
    # Only now: what a run recorded is what it has.
    resources.io_stats.warning = "; ".join(
        filter(None, (gap_warning(s.spec, s.shards) for s in manifest.sources))
    )
    manifest = resources.with_code(manifest, [source for _, source in config.named_sources()])
    definition = _find_tokenizer(config, base_dir)
    choice = (
        chosen_engine(config, resources, manifest, definition) if config.batching is None else None
    )
    record = RunRecord(
        config=config,
        manifest=manifest,
        tokenizer=definition if config.batching is None else None,
        engine=choice.record if choice is not None else None,
        engine_ids=choice.ids if choice is not None else None,
        has_loss_mask=config.masks_loss,
    )
    factory = PipelineFactory(record, resources)
    factory.check_columns()
    factory.readers.check_files()
    factory.readers.check_seen()
    factory.readers.make_buckets()
    return _with_estimates(factory, {})


def load(
    config: RunConfig,
    base_dir: Path,
    index_dir: Path | None,
    record: str,
    roots: DataRoots | None = None,
) -> PipelineFactory:
    """A run that the ledger has, from its record (``RunRecord.to_json``).

    Raises ``ConfigError`` naming each field of the mixture file that differs from the record, with
    both values; ``SourceChanged``; ``TokenizerError``; ``LedgerError`` for a record of another version.
    """
    recorded = recorded_fields(record, config.run)
    refuse(config, differences(config, recorded))
    config = config.counting(recorded["config"].get("count", "positions"))
    resources = RunResources(base_dir, index_dir, roots)
    resources.changed = changed_beside(config, recorded)
    check_named(config, resources)
    manifest = Manifest.from_document(recorded["manifest"])
    resources.check_files(manifest)
    listings = Listings(config.catalog.sources)
    verify(manifest, base_dir, config.catalog.sources, listings)
    resources.with_code(manifest, [source for _, source in config.named_sources()])
    for path in appeared(manifest, base_dir, listings):
        _log.warning("%s: %s appeared after the run began and is not read", config.run, path)
    definition = _find_tokenizer(config, base_dir)
    tokenizer, engine = (
        recorded["tokenizer"],
        recorded_engine(recorded, config, resources, manifest, definition),
    )
    loaded = RunRecord(
        config=config,
        manifest=manifest,
        tokenizer=definition,
        engine=engine.record,
        engine_ids=engine.ids,
        substitute_engine=engine.substitute,
        has_loss_mask=config.masks_loss,
        size_estimates=estimates_from_json(recorded),
        phase_estimates=dict(estimates_by_name(recorded.get("phase_estimates", {}))),
    )
    factory = PipelineFactory(loaded, resources)
    if loaded.vocab_size != recorded["vocab_size"]:
        raise TokenizerError(
            f"the vocabulary has {loaded.vocab_size} ids, the run began with {recorded['vocab_size']}; "
            "put the tokeniser or vocab_size back, or begin a new run"
        )
    if engine.record is not None:
        resources.engine(loaded)
    elif loaded.tokenizer_fields != tokenizer:
        raise TokenizerError(
            f"tokenizer {config.tokenizer!r}: its digest is {loaded.tokenizer_fields['digest'] or 'none'}, but "
            f"the run began with {tokenizer['digest'] or 'none'}; put the old files back, or begin a new run"
        )
    return factory


def under(
    before: PipelineFactory,
    config: RunConfig,
    manifest: Manifest,
    excluded: Exclusions,
    size_estimates: Mapping[int, TokenCurve] = MappingProxyType({}),
) -> PipelineFactory:
    """The same run under another config, with files and excluded rows of its own. ``size_estimates`` that are not given
    are those of before, or measured.

    Raises ``ConfigError`` where the config cannot go on from the one before, and what reading new files raises.
    """
    old = before.record
    _refuse_moved_parts(old.config, config)
    known_files = {source.spec: set(source.shards) for source in old.manifest.sources}
    new_files = Manifest(
        tuple(
            SourceFiles(source.spec, tuple(more))
            for source in manifest.sources
            if (
                more := [
                    shard
                    for shard in source.shards
                    if shard not in known_files.get(source.spec, ())
                ]
            )
        ),
        manifest.plugins,
    )
    verify_files(before, new_files)
    manifest = before.resources.with_code(manifest, config.sources)
    file_counts = {
        i: old.earlier_file_counts.get(i, frozenset()) | {len(shards)}
        for i, shards in enumerate(old.shards)
    }
    grown = [source.spec for source in new_files.sources]
    record = replace(
        old,
        config=config,
        manifest=manifest,
        excluded=excluded,
        size_estimates={},
        phase_estimates={
            spec: one for spec, one in old.phase_estimates.items() if spec not in grown
        },
        earlier_file_counts=file_counts,
    )
    factory = before.with_record(record)
    for source, files_before, files in zip(config.sources, old.shards, record.shards, strict=False):
        drawn = source.shuffle != "none" or source.lanes > 1
        if config.packing == "best_fit" and drawn and files_before != files:
            raise ConfigError(
                f"append_files: {source.name} is shuffled, or has lanes, and is packed by best fit: files between "
                "others would make other samples of rows that are under way; add them as a source of their own"
            )
    factory.check_columns(len(old.specs))
    factory.readers.check_files({shard for shards in old.shards for shard in shards})
    factory.readers.check_seen(len(old.specs))
    _refuse_new_text(factory, old)
    factory.readers.make_buckets()
    ahead, by_phase = record.phase_estimates, enumerate(record.specs)
    known = {
        i: ahead[spec] for i, spec in by_phase if spec in ahead and i in config.measured_sources
    }
    known |= {i: one for i, one in old.size_estimates.items() if record.shards[i] == old.shards[i]}
    return _with_estimates(factory, {**known, **size_estimates})


def aside(
    training: PipelineFactory, config: RunConfig, manifest: Manifest | None = None, stream: str = ""
) -> PipelineFactory:
    """A stream beside training, which shares the run's tokeniser: what is held out of the run's own files, or a
    ``manifest`` of others, for which the name of the ``stream`` is given.

    Raises ``ConfigError`` and what reading the files raises.
    """
    run = training.record
    record = RunRecord(
        config=config,
        manifest=manifest or run.manifest,
        tokenizer=run.tokenizer,
        engine=run.engine,
        substitute_engine=run.substitute_engine,
        has_loss_mask=run.has_loss_mask,
        stream=stream if manifest is not None else "",
        gives_held_out=manifest is None,
    )
    factory = training.with_record(record)
    if manifest is None:
        return factory
    factory.check_columns()
    factory.readers.check_files()
    for i, source in enumerate(config.sources):
        if run.engine is None and factory.readers.open(i).content is Content.TEXT:
            raise ConfigError(
                f"streams.{stream}: {source.source!r} holds text, but run {run.name!r} trains on ids alone, so no "
                "tokeniser was chosen for it: prepare the source's ids"
            )
    return _with_estimates(factory, {})


def stream_files(resources: RunResources, name: str, mixture: NodeConfig) -> Manifest:
    """The files of a stream that has a mixture of its own, as they are now. Raises what ``create`` does."""
    sources = RunConfig.sources_of(mixture)
    for source in sources:
        resources.roots.check_pattern(
            f"streams.{name}: {source.source}", resources.base_dir, source.spec.place
        )
    manifest = build([source.spec for source in sources], resources.base_dir)
    resources.check_files(manifest)
    return resources.with_code(manifest, sources)


def verify_files(factory: PipelineFactory, manifest: Manifest) -> None:
    """Checks that files are what they were. Raises ``ConfigError`` and ``SourceChanged``."""
    resources = factory.resources
    resources.check_files(manifest)
    verify(manifest, resources.base_dir, factory.record.config.catalog.sources)


def check_named(config: RunConfig, resources: RunResources) -> None:
    """Checks that whatever a config names lies below a data root, before anything of it is looked at. Raises
    ``ConfigError``."""
    roots, base_dir = resources.roots, resources.base_dir
    for path, source in config.named_sources():
        roots.check_pattern(f"{path}.source", base_dir, source.spec.place)
        if source.seen is not None:
            roots.check_paths(f"{path}.seen.file", base_dir, [source.seen.file])
    if config.tokenizer is not None:
        roots.check_paths("tokenizer", base_dir, tokenizer_files(config.tokenizer, base_dir))


def warnings(factory: PipelineFactory) -> list[str]:
    """What a user should know about the sources before training."""
    record = factory.record
    warned = [
        order_warning(source.spec, shards)
        for source, shards in zip(record.config.sources, record.shards, strict=True)
        if source.shuffle == "none" and record.config.batching is None
    ]
    phases = record.config.phases
    if phases and phases[0].mixture is not None:
        unused = "mixture: is never in force, for phases.0 begins with the first token and has one of its own"
        warned.append(
            f"{unused}; leave that one out, and write at the top what the run begins with"
        )
    return [text for text in (*warned, factory.resources.io_stats.warning) if text]


def moves_parts(before: float, now: float) -> bool:
    """Whether another number of epochs has or had a last one of which only a part is read."""
    return before != now and not all(
        math.isinf(epochs) or float(epochs).is_integer() for epochs in (before, now)
    )


def _find_tokenizer(config: RunConfig, base_dir: Path) -> TokenizerDefinition | None:
    return (
        find_tokenizer(config.tokenizer, base_dir, chat=config.has_chats)
        if config.tokenizer is not None
        else None
    )


def _with_estimates(factory: PipelineFactory, known: Mapping[int, TokenCurve]) -> PipelineFactory:
    """The order with the ``known`` sizes of sources, and those of the others that a policy needs to know, measured."""
    missing = set(factory.config.measured_sources) - known.keys()
    estimates = {**known, **{i: measure(factory, i) for i in sorted(missing)}}
    return factory.with_record(replace(factory.record, size_estimates=estimates))


def _refuse_new_text(factory: PipelineFactory, old: RunRecord) -> None:
    """Without an engine, sources that come later hold ids. Raises ``ConfigError``."""
    if factory.config.batching is not None or old.engine is not None:
        return
    for i, source in enumerate(factory.config.sources):
        if source.source not in old.specs and factory.readers.open(i).content is Content.TEXT:
            raise ConfigError(
                f"{source.source!r} holds text, but run {old.name!r} began with ids alone, so no tokeniser was "
                "chosen for it: prepare the source's ids, or begin a new run"
            )


def _refuse_moved_parts(old: RunConfig, new: RunConfig) -> None:
    """A part of an epoch ends within a window of rows, and is what its lanes share: another part would make other
    samples of the window, or give lanes rows that others gave. Raises ``ConfigError``."""
    for source in new.sources[: len(old.sources)]:
        before, now = old.epochs[source.id], new.epochs[source.id]
        if source.presence == "dropped" or not moves_parts(before, now):
            continue
        for applies, reason in (
            (
                new.packing == "best_fit",
                "with packing: best_fit a window of rows that has begun cannot end elsewhere",
            ),
            (
                source.lanes > 1,
                f"its {source.lanes} lanes share the rows of an epoch, and have begun on their parts",
            ),
        ):
            if applies:
                raise ConfigError(
                    f"{source.name}: epochs is {before:g} and would be {now:g}, but {reason}: change whole epochs to "
                    "whole ones, or give max_tokens instead"
                )
