"""The canonical order at work: from a state to the samples after it, bit for bit.

Sources, tokeniser and packers are the leaves; here is the one loop that decides, counts and digests.
No clock, thread, socket or ledger is known here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise, repeat
from operator import mul
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenloom_server.config.run import RunConfig
from tokenloom_server.core.hashing import slice_rotation
from tokenloom_server.core.size_estimate import SizeEstimate
from tokenloom_server.core.state import DIGEST_MODULUS, DIGEST_MULTIPLIER, MAX_COUNTER, SourceState, State
from tokenloom_server.errors import ConfigError, CounterOverflow, JoinRefused
from tokenloom_server.mixing.mixer import Mixer, MixWeights, initial_nodes
from tokenloom_server.mixing.node import Picks
from tokenloom_server.order.feed import Feed
from tokenloom_server.order.steps import PADDING, BatchPlan, Stage, StepGroup, StepMark, slots_of_steps, state_at
from tokenloom_server.packing.base import PackerFactory
from tokenloom_server.packing.real_tokens import RealTokens

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
    #: Why batches end here, because those after have another shape; None where they go on.
    ends: str | None
    #: Of the other config's ``measured_sources``, by id.
    size_estimates: Mapping[int, SizeEstimate] = MappingProxyType({})


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
        ``switches``, in order, lie after the state."""
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
        #: Samples of an incomplete last micro-step that were dropped.
        self.dropped_samples = 0

    def _begin(
        self, config: RunConfig, packers: PackerFactory, state: State, size_estimates: Mapping[int, SizeEstimate]
    ) -> None:
        self._stage = Stage(config, Mixer(config, state.nodes, size_estimates), state)
        self._feeds = [Feed(packers(i, source), source) for i, source in enumerate(state.sources)]

    @property
    def sample_index(self) -> int:
        """Of the sample that is next."""
        return self._index

    def switch(self, switches: Sequence[Switch]) -> None:
        """From now on these, in order, are the switches after the present sample index."""
        assert all(switch.sample_index > self._index for switch in switches), "samples after a switch are made already"
        self._switches = deque(switches)

    def begin_group(self, plan: BatchPlan) -> StepGroup:
        """An empty group that begins here, at a state boundary of the plan."""
        shape = (plan.world_size, plan.group_micro_steps, plan.batch_size)
        return StepGroup(
            plan=plan,
            base=self.state(),
            real=self._real,
            samples=_objects([self._padding] * plan.group_samples),
            source_ids=np.full(shape, PADDING, np.int32),
        )

    def fill(self, group: StepGroup, steps: int) -> None:
        """Appends ``steps`` micro-steps to the group (at most what it has room for); fewer where the data end.

        An incomplete last micro-step is dropped or padded, as configured; then, or when nothing is left,
        ``ended`` says why. Raises ``SourceError`` and ``TokenizerError``; the pipeline is of no use then.
        """
        plan, config = group.plan, self._stage.config
        first, size, length = len(group.marks), plan.step_samples, config.sequence_length
        begin, tokens = self._index, self._tokens
        wanted = min(steps, plan.group_micro_steps - first) * size
        rotations = [slice_rotation(config.seed, begin + i, plan.world_size) for i in range(0, wanted, size)]
        slots = slots_of_steps(plan, rotations, first)
        # From which sample on which stage and weights are in force.
        changes: list[tuple[int, Stage, MixWeights]] = []
        hashes: list[int] = []
        done = count = 0
        while done < wanted and self.ended is None:
            stage = self._stage
            self._check_step(size)
            most = min(wanted - done, self._until_switch())
            picks, changed = self._decide(most)
            changes += [(done + i, stage, mix_weights) for i, mix_weights in changed]
            done += len(picks)
            count = done
            if len(picks) < most and done % size and config.last_micro_step == "drop":
                self.dropped_samples = done % size
                count = done - done % size
            taken = max(0, len(picks) - (done - count))
            hashes += self._take(group, picks[:taken], slots[done - len(picks) :][:taken])
            why_batches_end = self._cross()
            if why_batches_end is not None:
                # In force after the sample before it, so that the state at the switch is the other config's.
                changes.append((done - 1, self._stage, self._stage.mixer.mix_weights))
                self._note_tails(group)
                self.ended = why_batches_end or None
        del hashes[count:]
        if not count:
            return
        ends = [*range(size, count + 1, size), *([count] if count % size else [])]
        group.rotations += rotations[: len(ends)]
        if self._real.varies:
            group.count(first, first + len(ends))
        for start, end in pairwise([0, *ends]):
            self._digest = _digest_after(self._digest, hashes[start:end], self._powers)
            # A change found after the step's last sample is the next decision's; but none follows a padded one.
            while len(changes) > 1 and changes[1][0] < end + (end % size > 0):
                del changes[0]
            group.marks.append(StepMark(begin + end, tokens + end * length, self._digest, *changes[0][1:]))

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
        mark = StepMark(self._index, self._tokens, self._digest, self._stage, self._stage.mixer.mix_weights)
        return state_at(mark, samples, positions, dropped)

    def _check_step(self, size: int) -> None:
        """With ``batching`` a micro-step is one batch, so that all ranks have its shape. Raises ``JoinRefused``."""
        batch = self._stage.config.global_batch_size
        if batch is not None and size != batch:
            raise JoinRefused(
                f"a micro-step of {size} samples was asked for, but this run's order is made of "
                f"global batches of {batch}"
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
        which weights are in force."""
        config, mixer, _ = self._stage
        pick = config.pick_samples
        changes = [(0, mixer.mix_weights)]
        parts: list[Picks] = []
        left = count
        while left and self.ended is None:
            index, tokens = self._index + count - left, self._tokens + (count - left) * config.sequence_length
            picks = mixer.decide(left // pick, index // pick, tokens, self)
            if mixer.mix_weights is not changes[-1][1]:
                changes.append((count - left, mixer.mix_weights))
            if not len(picks):
                self.ended = mixer.why_over()
                break
            parts.append(picks if pick == 1 else np.repeat(picks, pick))
            self._picked(parts[-1])
            left -= len(parts[-1])
        self._index += count - left
        self._tokens += (count - left) * config.sequence_length
        if self._tokens > MAX_COUNTER:
            raise CounterOverflow(f"the run has {self._tokens} tokens; counters end at 2^53 − 1: start a new run")
        return np.concatenate(parts) if parts else np.empty(0, np.int32), changes

    def has_sample(self, source: int) -> bool:
        """See ``Stock``, which this is to the mixer."""
        return self._feeds[source].has_sample()

    def short(self, counts: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        """See ``Stock``; loads blocks as needed."""
        pick = self._stage.config.pick_samples
        for source in np.flatnonzero(counts).tolist():
            loaded = self._feeds[source].load(int(counts[source]) * pick) // pick
            if loaded < counts[source]:
                yield source, loaded

    def rows_picked(self, source: int) -> tuple[int, int]:
        """See ``Stock``."""
        rows, offset = self._feeds[source].rows_picked()
        # Of samples that are padded, no part of the tokens is a row's.
        return rows, offset if self._stage.config.packing == "concat" else 0

    def _picked(self, picks: Picks) -> None:
        for source, count in enumerate(np.bincount(picks).tolist()):
            self._feeds[source].picked += count

    def _take(self, group: StepGroup | None, picks: Picks, slots: npt.NDArray[np.integer]) -> list[int]:
        """Takes the picked samples, puts them where they belong in the group, and returns their hashes in order."""
        # Sorted by source, so that each source's samples are one range of it.
        order = np.argsort(picks, kind="stable")
        counts = np.bincount(picks).tolist()
        ids: list[memoryview] = []
        hashes: list[int] = []
        for source, count in enumerate(counts):
            if count:
                taken, taken_hashes, origins = self._feeds[source].take(count)
                ids += taken
                hashes += taken_hashes
                if group is not None:
                    known = group.origins[source]
                    known += origins[1:] if known and known[-1] is origins[0] else origins
        if group is not None:
            group.source_ids.reshape(-1)[slots] = picks
            group.samples[slots[order]] = _objects(ids)
            self._note_tails(group)
        in_order = np.empty(len(picks), np.object_)
        in_order[order] = _objects(hashes)
        ordered: list[int] = in_order.tolist()
        return ordered

    def _note_tails(self, group: StepGroup) -> None:
        group.dropped_tokens[self._stage.start.sample_index] = [feed.dropped_tokens for feed in self._feeds]


def _digest_after(digest: int, hashes: Sequence[int], powers: Sequence[int]) -> int:
    """The rolling digest after more samples: one reduction for many, where each one's would cost more than the
    product (see ``state``). ``powers`` are the multiplier's, from that of 0 on."""
    for start in range(0, len(hashes), len(powers) - 1):
        some = hashes[start : start + len(powers) - 1]
        digest = (digest * powers[len(some)] + sum(map(mul, reversed(some), powers))) % DIGEST_MODULUS
    return digest


def _objects(items: Sequence[object]) -> npt.NDArray[np.object_]:
    """A list as an array of what it holds: numpy would look into memoryviews."""
    return np.fromiter(items, np.object_, len(items))
