"""The segments of a run's order, each under one config: its phases and revisions, one after the other."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tokenloom_proto.seal import canonical

from tokenloom_server.config.run import RunConfig
from tokenloom_server.config.source import SourceConfig
from tokenloom_server.errors import SourceError
from tokenloom_server.ledger.records import StoredRevision
from tokenloom_server.order import builder, exclusions
from tokenloom_server.order.exclusions import ExclusionFile, Exclusions
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.mixture_content import validated, with_content
from tokenloom_server.order.record import estimates_from_json
from tokenloom_server.order.returning import Returning
from tokenloom_server.order.revision import merged, without
from tokenloom_server.order.size_estimates import ENCODED_BYTES, measure
from tokenloom_server.sources.base import Shard
from tokenloom_server.sources.manifest import Manifest, SourceFiles, plugins_from_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a run was forked from another: it begins there, at that sample index and with those tokens."""

    run: str
    uid: str
    generation: int
    sample_index: int
    total_tokens: int
    digest: str
    #: Samples and tokens before that of sources which this run does not have.
    left_samples: int
    left_tokens: int
    #: ``resume_state`` at the sample index, as this run has it; empty where only a snapshot after it tells of it.
    state: str = ""
    #: (sample index, samples) of what the other run passes over, before that and, as this one does, after it.
    skips: Sequence[tuple[int, int]] = ()

    def to_json(self) -> str:
        """Canonical JSON, as an opening keeps it."""
        return str(canonical(asdict(self)))

    def described(self) -> dict[str, Any]:
        """All of it but the state."""
        return asdict(replace(self, state=""))

    @classmethod
    def from_json(cls, text: str) -> Origin | None:
        """Reads ``to_json``; None for the empty text of a run that was not forked."""
        return cls(**json.loads(text)) if text else None


#: A source with more bytes than this for each token of a sample, or too many to be measured exactly, is taken to fill
#: one.
_SMALL_BYTES = 64


@dataclass(frozen=True, slots=True)
class TimelineSegment:
    """The order from a sample index on, up to the next segment's."""

    begin: int
    #: The run's total tokens there.
    tokens: int
    factory: PipelineFactory
    #: Sources that have more files than before.
    grown: tuple[int, ...] = ()
    #: Sources that come back where the state alone does not say how they go on.
    returning: tuple[Returning, ...] = ()
    #: The phase that begins here, counted from 0.
    phase: int | None = None
    #: The revision that begins here, the last of them; a skip is none.
    revision: StoredRevision | None = None
    #: So many samples are passed over before the first.
    skip: int = 0
    #: What began here before another revision did, and gave no sample: states of before that still name it.
    replaced: tuple[TimelineSegment, ...] = ()

    @property
    def config(self) -> RunConfig:
        return self.factory.config

    def tokens_at(self, sample_index: int) -> int:
        """The run's total tokens before a sample of this segment."""
        return self.tokens + (sample_index - self.begin) * self.config.sequence_length


def skip_content(skips: Mapping[int, int]) -> dict[str, Any]:
    """The content of a revision that changes no config, and says all that a run passes over: how many samples of its
    order, by sample index."""
    changes = [
        f"at sample {index:,}, {samples:,} samples of the order are passed over"
        for index, samples in skips.items()
    ]
    return {
        "skips": [*skips.items()],
        "changes": changes or ["nothing of the order is passed over any more"],
    }


def skips_after(skips: Mapping[int, int], index: int, samples: int) -> dict[int, int]:
    """What is passed over where so many samples more are, at a sample index. What lies after it stays with its data, so
    that it moves by as many samples."""
    passed = {index: samples} if samples else {}
    for other, count in skips.items():
        moved = max(index, other - samples) if other > index else other
        passed[moved] = passed.get(moved, 0) + count
    return dict(sorted(passed.items()))


def with_skips(
    segments: Sequence[TimelineSegment], skips: Mapping[int, int]
) -> Iterator[TimelineSegment]:
    """The segments of a run, cut where samples are passed over."""
    for segment, after in zip(segments, [*segments[1:], None], strict=True):
        for index, samples in skips.items():
            if segment.begin < index and (after is None or index < after.begin):
                yield segment
                segment = TimelineSegment(index, segment.tokens_at(index), segment.factory)
            if segment.begin == index:
                segment = replace(segment, skip=samples)
        yield segment


