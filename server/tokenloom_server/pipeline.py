"""The canonical order at work: from a state to the samples behind it, bit for bit.

Sources, tokeniser and packers are the leaves; here is the one loop that decides, counts and digests.
No clock, thread, socket or ledger is known here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenloom_server.config import RunConfig
from tokenloom_server.errors import CounterOverflow
from tokenloom_server.hashing import slice_rotation
from tokenloom_server.mixing.mixer import NOTHING, Mixer, NodeMark, exhausted_sources, initial_nodes
from tokenloom_server.packing.base import Block, Packer, PackerFactory
from tokenloom_server.state import (
    DIGEST_MODULUS,
    DIGEST_MULTIPLIER,
    MAX_COUNTER,
    Cursor,
    SourceState,
    State,
)

Ids = npt.NDArray[np.unsignedinteger]

#: What a padding sample's source is called.
PADDING = -1


def initial_state(config: RunConfig) -> State:
    """The state before sample 0."""
    return State(
        sample_index=0,
        total_tokens=0,
        digest=0,
        sources=(SourceState(),) * len(config.sources),
        nodes=initial_nodes(config),
    )


class Mark(NamedTuple):
    """What a state differs in from the state at the group's begin: small, immutable, taken every step."""

    sample_index: int
    total_tokens: int
    digest: int
    samples: tuple[int, ...]
    nodes: tuple[NodeMark, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """How a generation cuts the order into steps: step s covers samples
    [start + s·world_size·batch_size, …); every ``group_steps`` steps is a state boundary."""

    start_index: int
    world_size: int
    batch_size: int
    group_steps: int

    @property
    def step_samples(self) -> int:
        return self.world_size * self.batch_size

    @property
    def group_samples(self) -> int:
        return self.step_samples * self.group_steps

    def boundary(self, sample_index: int) -> int:
        """The state boundary that a snapshot at a sample index starts from: the one at which the group
        of the last step before it begins, so that whoever has that step has the boundary, too."""
        if sample_index <= self.start_index:
            return self.start_index
        return sample_index - ((sample_index - self.start_index - 1) % self.group_samples + 1)


@dataclass(slots=True)
class Group:
    """The steps between two state boundaries, filled one burst after the other.

    ``ids`` [world_size, group_steps, batch_size, width] holds each rank's samples in one piece, so that
    a message of several steps is one contiguous range. ``source_ids`` int32 and ``origins`` int64 (the
    sample's number within its source) are [world_size, group_steps, batch_size]. ``marks[g]`` is the
    mark *behind* step g, ``rotations[g]`` the rotation of its slices. ``blocks`` are those that the
    samples came from, by source.
    """

    config: RunConfig
    mixer: Mixer
    plan: BatchPlan
    base: State
    ids: Ids
    source_ids: npt.NDArray[np.int32]
    origins: npt.NDArray[np.int64]
    blocks: list[list[Block]]
    dropped_tokens: list[int]
    marks: list[Mark] = field(default_factory=list)
    rotations: list[int] = field(default_factory=list)
    #: The base as canonical JSON, once somebody made it.
    resume_state: str | None = None

    @property
    def begin(self) -> int:
        return self.base.sample_index

    @property
    def end(self) -> int:
        return self.marks[-1].sample_index if self.marks else self.begin

    def step_begin(self, step: int) -> int:
        return self.marks[step - 1].sample_index if step else self.begin

    def slice_of(self, step: int, rank: int) -> int:
        """Which slice of the step the rank gets: its samples begin at step_begin + slice × batch_size."""
        return (rank + self.rotations[step]) % self.plan.world_size

    def forget_behind(self, steps: int) -> None:
        """Drops what lies behind the first ``steps`` steps: a burst that failed half-way."""
        del self.marks[steps:], self.rotations[steps:]

    def document_starts(self, rank: int, first: int, last: int) -> tuple[list[int], npt.NDArray[np.uint32]]:
        """(how many documents begin in each sample, their positions in it) of a rank's steps [first, last)."""
        found = []
        sources = self.source_ids[rank, first:last].ravel().tolist()
        for source, sample in zip(sources, self.origins[rank, first:last].ravel().tolist(), strict=True):
            found.append(np.empty(0, np.uint32) if source == PADDING else self._block(source, sample).starts_of(sample))
        return [len(starts) for starts in found], np.concatenate(found)

    def state_behind(self, step: int) -> State:
        """The state behind a step."""
        mark = self.marks[step]
        places = [
            self._block(i, samples - 1).cursor_behind(samples - 1)
            if samples > known.samples
            else (known.cursor, known.rows)
            for i, (samples, known) in enumerate(zip(mark.samples, self.base.sources, strict=True))
        ]
        return _state_at(mark, self.config, self.mixer, places, self.dropped_tokens)

    def _block(self, source: int, sample: int) -> Block:
        return next(block for block in reversed(self.blocks[source]) if block.first_sample <= sample)


def _state_at(
    mark: Mark,
    config: RunConfig,
    mixer: Mixer,
    places: Sequence[tuple[Cursor, int]],
    dropped_tokens: Sequence[int],
) -> State:
    """The state at a mark; ``places`` are each source's cursor and rows counter there."""
    nodes = mixer.states(mark.nodes)
    exhausted = exhausted_sources(config, nodes)
    sources = [
        SourceState(
            cursor=cursor,
            samples=samples,
            rows=rows,
            tokens=samples * config.sequence_length,
            dropped_tokens=dropped if out else 0,
            exhausted=out,
        )
        for samples, (cursor, rows), dropped, out in zip(mark.samples, places, dropped_tokens, exhausted, strict=True)
    ]
    return State(
        sample_index=mark.sample_index,
        total_tokens=mark.total_tokens,
        digest=mark.digest,
        sources=tuple(sources),
        nodes=nodes,
    )


class _Feed:
    """One source's blocks: picked sample by sample, then taken in runs."""

    def __init__(self, packer: Packer, state: SourceState) -> None:
        self._packer = packer
        self._blocks = packer.blocks()
        self._held: deque[Block] = deque()
        self._loaded = state.samples
        self._taken = state.samples
        self.picked = state.samples
        self.hashes: Iterator[int] = iter(())
        # Behind the last sample taken.
        self.cursor = state.cursor
        self.rows = state.rows
        self.exhausted = state.exhausted
        self.dropped_tokens = state.dropped_tokens

    def has_sample(self) -> bool:
        """Whether a pick succeeds; loads the next block when needed."""
        if self.picked < self._loaded:
            return True
        if self.exhausted:
            return False
        block = next(self._blocks, None)
        if block is None:
            self.exhausted = True
            self.dropped_tokens = self._packer.dropped_tokens
            return False
        assert block.first_sample == self._loaded, "a packer skipped or repeated samples"
        self._loaded += len(block)
        self._held.append(block)
        self.hashes = iter(block.hashes)
        return True

    def take(self, count: int) -> Iterator[tuple[Block, int, int]]:
        """The next ``count`` picked samples as (block, first, last) ranges; settles the cursor behind them."""
        while count:
            block = self._held[0]
            first = self._taken - block.first_sample
            last = min(first + count, len(block))
            yield block, first, last
            self._taken += last - first
            count -= last - first
            self.cursor, self.rows = block.cursor_behind(self._taken - 1)
            if last == len(block):
                self._held.popleft()


class Pipeline:
    """Produces samples ``state.sample_index``, +1, … of a run's canonical order. For one thread at a time."""

    def __init__(
        self, config: RunConfig, packers: PackerFactory, state: State, *, width: int, dtype: npt.DTypeLike
    ) -> None:
        """``width``: ids per sample as they travel; ``dtype``: the run's narrow integer type."""
        self._config = config
        self._width = width
        self._dtype = np.dtype(dtype)
        self._mixer = Mixer(config, state.nodes)
        self._feeds = [_Feed(packers(i, source), source) for i, source in enumerate(state.sources)]
        self._index = state.sample_index
        self._tokens = state.total_tokens
        self._digest = state.digest
        #: Why the data ended; None while they go on.
        self.ended: str | None = None
        #: Samples of an incomplete last step that were dropped.
        self.dropped_samples = 0

    def begin_group(self, plan: BatchPlan) -> Group:
        """An empty group that begins here, at a state boundary of the plan."""
        shape = (plan.world_size, plan.group_steps, plan.batch_size)
        return Group(
            config=self._config,
            mixer=self._mixer,
            plan=plan,
            base=self.state(),
            ids=np.zeros((*shape, self._width), self._dtype),
            source_ids=np.full(shape, PADDING, np.int32),
            origins=np.zeros(shape, np.int64),
            blocks=[[] for _ in self._feeds],
            dropped_tokens=[0] * len(self._feeds),
        )

    def fill(self, group: Group, steps: int) -> None:
        """Appends ``steps`` steps to the group (at most what it has room for); fewer where the data end.

        An incomplete last step is dropped or padded, as configured; then, or when nothing is left,
        ``ended`` says why. Raises ``SourceError`` and ``TokenizerError``; the pipeline is of no use then.
        """
        plan = group.plan
        first = len(group.marks)
        picks: list[int] = []
        for _ in range(min(steps, plan.group_steps - first)):
            begin, before = self._index, len(picks)
            taken = self._pick(plan.step_samples, picks)
            if not taken or (taken < plan.step_samples and self._config.last_step == "drop"):
                self.dropped_samples = taken
                del picks[before:]
                break
            group.marks.append(self._mark())
            group.rotations.append(slice_rotation(self._config.seed, begin, plan.world_size))
            if self.ended is not None:
                break
        self._gather(group, first, np.array(picks, np.int32))

    def advance(self, samples: int) -> None:
        """Goes forward without building batches; stops early, with ``ended`` set, where the data end."""
        while samples and self.ended is None:
            picks: list[int] = []
            samples -= self._pick(min(samples, 4096), picks)
            for source, count in zip(*np.unique(np.array(picks, np.int32), return_counts=True), strict=True):
                for _ in self._feeds[source].take(int(count)):
                    pass

    def state(self) -> State:
        """The state at the present sample index."""
        places = [(feed.cursor, feed.rows) for feed in self._feeds]
        dropped = [feed.dropped_tokens for feed in self._feeds]
        return _state_at(self._mark(), self._config, self._mixer, places, dropped)

    def _pick(self, count: int, picks: list[int]) -> int:
        """Decides up to ``count`` samples, appends their sources and returns how many there were."""
        feeds, mixer, length = self._feeds, self._mixer, self._config.sequence_length
        digest, taken = self._digest, 0
        probes = [feed.has_sample for feed in feeds]

        def has_sample(source: int) -> bool:
            return probes[source]()

        while taken < count:
            source = mixer.pick(has_sample)
            if source == NOTHING:
                self.ended = self._reason()
                break
            mixer.issue(length)
            feed = feeds[source]
            feed.picked += 1
            digest = (digest * DIGEST_MULTIPLIER + next(feed.hashes)) % DIGEST_MODULUS
            picks.append(source)
            taken += 1
        self._digest = digest
        self._index += taken
        self._tokens += taken * length
        if self._tokens > MAX_COUNTER:
            raise CounterOverflow(f"the run has {self._tokens} tokens; counters end at 2^53 − 1: start a new run")
        return taken

    def _gather(self, group: Group, first: int, picks: npt.NDArray[np.int32]) -> None:
        """Copies the picked samples to their places: one vectorised copy per source and block."""
        plan = group.plan
        steps = len(group.marks) - first
        if not steps:
            return
        # Where sample k of these steps lies among [rank, step, place]: slice j of step g is rank j − rotation's.
        rotations = np.array(group.rotations[first:], np.int64)
        ranks = (np.arange(plan.world_size) - rotations[:, None]) % plan.world_size
        rows = ranks * plan.group_steps + np.arange(first, first + steps)[:, None]
        places = (rows[:, :, None] * plan.batch_size + np.arange(plan.batch_size)).ravel()[: len(picks)]
        ids = group.ids.reshape(-1, self._width)
        group.source_ids.reshape(-1)[places] = picks
        origins = group.origins.reshape(-1)
        for source in np.unique(picks).tolist():
            wanted = places[picks == source]
            done = 0
            for block, lo, hi in self._feeds[source].take(len(wanted)):
                into = wanted[done : done + hi - lo]
                ids[into] = block.ids[lo:hi]
                origins[into] = np.arange(block.first_sample + lo, block.first_sample + hi)
                done += hi - lo
                if not group.blocks[source] or group.blocks[source][-1] is not block:
                    group.blocks[source].append(block)
        for source, feed in enumerate(self._feeds):
            group.dropped_tokens[source] = feed.dropped_tokens

    def _mark(self) -> Mark:
        picked = tuple(feed.picked for feed in self._feeds)
        return Mark(self._index, self._tokens, self._digest, picked, self._mixer.marks())

    def _reason(self) -> str:
        out = [feed.exhausted for feed in self._feeds]
        if all(out):
            return "every source is exhausted"
        names = ", ".join(source.name for source, gone in zip(self._config.sources, out, strict=True) if gone)
        return f"exhausted, and its node stops: {names}"
