"""Bytes that will be read, fetched before they are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from tokenloom_server.storage.cache import BLOCK_BYTES as CACHED_BYTES
from tokenloom_server.storage.file import Range
from tokenloom_server.storage.hedged_read import HedgedRead
from tokenloom_server.storage.io_stats import IoStats

#: The first block that is read ahead, and the largest: each is twice as long as the one before.
FIRST_BLOCK_BYTES, BLOCK_BYTES = 1 << 20, 8 << 20
#: Ranges with no more than so much between them are read as one: a round trip costs as much as these bytes.
GAP_BYTES = 256 << 10
#: Blocks of one file under way or waiting to be read.
DEPTH = 4


class _Block(NamedTuple):
    begin: int
    end: int
    fetch: HedgedRead[bytes]


class Prefetcher:
    """Blocks of the ranges that will be read of a file. For one thread.

    The memory is shared by all readers of a run (``io_stats.AHEAD_BYTES``): where none is left, nothing is fetched.
    """

    def __init__(
        self,
        fetch: Callable[[int, int], HedgedRead[bytes]],
        size: int,
        ranges: Iterable[Range],
        io_stats: IoStats,
    ) -> None:
        """``fetch`` begins to read from an offset, so many bytes; the file has ``size``."""
        self._fetch = fetch
        self._io_stats = io_stats
        self._ranges = _joined(Range(max(0, each.begin), min(each.end, size)) for each in ranges)
        self._range = Range(0, 0)
        self._blocks: deque[_Block] = deque()
        self._next_bytes = FIRST_BLOCK_BYTES
        # The ranges may be found by reading of the same file.
        self._looking = False

    def read(self, begin: int, end: int) -> memoryview | None:
        """Bytes from ``begin`` on, up to ``end`` at most; None where these are not, or no longer, among what is read
        ahead."""
        if self._looking:
            return None
        if not self._blocks:
            self._fetch_ahead(begin)
        passed = next(
            (i for i, block in enumerate(self._blocks) if block.begin <= begin < block.end), None
        )
        if passed is None:
            return None
        for _ in range(passed):
            self._drop()
        block = self._blocks[0]
        data = memoryview(block.fetch.result())[begin - block.begin : end - block.begin]
        if begin + len(data) == block.end:
            self._drop()
        self._fetch_ahead()
        return data

    def close(self) -> None:
        while self._blocks:
            self._drop()

    def _drop(self) -> None:
        block = self._blocks.popleft()
        self._io_stats.release(block.end - block.begin)

    def _fetch_ahead(self, begin: int | None = None) -> None:
        """``begin``: where reading goes on, if it lies within the range: what is before it is not wanted."""
        while len(self._blocks) < DEPTH:
            if self._range.begin >= self._range.end:
                self._looking = True
                try:
                    following = next(self._ranges, None)
                finally:
                    self._looking = False
                if following is None:
                    return
                self._range = following
            if begin is not None:
                if not self._range.begin <= begin < self._range.end:
                    return
                self._range, begin = Range(begin, self._range.end), None
            start = self._range.begin
            # To the nearest end of a block of the cache, so that no two reads have one in common.
            end = (start + self._next_bytes + CACHED_BYTES // 2) // CACHED_BYTES * CACHED_BYTES
            end = min(end, self._range.end)
            if not self._io_stats.reserve(end - start):
                return
            self._blocks.append(_Block(start, end, self._fetch(start, end - start)))
            self._range = Range(end, self._range.end)
            self._next_bytes = min(2 * self._next_bytes, BLOCK_BYTES)


def _joined(ranges: Iterable[Range]) -> Iterator[Range]:
    held: Range | None = None
    for each in ranges:
        if held is not None and held.begin <= each.begin <= held.end + GAP_BYTES:
            held = Range(held.begin, max(held.end, each.end))
            continue
        if held is not None:
            yield held
        held = each
    if held is not None:
        yield held
