"""Copies of one engine for several threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import pyarrow as pa

from tokenloom_server.tokenizer.engine import Encoded, Engine


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
