"""A run's ledger as any outsider may read it, with a plain Redis or SQLite client."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import redis

#: The stores answer in milliseconds unless they are being killed, and then there is nothing to see.
_TIMEOUT_S = 1.0
_COMMITTED = """
SELECT runs.id, runs.generation, runs.epoch, committed.sample_index, committed.total_tokens, openings.attempt,
  committed.digest
FROM runs JOIN committed ON committed.run = runs.id
  JOIN openings ON openings.run = runs.id AND openings.generation = runs.generation
WHERE runs.name = ? AND runs.stream = 'train'
"""


def committed(ledger: str, run: str) -> dict[str, Any] | None:
    """What the ledger at a URL holds of a run at one moment: generation, epoch, the committed state, and
    ``counters`` of each spec; None where it has no generation yet. Raises what the client does."""
    if ledger.startswith("redis:"):
        return _in_redis(urlsplit(ledger).port or 0, run)
    file = Path(ledger.removeprefix("sqlite:///"))
    return _in_file(file, run) if file.exists() else None


def _in_redis(port: int, run: str) -> dict[str, Any] | None:
    options: dict[str, Any] = {
        "socket_timeout": _TIMEOUT_S,
        "socket_connect_timeout": _TIMEOUT_S,
        "retry": None,
    }
    with redis.Redis(port=port, decode_responses=True, **options) as client:
        uid = client.hget("tokenloom:runs", f"{run}/train")
        if uid is None:
            return None
        key = f"tokenloom:{{{uid}}}:train"
        with client.pipeline(transaction=True) as pipeline:
            for name in ("", ":samples", ":rows", ":tokens"):
                pipeline.hgetall(key + name)
            pipeline.hgetall(key + ":openings")
            fields, samples, rows, tokens, openings = pipeline.execute()
    if "sample_index" not in fields:
        return None
    counters = {
        spec: {"samples": int(samples[spec]), "rows": int(rows[spec]), "tokens": int(tokens[spec])}
        for spec in samples
    }
    numbers = {
        name: int(fields[name]) for name in ("generation", "epoch", "sample_index", "total_tokens")
    }
    attempt = json.loads(openings[fields["generation"]])["attempt"]
    return numbers | {"attempt": attempt, "digest": fields["digest"], "counters": counters}


def _in_file(file: Path, run: str) -> dict[str, Any] | None:
    with closing(
        sqlite3.connect(f"file:{file}?mode=ro", uri=True, timeout=_TIMEOUT_S)
    ) as connection:
        connection.execute("BEGIN")
        found = connection.execute(_COMMITTED, (run,)).fetchone()
        if found is None:
            return None
        query = "SELECT spec, samples, rows, tokens FROM counters WHERE run = ?"
        rows = connection.execute(query, (found[0],)).fetchall()
    names = ("generation", "epoch", "sample_index", "total_tokens", "attempt", "digest")
    state: dict[str, Any] = dict(zip(names, found[1:], strict=True))
    counters = {
        spec: {"samples": samples, "rows": taken, "tokens": tokens}
        for spec, samples, taken, tokens in rows
    }
    return state | {"counters": counters}
