"""Looks at a run's ledger as any outsider may, and writes down what it sees."""

from __future__ import annotations

import json
import sqlite3
import time
from pathlib import Path
from typing import Any

import redis
from support.ledger_view import committed


class Observer:
    """Sees the committed state and counters of a run at one moment, and appends them to a file."""

    def __init__(self, run: str, log: Path, ledger: str) -> None:
        self._run = run
        self._log = log
        self._ledger = ledger

    def look(self) -> dict[str, Any] | None:
        """What the ledger holds now; None where it is away or has no generation yet."""
        try:
            found = committed(self._ledger, self._run)
        except (redis.RedisError, sqlite3.OperationalError):
            return None
        if found is not None:
            found["at"] = time.time()
            self._note(found)
        return found

    def note_loss(self) -> None:
        """From here on the ledger may be behind what it was: it was made to lose data."""
        self._note({"lost": True})

    def _note(self, line: dict[str, Any]) -> None:
        with self._log.open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
