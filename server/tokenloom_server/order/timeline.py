"""A run's whole order: which mixture is in force from which sample on, by its phases and its revisions."""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import count, zip_longest
from typing import Any, NamedTuple

from tokenloom_proto.seal import canonical

from tokenloom_server.config.run import RunConfig
from tokenloom_server.core import caller
from tokenloom_server.core.state import MAX_COUNTER, State, passed_over
from tokenloom_server.errors import BeyondHorizon, ServerStopping, SnapshotInvalid
from tokenloom_server.ledger.records import StoredRevision
from tokenloom_server.order import state_document
from tokenloom_server.order.carry_over import carry
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.mixture_content import validated
from tokenloom_server.order.pipeline import Pipeline, Switch
from tokenloom_server.order.returning import returning
from tokenloom_server.order.segments import (
    Origin,
    TimelineSegment,
    files_of,
    files_to_json,
    lay,
    skip_content,
    with_skips,
)
from tokenloom_server.packing.base import PackerFactory

_log = logging.getLogger(__name__)

#: Between two looks whether the caller still waits, so many tokens are passed over at most: about a second of one core.
TURN_TOKENS = 2**20
#: Between two lines of the log.
_REPORT_TURNS = 5


class _Recorded(NamedTuple):
    """A revision as states carry it."""

    begin: int
    content: Mapping[str, Any]
    #: See ``canonical_content``.
    canonical: str

    def is_named(self, sample_index: int, generation: int | None) -> bool:
        """Whether states of a generation at a sample index name it: where it is in force, and where it was accepted
        before the samples after them were produced (None: it was)."""
        if generation is None or self.begin <= sample_index:
            return True
        made_in, known_from = self.content.get("generation", 0), self.content.get("known_from", 0)
        return bool(made_in < generation or (made_in == generation and sample_index >= known_from))


