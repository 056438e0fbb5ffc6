"""Wakes the streams that one loop serves: where there is news for them, and where they were silent for long."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from tokenloom_server.api.grpc.stream import HEARTBEAT_S, ClientStream

#: Bells that are answered before the loop looks what else there is: a call that comes, one of another kind.
TURNS = 4


class Bell(asyncio.Event):
    """What is set where a stream may have something to say."""

    #: Whether its turn comes anyway.
    is_rung = False


class Rings:
    """Those of one loop, on which it is made."""

    def __init__(self) -> None:
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._rung: deque[Bell] = deque()
        self._is_answered = True
        self._streams: dict[Bell, ClientStream] = {}
        self._ticking = self._loop.create_task(self._tick())

    @contextmanager
    def bell(self, stream: ClientStream) -> Iterator[Bell]:
        """A stream's, as long as that goes on."""
        bell = Bell()
        self._streams[bell] = stream
        try:
            yield bell
        finally:
            del self._streams[bell]

    def ring(self, bell: Bell) -> None:
        """Any thread may ring. However many bells ring, the loop is woken once: that costs a system call."""
        if bell.is_rung:
            return
        bell.is_rung = True
        self._rung.append(bell)
        if self._is_answered:
            self._is_answered = False
            own = threading.get_ident() == self._thread
            (self._loop.call_soon if own else self._loop.call_soon_threadsafe)(self._answer)

    def close(self) -> None:
        """Nobody rings any more."""
        self._ticking.cancel()

    def _answer(self) -> None:
        self._is_answered = True
        for _ in range(min(TURNS, len(self._rung))):
            bell = self._rung.popleft()
            bell.is_rung = False
            bell.set()
        if self._rung and self._is_answered:
            self._is_answered = False
            self._loop.call_soon(self._answer)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S / 4)
            now = time.monotonic()
            for bell, stream in self._streams.items():
                if stream.is_due(now):
                    bell.set()
