"""A source read through several cursors in turn, so that what lies together in it comes apart.

Each *lane* has a part of every epoch's rows, the first lane the first of them, and packs it by itself. The source's
next sample is the next one of the lane that has given the fewest, of these the first; a lane that is out is left out.
So of n lanes each gives every n-th sample, and a document that fills a thousand samples of its lane is spread over n
thousand of the source's. Which lane gives which sample follows from how many each has given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenloom_server.core.state import Lane, RowCounts, SourceState
from tokenloom_server.errors import TokenloomError
from tokenloom_server.packing.base import (
    Batch,
    Block,
    DocumentPacker,
    Packer,
    SampleOrigins,
    SourcePosition,
)
from tokenloom_server.packing.real_tokens import Boundaries
from tokenloom_server.packing.samples import Int64s, Sample
from tokenloom_server.packing.tokenized_rows import DocumentSpan

#: Samples of a block: those of long blocks of the lanes wait meanwhile, as what they are.
BLOCK_SAMPLES = 1024


def lane_state(state: SourceState, lane: int) -> SourceState:
    """Where a lane of a source stands, as a source's state."""
    cursor, samples, rows, row_counts = state.lanes[lane] if state.lanes else Lane()
    return SourceState(cursor=cursor, samples=samples, rows=rows, row_counts=row_counts)


@dataclass(frozen=True, slots=True)
class LaneOrigins:
    """Implements ``SampleOrigins`` of samples that several lanes gave: sample i is sample ``numbers[i]`` of lane
    ``lanes[i]``, among the ``origins[lane]`` of that lane's block. ``before``: where the lanes stand before the first.
    """

    first_sample: int
    lanes: Int64s
    numbers: Int64s
    origins: Sequence[SampleOrigins | None]
    before: Sequence[Lane]
    batch: Batch | None = None

    def __len__(self) -> int:
        return len(self.lanes)

    def after(self, sample: int) -> SourcePosition:
        index = sample - self.first_sample
        last = np.full(len(self.before), -1)
        # Of several, the last assignment stays.
        last[self.lanes[: index + 1]] = np.arange(index + 1)
        lanes = [
            before if own_index < 0 else self._lane(own_index)
            for own_index, before in zip(last.tolist(), self.before, strict=True)
        ]
        row_counts = RowCounts(*map(sum, zip(*(lane.row_counts for lane in lanes), strict=True)))
        cursor = lanes[int(self.lanes[index])].cursor
        return SourcePosition(cursor, sum(lane.rows for lane in lanes), row_counts, tuple(lanes))

    def starts_of(self, sample: int) -> npt.NDArray[np.uint32]:
        origins, number = self._own(sample - self.first_sample)
        return origins.starts_of(number)

    def boundaries(self, first: int, end: int) -> Boundaries:
        starts = [self.starts_of(sample) for sample in range(first, end)]
        sample = np.repeat(np.arange(end - first), [len(own) for own in starts])
        return Boundaries(sample, np.concatenate(starts).astype(np.int64))

    def _own(self, index: int) -> tuple[SampleOrigins, int]:
        """The origins of the lane that gave a sample, and the sample's number in that lane."""
        origins = self.origins[int(self.lanes[index])]
        assert origins is not None, "a lane that gave none of these samples"
        return origins, int(self.numbers[index])

    def _lane(self, index: int) -> Lane:
        origins, number = self._own(index)
        cursor, rows, row_counts, _ = origins.after(number)
        return Lane(cursor, number + 1, rows, row_counts)


class _LaneFeed:
    """One lane at work: its samples that wait, block by block. Its error waits for its turn, wherever blocks end."""

    def __init__(self, packer: Packer, state: SourceState) -> None:
        self._blocks = packer.blocks()
        self._block: Block | None = None
        self.error: TokenloomError | None = None
        #: Samples taken since the run began, and which of the block is next.
        self.taken = state.samples
        self._next = 0

    def waiting(self) -> int:
        """How many samples wait; makes some where none do. 0: it is out, or failed."""
        while self._block is None or self._next == len(self._block.ids):
            try:
                self._block, self._next = next(self._blocks, None), 0
            except TokenloomError as error:
                self._block, self.error = None, error
            if self._block is None:
                self._blocks = iter(())
                return 0
        return len(self._block.ids) - self._next

    def take(self, count: int) -> Block | None:
        """The next of those that wait, with the origins of the block that they come from; None for none."""
        if not count:
            return None
        assert self._block is not None
        part = slice(self._next, self._next + count)
        self.taken += count
        self._next += count
        return Block(
            self._block.ids[part],
            self._block.hashes[part],
            self._block.origins,
            self._block.real[part],
        )


