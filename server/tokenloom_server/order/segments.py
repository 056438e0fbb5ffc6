"""The segments of a run's order, each under one config: its phases and revisions, one after the other."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenloom_server.config.run import RunConfig
from tokenloom_server.ledger.records import StoredRevision
from tokenloom_server.order import builder, exclusions
from tokenloom_server.order.exclusions import ExclusionFile, Exclusions
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.mixture_content import content_of, with_content
from tokenloom_server.order.origin import Origin
from tokenloom_server.order.record import estimates_from_json
from tokenloom_server.order.revision import merged, without
from tokenloom_server.sources.base import Shard
from tokenloom_server.sources.manifest import (
    Manifest,
    SourceFiles,
    plugins_from_json,
)


@dataclass(frozen=True, slots=True)
class TimelineSegment:
    """The order from a sample index on, up to the next segment's."""

    begin: int
    #: The run's total tokens there.
    tokens: int
    order: PipelineFactory
    #: Sources that have more files than before.
    grown: tuple[int, ...] = ()
    #: The phase that begins here, counted from 0.
    phase: int | None = None
    #: The revision that begins here, the last of them.
    revision: StoredRevision | None = None


def _gone(before: Collection[int], old: RunConfig, new: RunConfig) -> set[int]:
    """The sources that revisions dropped, and did not bring back, once another one made ``new`` of ``old``."""
    left = {source.id for source in old.sources if source.presence != "dropped"}
    dropped = {source.id for source in new.sources if source.presence == "dropped"}
    return {source for source in before if source in dropped} | (left & dropped)


def _in_phase(
    order: PipelineFactory, number: int, left_tokens: int, tokens: int, gone: Collection[int]
) -> PipelineFactory:
    """The order in a phase, which begins at so many of the run's tokens; what is ``gone`` stays so."""
    phase, last = order.config.phases[number], number == len(order.config.phases) - 1
    length = phase.sequence_length or order.config.sequence_length
    ends = phase.until_tokens if last else None
    if phase.mixture is None and ends is None and length == order.config.sequence_length:
        return order
    mixture = phase.mixture
    if ends is not None:
        # What the mixture gives is what the run has, but for what a fork left behind: after its last phase it ends.
        # To the next whole sample, like every phase.
        unit = length * order.config.pick_samples
        ends = tokens + -(-(ends - tokens) // unit) * unit if ends > tokens else ends
        root, ends = mixture or order.config.mixture, max(1, ends - left_tokens)
        mixture = root.model_copy(update={"max_tokens": min(ends, root.max_tokens or ends)})
    config = (
        merged(order.config, mixture, length)
        if mixture is not None
        else with_content(order.config, {**content_of(order.config), "sequence_length": length})
    )
    return builder.under(order, without(config, gone), order.record.manifest, order.record.excluded)


def files_to_json(files_of: Iterable[tuple[str, Sequence[Shard]]]) -> dict[str, list[list[Any]]]:
    return {spec: [[shard.path, shard.size, shard.fingerprint] for shard in found] for spec, found in files_of}


def revised(order: PipelineFactory, content: Mapping[str, Any]) -> PipelineFactory:
    """The order under a revision's content."""
    config = with_content(order.config, {**content, "sequence_length": order.config.sequence_length})
    given = {
        spec: tuple(Shard(path, size, fingerprint) for path, size, fingerprint in found)
        for spec, found in content.get("shards", {}).items()
    }
    kept = [SourceFiles(source.spec, given.pop(source.spec, source.shards)) for source in order.record.manifest.sources]
    plugins = order.record.manifest.plugins | plugins_from_json(content.get("plugins", {}))
    manifest = Manifest((*kept, *(SourceFiles(spec, shards) for spec, shards in given.items())), plugins)
    named: dict[str, tuple[str, list[str]]] = {}
    for source in config.sources:
        paths = [shard.path for shard in manifest.shards(source.source)]
        named |= {name: (source.source, paths) for name in (source.source, source.alias) if name is not None}
    listed = [ExclusionFile(*file) for file in content.get("exclude", ())]
    excluded: Exclusions = order.record.excluded
    known = excluded.files
    if tuple(listed[: len(known)]) != known:
        excluded = exclusions.load(listed, order.resources.base_dir, named)
    elif len(listed) > len(known):
        # Those before are known, by the names that sources had then.
        excluded = exclusions.joined(excluded, exclusions.load(listed[len(known) :], order.resources.base_dir, named))
    return builder.under(order, config, manifest, excluded, estimates_from_json(content.get("extents", {})))


def _grown(before: PipelineFactory, now: PipelineFactory) -> tuple[int, ...]:
    return tuple(
        i
        for i, shards in enumerate(now.record.shards[: len(before.record.shards)])
        if len(shards) > len(before.record.shards[i])
    )


def known_shards(order: PipelineFactory, spec: str) -> tuple[Shard, ...]:
    return next((source.shards for source in order.record.manifest.sources if source.spec == spec), ())


def lay(
    first: PipelineFactory, revisions: Sequence[StoredRevision], origin: Origin | None
) -> Iterator[TimelineSegment]:
    """The segments of a run, in order. Raises what ``builder.under`` does."""
    phases, order = first.config.phases, first
    begin, tokens = (0, 0) if origin is None else (origin.sample_index, origin.total_tokens)
    # A run that was forked begins in the phase that its tokens lie in.
    over = [phase.until_tokens is not None and phase.until_tokens <= tokens for phase in phases]
    present = over.index(False) if False in over else len(phases)
    left = origin.left_tokens if origin is not None else 0
    for i in range(min(present + 1, len(phases))):
        order = _in_phase(order, i, left, tokens, ())
    segment = TimelineSegment(begin, tokens, order, phase=present if phases else None)
    waiting = list(revisions)
    # What revisions dropped: a phase that has it in its mixture does not bring it back.
    gone: set[int] = set()
    ends = phases[present:-1] if present < len(phases) else []
    for number, phase in enumerate([*ends, None], present):
        # The sequence length is one within a phase, so its end is known before any revision is.
        length = segment.order.config.sequence_length
        end = None
        if phase is not None and phase.until_tokens is not None:
            pick = segment.order.config.pick_samples
            end = segment.begin - ((segment.tokens - phase.until_tokens) // (length * pick)) * pick
        while waiting and (end is None or waiting[0].sample_index < end):
            revision = waiting.pop(0)
            content = json.loads(revision.content)
            tokens = segment.tokens + (revision.sample_index - segment.begin) * length
            order = revised(segment.order, content)
            gone = _gone(gone, segment.order.config, order.config)
            more, phase_here = _grown(segment.order, order), None
            if revision.sample_index > segment.begin:
                yield segment
            else:
                # Nothing was given between: what began here before begins together with it.
                more, phase_here = tuple(sorted({*more, *segment.grown})), segment.phase
            segment = TimelineSegment(revision.sample_index, tokens, order, more, phase_here, revision)
        if end is None:
            yield segment
            return
        grown: tuple[int, ...] = ()
        if end > segment.begin:
            yield segment
        else:
            # A phase of less than a sample: nothing is given in it.
            grown = segment.grown
        tokens = segment.tokens + (end - segment.begin) * length
        segment = TimelineSegment(
            end, tokens, _in_phase(segment.order, number + 1, left, tokens, gone), grown, phase=number + 1
        )
