"""The canonical order at work: from a state to the samples behind it, bit for bit.

Sources, tokeniser and packers are the leaves; here is the one loop that decides, counts and digests.
No clock, thread, socket or ledger is known here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, repeat
from operator import mul
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenloom_server.config.run import RunConfig
from tokenloom_server.core.hashing import slice_rotation
from tokenloom_server.core.size_estimate import SizeEstimate
from tokenloom_server.core.state import (
    DIGEST_MODULUS,
    DIGEST_MULTIPLIER,
    MAX_COUNTER,
    SourceState,
    State,
)
from tokenloom_server.errors import ConfigError, CounterOverflow, JoinRefused, TokenloomError
from tokenloom_server.mixing.mixer import Mixer, MixWeights, initial_nodes
from tokenloom_server.mixing.node import NOTHING, Picks
from tokenloom_server.packing.base import Batch, Packer, PackerFactory, SampleOrigins, SourcePosition
from tokenloom_server.packing.real_tokens import Boundaries, RealTokens

#: What a padding sample's source is called.
PADDING = -1

#: Samples that the digest takes in with one reduction.
_DIGESTED_AT_ONCE = 64


def initial_state(config: RunConfig) -> State:
    """The state before sample 0."""
    return State(
        sample_index=0,
        total_tokens=0,
        digest=0,
        sources=(SourceState(),) * len(config.sources),
        nodes=initial_nodes(config),
    )


class Switch(NamedTuple):
    """A sample index from which on the order is made by another config."""

    sample_index: int
    config: RunConfig
    packers: PackerFactory
    #: The state there as the other config has it.
    carry: Callable[[State], State]
    #: Why batches end here, because those behind have another shape; None where they go on.
    ends: str | None
    #: Of the other config's ``measured_sources``, by id.
    size_estimates: Mapping[int, SizeEstimate] = MappingProxyType({})


class Segment(NamedTuple):
    """What decides the samples from a state on."""

    config: RunConfig
    mixer: Mixer
    start: State


class StepMark(NamedTuple):
    """What a state behind a step has that cannot be counted from the samples before it: taken every step."""

    sample_index: int
    total_tokens: int
    digest: int
    segment: Segment
    mix_weights: MixWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """How consecutive steps of one batch size cut the order: the n-th of them covers samples
    [start + n·world_size·batch_size, …); every ``group_steps`` steps is a state boundary.

    A generation's steps are counted from its start; ``ramp.Ramp`` puts plans of several sizes behind one another.
    """

    start_index: int
    world_size: int
    batch_size: int
    group_steps: int
    #: Steps, and groups, of the generation before it.
    first_step: int = 0
    first_group: int = 0
    #: The step behind its last one, which begins a group of its own.
    behind: int = MAX_COUNTER

    @property
    def step_samples(self) -> int:
        return self.world_size * self.batch_size

    @property
    def group_samples(self) -> int:
        return self.step_samples * self.group_steps

    def index_of(self, step: int) -> int:
        """The sample index at which a step begins."""
        return self.start_index + (step - self.first_step) * self.world_size * self.batch_size

    def group_begin(self, step: int) -> int:
        """The first step of the group that a step is of."""
        return step - (step - self.first_step) % self.group_steps

    def group_end(self, step: int) -> int:
        """The step behind the last one of the group that a step is of."""
        return min(self.group_begin(step) + self.group_steps, self.behind)

    def group_number(self, step: int) -> int:
        """Groups of the generation before that which a step is of."""
        return self.first_group + (step - self.first_step) // self.group_steps


@dataclass(slots=True)
class StepGroup:
    """The steps between two state boundaries, filled one burst after the other.

    ``samples`` are the ids of each rank's samples, as views of the blocks that they came from, by rank, step
    and place in the batch ([world_size, group_steps, batch_size], as ``source_ids``, int32); empty once released.
    ``marks[g]`` is the mark *behind* step g, ``rotations[g]`` the rotation of its slices. ``places`` are those of
    the blocks that the samples came from, and
    ``dropped_tokens`` the tails, by source and by where the segment began.
    """

    plan: BatchPlan
    base: State
    real: RealTokens
    samples: npt.NDArray[np.object_]
    source_ids: npt.NDArray[np.int32]
    places: list[list[SampleOrigins]] = field(default_factory=list)
    dropped_tokens: dict[int, list[int]] = field(default_factory=dict)
    marks: list[StepMark] = field(default_factory=list)
    rotations: list[int] = field(default_factory=list)
    #: Tokens and labels of each step, over all ranks; empty where every sample has as many (``real``).
    counts: list[tuple[int, int]] = field(default_factory=list)
    #: The base as canonical JSON, and steps as the wire has them, once somebody made them.
    resume_state: str | None = None
    step_infos: dict[int, bytes] = field(default_factory=dict)

    @property
    def begin(self) -> int:
        return self.base.sample_index

    @property
    def end(self) -> int:
        return self.marks[-1].sample_index if self.marks else self.begin

    @property
    def first_step(self) -> int:
        """Its first step, counted from the generation's start."""
        return self.plan.first_step + (self.begin - self.plan.start_index) // self.plan.step_samples

    def step_begin(self, step: int) -> int:
        return self.marks[step - 1].sample_index if step else self.begin

    def slice_of(self, step: int, rank: int) -> int:
        """Which slice of the step the rank gets: its samples begin at step_begin + slice × batch_size."""
        return (rank + self.rotations[step]) % self.plan.world_size

    def forget_behind(self, steps: int) -> None:
        """Drops what lies behind the first ``steps`` steps: a burst that failed half-way."""
        del self.marks[steps:], self.rotations[steps:], self.counts[steps:]

    def real_tokens(self, step: int) -> tuple[int, int]:
        """Tokens and labels of a step over all ranks, as ``RealTokens`` says."""
        if self.real.varies:
            return self.counts[step]
        samples, (tokens, labels) = self.marks[step].sample_index - self.step_begin(step), self.real.full
        return samples * tokens, samples * labels

    def count(self, first: int, last: int) -> None:
        """Counts the real tokens of the steps [first, last), whose samples and rotations are there."""
        samples = self.samples.reshape(self.source_ids.shape)[:, first:last].swapaxes(0, 1).reshape(-1)
        sources = self.source_ids[:, first:last].swapaxes(0, 1).reshape(-1)
        boundaries = self._boundaries(first, last, sources) if self.real.mask_boundaries else None
        self.counts += self.real.of(samples.tolist(), last - first, sources == PADDING, boundaries)

    def _boundaries(self, first: int, last: int, sources: npt.NDArray[np.int32]) -> Boundaries:
        """Where documents begin in the samples of the steps [first, last), arranged as ``sources``: by step, rank
        and place."""
        origins = self._origins(last)[:, first:last].swapaxes(0, 1).reshape(-1)
        samples, starts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for source in np.unique(sources[sources != PADDING]).tolist():
            # In consecutive steps a source's numbers are consecutive.
            where = np.flatnonzero(sources == source)
            where = where[np.argsort(origins[where])]
            begin, behind = int(origins[where[0]]), int(origins[where[-1]]) + 1
            at = behind
            while at > begin:
                places = self._places(source, at - 1)
                upto, at = at, max(begin, places.first_sample)
                sample, start = places.boundaries(at, upto)
                samples.append(where[sample + at - begin])
                starts.append(start)
        return Boundaries(np.concatenate(samples), np.concatenate(starts))

    def ids(self, rank: int, first: int, last: int) -> list[memoryview]:
        """The ids of a rank's steps [first, last), one sample after the other, as they travel; empty once released."""
        plan = self.plan
        at = rank * plan.group_steps
        found: list[memoryview] = self.samples[(at + first) * plan.batch_size : (at + last) * plan.batch_size].tolist()
        return found

    def release(self) -> None:
        """Lets the ids go: every rank has consumed them. States can still be made."""
        self.samples = self.samples[:0].copy()

    def document_starts(self, rank: int, first: int, last: int) -> tuple[list[int], npt.NDArray[np.uint32]]:
        """(how many documents begin in each sample, their positions in it) of a rank's steps [first, last)."""
        found = []
        sources = self.source_ids[rank, first:last].ravel().tolist()
        for source, sample in zip(sources, self._origins(last)[rank, first:last].ravel().tolist(), strict=True):
            found.append(
                np.empty(0, np.uint32) if source == PADDING else self._places(source, sample).starts_of(sample)
            )
        return [len(starts) for starts in found], np.concatenate(found)

    def _origins(self, steps: int) -> npt.NDArray[np.int64]:
        """The number within its source of each sample of the first steps, arranged as ``source_ids``."""
        # Not of those behind them: the producer may be about to add some.
        where = _places_of(self.plan, self.rotations[:steps], 0)
        picks = self.source_ids.reshape(-1)[where]
        where, picks = where[picks != PADDING], picks[picks != PADDING]
        counts = np.bincount(picks, minlength=len(self.base.sources))
        before = np.zeros(len(counts), np.int64)
        before[: len(self.base.sources)] = [source.samples for source in self.base.sources]
        first = before - np.cumsum([0, *counts[:-1]])
        origins = np.zeros(self.source_ids.shape, np.int64)
        # Sorted by source, each source's samples are one range of consecutive numbers.
        origins.reshape(-1)[where[np.argsort(picks, kind="stable")]] = np.arange(len(picks)) + np.repeat(first, counts)
        return origins

    def state_behind(self, step: int) -> State:
        """The state behind a step."""
        mark = self.marks[step]
        before = self.source_ids[:, : step + 1]
        counts = np.bincount(before[before != PADDING], minlength=len(mark.segment.start.sources)).tolist()
        # A source that came within the group had nothing before.
        known = [*self.base.sources, *[SourceState()] * (len(counts) - len(self.base.sources))]
        samples = [was.samples + count for was, count in zip(known, counts, strict=True)]
        places = [
            self._places(i, samples[i] - 1).behind(samples[i] - 1) if count else SourcePosition.of(was)
            for i, (count, was) in enumerate(zip(counts, known, strict=True))
        ]
        return _state_at(mark, samples, places, self.dropped_tokens[mark.segment.start.sample_index])

    @property
    def of_rows(self) -> bool:
        """Whether its steps are batches of rows (``batching``)."""
        return bool(self.marks) and self.marks[0].segment.config.batching is not None

    def batch_of(self, step: int) -> Batch:
        """What a step is made of that is a batch of rows."""
        picks = self.source_ids[0, : step + 1, 0]
        source = int(picks[step])
        before = self.base.sources[source].samples if source < len(self.base.sources) else 0
        batch = self._places(source, before + int((picks[:-1] == source).sum()) * self.plan.step_samples).batch
        assert batch is not None, "only packers of rows are in a run with batching"
        return batch

    def places_of(self, source: int) -> list[SampleOrigins]:
        """Those of a source's samples, to be added to."""
        while len(self.places) <= source:
            self.places.append([])
        return self.places[source]

    def _places(self, source: int, sample: int) -> SampleOrigins:
        # Behind a switch blocks are made anew, where those of before may have reached further.
        return next(places for places in reversed(self.places[source]) if places.first_sample <= sample)