class LanesPacker:
    """Implements ``DocumentPacker`` around those of the lanes."""

    def __init__(self, packers: Sequence[DocumentPacker], state: SourceState) -> None:
        """``packers`` go on from the ``lane_state`` of their lanes."""
        self._packers = packers
        self._first_sample = state.samples
        self._states = [lane_state(state, lane) for lane in range(len(packers))]

    @property
    def dropped_tokens(self) -> int:
        return sum(packer.dropped_tokens for packer in self._packers)

    def spans(self, count: int) -> Iterator[list[DocumentSpan]]:
        taken = [state.samples for state in self._states]
        samples = [packer.spans(count) for packer in self._packers]
        live = list(range(len(taken)))
        while live and count:
            lane = min(live, key=lambda lane: (taken[lane], lane))
            spans = next(samples[lane], None)
            if spans is None:
                live.remove(lane)
                continue
            yield spans
            taken[lane] += 1
            count -= 1

    def blocks(self) -> Iterator[Block]:
        lanes = [
            _LaneFeed(packer, state)
            for packer, state in zip(self._packers, self._states, strict=True)
        ]
        before = [
            Lane(state.cursor, state.samples, state.rows, state.row_counts)
            for state in self._states
        ]
        first_sample = self._first_sample
        while True:
            waiting = [lane.waiting() for lane in lanes]
            live = [i for i, lane in enumerate(lanes) if waiting[i] or lane.error is not None]
            turns = _turns([lane.taken for lane in lanes], waiting, live)
            if not len(turns):
                if live and (error := lanes[min(live, key=lambda i: lanes[i].taken)].error):
                    raise error
                return
            counts = np.bincount(turns, minlength=len(lanes)).tolist()
            begins = [lane.taken for lane in lanes]
            blocks = [lane.take(count) for lane, count in zip(lanes, counts, strict=True)]
            block = _merged(turns, begins, blocks, before, first_sample)
            yield block
            first_sample += len(turns)
            before = list(block.origins.after(first_sample - 1).lanes)


def _turns(taken: Sequence[int], waiting: Sequence[int], live: Sequence[int]) -> Int64s:
    """Which lanes give the next samples, as far as that is known: until one that is ``live`` has none left."""
    if not live:
        return np.empty(0, np.int64)
    numbers = np.concatenate([taken[lane] + np.arange(waiting[lane]) for lane in live])
    lanes = np.repeat(live, [waiting[lane] for lane in live])
    order = np.lexsort((lanes, numbers))
    # The first sample that does not wait: after it, it would be that one's turn.
    end, lane = min((taken[lane] + waiting[lane], lane) for lane in live)
    known = (numbers < end) | ((numbers == end) & (lanes < lane))
    turns: Int64s = lanes[order[known[order]]][:BLOCK_SAMPLES]
    return turns


def _merged(
    turns: Int64s,
    begins: Sequence[int],
    blocks: Sequence[Block | None],
    before: Sequence[Lane],
    first_sample: int,
) -> Block:
    """The block of samples that some lanes gave. ``begins``: the lanes' numbers of the first ones."""
    numbers = np.empty(len(turns), np.int64)
    ids: list[Sample] = [np.empty(0, np.uint8)] * len(turns)
    hashes = [0] * len(turns)
    real = [0] * len(turns)
    for lane, block in enumerate(blocks):
        if block is not None:
            own = np.flatnonzero(turns == lane)
            numbers[own] = begins[lane] + np.arange(len(own))
            for index, sample, hashed, length in zip(
                own.tolist(), block.ids, block.hashes, block.real, strict=True
            ):
                ids[index], hashes[index], real[index] = sample, hashed, length
    origins = [block.origins if block is not None else None for block in blocks]
    return Block(ids, hashes, LaneOrigins(first_sample, turns, numbers, origins, before), real)
