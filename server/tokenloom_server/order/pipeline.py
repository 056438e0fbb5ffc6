"""The canonical order at work: from a state to the samples after it, bit for bit.

Sources, tokeniser and packers are the leaves; here is the one loop that decides, counts and digests.
No clock, thread, socket or ledger is known here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, repeat
from operator import mul
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenloom_server.config.run import RunConfig
from tokenloom_server.core.hashing import slice_rotation
from tokenloom_server.core.state import (
    DIGEST_MODULUS,
    DIGEST_MULTIPLIER,
    MAX_COUNTER,
    SourceState,
    State,
    tokens_in_row,
)
from tokenloom_server.core.token_curve import TokenCurve
from tokenloom_server.errors import ConfigError, CounterOverflow, JoinRefused, TokenloomError
from tokenloom_server.mixing.mixer import Mixer, MixWeights, initial_nodes
from tokenloom_server.mixing.node import Picks
from tokenloom_server.order.steps import (
    PADDING,
    BatchPlan,
    Stage,
    StepGroup,
    StepMark,
    slots_of_steps,
    state_at,
)
from tokenloom_server.packing.base import Packer, PackerFactory, SampleOrigins, SourcePosition
from tokenloom_server.packing.real_tokens import RealTokens
from tokenloom_server.packing.samples import Sample

#: Lengths that are handed out at a time.
_LENGTHS = 64


class Feed:
    """One source's samples: loaded ahead, then picked one after the other."""

    def __init__(self, packer: Packer, state: SourceState) -> None:
        self._packer = packer
        self._blocks = packer.blocks()
        self._origins: deque[SampleOrigins] = deque()
        self._loaded = state.samples
        self._error: TokenloomError | None = None
        self._taken = state.samples
        #: The number of the next sample to be picked.
        self.picked = state.samples
        # Of the samples that are loaded and not yet taken.
        self._ids: list[Sample] = []
        self._hashes: list[int] = []
        self._real: list[int] = []
        #: See ``RealLengths``.
        self.real_tokens = state.real_tokens
        #: Where the source stands after the last sample that was taken.
        self.position = SourcePosition.of(state)
        self.exhausted = state.exhausted
        self.dropped_tokens = state.dropped_tokens

    def load(self, count: int) -> int:
        """Makes ``count`` samples ready to be picked, as far as there are so many; returns how many are.

        ``has_sample`` raises what a source fails with after them, once nothing before the fault is left.
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
            assert block.origins.first_sample == self._loaded, (
                "a packer skipped or repeated samples"
            )
            self._loaded += len(block.ids)
            self._origins.append(block.origins)
            self._ids += block.ids
            self._hashes += block.hashes
            self._real += block.real
        return min(count, self._loaded - self.picked)

    def has_sample(self) -> bool:
        """Whether a pick succeeds. Raises what the source failed with."""
        if self.load(1):
            return True
        if self._error is not None:
            raise self._error
        return False

    def real_lengths(self) -> Iterator[int]:
        """See ``RealLengths``; loads blocks as needed."""
        number = self.picked
        while self.load(number + 1 - self.picked) > number - self.picked:
            loaded = self._real[number - self._taken : number - self._taken + _LENGTHS]
            number += len(loaded)
            yield from loaded

    def real_of(self, picks: int) -> int:
        """See ``RealLengths``."""
        first = self.picked - self._taken
        return sum(self._real[first : first + picks])

    def rows_picked(self) -> tuple[int, int]:
        """The rows counter, and the tokens taken of a row that is not at its end, after the last picked sample."""
        position = self.position
        if self.picked != self._taken:
            last = self.picked - 1
            position = next(
                block for block in reversed(self._origins) if block.first_sample <= last
            ).after(last)
        return position.rows, tokens_in_row(position.cursor)

    def take(self, count: int) -> tuple[list[Sample], list[int], list[SampleOrigins]]:
        """The next ``count`` picked samples: their ids, their hashes, and their origins, a record for each block.
        Moves the cursor after them."""
        ids, hashes = self._ids[:count], self._hashes[:count]
        del self._ids[:count], self._hashes[:count], self._real[:count]
        self._taken += count
        last = self._taken - 1
        origins = [self._origins[0]]
        while last - self._origins[0].first_sample >= len(self._origins[0]):
            self._origins.popleft()
            origins.append(self._origins[0])
        self.position = origins[-1].after(last)
        return ids, hashes, origins


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
    #: Makes of the state there the one that the other config goes on from.
    carry: Callable[[State], State]
    #: Why the data end here for the trainers of now, since later batches have another shape; None where they go on.
    end_reason: str | None
    #: Of the other config's ``measured_sources``, by id.
    size_estimates: Mapping[int, TokenCurve] = MappingProxyType({})


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
        size_estimates: Mapping[int, TokenCurve] | None = None,
        switches: Sequence[Switch] = (),
    ) -> None:
        """``sample_bytes``: the size of a sample as it is sent. ``real`` counts the tokens of it that are documents'.
        ``size_estimates``: of the ``RunConfig.measured_sources``, by id. ``switches``, in order, lie after the
        state."""
        self._padding = np.zeros(sample_bytes, np.uint8)
        self._real = real
        self._switches = deque(switches)
        self._begin(config, packers, state, size_estimates or {})
        self._index = state.sample_index
        self._tokens = state.total_tokens
        self._digest = state.digest
        steps = repeat(DIGEST_MULTIPLIER, _DIGESTED_AT_ONCE)
        self._powers = tuple(
            accumulate(steps, lambda power, by: power * by % DIGEST_MODULUS, initial=1)
        )
        #: Why the data ended; None while they go on.
        self.ended: str | None = None
        #: Samples of an incomplete last micro-step that were dropped.
        self.dropped_samples = 0

    def _begin(
        self,
        config: RunConfig,
        packers: PackerFactory,
        state: State,
        size_estimates: Mapping[int, TokenCurve],
    ) -> None:
        # Within a group a source's samples have consecutive numbers, so what is passed over has none.
        numbered = [replace(source, samples=source.number) for source in state.sources]
        self._feeds = [Feed(packers(i, source), source) for i, source in enumerate(numbered)]
        lengths = self._feeds if config.balances_real else None
        mixer = Mixer(config, state.nodes, size_estimates, lengths, clock_offset=state.clock_ahead)
        self._stage = Stage(config, mixer, state)

    @property
    def sample_index(self) -> int:
        """The index of the next sample."""
        return self._index

    def replace_switches(self, switches: Sequence[Switch]) -> None:
        """From now on these, in order, are the switches after the present sample index, in place of those before."""
        assert all(switch.sample_index > self._index for switch in switches), (
            "samples after a switch are made already"
        )
        self._switches = deque(switches)

    def begin_group(self, plan: BatchPlan) -> StepGroup:
        """An empty group that begins here, at a state boundary of the plan."""
        shape = (plan.world_size, plan.group_micro_steps, plan.batch_size)
        base = self.state()
        return StepGroup(
            plan=plan,
            base=base,
            real=self._real,
            padding_tokens=base.total_tokens - base.real_tokens,
            samples=_objects([self._padding] * plan.group_samples),
            source_ids=np.full(shape, PADDING, np.int32),
            padding=np.zeros(shape if self._real.varies else 0, np.int32),
        )

    def fill(self, group: StepGroup, steps: int) -> None:
        """Appends ``steps`` micro-steps to the group (at most what it has room for); fewer where the data end.

        An incomplete last micro-step is dropped or padded, as configured; then, or when nothing is left,
        ``ended`` says why. Raises ``SourceError`` and ``TokenizerError``; the pipeline is of no use then.
        """
        plan, config = group.plan, self._stage.config
        first_step, step_samples = len(group.marks), plan.step_samples
        begin_index, begin_tokens = self._index, self._tokens
        wanted = min(steps, plan.group_micro_steps - first_step) * step_samples
        begins = range(begin_index, begin_index + wanted, step_samples)
        rotations = [slice_rotation(config.seed, begin, plan.world_size) for begin in begins]
        slots = slots_of_steps(plan, rotations, first_step)
        # From which sample on which stage and weights are in force.
        changes: list[tuple[int, Stage, MixWeights]] = []
        hashes: list[int] = []
        # Samples of this call: those whose source is decided, and without those of a micro-step that is dropped.
        decided = kept = 0
        while decided < wanted and self.ended is None:
            stage, decided_before = self._stage, decided
            self._check_step(step_samples)
            limit = min(wanted - decided, self._until_switch())
            picks, changed = self._decide(limit)
            changes += [(decided_before + i, stage, mix_weights) for i, mix_weights in changed]
            decided += len(picks)
            kept = decided
            if len(picks) < limit and decided % step_samples and config.last_micro_step == "drop":
                self.dropped_samples = decided % step_samples
                kept = decided - self.dropped_samples
            kept_picks = picks[: max(0, kept - decided_before)]
            hashes += self._take(
                group, kept_picks, slots[decided_before : decided_before + len(kept_picks)]
            )
            crossed = self._cross()
            if crossed is not None:
                # In force after the sample before it, so that the state at the switch is the other config's.
                changes.append((decided - 1, self._stage, self._stage.mixer.mix_weights))
                self._note_tails(group)
                self.ended = crossed.end_reason
        # A dropped micro-step may have begun before a switch.
        del hashes[kept:]
        if not kept:
            return
        last_partial = [kept] if kept % step_samples else []
        ends = [*range(step_samples, kept + 1, step_samples), *last_partial]
        group.rotations += rotations[: len(ends)]
        if self._real.varies:
            group.count(first_step, first_step + len(ends))
        for start, end in pairwise([0, *ends]):
            self._digest = _digest_after(self._digest, hashes[start:end], self._powers)
            # A change found after the step's last sample is the next decision's; but none follows a padded one.
            while len(changes) > 1 and changes[1][0] < end + (end % step_samples > 0):
                del changes[0]
            tokens = begin_tokens + end * config.sequence_length
            group.marks.append(StepMark(begin_index + end, tokens, self._digest, *changes[0][1:]))

    def advance(self, samples: int) -> None:
        """Goes forward without building batches; stops early, with ``ended`` set, where the data end."""
        while samples and self.ended is None:
            pick = self._stage.config.pick_samples
            if samples % pick:
                raise ConfigError(
                    f"sample {self._index + samples} lies within a global batch of {pick}, which is given as a whole; "
                    f"expected a multiple of {pick}, such as {self._index + samples // pick * pick}"
                )
            picks, _ = self._decide(min(samples, 4096 if pick == 1 else pick, self._until_switch()))
            samples -= len(picks)
            self._digest = _digest_after(self._digest, self._take(None, picks, picks), self._powers)
            self._cross()

    def state(self) -> State:
        """The state at the present sample index."""
        positions = [feed.position for feed in self._feeds]
        dropped = [feed.dropped_tokens for feed in self._feeds]
        samples = [feed.picked for feed in self._feeds]
        mark = StepMark(
            self._index, self._tokens, self._digest, self._stage, self._stage.mixer.mix_weights
        )
        return state_at(mark, samples, positions, dropped)

    def _check_step(self, step_samples: int) -> None:
        """With ``batching`` a micro-step is one batch, so that all ranks have its shape. Raises ``JoinRefused``."""
        batch = self._stage.config.global_batch_size
        if batch is not None and step_samples != batch:
            raise JoinRefused(
                f"a micro-step of {step_samples} samples was asked for, but this run's order is made of "
                f"global batches of {batch}"
            )

    def _until_switch(self) -> int:
        return self._switches[0].sample_index - self._index if self._switches else MAX_COUNTER

    def _cross(self) -> Switch | None:
        """Goes over to another config where a switch lies here, and returns that switch; None where there is none."""
        if self._until_switch():
            return None
        switch = self._switches.popleft()
        self._begin(
            switch.config, switch.packers, switch.carry(self.state()), switch.size_estimates
        )
        return switch

    def _decide(self, count: int) -> tuple[Picks, list[tuple[int, MixWeights]]]:
        """The sources of the next ``count`` samples, fewer where the data end; and from which of them on
        which weights are in force."""
        config, mixer, _ = self._stage
        pick = config.pick_samples
        changes = [(0, mixer.mix_weights)]
        parts: list[Picks] = []
        decided = 0
        while decided < count and self.ended is None:
            index, tokens = self._index + decided, self._tokens + decided * config.sequence_length
            picks = mixer.decide((count - decided) // pick, index // pick, tokens, self)
            if mixer.mix_weights is not changes[-1][1]:
                changes.append((decided, mixer.mix_weights))
            if not len(picks):
                self.ended = mixer.why_over()
                break
            parts.append(picks if pick == 1 else np.repeat(picks, pick))
            self._picked(parts[-1])
            decided += len(parts[-1])
        self._index += decided
        self._tokens += decided * config.sequence_length
        if self._tokens > MAX_COUNTER:
            raise CounterOverflow(
                f"the run has {self._tokens} tokens; counters end at 2^53 − 1: start a new run"
            )
        return np.concatenate(parts) if parts else np.empty(0, np.int32), changes

    def has_sample(self, source: int) -> bool:
        """See ``Stock``, which this is to the mixer."""
        return self._feeds[source].has_sample()

    def shortages(self, picks: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        """See ``Stock``; loads blocks as needed."""
        pick = self._stage.config.pick_samples
        for source in np.flatnonzero(picks).tolist():
            loaded = self._feeds[source].load(int(picks[source]) * pick) // pick
            if loaded < picks[source]:
                yield source, loaded

    def rows_picked(self, source: int) -> tuple[int, int]:
        """See ``Stock``."""
        rows, offset = self._feeds[source].rows_picked()
        # Of samples that are padded, no part of the tokens is a row's.
        return rows, offset if self._stage.config.packing == "concat" else 0

    def _picked(self, picks: Picks) -> None:
        for source, count in enumerate(np.bincount(picks).tolist()):
            self._feeds[source].picked += count

    def _take(
        self, group: StepGroup | None, picks: Picks, slots: npt.NDArray[np.integer]
    ) -> list[int]:
        """Takes the picked samples, puts them where they belong in the group, and returns their hashes in order."""
        # Sorted by source, so that each source's samples are one range of it.
        order = np.argsort(picks, kind="stable")
        counts = np.bincount(picks).tolist()
        ids: list[Sample] = []
        hashes: list[int] = []
        for source, count in enumerate(counts):
            if count:
                taken, taken_hashes, origins = self._feeds[source].take(count)
                ids += taken
                hashes += taken_hashes
                if group is not None:
                    group_origins = group.origins[source]
                    goes_on = group_origins and group_origins[-1] is origins[0]
                    group_origins += origins[1:] if goes_on else origins
        if group is not None:
            group.source_ids.reshape(-1)[slots] = picks
            group.samples[slots[order]] = _objects(ids)
            self._note_tails(group)
        in_order = np.empty(len(picks), np.object_)
        in_order[order] = _objects(hashes)
        ordered: list[int] = in_order.tolist()
        return ordered

    def _note_tails(self, group: StepGroup) -> None:
        group.dropped_tokens[self._stage.start.sample_index] = [
            feed.dropped_tokens for feed in self._feeds
        ]


def _digest_after(digest: int, hashes: Sequence[int], powers: Sequence[int]) -> int:
    """The rolling digest after more samples: one reduction for many, where each one's would cost more than the
    product (see ``state``). ``powers`` are the multiplier's, from that of 0 on."""
    for start in range(0, len(hashes), len(powers) - 1):
        some = hashes[start : start + len(powers) - 1]
        digest = (
            digest * powers[len(some)] + sum(map(mul, reversed(some), powers))
        ) % DIGEST_MODULUS
    return digest


def _objects(items: Sequence[object]) -> npt.NDArray[np.object_]:
    """A list as an array of what it holds: numpy would look into arrays."""
    return np.fromiter(items, np.object_, len(items))