def _state_at(
    mark: StepMark, samples: Sequence[int], places: Sequence[SourcePosition], dropped_tokens: Sequence[int]
) -> State:
    """The state at a mark. By source: ``samples`` since the run began, and where it stands."""
    config, mixer, start = mark.segment
    given = [now - was.samples for now, was in zip(samples, start.sources, strict=True)]
    exhausted = mixer.exhausted(mark.mix_weights)
    sources = [
        replace(
            was,
            cursor=place.cursor,
            samples=was.samples + more,
            rows=place.rows,
            tally=place.tally,
            lanes=place.lanes,
            tokens=was.tokens + more * config.sequence_length,
            dropped_tokens=dropped if out else 0,
            exhausted=out,
        )
        for was, more, place, dropped, out in zip(start.sources, given, places, dropped_tokens, exhausted, strict=True)
    ]
    return replace(
        start,
        sample_index=mark.sample_index,
        total_tokens=mark.total_tokens,
        digest=mark.digest,
        sources=tuple(sources),
        nodes=mixer.states(mark.mix_weights, given),
        preserved=start.preserved,
        imported=start.imported,
    )


class _Feed:
    """One source's samples: loaded ahead, then picked one after the other."""

    def __init__(self, packer: Packer, state: SourceState) -> None:
        self._packer = packer
        self._blocks = packer.blocks()
        self._held: deque[SampleOrigins] = deque()
        self._loaded = state.samples
        self._error: TokenloomError | None = None
        self._taken = state.samples
        #: Samples picked since the run began.
        self.picked = state.samples
        # Of the samples that are loaded and not yet taken.
        self._ids: list[memoryview] = []
        self._hashes: list[int] = []
        # Behind the last sample that was taken.
        self.place = SourcePosition.of(state)
        self.exhausted = state.exhausted
        self.dropped_tokens = state.dropped_tokens

    def load(self, count: int) -> int:
        """Makes ``count`` samples ready to be picked, as far as there are so many; returns how many are.

        A source that fails behind them is told by ``has_sample``, once nothing before the fault is left.
        """
        while self._loaded - self.picked < count and not self.exhausted and self._error is None:
            try:
                block = next(self._blocks, None)
            except TokenloomError as error:
                self._error = error
                break
            if block is None:
                self.exhausted = True
                self.dropped_tokens = self._packer.dropped_tokens
                break
            assert block.places.first_sample == self._loaded, "a packer skipped or repeated samples"
            self._loaded += len(block.ids)
            self._held.append(block.places)
            self._ids += block.ids
            self._hashes += block.hashes
        return min(count, self._loaded - self.picked)

    def has_sample(self) -> bool:
        """Whether a pick succeeds. Raises what the source failed with."""
        if self.load(1):
            return True
        if self._error is not None:
            raise self._error
        return False

    def rows_picked(self) -> tuple[int, int]:
        """The rows counter, and the offset of the cursor, behind the last picked sample."""
        place = self.place
        if self.picked != self._taken:
            last = self.picked - 1
            place = next(held for held in reversed(self._held) if held.first_sample <= last).behind(last)
        return place.rows, place.cursor.offset

    def take(self, count: int) -> tuple[list[memoryview], list[int], list[SampleOrigins]]:
        """The next ``count`` picked samples: their ids, their hashes, and the places they have. Moves the cursor
        behind them."""
        ids, hashes = self._ids[:count], self._hashes[:count]
        del self._ids[:count], self._hashes[:count]
        self._taken += count
        last = self._taken - 1
        places = [self._held[0]]
        while last - self._held[0].first_sample >= len(self._held[0].cursors):
            self._held.popleft()
            places.append(self._held[0])
        self.place = places[-1].behind(last)
        return ids, hashes, places


