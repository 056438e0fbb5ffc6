"""Micro-steps: how they cut the order for the ranks of a world, and what is kept of those between two state
boundaries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenloom_server.config.run import RunConfig
from tokenloom_server.core.state import MAX_COUNTER, SHARE_UNIT, SourceState, State
from tokenloom_server.mixing.mixer import Mixer, MixWeights
from tokenloom_server.packing.base import Batch, SampleOrigins, SourcePosition
from tokenloom_server.packing.real_tokens import Boundaries, RealTokens
from tokenloom_server.packing.samples import Int64s, Sample

#: What a padding sample's source is called.
PADDING = -1


class Stage(NamedTuple):
    """What decides the samples from a state on."""

    config: RunConfig
    mixer: Mixer
    start: State


class StepMark(NamedTuple):
    """What a state after a micro-step has that cannot be counted from the samples before it: taken every micro-step."""

    sample_index: int
    total_tokens: int
    digest: int
    stage: Stage
    mix_weights: MixWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """How consecutive micro-steps of one batch size cut the order: the n-th of them covers samples
    [start + n·world_size·batch_size, …); every ``group_micro_steps`` micro-steps is a state boundary.

    A generation's micro-steps are counted from its start; ``BatchPlans`` puts plans of several sizes after one
    another.
    """

    start_index: int
    world_size: int
    batch_size: int
    group_micro_steps: int
    #: Micro-steps, and groups, of the generation before it.
    first_step: int = 0
    first_group: int = 0
    #: The micro-step after its last one, which begins a group of its own.
    end_step: int = MAX_COUNTER

    @property
    def step_samples(self) -> int:
        return self.world_size * self.batch_size

    @property
    def group_samples(self) -> int:
        return self.step_samples * self.group_micro_steps

    def index_of(self, step: int) -> int:
        """The sample index at which a micro-step begins."""
        return self.start_index + (step - self.first_step) * self.step_samples

    def group_begin(self, step: int) -> int:
        """The first micro-step of the group that a micro-step is of."""
        return step - (step - self.first_step) % self.group_micro_steps

    def group_end(self, step: int) -> int:
        """The micro-step after the last one of the group that a micro-step is of."""
        return min(self.group_begin(step) + self.group_micro_steps, self.end_step)

    def group_number(self, step: int) -> int:
        """Groups of the generation before that which a micro-step is of."""
        return self.first_group + (step - self.first_step) // self.group_micro_steps


@dataclass(slots=True)
class StepGroup:
    """The micro-steps between two state boundaries, filled one burst after the other.

    ``samples`` are the ids of each rank's samples, as views of the blocks that they came from, by rank, micro-step
    and place in the batch ([world_size, group_micro_steps, batch_size], as ``source_ids``, int32); empty once released.
    ``marks[g]`` is the mark *after* micro-step g, ``rotations[g]`` the rotation of its slices. ``origins`` are those of
    the blocks that the samples came from, by source; ``dropped_tokens`` the tails, by source and by where the stage
    began.
    """

    plan: BatchPlan
    base: State
    real: RealTokens
    #: Of the base.
    padding_tokens: int
    samples: npt.NDArray[np.object_]
    source_ids: npt.NDArray[np.int32]
    #: Of each sample's tokens, those that no document filled, as ``source_ids``; empty where samples are always full.
    padding: npt.NDArray[np.int32]
    origins: defaultdict[int, list[SampleOrigins]] = field(
        default_factory=lambda: defaultdict(list)
    )
    dropped_tokens: dict[int, list[int]] = field(default_factory=dict)
    marks: list[StepMark] = field(default_factory=list)
    rotations: list[int] = field(default_factory=list)
    #: Tokens and labels of each micro-step, over all ranks; empty where every sample has as many (``real``).
    counts: list[tuple[int, int]] = field(default_factory=list)
    #: The base as canonical JSON, as it was when production began the group: every rank gets this text.
    resume_state: str = ""
    #: Micro-steps, and what sources gave up to those of a message, as the wire has them, once somebody made them.
    step_infos: dict[int, bytes] = field(default_factory=dict)
    message_counts: dict[tuple[int, int], bytes] = field(default_factory=dict)

    @property
    def begin(self) -> int:
        return self.base.sample_index

    @property
    def end(self) -> int:
        return self.marks[-1].sample_index if self.marks else self.begin

    @property
    def first_step(self) -> int:
        """Its first micro-step, counted from the generation's start."""
        return self.plan.first_step + (self.begin - self.plan.start_index) // self.plan.step_samples

    def step_begin(self, step: int) -> int:
        return self.marks[step - 1].sample_index if step else self.begin

    def slice_of(self, step: int, rank: int) -> int:
        """Which slice of the micro-step the rank gets: its samples begin at step_begin + slice × batch_size."""
        return (rank + self.rotations[step]) % self.plan.world_size

    def forget_after(self, steps: int) -> None:
        """Drops what lies after the first ``steps`` steps: a burst that failed half-way."""
        del self.marks[steps:], self.rotations[steps:], self.counts[steps:]

    def real_tokens(self, step: int) -> tuple[int, int]:
        """Tokens and labels of a micro-step over all ranks, as ``RealTokens`` says."""
        if self.real.varies:
            return self.counts[step]
        samples, (tokens, labels) = (
            self.marks[step].sample_index - self.step_begin(step),
            self.real.full,
        )
        return samples * tokens, samples * labels

    def run_real_tokens(self, step: int) -> int:
        """Of the run up to the end of a micro-step, its total tokens without padding."""
        unfilled = int(self.padding[:, : step + 1].sum()) if len(self.padding) else 0
        return self.marks[step].total_tokens - self.padding_tokens - unfilled

    def count(self, first: int, last: int) -> None:
        """Counts the real tokens of the micro-steps [first, last), whose samples and rotations are there."""
        samples = (
            self.samples.reshape(self.source_ids.shape)[:, first:last].swapaxes(0, 1).reshape(-1)
        )
        sources = self.source_ids[:, first:last].swapaxes(0, 1)
        boundaries = (
            self._boundaries(first, last, sources.reshape(-1))
            if self.real.mask_boundaries
            else None
        )
        tokens, labels = self.real.of(
            samples.tolist(), last - first, sources.reshape(-1) == PADDING, boundaries
        )
        self.counts += zip(tokens.reshape(last - first, -1).sum(1).tolist(), labels, strict=True)
        unfilled = (self.real.full[0] - tokens).reshape(sources.shape) * (sources != PADDING)
        self.padding[:, first:last] = unfilled.swapaxes(0, 1)

    def source_counts(self, first: int, last: int) -> tuple[Int64s, Int64s, Int64s, Int64s]:
        """What sources gave in the micro-steps before ``first`` together, and in each from there to ``last``: how
        many sources that were, their ids, how many samples each gave, and how many of their tokens no document filled
        (empty where samples are always full)."""
        sources = self.source_ids[:, :last].swapaxes(0, 1).reshape(last, -1)
        parts, width = np.maximum(np.arange(last) - first + 1, 0), int(sources.max()) + 2
        # Padding samples come before the sources of their part.
        slots = (parts[:, None] * width + sources + 1).ravel()
        samples = np.bincount(slots, minlength=(last - first + 1) * width).reshape(-1, width)[:, 1:]
        where, padding = np.nonzero(samples), np.empty(0, np.int64)
        if len(self.padding):
            weights = self.padding[:, :last].swapaxes(0, 1).ravel()
            padding = np.bincount(slots, weights, samples.shape[0] * width).reshape(-1, width)[
                :, 1:
            ][where]
        return np.count_nonzero(samples, axis=1), where[1], samples[where], padding.astype(np.int64)

    def _boundaries(self, first: int, last: int, sources: npt.NDArray[np.int32]) -> Boundaries:
        """Where documents begin in the samples of the micro-steps [first, last), as ``sources``: by micro-step, rank
        and place."""
        numbers = self._numbers(last)[:, first:last].swapaxes(0, 1).reshape(-1)
        samples, starts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for source in np.unique(sources[sources != PADDING]).tolist():
            # In consecutive micro-steps a source's numbers are consecutive.
            where = np.flatnonzero(sources == source)
            where = where[np.argsort(numbers[where])]
            first_number, end = int(numbers[where[0]]), int(numbers[where[-1]]) + 1
            while end > first_number:
                origins = self._origins(source, end - 1)
                begin = max(first_number, origins.first_sample)
                sample, start = origins.boundaries(begin, end)
                samples.append(where[sample + begin - first_number])
                starts.append(start)
                end = begin
        return Boundaries(np.concatenate(samples), np.concatenate(starts))

    def ids(self, rank: int, first: int, last: int) -> list[Sample]:
        """The ids of a rank's micro-steps [first, last), one after the other, as they travel; empty once released."""
        begin, size = rank * self.plan.group_micro_steps, self.plan.batch_size
        ids: list[Sample] = self.samples[(begin + first) * size : (begin + last) * size].tolist()
        return ids

    def release(self) -> None:
        """Lets the ids go: every rank has consumed them. States can still be made."""
        self.samples = self.samples[:0].copy()

    def document_starts(
        self, rank: int, first: int, last: int
    ) -> tuple[list[int], npt.NDArray[np.uint32]]:
        """(how many documents begin in each sample, their positions in it) of a rank's micro-steps [first, last)."""
        sources = self.source_ids[rank, first:last].ravel().tolist()
        numbers = self._numbers(last)[rank, first:last].ravel().tolist()
        starts = [
            np.empty(0, np.uint32)
            if source == PADDING
            else self._origins(source, number).starts_of(number)
            for source, number in zip(sources, numbers, strict=True)
        ]
        return list(map(len, starts)), np.concatenate(starts)

    def _numbers(self, steps: int) -> npt.NDArray[np.int64]:
        """The number within its source of each sample of the first micro-steps, arranged as ``source_ids``."""
        # Not of those after them: the producer may be about to add some.
        where = slots_of_steps(self.plan, self.rotations[:steps], 0)
        picks = self.source_ids.reshape(-1)[where]
        where, picks = where[picks != PADDING], picks[picks != PADDING]
        counts = np.bincount(picks, minlength=len(self.base.sources))
        before = np.zeros(len(counts), np.int64)
        before[: len(self.base.sources)] = [source.number for source in self.base.sources]
        first = before - np.cumsum([0, *counts[:-1]])
        numbers = np.zeros(self.source_ids.shape, np.int64)
        # Sorted by source, each source's samples are one range of consecutive numbers.
        numbers.reshape(-1)[where[np.argsort(picks, kind="stable")]] = np.arange(
            len(picks)
        ) + np.repeat(first, counts)
        return numbers

    def state_after(self, step: int) -> State:
        """The state after a micro-step."""
        mark = self.marks[step]
        before = self.source_ids[:, : step + 1]
        counts = np.bincount(
            before[before != PADDING], minlength=len(mark.stage.start.sources)
        ).tolist()
        # A source that came within the group had nothing before.
        known = [*self.base.sources, *[SourceState()] * (len(counts) - len(self.base.sources))]
        numbers = [source.number + count for source, count in zip(known, counts, strict=True)]
        positions = [
            self._origins(i, numbers[i] - 1).after(numbers[i] - 1)
            if count
            else SourcePosition.of(source)
            for i, (count, source) in enumerate(zip(counts, known, strict=True))
        ]
        return state_at(
            mark, numbers, positions, self.dropped_tokens[mark.stage.start.sample_index]
        )

    @property
    def of_rows(self) -> bool:
        """Whether its micro-steps are batches of rows (``batching``)."""
        return bool(self.marks) and self.marks[0].stage.config.batching is not None

    def batch_of(self, step: int) -> Batch:
        """What a micro-step is made of that is a batch of rows."""
        picks = self.source_ids[0, : step + 1, 0]
        source = int(picks[step])
        before = self.base.sources[source].number if source < len(self.base.sources) else 0
        batch = self._origins(
            source, before + int((picks[:-1] == source).sum()) * self.plan.step_samples
        ).batch
        assert batch is not None, "only packers of rows are in a run with batching"
        return batch

    def _origins(self, source: int, sample: int) -> SampleOrigins:
        # After a switch blocks are made anew, where those of before may have reached further.
        return next(
            origins for origins in reversed(self.origins[source]) if origins.first_sample <= sample
        )