class Timeline:
    """Immutable. A run without phases and revisions has one segment."""

    def __init__(
        self,
        first: PipelineFactory,
        revisions: Sequence[StoredRevision] = (),
        origin: Origin | None = None,
        clock_offset: int = 0,
    ) -> None:
        """``first`` is that of the run's record; ``clock_offset`` that of the states (a fork begins with its parent's
        clock, by ``origin``). Raises ``ConfigError``, ``SourceError`` and ``SourceChanged`` where a revision cannot be
        honoured."""
        self.first = first
        self.revisions = tuple(revisions)
        self.origin = origin
        self.clock_offset = clock_offset
        self.name = first.name
        contents = [json.loads(revision.content) for revision in self.revisions]
        lists = [
            origin.skips if origin is not None else (),
            *(content.get("skips") for content in contents),
        ]
        #: How many samples are passed over, by sample index, ascending: what the newest that tells of it says.
        self.skips = dict([pairs for pairs in lists if pairs is not None][-1])
        changes = [
            one
            for one, content in zip(self.revisions, contents, strict=True)
            if "skips" not in content
        ]
        self._segments = tuple(
            with_skips(list(lay(first, changes, origin, clock_offset)), self.skips)
        )
        self._begins = [segment.begin for segment in self._segments]
        lengths = {segment.config.sequence_length for segment in self._segments}
        #: Whether total tokens are those of so many samples of one length.
        self.has_plain_clock = len(lengths) == 1 and origin is None and not clock_offset
        # The last timeline under another clock that was asked for.
        self._other_clock: Timeline | None = None

    @property
    def sample_bytes(self) -> int:
        """Bytes of the longest sample of the run, as it travels."""
        return max(segment.factory.form.sample_bytes for segment in self._segments)

    @property
    def segments(self) -> Sequence[TimelineSegment]:
        """All segments in order; the first begins at sample 0."""
        return self._segments

    @property
    def last_revised(self) -> int:
        """The sample index of the last revision in the order, which need not be the newest; 0 without one."""
        return max((revision.sample_index for revision in self.revisions), default=0)

    def with_revisions(self, revisions: Sequence[StoredRevision]) -> Timeline:
        """The timeline under other revisions."""
        same = tuple(revisions) == self.revisions
        return self if same else Timeline(self.first, revisions, self.origin, self.clock_offset)

    def skipping(
        self, skips: Sequence[tuple[int, int]], sample_index: int, made_at: float = 0.0
    ) -> Timeline:
        """The timeline where these, and no others, are passed over, by a revision at a sample index."""
        revision = StoredRevision(
            number=len(self.revisions) + 1,
            sample_index=sample_index,
            made_at=made_at,
            author="",
            reason="a restore",
            content=canonical(skip_content(dict(skips))),
        )
        return self.with_revisions((*self.revisions, revision))

    def before_skip(self, sample_index: int) -> Timeline:
        """The timeline where nothing is passed over at a sample index."""
        return self.skipping(
            [skip for skip in self.skips.items() if skip[0] != sample_index], sample_index
        )

    def with_origin(self, origin: Origin | None) -> Timeline:
        """The timeline of a run that was forked, or was not."""
        return (
            self
            if origin == self.origin
            else Timeline(self.first, self.revisions, origin, self.clock_offset)
        )

    def with_clock(self, clock_offset: int) -> Timeline:
        """The timeline of states that have this ``clock_offset``."""
        other = self if clock_offset == self.clock_offset else self._other_clock
        if other is None or other.clock_offset != clock_offset:
            other = self._other_clock = Timeline(
                self.first, self.revisions, self.origin, clock_offset
            )
        return other

    def of_state(self, resume_state: str) -> Timeline:
        """The timeline by whose clock a state was made, as this run wrote it; empty for none."""
        return self.with_clock(json.loads(resume_state or "{}").get("clock_offset", 0))

    def at(self, sample_index: int) -> PipelineFactory:
        """What makes the sample at an index."""
        return self._segment(sample_index).factory

    def segment_end(self, sample_index: int) -> int:
        """Where the segment of a sample ends."""
        after = bisect_right(self._begins, sample_index)
        return self._begins[after] if after < len(self._begins) else MAX_COUNTER

    def tokens_at(self, sample_index: int) -> int:
        """The run's total tokens before the sample at an index."""
        return self._segment(sample_index).tokens_at(sample_index)

    def epochs_until(self, sample_index: int) -> Sequence[float]:
        """The most epochs that each source had in any segment that began at a sample index or before it, by id."""
        by_segment = [
            segment.config.epochs for segment in self._segments if segment.begin <= sample_index
        ]
        return [max(epochs) for epochs in zip_longest(*by_segment, fillvalue=0.0)]

    def index_at(self, total_tokens: int) -> int:
        """The first sample index at which the run has had so many tokens; with ``batching`` after a whole batch."""
        for segment, after in zip(self._segments, [*self._segments[1:], None], strict=True):
            picks = -((segment.tokens - total_tokens) // segment.config.pick_tokens)
            index = segment.begin + max(0, picks) * segment.config.pick_samples
            if after is None or index < after.begin:
                return index
        raise AssertionError("unreachable: the last segment has no end")

    def initial(self) -> State:
        """The state before the first sample."""
        origin = self.origin
        if origin is None:
            return replace(
                self.at(0).initial(), total_tokens=self.clock_offset, clock_offset=self.clock_offset
            )
        if origin.state:
            return self.decode(origin.state)
        # Of use for figures alone: nobody can begin there (see ``ResumePoints.beginning``).
        return replace(
            self.at(0).initial(),
            sample_index=origin.sample_index,
            total_tokens=origin.total_tokens,
            digest=int(origin.digest, 16),
        )

    def pipeline(self, state: State, *, ahead: bool = False) -> Pipeline:
        """As ``PipelineFactory.pipeline``; goes over from segment to segment by itself."""
        return self.at(state.sample_index).pipeline(
            self.settled(state),
            ahead=ahead,
            switches=self.switches(state.sample_index, ahead=ahead),
        )

    def settled(self, state: State) -> State:
        """A state after what is passed over at its sample index, where it stands before that. Raises what
        ``check_skips`` and reading do."""
        self.check_skips(state, state.sample_index)
        return self._past_skip(self._segment(state.sample_index), state)

    def check_skips(self, state: State, index: int) -> None:
        """Raises ``SnapshotInvalid`` for a state that passed over other samples before an index than the run does, or
        more at it."""
        passed = {skip.sample_index: skip.samples for skip in state.skips}
        for skip in sorted({*passed, *self.skips}):
            samples, theirs = self.skips.get(skip, 0), passed.get(skip, 0)
            if skip <= index and samples != theirs and (skip < index or samples < theirs):
                raise SnapshotInvalid(
                    f"at sample {skip} this run passes over {samples} samples, and the state at sample {index} comes "
                    f"from a line that passed over {theirs}: restore to sample {skip} or before, or to this state "
                    "without that skip (tokenloom restore --undo-skip)"
                )

    def skips_from(self, state: State) -> list[str]:
        """For people: what is passed over from a state on, and what of each source was so far."""
        ahead = {
            index: samples for index, samples in self.skips.items() if index >= state.sample_index
        }
        sources = zip(self.at(state.sample_index).config.sources, state.sources, strict=True)
        passed = [
            f"{of.name} {source.skipped_tokens:,} tokens"
            for of, source in sources
            if source.skipped_samples
        ]
        so_far = [f"passed over so far: {', '.join(passed)}"] if passed else []
        return (skip_content(ahead)["changes"] if ahead else []) + so_far

    def _past_skip(self, segment: TimelineSegment, state: State) -> State:
        """A state at a segment's beginning, after the samples that are passed over there."""
        left = segment.skip - sum(
            skip.samples for skip in state.skips if skip.sample_index == segment.begin
        )
        if left <= 0 or state.sample_index != segment.begin:
            return state
        pipeline, config = segment.factory.pipeline(state), segment.config
        turn = max(1, TURN_TOKENS // config.pick_tokens) * config.pick_samples
        turns = count()
        while (
            pipeline.ended is None
            and (rest := state.sample_index + left - pipeline.sample_index) > 0
        ):
            if rest > turn and next(turns) % _REPORT_TURNS == 0:
                name, done = self.first.config.run, left - rest
                _log.info(
                    "%s: passing over %d samples at sample %d: %d done",
                    name,
                    left,
                    segment.begin,
                    done,
                )
            if caller.has_gone():
                raise ServerStopping(
                    f"nobody waits any more for the end of {left} samples that are passed over"
                )
            pipeline.advance(min(rest, turn))
        if pipeline.ended is not None and pipeline.sample_index < state.sample_index + left:
            raise BeyondHorizon(
                f"{left} samples cannot be passed over at sample {segment.begin}: the order has "
                f"{pipeline.sample_index - state.sample_index} more ({pipeline.ended})"
            )
        return passed_over(state, pipeline.state())

    def _entered(self, before: TimelineSegment, segment: TimelineSegment, state: State) -> State:
        """The state at the end of one segment, as the next one goes on from it."""
        if segment.factory is not before.factory:
            state = _carried(before.config, segment, state)
        return self._past_skip(segment, state)

    def switches(self, sample_index: int, *, ahead: bool = False) -> list[Switch]:
        """The switches after a sample index."""
        switches = []
        before = self._segment(sample_index)
        for segment in self._segments[bisect_right(self._begins, sample_index) :]:
            config = segment.config
            end_reason = None
            if config.sequence_length != before.config.sequence_length:
                end_reason = (
                    f"sample {segment.begin} begins phase {segment.phase}, with a sequence length of "
                    f"{config.sequence_length} instead of {before.config.sequence_length}: join again from the state "
                    "here to go on"
                )
            carried = partial(self._entered, before, segment)
            estimates = segment.factory.record.size_estimates
            packers = _lazily(segment.factory, ahead)
            switches.append(Switch(segment.begin, config, packers, carried, end_reason, estimates))
            before = segment
        return switches

    # --- states as text ------------------------------------------------------------------------------

    def shape_at(self, sample_index: int, clock_offset: int) -> state_document.Shape:
        """What the states at a sample index look like, under a ``clock_offset``."""
        timeline = self.with_clock(clock_offset)
        shape = timeline.at(sample_index).record.shape
        in_force = [one for one in timeline._recorded if one.begin <= sample_index]
        if in_force:
            shape = replace(shape, revision=(in_force[-1].begin, in_force[-1].canonical))
        if timeline.has_plain_clock:
            return shape
        left = self.origin.left_samples if self.origin is not None else 0
        return replace(shape, total_tokens=timeline.tokens_at, left_samples=left)

    def encode(self, state: State, generation: int | None = None) -> str:
        """``resume_state``: the canonical JSON of a state, with the revision in force and those that are to come, and
        all skips: what a ledger that knows none of them needs to go on.

        ``generation``: without those that were accepted after the samples from here on were produced in it, so that
        every server, whenever it is asked, writes one text."""
        index, recorded = state.sample_index, self.with_clock(state.clock_offset)._recorded
        # At one sample index the newest counts.
        named = {one.begin: one for one in recorded if one.is_named(index, generation)}.values()
        in_force = [one for one in named if one.begin <= index]
        ahead = [one for one in named if one.begin > index]
        revisions = [
            {"sample_index": one.begin, "content": one.content} for one in (*in_force[-1:], *ahead)
        ]
        skips = [*self.skips.items()]
        if skips:
            revisions.insert(
                0, {"sample_index": min(self.skips), "content": skip_content(self.skips)}
            )
        # What its parent passed over, and this run does not any more, is not taken back by an empty ledger.
        origin = replace(self.origin, skips=skips).described() if self.origin is not None else None
        return state_document.encode_state(
            state, self.shape_at(index, state.clock_offset), revisions, origin
        )

    def decode(self, resume_state: str) -> State:
        """Reads ``encode`` back. Raises ``SnapshotInvalid``."""
        return state_document.decode_state(resume_state, self.shape_at)

    @cached_property
    def _recorded(self) -> Sequence[_Recorded]:
        """The revisions as states carry them: readable without those before, so with all files that the run did not
        begin with."""
        recorded, first_files = [], files_of(self.first)
        for segment in (each for last in self._segments for each in (*last.replaced, last)):
            if segment.revision is not None:
                content: dict[str, Any] = json.loads(segment.revision.content)
                files = files_of(segment.factory)
                new = {spec: files[spec] for spec in files if files[spec] != first_files.get(spec)}
                content |= {"shards": files_to_json(new)} if new else {}
                recorded.append(
                    _Recorded(segment.begin, content, state_document.canonical_content(content))
                )
        return recorded

    def holds(self, sample_index: int, content: Mapping[str, Any]) -> bool:
        """Whether a revision, as a state has it, is one of this timeline."""
        if "skips" in content:
            # Fewer are those of before, and others of another line.
            return not self.skips.items() < dict(content["skips"]).items()
        canonical = state_document.canonical_content(content)
        return any(
            (one.begin, one.canonical) == (sample_index, canonical) for one in self._recorded
        )

    # --- revisions -----------------------------------------------------------------------------------

    def as_revised(self) -> RunConfig:
        """What the newest revision made of the mixture, as a file has it: phases that begin after it, and the end of
        the last one, stand there by themselves."""
        revised = [segment for segment in self._segments if segment.revision is not None]
        config = (revised[-1] if revised else self._segments[0]).config
        if config.ends_with_last_phase(self.origin.left_tokens if self.origin is not None else 0):
            return validated(config, config.mixture.model_dump() | {"max_tokens": None})
        return config

    # -------------------------------------------------------------------------------------------------

    def _segment(self, sample_index: int) -> TimelineSegment:
        return self._segments[max(0, bisect_right(self._begins, sample_index) - 1)]


def _carried(old: RunConfig, segment: TimelineSegment, state: State) -> State:
    """The state at the beginning of a segment. What a revision does not name comes back by a phase."""
    named = [one.entry for one in segment.returning]
    others = [entry for entry in state.preserved if entry not in named]
    back = (*segment.returning, *returning(others, segment.factory, len(old.sources)))
    return carry(state, old, segment.config, segment.grown, back)


def _lazily(factory: PipelineFactory, ahead: bool) -> PackerFactory:
    """The packers of a segment that may never be reached: made when the first is asked for."""
    packers = cache(partial(factory.packers, ahead=ahead))
    return lambda source_id, state: packers()(source_id, state)
