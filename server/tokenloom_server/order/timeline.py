"""A run's whole order: which mixture is in force from which sample on, by its phases and its revisions."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from itertools import zip_longest
from typing import Any, NamedTuple

from tokenloom_proto.seal import canonical

from tokenloom_server.config.mixture_change import MixtureChange
from tokenloom_server.config.node import NodeConfig
from tokenloom_server.config.run import RunConfig
from tokenloom_server.config.source import SourceConfig
from tokenloom_server.core.state import State
from tokenloom_server.errors import ConfigError, SourceChanged, SourceError
from tokenloom_server.ledger.records import StoredRevision
from tokenloom_server.order import builder, exclusions, snapshot
from tokenloom_server.order.exclusions import ExclusionFile, Exclusions
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.pipeline import Pipeline, Switch
from tokenloom_server.order.record import estimates_from_json, estimates_to_json
from tokenloom_server.order.revision import carry, changed, content_of, differences, merged, with_content, without
from tokenloom_server.packing.base import PackerFactory
from tokenloom_server.sources.base import Shard
from tokenloom_server.sources.manifest import (
    Manifest,
    SourceFiles,
    build,
    plugins_from_json,
    plugins_of,
    plugins_to_json,
)
from tokenloom_server.sources.scheme import scheme_of


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
    #: ``resume_state`` at the sample index, as this run has it; empty where only a snapshot behind it tells of it.
    state: str = ""

    def to_json(self) -> str:
        """Canonical JSON, as an opening keeps it."""
        return str(canonical(asdict(self)))

    @classmethod
    def from_json(cls, text: str) -> Origin | None:
        """Reads ``to_json``; None for the empty text of a run that was not forked."""
        return cls(**json.loads(text)) if text else None


class _Recorded(NamedTuple):
    """A revision as states tell it."""

    begin: int
    content: Mapping[str, Any]
    what: str


class Timeline:
    """Immutable. A run without phases and revisions has one segment."""

    def __init__(
        self, first: PipelineFactory, revisions: Sequence[StoredRevision] = (), origin: Origin | None = None
    ) -> None:
        """``first`` is the order that the run's record gives. Raises ``ConfigError``, ``SourceError`` and
        ``SourceChanged`` where a revision cannot be honoured."""
        self.first = first
        self.revisions = tuple(revisions)
        self.origin = origin
        self.name = first.name
        self._segments = tuple(self._lay())
        self._begins = [segment.begin for segment in self._segments]
        lengths = {segment.order.config.sequence_length for segment in self._segments}
        self._one_length = len(lengths) == 1 and origin is None

    @property
    def sample_bytes(self) -> int:
        """Bytes of the longest sample of the run, as it travels."""
        return max(segment.order.form.sample_bytes for segment in self._segments)

    @property
    def segments(self) -> Sequence[TimelineSegment]:
        """In order; the first begins at sample 0."""
        return self._segments

    def with_revisions(self, revisions: Sequence[StoredRevision]) -> Timeline:
        """The course under other revisions."""
        return self if tuple(revisions) == self.revisions else Timeline(self.first, revisions, self.origin)

    def with_origin(self, origin: Origin | None) -> Timeline:
        """The course of a run that was forked, or was not."""
        return self if origin == self.origin else Timeline(self.first, self.revisions, origin)

    def at(self, sample_index: int) -> PipelineFactory:
        """The order that decides the sample at an index."""
        return self._segment(sample_index).order

    def tokens_at(self, sample_index: int) -> int:
        """The run's total tokens before the sample at an index."""
        segment = self._segment(sample_index)
        return segment.tokens + (sample_index - segment.begin) * segment.order.config.sequence_length

    def epochs_until(self, sample_index: int) -> Sequence[float]:
        """The most epochs that each source had in any segment that began at a sample index or before it, by id."""
        had = [segment.order.config.epochs for segment in self._segments if segment.begin <= sample_index]
        return [max(found) for found in zip_longest(*had, fillvalue=0.0)]

    def index_at(self, total_tokens: int) -> int:
        """The first sample index at which the run has had so many tokens; with ``batching`` behind a whole batch."""
        for segment, behind in zip(self._segments, [*self._segments[1:], None], strict=True):
            config = segment.order.config
            index = (
                segment.begin + max(0, -((segment.tokens - total_tokens) // config.pick_tokens)) * config.pick_samples
            )
            if behind is None or index < behind.begin:
                return index
        raise AssertionError("unreachable: the last segment has no end")

    def initial(self) -> State:
        """The state before the first sample."""
        origin = self.origin
        if origin is None:
            return self.at(0).initial()
        if origin.state:
            return self.decode(origin.state)
        # Of use for figures alone: nobody can begin there (see ``History.beginning``).
        return replace(
            self.at(0).initial(),
            sample_index=origin.sample_index,
            total_tokens=origin.total_tokens,
            digest=int(origin.digest, 16),
        )

    def pipeline(self, state: State, *, ahead: bool = False) -> Pipeline:
        """As ``PipelineFactory.pipeline``; goes over from segment to segment by itself."""
        return self.at(state.sample_index).pipeline(
            state, ahead=ahead, switches=self.switches(state.sample_index, ahead=ahead)
        )

    def switches(self, sample_index: int, *, ahead: bool = False) -> list[Switch]:
        """Those behind a sample index."""
        found = []
        before = self._segment(sample_index).order
        for segment in self._segments[bisect_right(self._begins, sample_index) :]:
            order = segment.order
            longer = order.config.sequence_length != before.config.sequence_length
            ends = None
            if longer:
                ends = (
                    f"sample {segment.begin} begins phase {segment.phase}, with a sequence length of "
                    f"{order.config.sequence_length} instead of {before.config.sequence_length}: join again from the "
                    "state here to go on"
                )
            carried = partial(carry, old=before.config, new=order.config, grown=segment.grown)
            found.append(
                Switch(segment.begin, order.config, _lazily(order, ahead), carried, ends, order.record.size_estimates)
            )
            before = order
        return found

    # --- states as text ------------------------------------------------------------------------------

    def shape_at(self, sample_index: int) -> snapshot.Shape:
        """What the states at a sample index look like."""
        shape = self.at(sample_index).record.shape
        held = [told for told in self._told if told.begin <= sample_index]
        if held:
            shape = replace(shape, revision=(held[-1].begin, held[-1].what))
        if self._one_length:
            return shape
        left = self.origin.left_samples if self.origin is not None else 0
        return replace(shape, total_tokens=self.tokens_at, left_samples=left)

    def encode(self, state: State) -> str:
        """``resume_state``: the canonical JSON of a state, with the revision in force and all that are to come: what a
        ledger that knows none of them needs to go on."""
        index = state.sample_index
        in_force = [told for told in self._told if told.begin <= index]
        ahead = [told for told in self._told if told.begin > index]
        revisions = [{"sample_index": told.begin, "content": told.content} for told in (*in_force[-1:], *ahead)]
        origin = asdict(replace(self.origin, state="")) if self.origin is not None else None
        return snapshot.encode_state(state, self.shape_at(index), revisions, origin)

    def decode(self, resume_state: str) -> State:
        """Reads ``encode`` back. Raises ``SnapshotInvalid``."""
        return snapshot.decode_state(resume_state, self.shape_at)

    @cached_property
    def _told(self) -> Sequence[_Recorded]:
        """The revisions as states tell them: for who has none of those before, so with all files that the run did not
        begin with."""
        found = []
        for segment in self._segments:
            if segment.revision is not None:
                content: dict[str, Any] = json.loads(segment.revision.content)
                more = _listed(
                    (source.spec, source.shards)
                    for source in segment.order.record.manifest.sources
                    if source.shards != _known_shards(self.first, source.spec)
                )
                content |= {"shards": more} if more else {}
                found.append(_Recorded(segment.begin, content, snapshot.what_of(content)))
        return found

    def holds(self, sample_index: int, content: Mapping[str, Any]) -> bool:
        """Whether a revision, as a state tells it, is one of this course."""
        what = snapshot.what_of(content)
        return any((told.begin, told.what) == (sample_index, what) for told in self._told)

    # --- revisions -----------------------------------------------------------------------------------

    def lineage(self, generation: int) -> Timeline:
        """The course as a generation had it: what was revised later is left out."""
        return self.with_revisions(
            [revision for revision in self.revisions if json.loads(revision.content)["generation"] <= generation]
        )

    def revise(self, change: MixtureChange, sample_index: int, generation: int = 0) -> dict[str, Any]:
        """The content of a revision that makes a change from a sample index on, during a generation.

        Raises ``ConfigError``, naming the field, what was found and what was expected, and ``SourceChanged``.
        """
        try:
            return self._content_of(change, sample_index, generation)
        except SourceChanged:
            raise
        except SourceError as error:
            # Who asks names files that are not there, or hold something else.
            raise ConfigError(str(error)) from None

    def _content_of(self, change: MixtureChange, sample_index: int, generation: int) -> dict[str, Any]:
        order = self.at(sample_index)
        _check_batches(order.config, change, sample_index)
        config = changed(order.config, change)
        if change.mixture is not None and config.mixture.max_tokens is None and self._in_last_phase(sample_index):
            # The mixture is another one; where the run ends is not a part of it.
            content = content_of(config)
            content["mixture"]["max_tokens"] = order.config.mixture.max_tokens
            config = with_content(config, content)
        _check_limits(order.config, config)
        builder.check_named(config, order.resources)
        if change.exclude is not None:
            order.resources.roots.check_paths("exclude.file", order.resources.base_dir, [change.exclude.file])
        shards = dict(self._new_files(order, config))
        shards |= {spec: more for name in change.append_files for spec, more in [self._appended(order, name)]}
        excluded = [*order.record.excluded.files]
        if change.exclude is not None:
            excluded.append(exclusions.describe(change.exclude.file, order.resources.base_dir))
        content = _content(order, config, shards, excluded)
        # That it can be read is found out now, and not when it is in force.
        revised = _revised(order, content)
        lines = differences(order.config, config)
        lines += [
            f"{spec}: {len(more) - len(_known_shards(order, spec))} files more"
            for spec, more in shards.items()
            if _known_shards(order, spec)
        ]
        for source in config.sources:
            more = revised.record.excluded.count(source.source) - order.record.excluded.count(source.source)
            if more:
                lines.append(f"{source.name}: {more} rows left out of each epoch")
        if not lines:
            raise ConfigError("this changes nothing: the mixture in force there is the same")
        lines += self._ended_by_a_phase(sample_index)
        if revised.record.size_estimates:
            content["extents"] = estimates_to_json(revised.record.size_estimates)
        return {**content, "changes": lines, "generation": generation}

    def as_revised(self) -> RunConfig:
        """What the newest revision made of the mixture, as a file has it: phases that begin behind it, and the end of
        the last one, stand there by themselves."""
        revised = [segment for segment in self._segments if segment.revision is not None]
        config = (revised[-1] if revised else self._segments[0]).order.config
        phases, left = config.phases, self.origin.left_tokens if self.origin is not None else 0
        ends = phases[-1].until_tokens if phases else None
        found = config.mixture.max_tokens
        # To the next whole sample (see ``_in_phase``).
        if ends is not None and found is not None and 0 <= found - max(1, ends - left) < config.pick_tokens:
            content = content_of(config)
            del content["mixture"]["max_tokens"]
            return with_content(config, content)
        return config

    def _ended_by_a_phase(self, sample_index: int) -> Iterator[str]:
        """That a change holds only until a phase brings a mixture of its own; what was dropped stays so."""
        phases = self.first.config.phases
        for segment in self._segments:
            brings = segment.phase is not None and segment.phase < len(phases) and phases[segment.phase].mixture
            if brings and segment.begin > sample_index:
                yield f"until sample {segment.begin}, where phase {segment.phase} begins with a mixture of its own"
                return

    def _in_last_phase(self, sample_index: int) -> bool:
        """Whether a sample lies in a last phase that ends the run."""
        phases = self.first.config.phases
        begins = (segment.begin for segment in self._segments if (segment.phase or 0) >= len(phases) - 1)
        return bool(phases) and phases[-1].until_tokens is not None and sample_index >= min(begins)

    def _new_files(self, order: PipelineFactory, config: RunConfig) -> Iterator[tuple[str, tuple[Shard, ...]]]:
        known = {source.spec for source in order.record.manifest.sources}
        new = [source.spec for source in config.sources if source.source not in known]
        if new:
            yield from ((source.spec, source.shards) for source in build(new, order.resources.base_dir).sources)

    def _appended(self, order: PipelineFactory, name: str) -> tuple[str, tuple[Shard, ...]]:
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
        known = _known_shards(order, source.source)
        new = scheme_of(source.spec).more_shards(source.spec, known, order.resources.base_dir)
        if not new:
            raise ConfigError(
                f"append_files: {name!r} has no file that the run does not read already ({len(known)} files)"
            )
        return source.source, (*known, *new)

    # -------------------------------------------------------------------------------------------------

    def _segment(self, sample_index: int) -> TimelineSegment:
        return self._segments[max(0, bisect_right(self._begins, sample_index) - 1)]

    def _lay(self) -> Iterator[TimelineSegment]:
        phases, order, origin = self.first.config.phases, self.first, self.origin
        begin, tokens = (0, 0) if origin is None else (origin.sample_index, origin.total_tokens)
        # A run that was forked begins in the phase that its tokens lie in.
        over = [phase.until_tokens is not None and phase.until_tokens <= tokens for phase in phases]
        present = over.index(False) if False in over else len(phases)
        left = origin.left_tokens if origin is not None else 0
        for i in range(min(present + 1, len(phases))):
            order = _in_phase(order, i, left, tokens, ())
        segment = TimelineSegment(begin, tokens, order, phase=present if phases else None)
        waiting = list(self.revisions)
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
                order = _revised(segment.order, content)
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


def _lazily(factory: PipelineFactory, ahead: bool) -> PackerFactory:
    """The packers of a segment that may never be reached: made when the first is asked for."""
    packers = cache(partial(factory.packers, ahead=ahead))
    return lambda source_id, state: packers()(source_id, state)


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


def _content(
    order: PipelineFactory, config: RunConfig, shards: Mapping[str, Sequence[Shard]], excluded: Sequence[ExclusionFile]
) -> dict[str, Any]:
    content: dict[str, Any] = content_of(config)
    if plugins := plugins_of(source.spec for source in config.sources):
        content["plugins"] = plugins_to_json(plugins)
    if shards:
        content["shards"] = _listed(shards.items())
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


def _listed(files_of: Iterable[tuple[str, Sequence[Shard]]]) -> dict[str, list[list[Any]]]:
    return {spec: [[shard.path, shard.size, shard.fingerprint] for shard in found] for spec, found in files_of}


def _revised(order: PipelineFactory, content: Mapping[str, Any]) -> PipelineFactory:
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


def _known_shards(order: PipelineFactory, spec: str) -> tuple[Shard, ...]:
    return next((source.shards for source in order.record.manifest.sources if source.spec == spec), ())