def state_at(
    mark: StepMark,
    numbers: Sequence[int],
    positions: Sequence[SourcePosition],
    dropped_tokens: Sequence[int],
) -> State:
    """The state at a mark. By source: the ``numbers`` of their next samples, and where it stands."""
    config, mixer, start = mark.stage
    since_start = [now - before.number for now, before in zip(numbers, start.sources, strict=True)]
    exhausted = mixer.exhausted(mark.mix_weights)
    # As ``RunConfig.balanced`` counts them.
    tokens_since = [
        more * config.sequence_length
        - (
            position.row_counts.padding_tokens - before.row_counts.padding_tokens
            if config.balances_real and more
            else 0
        )
        for before, more, position in zip(start.sources, since_start, positions, strict=True)
    ]
    expected = mark.mix_weights.expected_after(sum(tokens_since))
    sources = [
        replace(
            before,
            # What has given nothing since then stands where the stage began, which may pass over samples.
            **(position._asdict() if more else {}),
            samples=before.samples + more,
            tokens=before.tokens + more * config.sequence_length,
            dropped_tokens=dropped if out else 0,
            exhausted=out,
            owed=before.owed + of_source - tokens * SHARE_UNIT,
        )
        for before, more, position, dropped, out, of_source, tokens in zip(
            start.sources,
            since_start,
            positions,
            dropped_tokens,
            exhausted,
            expected,
            tokens_since,
            strict=True,
        )
    ]
    return replace(
        start,
        sample_index=mark.sample_index,
        total_tokens=mark.total_tokens,
        digest=mark.digest,
        sources=tuple(sources),
        nodes=mixer.states(mark.mix_weights, since_start, [*map(config.balanced, sources)]),
    )


def slots_of_steps(plan: BatchPlan, rotations: Sequence[int], first: int) -> npt.NDArray[np.int64]:
    """Where each sample of consecutive micro-steps, the ``first`` and following of a group, lies among
    [rank, micro-step, place]: slice j of a micro-step is rank j − rotation's."""
    turned = np.array(rotations, np.int64)[:, None]
    ranks = (np.arange(plan.world_size) - turned) % plan.world_size
    rows = ranks * plan.group_micro_steps + np.arange(first, first + len(rotations))[:, None]
    slots: npt.NDArray[np.int64] = (
        rows[:, :, None] * plan.batch_size + np.arange(plan.batch_size)
    ).ravel()
    return slots
