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
from tokenloom_server.packing.base import Block, DocumentPacker, Packer, SampleOrigins, SourcePosition
from tokenloom_server.packing.origins import DocumentSpan
from tokenloom_server.packing.real_tokens import Boundaries

#: Samples of a block: those of long blocks of the lanes wait meanwhile, as what they are.
BLOCK_SAMPLES = 1024

_Int64s = npt.NDArray[np.int64]


def lane_state(state: SourceState, lane: int) -> SourceState:
    """Where a lane of a source stands, as a source's state."""
    found = state.lanes[lane] if state.lanes else Lane()
    return SourceState(cursor=found.cursor, samples=found.samples, rows=found.rows, tally=found.tally)


@dataclass(frozen=True, slots=True, kw_only=True)
class LanesPlaces(SampleOrigins):
    """Those of samples that several lanes gave: sample i is sample ``numbers[i]`` of lane ``lanes[i]``, in the
    ``places[of[i]]`` of that lane, which tells its starts and its tally; ``cursors`` are the lanes' own. ``before``:
    where the lanes stand before the first."""

    lanes: _Int64s
    numbers: _Int64s
    of: _Int64s
    places: Sequence[SampleOrigins]
    before: Sequence[Lane]

    def behind(self, sample: int) -> SourcePosition:
        at = sample - self.first_sample
        last = np.full(len(self.before), -1)
        # Of several, the last assignment stays.
        last[self.lanes[: at + 1]] = np.arange(at + 1)
        found = [was if i < 0 else self._lane(i) for i, was in zip(last.tolist(), self.before, strict=True)]
        tally = RowCounts(*map(sum, zip(*(lane.tally for lane in found), strict=True)))
        cursor = found[int(self.lanes[at])].cursor
        return SourcePosition(cursor, sum(lane.rows for lane in found), tally, tuple(found))

    def starts_of(self, sample: int) -> npt.NDArray[np.uint32]:
        at = sample - self.first_sample
        places: SampleOrigins = self.places[int(self.of[at])]
        return places.starts_of(int(self.numbers[at]))

    def boundaries(self, first: int, behind: int) -> Boundaries:
        found = [self.starts_of(sample) for sample in range(first, behind)]
        sample = np.repeat(np.arange(behind - first), [len(starts) for starts in found])
        return Boundaries(sample, np.concatenate(found).astype(np.int64))

    def _lane(self, at: int) -> Lane:
        number = int(self.numbers[at])
        cursor, rows, tally, _ = self.places[int(self.of[at])].behind(number)
        return Lane(cursor, number + 1, rows, tally)


class _Lane:
    """One lane at work: its samples that wait, block by block."""

    def __init__(self, packer: Packer, state: SourceState) -> None:
        self._blocks = packer.blocks()
        self._block: Block | None = None
        #: Samples given since the run began, and which of the block is next.
        self.given = state.samples
        self._next = 0

    def waiting(self) -> int:
        """How many samples wait; makes some where none do. 0: it is out."""
        while self._block is None or self._next == len(self._block.ids):
            self._block, self._next = next(self._blocks, None), 0
            if self._block is None:
                self._blocks = iter(())
                return 0
        return len(self._block.ids) - self._next

    def take(self, count: int) -> Block:
        """The next of those that wait; the places are those of the block that they come from."""
        assert self._block is not None
        part = slice(self._next, self._next + count)
        self.given += count
        self._next += count
        return Block(self._block.ids[part], self._block.hashes[part], self._block.places)


class LanesPacker:
    """Implements ``DocumentPacker`` around those of the lanes."""

    def __init__(self, packers: Sequence[DocumentPacker], state: SourceState) -> None:
        """``packers`` go on from the ``lane_state`` of their lanes."""
        self._packers = packers
        self._state = state

    @property
    def dropped_tokens(self) -> int:
        return sum(packer.dropped_tokens for packer in self._packers)

    def parts(self, count: int) -> Iterator[list[DocumentSpan]]:
        given = [lane_state(self._state, i).samples for i in range(len(self._packers))]
        parts = [packer.parts(count) for packer in self._packers]
        live = list(range(len(given)))
        while live and count:
            lane = min(live, key=lambda lane: (given[lane], lane))
            found = next(parts[lane], None)
            if found is None:
                live.remove(lane)
                continue
            yield found
            given[lane] += 1
            count -= 1

    def blocks(self) -> Iterator[Block]:
        states = [lane_state(self._state, i) for i in range(len(self._packers))]
        lanes = [_Lane(packer, state) for packer, state in zip(self._packers, states, strict=True)]
        before = [Lane(state.cursor, state.samples, state.rows, state.tally) for state in states]
        first = self._state.samples
        while True:
            turns = _turns([lane.given for lane in lanes], [lane.waiting() for lane in lanes])
            if not len(turns):
                return
            counts = np.bincount(turns, minlength=len(lanes)).tolist()
            begins = [lane.given for lane in lanes]
            taken = [lane.take(count) if count else None for lane, count in zip(lanes, counts, strict=True)]
            block = _merged(turns, begins, taken, before, first)
            yield block
            first += len(turns)
            last = block.places.behind(first - 1)
            before = list(last.lanes)


def _turns(given: Sequence[int], waiting: Sequence[int]) -> _Int64s:
    """Which lanes give the next samples, as far as that is known: until one that is not out has none left."""
    live = [lane for lane, count in enumerate(waiting) if count]
    if not live:
        return np.empty(0, np.int64)
    numbers = np.concatenate([given[lane] + np.arange(waiting[lane]) for lane in live])
    lanes = np.repeat(live, [waiting[lane] for lane in live])
    order = np.lexsort((lanes, numbers))
    # The first sample that does not wait: after it, it would be that one's turn.
    end, lane = min((given[lane] + waiting[lane], lane) for lane in live)
    known = (numbers < end) | ((numbers == end) & (lanes < lane))
    turns: _Int64s = lanes[order[known[order]]][:BLOCK_SAMPLES]
    return turns


def _merged(
    turns: _Int64s, begins: Sequence[int], taken: Sequence[Block | None], before: Sequence[Lane], first: int
) -> Block:
    """The block of samples that some lanes gave. ``begins``: the lanes' numbers of the first ones."""
    places = [block.places for block in taken if block is not None]
    cursors = np.empty((len(turns), 5), np.int64)
    of = np.cumsum([block is not None for block in taken]) - 1
    numbers = np.empty(len(turns), np.int64)
    ids: list[memoryview] = [memoryview(b"")] * len(turns)
    hashes = [0] * len(turns)
    for lane, block in enumerate(taken):
        if block is not None:
            at = np.flatnonzero(turns == lane)
            numbers[at] = begins[lane] + np.arange(len(at))
            skipped = begins[lane] - block.places.first_sample
            cursors[at] = block.places.cursors[skipped : skipped + len(at)]
            for i, sample, hashed in zip(at.tolist(), block.ids, block.hashes, strict=True):
                ids[i], hashes[i] = sample, hashed
    nothing = np.zeros(0, np.int64)
    return Block(
        ids,
        hashes,
        LanesPlaces(
            length=places[0].length,
            first_sample=first,
            cursors=cursors,
            starts=nothing.astype(np.uint32),
            bounds=nothing,
            tallies=nothing,
            lanes=turns,
            numbers=numbers,
            of=of[turns],
            places=places,
            before=before,
        ),
    )
