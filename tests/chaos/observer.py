"""Looks at a run's ledger as any outsider may, with a plain Redis or SQLite client, and writes down what it sees."""

from __future__ import annotations

import json
import sqlite3
import time
from pathlib import Path
from typing import Any

import redis

#: The stores answer in milliseconds unless they are being killed, and then there is nothing to see.
_TIMEOUT_S = 1.0


class Observer:
    """Sees the committed state and counters of a run at one moment, and appends them to a file."""

    def __init__(self, run: str, log: Path, *, redis_port: int | None = None, file: Path | None = None) -> None:
        self._run = run
        self._log = log
        self._redis_port = redis_port
        self._file = file

    def look(self) -> dict[str, Any] | None:
        """What the ledger holds now; None where it is away or has no generation yet."""
        try:
            found = self._look_at_redis() if self._redis_port is not None else self._look_at_file()
        except (redis.RedisError, sqlite3.OperationalError):
            return None
        if found is not None:
            found["at"] = time.time()
            with self._log.open("a", encoding="utf-8") as log:
                log.write(json.dumps(found) + "\n")
        return found

    def note_loss(self) -> None:
        """From here on the ledger may be behind what it was: it was made to lose data."""
        with self._log.open("a", encoding="utf-8") as log:
            log.write(json.dumps({"lost": True}) + "\n")

    def _look_at_redis(self) -> dict[str, Any] | None:
        assert self._redis_port is not None
        options: dict[str, Any] = {"socket_timeout": _TIMEOUT_S, "socket_connect_timeout": _TIMEOUT_S, "retry": None}
        with redis.Redis(port=self._redis_port, decode_responses=True, **options) as client:
            home = client.hget("tokenloom:runs", f"{self._run}/train")
            if home is None:
                return None
            key = f"tokenloom:{{{home}}}:train"
            with client.pipeline(transaction=True) as pipeline:
                for name in ("", ":samples", ":rows", ":tokens"):
                    pipeline.hgetall(key + name)
                fields, samples, rows, tokens = pipeline.execute()
        if "sample_index" not in fields:
            return None
        counters = {
            spec: {"samples": int(samples[spec]), "rows": int(rows[spec]), "tokens": int(tokens[spec])}
            for spec in samples
        }
        numbers = {name: int(fields[name]) for name in ("generation", "epoch", "sample_index", "total_tokens")}
        return numbers | {"attempt": fields["attempt"], "digest": fields["digest"], "counters": counters}

    def _look_at_file(self) -> dict[str, Any] | None:
        assert self._file is not None
        if not self._file.exists():
            return None
        connection = sqlite3.connect(f"file:{self._file}?mode=ro", uri=True, timeout=_TIMEOUT_S)
        try:
            connection.execute("BEGIN")
            run = connection.execute(
                "SELECT runs.id, runs.generation, runs.epoch, committed.sample_index, committed.total_tokens, "
                "openings.attempt, committed.digest FROM runs JOIN committed ON committed.run = runs.id "
                "JOIN openings ON openings.run = runs.id AND openings.generation = runs.generation "
                "WHERE runs.name = ? AND runs.stream = 'train'",
                (self._run,),
            ).fetchone()
            if run is None:
                return None
            rows = connection.execute(
                "SELECT spec, samples, rows, tokens FROM counters WHERE run = ?", (run[0],)
            ).fetchall()
        finally:
            connection.close()
        names = ("generation", "epoch", "sample_index", "total_tokens", "attempt", "digest")
        found: dict[str, Any] = dict(zip(names, run[1:], strict=True))
        found["counters"] = {row[0]: {"samples": row[1], "rows": row[2], "tokens": row[3]} for row in rows}
        return found
