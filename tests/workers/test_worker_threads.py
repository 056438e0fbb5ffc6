"""Blocks that are made ahead are the same blocks, and a source is asked by one thread at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tokenloom_server.errors import SourceError
from tokenloom_server.packing.base import Block, BlockOrigins
from tokenloom_server.workers.threads import LazyPacker, Pools, ReadAhead


class Slow:
    """Implements ``Packer``: numbered blocks that take a while, and notes who is in here."""

    def __init__(self, count: int, fails: bool = False) -> None:
        self.count = count
        self.fails = fails
        self.made = 0
        self.dropped_tokens = 0
        self._inside = threading.Lock()

    def blocks(self) -> Iterator[Block]:
        nothing = np.empty(0, np.int64)
        for number in range(self.count):
            assert self._inside.acquire(blocking=False), "two threads are in one source"
            time.sleep(0.002)
            self.made += 1
            self._inside.release()
            yield Block(
                [],
                [number],
                BlockOrigins(1, number, nothing, nothing.astype(np.uint32), nothing, nothing),
            )
        if self.fails:
            raise SourceError("row 7 is damaged")
        self.dropped_tokens = 5


def test_one_block_is_made_ahead_and_no_more() -> None:
    with ThreadPoolExecutor(2) as pool:
        packer = Slow(20)
        blocks = ReadAhead(packer, pool).blocks()
        next(blocks)
    assert packer.made == 2


def test_what_waits_is_not_made_once_nobody_will_ask_for_it() -> None:
    with ThreadPoolExecutor(1) as pool:
        packers = [Slow(20) for _ in range(5)]
        begun = [ReadAhead(packer, pool).blocks() for packer in packers]
        for blocks in begun:
            next(blocks)
        held = threading.Event()
        pool.submit(held.wait)
        for blocks in begun:
            next(blocks)
        made = sum(packer.made for packer in packers)
        begun.clear()
        del blocks
        held.set()
    assert sum(packer.made for packer in packers) == made


def test_what_a_source_fails_with_comes_behind_all_that_it_gave() -> None:
    with ThreadPoolExecutor(2) as pool:
        found = []
        with pytest.raises(SourceError, match="row 7"):
            for block in ReadAhead(Slow(3, fails=True), pool).blocks():
                found += block.hashes
        assert found == [0, 1, 2]


def test_sources_are_opened_side_by_side_and_give_the_same_blocks() -> None:
    with ThreadPoolExecutor(3) as opening, ThreadPoolExecutor(2) as making:
        packers = [Slow(5) for _ in range(8)]
        lates = [
            LazyPacker(lambda packer=packer: packer, Pools(opening, making)) for packer in packers
        ]
        rounds = list(zip(*(late.blocks() for late in lates), strict=True))
        assert [[block.hashes for block in blocks] for blocks in rounds] == [
            [[n]] * 8 for n in range(5)
        ]
        assert [late.dropped_tokens for late in lates] == [5] * 8


def test_without_threads_a_source_is_opened_when_it_is_asked_for() -> None:
    made: list[Slow] = []
    late = LazyPacker(lambda: made.append(Slow(3)) or made[-1], None)
    assert (made, late.dropped_tokens) == ([], 0)
    assert [block.hashes for block in late.blocks()] == [[0], [1], [2]]
    assert late.dropped_tokens == 5


def test_a_source_that_cannot_be_opened_says_so_where_its_blocks_are_asked_for() -> None:
    def make() -> Slow:
        raise SourceError("it is gone")

    with ThreadPoolExecutor(1) as pool:
        late = LazyPacker(make, Pools(pool, pool))
        with pytest.raises(SourceError, match="it is gone"):
            next(late.blocks())


def test_sources_of_a_pipeline_that_is_gone_are_not_opened() -> None:
    begun, go_on = threading.Event(), threading.Event()
    made: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: (begun.set(), go_on.wait()))
        begun.wait()
        lates = [
            LazyPacker(lambda number=number: made.append(number) or Slow(1), Pools(pool, pool))
            for number in range(5)
        ]
        del lates
        go_on.set()
    assert made == []