def _gone(before: Collection[int], old: RunConfig, new: RunConfig) -> set[int]:
    """The sources that revisions dropped, and did not bring back, once another one made ``new`` of ``old``."""
    left = {source.id for source in old.sources if source.presence != "dropped"}
    dropped = {source.id for source in new.sources if source.presence == "dropped"}
    return {source for source in before if source in dropped} | (left & dropped)


def _in_phase(
    before: PipelineFactory, number: int, left_tokens: int, tokens: int, gone: Collection[int]
) -> PipelineFactory:
    """The order in a phase, which begins at ``tokens`` of the run's tokens; sources that are ``gone`` stay dropped."""
    config, record = before.config, before.record
    phase, last = config.phases[number], number == len(config.phases) - 1
    length = phase.sequence_length or config.sequence_length
    ends = phase.until_tokens if last else None
    if phase.mixture is None and ends is None and length == config.sequence_length:
        return before
    mixture = phase.mixture
    if ends is not None:
        # What the mixture gives is what the run has, but for what a fork left after: after its last phase it ends.
        # To the next whole sample, like every phase.
        unit = length * config.pick_samples
        ends = tokens + -(-(ends - tokens) // unit) * unit if ends > tokens else ends
        root, ends = mixture or config.mixture, max(1, ends - left_tokens)
        mixture = root.model_copy(update={"max_tokens": min(ends, root.max_tokens or ends)})
    if mixture is not None:
        config = merged(config, mixture, length)
    else:
        config = validated(config, config.mixture.model_dump(), length)
    return builder.under(before, without(config, gone), record.manifest, record.excluded)


def files_to_json(files: Mapping[str, Sequence[Shard]]) -> dict[str, list[list[Any]]]:
    """By spec: path, size and fingerprint of each file."""
    return {
        spec: [[shard.path, shard.size, shard.fingerprint] for shard in shards]
        for spec, shards in files.items()
    }


def revised(before: PipelineFactory, content: Mapping[str, Any]) -> PipelineFactory:
    """The order that a revision's content makes of a run."""
    record, base_dir = before.record, before.resources.base_dir
    config = with_content(
        before.config, {**content, "sequence_length": before.config.sequence_length}
    )
    files = files_of(before)
    for spec, shards in content.get("shards", {}).items():
        files[spec] = tuple(Shard(path, size, fingerprint) for path, size, fingerprint in shards)
    plugins = record.manifest.plugins | plugins_from_json(content.get("plugins", {}))
    transforms = {**record.manifest.transforms, **content.get("transforms", {})}
    manifest = Manifest(
        tuple(SourceFiles(spec, shards) for spec, shards in files.items()), plugins, transforms
    )
    named: dict[str, tuple[str, list[str]]] = {}
    for source in config.sources:
        paths = [shard.path for shard in manifest.shards(source.source)]
        named |= {
            name: (source.source, paths)
            for name in (source.source, source.alias)
            if name is not None
        }
    listed = [ExclusionFile(*file) for file in content.get("exclude", ())]
    excluded: Exclusions = record.excluded
    known = excluded.files
    if tuple(listed[: len(known)]) != known:
        excluded = exclusions.load(listed, base_dir, named)
    elif len(listed) > len(known):
        # Those before are known, by the names that sources had then.
        excluded = exclusions.joined(
            excluded, exclusions.load(listed[len(known) :], base_dir, named)
        )
    return builder.under(before, config, manifest, excluded, estimates_from_json(content))


def files_of(factory: PipelineFactory) -> dict[str, tuple[Shard, ...]]:
    """By spec, the files of each source."""
    return {source.spec: source.shards for source in factory.record.manifest.sources}


def _grown(before: PipelineFactory, after: PipelineFactory) -> tuple[int, ...]:
    pairs = zip(before.record.shards, after.record.shards, strict=False)
    return tuple(i for i, (old, new) in enumerate(pairs) if len(new) > len(old))


def measured_ahead(first: PipelineFactory) -> PipelineFactory:
    """The order of a new run whose record has the sizes of sources that its later phases need to know, too."""
    factories = [segment.factory for segment in lay(first, (), None, 0)]
    by_spec = {
        factory.record.specs[source]: one
        for factory in factories
        for source, one in factory.record.size_estimates.items()
        if source not in first.record.size_estimates
    }
    return first.with_record(replace(first.record, phase_estimates=by_spec))


def refuse_unfilled(segments: Iterable[TimelineSegment]) -> None:
    """To be asked before the first sample of a run, not of one that goes on. Raises ``SourceError`` for a source that
    has too few tokens for a single sample in any of its segments."""
    uses: dict[str, list[tuple[PipelineFactory, SourceConfig]]] = {}
    for factory in [segment.factory for segment in segments]:
        for source in factory.config.sources:
            if source.presence != "dropped":
                uses.setdefault(source.source, []).append((factory, source))
    for each in uses.values():
        _refuse_unfilled(each)


def _refuse_unfilled(uses: Sequence[tuple[PipelineFactory, SourceConfig]]) -> None:
    """``uses``: of one source, the orders that have it, each with its options there."""
    factory, source = uses[0]
    config, size = factory.config, sum(shard.size for shard in factory.record.shards[source.id])
    # A phase may read it more often, or have shorter samples.
    length = min(order.config.sequence_length for order, _ in uses)
    epochs = max(order.config.epochs[own.id] for order, own in uses)
    makes_any = config.packing != "concat" or config.tail == "pad" or config.batching is not None
    # Ids that rearranged documents have beside their own are not measured; and nobody waits here for remote storage.
    is_unknown = source.fim is not None or source.spec.is_remote
    if (
        makes_any
        or is_unknown
        or math.isinf(epochs)
        or size > min(_SMALL_BYTES * length, ENCODED_BYTES)
    ):
        return
    tokens = (
        factory.record.size_estimates.get(source.id) or measure(factory, source.id)
    ).epoch_tokens
    if 0 < tokens * epochs < length:
        raise SourceError(
            f"{source.name}: it has {tokens:,} tokens and is read {epochs:g} times, and a sample takes {length:,} "
            f"(sequence_length), so it could never give one: set epochs to {math.ceil(length / tokens):,} or "
            "more, lower sequence_length, set tail: pad, or leave the source out"
        )


def lay(
    first: PipelineFactory,
    revisions: Sequence[StoredRevision],
    origin: Origin | None,
    clock_offset: int,
) -> Iterator[TimelineSegment]:
    """The segments of a run, in order. Raises what ``builder.under`` does."""
    phases, factory = first.config.phases, first
    begin, tokens = (
        (0, clock_offset) if origin is None else (origin.sample_index, origin.total_tokens)
    )
    # A run that was forked, or goes on by another clock, begins in the phase that its tokens lie in.
    over = [phase.until_tokens is not None and phase.until_tokens <= tokens for phase in phases]
    present = over.index(False) if False in over else len(phases)
    left = origin.left_tokens if origin is not None else 0
    for i in range(min(present + 1, len(phases))):
        factory = _in_phase(factory, i, left, tokens, ())
    segment = TimelineSegment(begin, tokens, factory, phase=present if phases else None)
    waiting = list(revisions)
    # What revisions dropped: a phase that has it in its mixture does not bring it back.
    gone: set[int] = set()
    ends = phases[present:-1] if present < len(phases) else []
    for number, phase in enumerate([*ends, None], present):
        # The sequence length is one within a phase, so its end is known before any revision is.
        end = None
        if phase is not None and phase.until_tokens is not None:
            picks = -((segment.tokens - phase.until_tokens) // segment.config.pick_tokens)
            end = segment.begin + picks * segment.config.pick_samples
        while waiting and (end is None or waiting[0].sample_index < end):
            revision = waiting.pop(0)
            tokens = segment.tokens_at(revision.sample_index)
            content = json.loads(revision.content)
            factory = revised(segment.factory, content)
            returning = tuple(Returning(*one) for one in content.get("returning", ()))
            gone = _gone(gone, segment.config, factory.config)
            grown, phase_here = _grown(segment.factory, factory), None
            replaced: tuple[TimelineSegment, ...] = ()
            if revision.sample_index > segment.begin:
                yield segment
            else:
                # Nothing was given between: what began here before begins together with it.
                grown, phase_here = tuple(sorted({*grown, *segment.grown})), segment.phase
                returning, replaced = segment.returning + returning, (*segment.replaced, segment)
            segment = TimelineSegment(
                revision.sample_index,
                tokens,
                factory,
                grown,
                returning,
                phase_here,
                revision,
                replaced=replaced,
            )
        if end is None:
            yield segment
            return
        # A phase of less than a sample: nothing is given in it.
        grown, returning = ((), ()) if end > segment.begin else (segment.grown, segment.returning)
        if end > segment.begin:
            yield segment
        tokens = segment.tokens_at(end)
        factory = _in_phase(segment.factory, number + 1, left, tokens, gone)
        segment = TimelineSegment(end, tokens, factory, grown, returning, phase=number + 1)
