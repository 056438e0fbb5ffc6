"""One source's samples: loaded ahead, then picked one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from tokenloom_server.core.state import SourceState, tokens_in_row
from tokenloom_server.errors import TokenloomError
from tokenloom_server.packing.base import Packer, SampleOrigins, SourcePosition
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
