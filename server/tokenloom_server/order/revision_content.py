"""What a revision says: made of the change that was asked for, and checked before anything is in force."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenloom_server.config.mixture_change import MixtureChange
from tokenloom_server.config.node import NodeConfig
from tokenloom_server.config.run import RunConfig
from tokenloom_server.config.source import SourceConfig
from tokenloom_server.errors import ConfigError, SourceChanged, SourceError
from tokenloom_server.order import builder, exclusions
from tokenloom_server.order.exclusions import ExclusionFile
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.mixture_content import content_of, with_content
from tokenloom_server.order.record import estimates_to_json
from tokenloom_server.order.revision import changed, differences
from tokenloom_server.order.segments import files_to_json, known_shards, revised
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.sources.base import Shard
from tokenloom_server.sources.manifest import (
    build,
    plugins_of,
    plugins_to_json,
)
from tokenloom_server.sources.scheme import scheme_of


def _content(
    order: PipelineFactory, config: RunConfig, shards: Mapping[str, Sequence[Shard]], excluded: Sequence[ExclusionFile]
) -> dict[str, Any]:
    content: dict[str, Any] = content_of(config)
    if plugins := plugins_of(source.spec for source in config.sources):
        content["plugins"] = plugins_to_json(plugins)
    if shards:
        content["shards"] = files_to_json(shards.items())
    if excluded:
        content["exclude"] = [list(file) for file in excluded]
    return content


def _check_batches(config: RunConfig, change: MixtureChange, sample_index: int) -> None:
    """That with ``batching`` a change leaves the buckets as they are. Raises ``ConfigError``."""
    if config.batching is None:
        return
    for field, given in (("append_files", change.append_files), ("exclude", change.exclude)):
        if given:
            raise ConfigError(
                f"{field}: this run is made of batches from buckets, and which rows these have stays for a whole "
                "epoch; put new rows into a source of their own, or begin a new run"
            )
    if sample_index % config.pick_samples:
        raise ConfigError(
            f"sample {sample_index} lies within a global batch of {config.pick_samples}; expected a multiple of that"
        )


def _check_limits(old: RunConfig, new: RunConfig) -> None:
    """That a limit that was asked for holds a sample, as in a mixture file. Raises ``ConfigError``."""
    before: list[SourceConfig | NodeConfig] = [*old.sources, *old.nodes]
    known = {(type(child), child.id): child.max_tokens for child in before}
    now: list[SourceConfig | NodeConfig] = [*new.sources, *new.nodes]
    for child in now:
        most = child.max_tokens
        if most is not None and most < new.pick_tokens and known.get((type(child), child.id)) != most:
            raise ConfigError(
                f"{child.name}: max_tokens is {most}, which is less than one sample of {new.pick_tokens} tokens; "
                "give at least that many, or pause or drop it"
            )


def revise(timeline: Timeline, change: MixtureChange, sample_index: int, generation: int = 0) -> dict[str, Any]:
    """The content of a revision that makes a change from a sample index on, during a generation.

    Raises ``ConfigError``, naming the field, what was found and what was expected, and ``SourceChanged``.
    """
    try:
        return _content_of(timeline, change, sample_index, generation)
    except SourceChanged:
        raise
    except SourceError as error:
        # Who asks names files that are not there, or hold something else.
        raise ConfigError(str(error)) from None


def _content_of(timeline: Timeline, change: MixtureChange, sample_index: int, generation: int) -> dict[str, Any]:
    order = timeline.at(sample_index)
    _check_batches(order.config, change, sample_index)
    config = changed(order.config, change)
    if change.mixture is not None and config.mixture.max_tokens is None and _in_last_phase(timeline, sample_index):
        # The mixture is another one; where the run ends is not a part of it.
        content = content_of(config)
        content["mixture"]["max_tokens"] = order.config.mixture.max_tokens
        config = with_content(config, content)
    _check_limits(order.config, config)
    builder.check_named(config, order.resources)
    if change.exclude is not None:
        order.resources.roots.check_paths("exclude.file", order.resources.base_dir, [change.exclude.file])
    shards = dict(_new_files(order, config))
    shards |= {spec: more for name in change.append_files for spec, more in [_appended(order, name)]}
    excluded = [*order.record.excluded.files]
    if change.exclude is not None:
        excluded.append(exclusions.describe(change.exclude.file, order.resources.base_dir))
    content = _content(order, config, shards, excluded)
    # That it can be read is found out now, and not when it is in force.
    after = revised(order, content)
    lines = differences(order.config, config)
    lines += [
        f"{spec}: {len(more) - len(known_shards(order, spec))} files more"
        for spec, more in shards.items()
        if known_shards(order, spec)
    ]
    for source in config.sources:
        more = after.record.excluded.count(source.source) - order.record.excluded.count(source.source)
        if more:
            lines.append(f"{source.name}: {more} rows left out of each epoch")
    if not lines:
        raise ConfigError("this changes nothing: the mixture in force there is the same")
    lines += _ended_by_a_phase(timeline, sample_index)
    if after.record.size_estimates:
        content["extents"] = estimates_to_json(after.record.size_estimates)
    return {**content, "changes": lines, "generation": generation}


def _new_files(order: PipelineFactory, config: RunConfig) -> Iterator[tuple[str, tuple[Shard, ...]]]:
    known = {source.spec for source in order.record.manifest.sources}
    new = [source.spec for source in config.sources if source.source not in known]
    if new:
        yield from ((source.spec, source.shards) for source in build(new, order.resources.base_dir).sources)


def _appended(order: PipelineFactory, name: str) -> tuple[str, tuple[Shard, ...]]:
    source = next((source for source in order.config.sources if name in (source.alias, source.source)), None)
    if source is None:
        names = ", ".join(repr(source.name) for source in order.config.sources)
        raise ConfigError(f"append_files: the mixture has no source {name!r}; it has {names}")
    if source.shuffle == "rows" or source.lanes > 1:
        way = "with shuffle: rows" if source.shuffle == "rows" else f"in {source.lanes} lanes"
        raise ConfigError(
            f"append_files: {name!r} is read {way}, and with more files every row would have another place: add "
            "the new files as a source of their own, or begin a new run"
        )
    known = known_shards(order, source.source)
    new = scheme_of(source.spec).more_shards(source.spec, known, order.resources.base_dir)
    if not new:
        raise ConfigError(f"append_files: {name!r} has no file that the run does not read already ({len(known)} files)")
    return source.source, (*known, *new)


def _ended_by_a_phase(timeline: Timeline, sample_index: int) -> Iterator[str]:
    """That a change holds only until a phase brings a mixture of its own; what was dropped stays so."""
    phases = timeline.first.config.phases
    for segment in timeline.segments:
        brings = segment.phase is not None and segment.phase < len(phases) and phases[segment.phase].mixture
        if brings and segment.begin > sample_index:
            yield f"until sample {segment.begin}, where phase {segment.phase} begins with a mixture of its own"
            return


def _in_last_phase(timeline: Timeline, sample_index: int) -> bool:
    """Whether a sample lies in a last phase that ends the run."""
    phases = timeline.first.config.phases
    begins = (segment.begin for segment in timeline.segments if (segment.phase or 0) >= len(phases) - 1)
    return bool(phases) and phases[-1].until_tokens is not None and sample_index >= min(begins)
