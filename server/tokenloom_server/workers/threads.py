"""Threads of this process that work for a run: they make the next block of a source while the one before is mixed and
sent, and encode texts, each with an engine of its own.

One producer decides the order of a run. What takes long before that, reading and tokenising text, depends on
its source alone, and its libraries let go of the interpreter lock: so several sources' blocks are made at
once, by a few threads, each source's one after the other.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pyarrow as pa

from tokenloom_server.packing.base import Block, Packer
from tokenloom_server.tokenizer.engine import Encoded, Engine

#: Threads that make blocks, for each run; but for one core, which the producer, streams and trainers keep busy: where
#: every core tokenises, each token costs a third more, and each engine learns the words of the text anew.
MAX_THREADS = 4
#: The same where blocks come over a network, and threads that open sources there: most of them wait.
REMOTE_THREADS = 16
OPENING_THREADS = 64


def block_threads(*, waits: bool = False) -> int:
    """How many threads make blocks of a run; ``waits``: most of them wait for what comes over a network."""
    return REMOTE_THREADS if waits else max(1, min(MAX_THREADS, (os.cpu_count() or 1) - 1))


class ReadAhead:
    """Implements ``Packer``: the blocks of another one, the next of which a pool's thread makes meanwhile."""

    def __init__(self, packer: Packer, pool: ThreadPoolExecutor) -> None:
        self._packer = packer
        self._pool = pool

    @property
    def dropped_tokens(self) -> int:
        return self._packer.dropped_tokens

    def blocks(self) -> Iterator[Block]:
        yield from _ahead(self._packer.blocks(), self._pool)


class LazyPacker:
    """Implements ``Packer``: one whose source is opened once it is asked for, or before that by a thread that has
    nothing else to do, with its first block. To open a source after a network takes round trips, and a mixture may
    have thousands: none waits for the others."""

    def __init__(self, make: Callable[[], Packer], pools: Pools | None) -> None:
        """``pools``: what opens sources, and makes the next blocks of those that are opened; None: nobody does."""
        self._make = make
        self._pools = pools
        self._packer: Packer | None = None
        # Once a pipeline is gone, nobody needs what it would have read.
        self._opened = pools.opening.submit(_open, weakref.ref(self)) if pools is not None else None

    @property
    def dropped_tokens(self) -> int:
        return self._packer.dropped_tokens if self._packer is not None else 0

    def blocks(self) -> Iterator[Block]:
        opened = None if self._opened is None or self._opened.cancel() else self._opened.result()
        first, rest = opened or self.open()
        if first is not None:
            yield first
            yield from _ahead(rest, self._pools.blocks) if self._pools is not None else rest

    def open(self) -> tuple[Block | None, Iterator[Block]]:
        """The first block, and the others."""
        self._packer = self._make()
        blocks = self._packer.blocks()
        return next(blocks, None), blocks


class Pools(NamedTuple):
    """Threads of a pipeline: those that open sources would keep those that make blocks waiting."""

    opening: ThreadPoolExecutor
    blocks: ThreadPoolExecutor


def _open(late: weakref.ref[LazyPacker]) -> tuple[Block | None, Iterator[Block]] | None:
    wanted = late()
    return wanted.open() if wanted is not None else None


def _ahead(blocks: Iterator[Block], pool: ThreadPoolExecutor) -> Iterator[Block]:
    # Never more than one call at a time into a source: the next is asked for once the last one is here.
    ahead = pool.submit(next, blocks, None)
    try:
        while (block := ahead.result()) is not None:
            ahead = pool.submit(next, blocks, None)
            yield block
    finally:
        # Nobody asks for it any more: a pool works off what waits, before a restore's first block or the exit.
        ahead.cancel()


class EnginePool:
    """Implements ``Engine`` for several threads, with as many engines as are at work at once: each serves one
    caller at a time."""

    def __init__(self, load: Callable[[], Engine], most: int) -> None:
        """Loads the first; raises ``TokenizerError`` where that fails."""
        first = load()
        self.name = first.name
        self.version = first.version
        self._load = load
        self._room = threading.Semaphore(most)
        self._idle = deque([first])

    def encode(self, texts: pa.LargeStringArray) -> Encoded:
        with self._room:
            try:
                # The one that was used last: what it knows is in the processor's cache.
                engine = self._idle.pop()
            except IndexError:
                engine = self._load()
            try:
                return engine.encode(texts)
            finally:
                self._idle.append(engine)
