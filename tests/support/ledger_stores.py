"""Stores that a ledger can be opened on, that can crash and come back: what the contract suite runs on."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import redis
from tokenloom_server.ledger.base import Ledger
from tokenloom_server.ledger.redis import RedisLedger
from tokenloom_server.ledger.sqlite import SqliteLedger

from support.memory_ledger import MemoryLedger, Store
from support.redis_server import RedisServer


class LedgerStore(Protocol):
    """An empty store; ``open`` gives a ledger as another server process would have it."""

    def open(self) -> Ledger: ...

    def crash(self) -> None:
        """Kills the store where it is a process, and brings it back on the same data."""

    def close(self) -> None:
        """Closes every ledger that was opened."""


class SqliteStore:
    def __init__(self, folder: Path, ledger: Callable[[Path], Ledger] = SqliteLedger) -> None:
        self.path = folder / f"{uuid.uuid4().hex}.db"
        self._ledger = ledger
        self._opened: list[Ledger] = []

    def open(self) -> Ledger:
        self._opened.append(self._ledger(self.path))
        return self._opened[-1]

    def crash(self) -> None:
        """There is no process to kill: the ledgers are closed, and must be opened again."""
        self.close()

    def close(self) -> None:
        while self._opened:
            self._opened.pop().close()


class MemoryStore:
    """What simulated worlds run on; it must keep the contract for them to prove anything."""

    def __init__(self) -> None:
        self._store = Store()

    def open(self) -> Ledger:
        return MemoryLedger(self._store)

    def crash(self) -> None:
        """There is no process to kill, and the store outlives its ledgers."""

    def close(self) -> None:
        """Nothing is held."""


class RedisStore:
    """``killed=False`` spares the process, where a crash is beside the point and its time is not."""

    def __init__(
        self,
        server: RedisServer,
        ledger: Callable[[str], Ledger] = RedisLedger,
        killed: bool = True,
    ) -> None:
        self._server = server
        self._ledger = ledger
        self._killed = killed
        self._opened: list[Ledger] = []
        with redis.Redis(port=server.port) as client:
            client.flushall()

    def open(self) -> Ledger:
        self._opened.append(self._ledger(self._server.url()))
        return self._opened[-1]

    def crash(self) -> None:
        if self._killed:
            self._server.kill()
            self._server.start()

    def close(self) -> None:
        while self._opened:
            self._opened.pop().close()
