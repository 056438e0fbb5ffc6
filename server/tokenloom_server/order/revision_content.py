"""What a revision says: made of the change that was asked for, and checked before anything is in force."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tokenloom_server.config.run import RunConfig
from tokenloom_server.core.state import SourceState, State
from tokenloom_server.errors import ConfigError, SnapshotInvalid, SourceChanged, SourceError
from tokenloom_server.order import builder, exclusions
from tokenloom_server.order.exclusions import ExclusionFile
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.mixture_content import child_key, children_of, content_of, validated
from tokenloom_server.order.notes import position_line
from tokenloom_server.order.record import estimates_to_json
from tokenloom_server.order.returning import Returning, returning
from tokenloom_server.order.revision import changed, differences
from tokenloom_server.order.segments import files_of, files_to_json, revised
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.sources.base import Shard
from tokenloom_server.sources.manifest import build, plugins_of, plugins_to_json
from tokenloom_server.sources.scheme import scheme_of

if TYPE_CHECKING:
    from tokenloom_server.config.mixture_change import MixtureChange


def revise(
    timeline: Timeline,
    change: MixtureChange,
    sample_index: int,
    generation: int = 0,
    known_from: int = 0,
    state: State | None = None,
) -> dict[str, Any]:
    """The content of a revision that makes a change from a sample index on, during a generation that has come to a
    ``state``. Samples before ``known_from`` may have been produced in that one, so their states do not name it.

    Raises ``ConfigError``, naming the field, what was found and what was expected, and ``SourceChanged``.
    """
    try:
        made = {"generation": generation, "known_from": known_from}
        return _checked_content(timeline, change, sample_index, state) | made
    except SourceChanged:
        raise
    except SourceError as error:
        # Who asks names files that are not there, or hold something else.
        raise ConfigError(str(error)) from None


def _checked_content(
    timeline: Timeline, change: MixtureChange, sample_index: int, state: State | None
) -> dict[str, Any]:
    factory = timeline.at(sample_index)
    config = _changed_config(timeline, change, sample_index)
    files = _new_files(factory, config) | dict(
        _appended(factory, name) for name in change.append_files
    )
    content = content_of(config)
    if plugins := plugins_of(source.spec for source in config.sources):
        content["plugins"] = plugins_to_json(plugins)
    if transforms := factory.resources.code_of(config.sources):
        content["transforms"] = transforms
    if files:
        content["shards"] = files_to_json(files)
    if excluded := _excluded(factory, change):
        content["exclude"] = [list(file) for file in excluded]
    # That it can be read is found out now, and not when it is in force.
    after = revised(factory, content)
    known = files_of(factory)
    lines = differences(factory.config, config)
    lines += [
        f"{spec}: {len(files[spec]) - len(known[spec])} files more"
        for spec in files
        if spec in known
    ]
    for source in config.sources:
        rows = after.record.excluded.count(source.source) - factory.record.excluded.count(
            source.source
        )
        if rows:
            lines.append(f"{source.name}: {rows} row{'s' * (rows != 1)} left out of each epoch")
    if not lines:
        raise ConfigError("this changes nothing: the mixture in force there is the same")
    if back := _returning(factory, after, change, state):
        content["returning"] = back
        lines += [_line(one, after, timeline, state) for one in back]
    content["changes"] = [*lines, *_ended_by_a_phase(timeline, sample_index)]
    # Those that the run's record has need not be carried by every state.
    recorded = timeline.first.record.size_estimates
    return content | estimates_to_json(
        {i: e for i, e in after.record.size_estimates.items() if recorded.get(i) != e}
    )


def _changed_config(timeline: Timeline, change: MixtureChange, sample_index: int) -> RunConfig:
    """The config from a sample index on. Raises ``ConfigError``."""
    factory = timeline.at(sample_index)
    before = factory.config
    _check_batches(before, change, sample_index)
    config = changed(before, change)
    if (
        change.mixture is not None
        and config.mixture.max_tokens is None
        and _in_last_phase(timeline, sample_index)
    ):
        # The mixture is another one; where the run ends is not a part of it.
        config = validated(
            config, config.mixture.model_dump() | {"max_tokens": before.mixture.max_tokens}
        )
    _check_limits(before, config)
    builder.check_named(config, factory.resources)
    return config


def _check_batches(config: RunConfig, change: MixtureChange, sample_index: int) -> None:
    """Checks that with ``batching`` a change leaves the buckets as they are. Raises ``ConfigError``."""
    if config.batching is None:
        return
    for field in ("append_files", "exclude"):
        if getattr(change, field):
            raise ConfigError(
                f"{field}: this run is made of batches from buckets, and which rows these have stays for a whole "
                "epoch; put new rows into a source of their own, or begin a new run"
            )
    if sample_index % config.pick_samples:
        raise ConfigError(
            f"sample {sample_index} lies within a global batch of {config.pick_samples}; expected a multiple of that"
        )


def _check_limits(old: RunConfig, new: RunConfig) -> None:
    """Checks that a limit that was asked for holds a sample, as in a mixture file. Raises ``ConfigError``."""
    known = {child_key(child): child.max_tokens for child in children_of(old)}
    for child in children_of(new):
        most = child.max_tokens
        if most is not None and most < new.pick_tokens and known.get(child_key(child)) != most:
            raise ConfigError(
                f"{child.name}: max_tokens is {most}, which is less than one sample of {new.pick_tokens} tokens; "
                "give at least that many, or pause or drop it"
            )


def _new_files(factory: PipelineFactory, config: RunConfig) -> dict[str, tuple[Shard, ...]]:
    """The files of sources that the run did not have, as they are now."""
    known = files_of(factory)
    new = [source.spec for source in config.sources if source.source not in known]
    return (
        {files.spec: files.shards for files in build(new, factory.resources.base_dir).sources}
        if new
        else {}
    )


def _appended(factory: PipelineFactory, name: str) -> tuple[str, tuple[Shard, ...]]:
    """The spec of a source that is to have more files, and all of them."""
    source = next(
        (source for source in factory.config.sources if name in (source.alias, source.source)), None
    )
    if source is None:
        names = ", ".join(repr(source.name) for source in factory.config.sources)
        raise ConfigError(f"append_files: the mixture has no source {name!r}; it has {names}")
    if source.shuffle == "rows" or source.lanes > 1:
        reading = "with shuffle: rows" if source.shuffle == "rows" else f"in {source.lanes} lanes"
        raise ConfigError(
            f"append_files: {name!r} is read {reading}, and with more files every row would have another place: add "
            "the new files as a source of their own, or begin a new run"
        )
    known = files_of(factory).get(source.source, ())
    new = scheme_of(source.spec).more_shards(source.spec, known, factory.resources.base_dir)
    if not new:
        raise ConfigError(
            f"append_files: {name!r} has no file that the run does not read already ({len(known)} files)"
        )
    return source.source, (*known, *new)


def _excluded(factory: PipelineFactory, change: MixtureChange) -> list[ExclusionFile]:
    """All files of rows that are left out. Raises ``ConfigError``."""
    files, resources = [*factory.record.excluded.files], factory.resources
    if change.exclude is not None:
        resources.roots.check_paths("exclude.file", resources.base_dir, [change.exclude.file])
        files.append(exclusions.describe(change.exclude.file, resources.base_dir))
    return files


def _returning(
    before: PipelineFactory, after: PipelineFactory, change: MixtureChange, state: State | None
) -> list[Returning]:
    """The sources that come back: those that the state preserves, and the run's own that were dropped. Raises
    ``ConfigError``."""
    preserved, sources = state.preserved if state is not None else (), after.config.sources
    try:
        back = returning(preserved, after, len(before.config.sources), from_start=change.from_start)
    except SnapshotInvalid as error:
        raise ConfigError(
            f"{error}; or have it read from its first row: from_start (--from-start)"
        ) from None
    for was, source in zip(before.config.sources, sources, strict=False):
        if was.presence != "dropped" or source.presence == "dropped":
            continue
        if change.from_start and not source.in_file_order:
            raise ConfigError(
                f"from_start: {source.name} is shuffled or has lanes, and only goes on where it stood"
            )
        back.append(Returning(source.id, "", None if change.from_start else ()))
    return back


def _line(one: Returning, after: PipelineFactory, timeline: Timeline, state: State | None) -> str:
    """How a source goes on, for people."""
    name, known, record = after.config.sources[one.source].name, SourceState(), after.record
    if one.place is None:
        return f"{name}: is read from its first row"
    if not one.entry:
        sources = timeline.at(state.sample_index).config.sources if state is not None else ()
        if state is None or not any(
            each.id == one.source and each.presence == "dropped" for each in sources
        ):
            return f"{name}: goes on where it is when it is dropped"
        known = state.sources[one.source]
    line = position_line(
        record.specs[one.source], one.carried(known), record.shard_paths[one.source]
    )
    return f"{name}: goes on: {line}"


def _ended_by_a_phase(timeline: Timeline, sample_index: int) -> Iterator[str]:
    """A note, where a change holds only until a phase brings a mixture of its own; what was dropped stays so."""
    phases = timeline.first.config.phases
    for segment in timeline.segments:
        brings = (
            segment.phase is not None
            and segment.phase < len(phases)
            and phases[segment.phase].mixture
        )
        if brings and segment.begin > sample_index:
            yield f"until sample {segment.begin}, where phase {segment.phase} begins with a mixture of its own"
            return


def _in_last_phase(timeline: Timeline, sample_index: int) -> bool:
    """Whether a sample lies in a last phase that ends the run."""
    phases = timeline.first.config.phases
    begins = (
        segment.begin for segment in timeline.segments if (segment.phase or 0) >= len(phases) - 1
    )
    return bool(phases) and phases[-1].until_tokens is not None and sample_index >= min(begins)
