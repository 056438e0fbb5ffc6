"""The next block of a source, made while the one before is mixed and sent.

One producer decides the order of a run. What takes long before that, reading and tokenising text, depends on
its source alone, and its libraries let go of the interpreter lock: so several sources' blocks are made at
once, by a few threads, each source's one after the other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from tokenloom_server.packing.base import Block, Packer
from tokenloom_server.packing.origins import Part

#: Threads that make blocks, for each run; never more than the machine has cores.
MAX_THREADS = 4


def threads() -> int:
    """How many threads make blocks of a run."""
    return min(MAX_THREADS, os.cpu_count() or 1)


class ReadAhead:
    """Implements ``Packer``: the blocks of another one, the next of which a pool's thread makes meanwhile."""

    def __init__(self, packer: Packer, pool: ThreadPoolExecutor) -> None:
        self._packer = packer
        self._pool = pool

    @property
    def dropped_tokens(self) -> int:
        return self._packer.dropped_tokens

    def parts(self, count: int) -> Iterator[list[Part]]:
        return self._packer.parts(count)

    def blocks(self) -> Iterator[Block]:
        blocks = self._packer.blocks()
        # Never more than one call at a time into a source: the next is asked for once the last one is here.
        ahead = self._pool.submit(next, blocks, None)
        try:
            while (block := ahead.result()) is not None:
                ahead = self._pool.submit(next, blocks, None)
                yield block
        finally:
            # Nobody asks for it any more: a pool works off what waits, before a restore's first block or the exit.
            ahead.cancel()