class Pipeline:
    """Produces samples ``state.sample_index``, +1, … of a run's canonical order. For one thread at a time."""

    def __init__(
        self,
        config: RunConfig,
        packers: PackerFactory,
        state: State,
        *,
        sample_bytes: int,
        real: RealTokens,
        size_estimates: Mapping[int, SizeEstimate] | None = None,
        switches: Sequence[Switch] = (),
    ) -> None:
        """``sample_bytes``: of a sample as it travels. ``real`` counts what of it is documents'. ``size_estimates`` of
        the ``RunConfig.measured_sources``, by id.
        ``switches``, in order, lie behind the state."""
        self._padding = memoryview(bytes(sample_bytes))
        self._real = real
        self._switches = deque(switches)
        self._begin(config, packers, state, size_estimates or {})
        self._index = state.sample_index
        self._tokens = state.total_tokens
        self._digest = state.digest
        steps = repeat(DIGEST_MULTIPLIER, _DIGESTED_AT_ONCE)
        self._powers = tuple(accumulate(steps, lambda power, by: power * by % DIGEST_MODULUS, initial=1))
        #: Why the data ended; None while they go on.
        self.ended: str | None = None
        #: Samples of an incomplete last step that were dropped.
        self.dropped_samples = 0

    def _begin(
        self, config: RunConfig, packers: PackerFactory, state: State, size_estimates: Mapping[int, SizeEstimate]
    ) -> None:
        self._segment = Segment(config, Mixer(config, state.nodes, size_estimates), state)
        self._feeds = [_Feed(packers(i, source), source) for i, source in enumerate(state.sources)]

    @property
    def sample_index(self) -> int:
        """Of the sample that is next."""
        return self._index

    def switch(self, switches: Sequence[Switch]) -> None:
        """From now on these, in order, are the switches behind the present sample index."""
        assert all(switch.sample_index > self._index for switch in switches), "samples behind a switch are made already"
        self._switches = deque(switches)

    def begin_group(self, plan: BatchPlan) -> StepGroup:
        """An empty group that begins here, at a state boundary of the plan."""
        shape = (plan.world_size, plan.group_steps, plan.batch_size)
        return StepGroup(
            plan=plan,
            base=self.state(),
            real=self._real,
            samples=_objects([self._padding] * plan.group_samples),
            source_ids=np.full(shape, PADDING, np.int32),
        )

    def fill(self, group: StepGroup, steps: int) -> None:
        """Appends ``steps`` steps to the group (at most what it has room for); fewer where the data end.

        An incomplete last step is dropped or padded, as configured; then, or when nothing is left,
        ``ended`` says why. Raises ``SourceError`` and ``TokenizerError``; the pipeline is of no use then.
        """
        plan, config = group.plan, self._segment.config
        first, size, length = len(group.marks), plan.step_samples, config.sequence_length
        begin, tokens = self._index, self._tokens
        wanted = min(steps, plan.group_steps - first) * size
        rotations = [slice_rotation(config.seed, begin + at, plan.world_size) for at in range(0, wanted, size)]
        where = _places_of(plan, rotations, first)
        # From which sample on which segment and regime are in force.
        changes: list[tuple[int, Segment, MixWeights]] = []
        hashes: list[int] = []
        done = count = 0
        while done < wanted and self.ended is None:
            segment = self._segment
            self._check_step(size)
            asked = min(wanted - done, self._until_switch())
            picks, changed = self._decide(asked)
            changes += [(done + at, segment, mix_weights) for at, mix_weights in changed]
            done += len(picks)
            count = done
            if len(picks) < asked and done % size and config.last_step == "drop":
                self.dropped_samples = done % size
                count = done - done % size
            taken = max(0, len(picks) - (done - count))
            hashes += self._take(group, picks[:taken], where[done - len(picks) :][:taken])
            ends = self._cross()
            if ends is not None:
                # In force behind the sample before it, so that the state at the switch is the other config's.
                changes.append((done - 1, self._segment, self._segment.mixer.mix_weights))
                self._note_tails(group)
                self.ended = ends or None
        del hashes[count:]
        if not count:
            return
        ends_at = [*range(size, count + 1, size), *([count] if count % size else [])]
        group.rotations += rotations[: len(ends_at)]
        if self._real.varies:
            group.count(first, first + len(ends_at))
        at = 0
        for end in ends_at:
            self._digest = _digest_behind(self._digest, hashes[at:end], self._powers)
            # A change found behind the step's last sample is the next decision's; but none follows a padded step.
            while len(changes) > 1 and changes[1][0] < end + (end % size > 0):
                del changes[0]
            group.marks.append(StepMark(begin + end, tokens + end * length, self._digest, *changes[0][1:]))
            at = end

    def advance(self, samples: int) -> None:
        """Goes forward without building batches; stops early, with ``ended`` set, where the data end."""
        while samples and self.ended is None:
            pick = self._segment.config.pick_samples
            if samples % pick:
                raise ConfigError(
                    f"sample {self._index + samples} lies within a global batch of {pick}, which is given as a whole; "
                    f"expected a multiple of {pick}, such as {self._index + samples // pick * pick}"
                )
            picks, _ = self._decide(min(samples, 4096 if pick == 1 else pick, self._until_switch()))
            samples -= len(picks)
            self._digest = _digest_behind(self._digest, self._take(None, picks, picks), self._powers)
            self._cross()

    def state(self) -> State:
        """The state at the present sample index."""
        places = [feed.place for feed in self._feeds]
        dropped = [feed.dropped_tokens for feed in self._feeds]
        samples = [feed.picked for feed in self._feeds]
        mark = StepMark(self._index, self._tokens, self._digest, self._segment, self._segment.mixer.mix_weights)
        return _state_at(mark, samples, places, dropped)

    def _check_step(self, size: int) -> None:
        """With ``batching`` a step is one batch, so that all ranks have its shape. Raises ``JoinRefused``."""
        batch = self._segment.config.global_batch_size
        if batch is not None and size != batch:
            raise JoinRefused(
                f"a step of {size} samples was asked for, but this run's order is made of global batches of {batch}"
            )

    def _until_switch(self) -> int:
        return self._switches[0].sample_index - self._index if self._switches else MAX_COUNTER

    def _cross(self) -> str | None:
        """Goes over to another config where a switch lies here: why batches end, empty where they go on; None where
        there is no switch."""
        if self._until_switch():
            return None
        switch = self._switches.popleft()
        self._begin(switch.config, switch.packers, switch.carry(self.state()), switch.size_estimates)
        return switch.ends or ""

    def _decide(self, count: int) -> tuple[Picks, list[tuple[int, MixWeights]]]:
        """The sources of the next ``count`` samples, fewer where the data end; and from which of them on
        which regime is in force."""
        config, mixer, _ = self._segment
        pick = config.pick_samples
        changes = [(0, mixer.mix_weights)]
        parts: list[Picks] = []
        left = count
        while left and self.ended is None:
            index, tokens = self._index + count - left, self._tokens + (count - left) * config.sequence_length
            # What follows the counters is made anew from those at this index, and holds for the next samples only.
            some = min(left // pick, mixer.begin(index // pick, tokens, self._rows_picked))
            if mixer.mix_weights is not changes[-1][1]:
                changes.append((count - left, mixer.mix_weights))
            plan = mixer.plan(some)
            ready = self._ready(plan, pick)
            if ready:
                mixer.issue(ready)
                parts.append(plan[:ready] if pick == 1 else np.repeat(plan[:ready], pick))
                self._picked(parts[-1])
                left -= ready * pick
            if ready < len(plan):
                source = mixer.pick(lambda source: self._feeds[source].has_sample())
                changes.append((count - left, mixer.mix_weights))
                if source == NOTHING:
                    self.ended = mixer.why_over()
                    break
                parts.append(np.full(pick, source, np.int32))
                self._picked(parts[-1])
                left -= pick
        self._index += count - left
        self._tokens += (count - left) * config.sequence_length
        if self._tokens > MAX_COUNTER:
            raise CounterOverflow(f"the run has {self._tokens} tokens; counters end at 2^53 − 1: start a new run")
        return np.concatenate(parts) if parts else np.empty(0, np.int32), changes

    def _rows_picked(self, source: int) -> tuple[int, int]:
        """The rows counter of a source, and the tokens of the row that is not at its end, behind its last picked
        sample."""
        rows, offset = self._feeds[source].rows_picked()
        # Of samples that are padded, no part of the tokens is a row's.
        return rows, offset if self._segment.config.packing == "concat" else 0

    def _ready(self, plan: Picks, pick: int) -> int:
        """How many of a plan's first picks, of so many samples each, are there; loads blocks as needed."""
        ready = len(plan)
        nothing = np.flatnonzero(plan == NOTHING)
        if len(nothing):
            ready = int(nothing[0])
        counts = np.bincount(plan[:ready], minlength=1)
        for source in np.flatnonzero(counts).tolist():
            found = self._feeds[source].load(int(counts[source]) * pick) // pick
            if found < counts[source]:
                ready = min(ready, int(np.flatnonzero(plan == source)[found]))
        return ready

    def _picked(self, picks: Picks) -> None:
        for source, count in enumerate(np.bincount(picks).tolist()):
            self._feeds[source].picked += count

    def _take(self, group: StepGroup | None, picks: Picks, where: npt.NDArray[np.integer]) -> list[int]:
        """Takes the picked samples, puts them where they belong in the group, and returns their hashes in order."""
        # Sorted by source, so that each source's samples are one range of it.
        order = np.argsort(picks, kind="stable")
        counts = np.bincount(picks).tolist()
        ids: list[memoryview] = []
        hashes: list[int] = []
        for source, count in enumerate(counts):
            if count:
                some, hashed, places = self._feeds[source].take(count)
                ids += some
                hashes += hashed
                if group is not None:
                    known = group.places_of(source)
                    known += places[1:] if known and known[-1] is places[0] else places
        if group is not None:
            group.source_ids.reshape(-1)[where] = picks
            group.samples[where[order]] = _objects(ids)
            self._note_tails(group)
        in_order = np.empty(len(picks), np.object_)
        in_order[order] = _objects(hashes)
        found: list[int] = in_order.tolist()
        return found

    def _note_tails(self, group: StepGroup) -> None:
        group.dropped_tokens[self._segment.start.sample_index] = [feed.dropped_tokens for feed in self._feeds]


def _places_of(plan: BatchPlan, rotations: Sequence[int], first: int) -> npt.NDArray[np.int64]:
    """Where each sample of consecutive steps, the ``first`` and following of a group, lies among
    [rank, step, place]: slice j of a step is rank j − rotation's."""
    turned = np.array(rotations, np.int64)[:, None]
    ranks = (np.arange(plan.world_size) - turned) % plan.world_size
    rows = ranks * plan.group_steps + np.arange(first, first + len(rotations))[:, None]
    found: npt.NDArray[np.int64] = (rows[:, :, None] * plan.batch_size + np.arange(plan.batch_size)).ravel()
    return found


def _digest_behind(digest: int, hashes: Sequence[int], powers: Sequence[int]) -> int:
    """The rolling digest behind more samples: one reduction for many, where each one's would cost more than the
    product (see ``state``). ``powers`` are the multiplier's, from that of 0 on."""
    for at in range(0, len(hashes), len(powers) - 1):
        some = hashes[at : at + len(powers) - 1]
        digest = (digest * powers[len(some)] + sum(map(mul, reversed(some), powers))) % DIGEST_MODULUS
    return digest


def _objects(items: Sequence[object]) -> npt.NDArray[np.object_]:
    """A list as an array of what it holds: numpy would look into memoryviews."""
    return np.fromiter(items, np.object_, len(items))
