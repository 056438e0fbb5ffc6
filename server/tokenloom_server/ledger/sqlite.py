"""The ledger in one SQLite file: the embedded default, beside the mixture file.

Write-ahead log with ``synchronous=FULL``: a transaction that returned is on the disk. Several server
processes may share the file; SQLite lets one write at a time, and the epochs decide who may.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any, TypeVar

from tokenloom_server.errors import LedgerUnsafe
from tokenloom_server.ledger import commands
from tokenloom_server.ledger.base import Ledger
from tokenloom_server.ledger.commands import Command
from tokenloom_server.ledger.records import (
    Commit,
    Counters,
    JournalEntry,
    Lease,
    Opening,
    StoredRevision,
    StoredRun,
    StoredSnapshot,
)
from tokenloom_server.ledger.rules import Head, Writes, decide, refuse_uid
from tokenloom_server.ledger.sqlite_file import SqliteFile

_Record = TypeVar("_Record", Lease, Opening, StoredRevision, StoredSnapshot)

_HEAD = """
SELECT runs.id, name, uid, epoch, generation, opening_mark, sample_index, digest,
       holder, acquired_at, lapses_at, lasts_s, heard_at
FROM runs LEFT JOIN committed ON committed.run = runs.id LEFT JOIN leases ON leases.run = runs.id
"""
_BY_UID = "WHERE uid = ? AND stream = ?"
_BY_FORMER_UID = "WHERE runs.id = (SELECT run FROM former_uids WHERE uid = ? AND stream = ?)"

# Only changed counters are written, so that a commit costs what it moved.
_PUT_COUNTERS = """
INSERT INTO counters (run, spec, samples, rows, tokens) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (run, spec) DO UPDATE SET samples = excluded.samples, rows = excluded.rows, tokens = excluded.tokens
WHERE samples != excluded.samples OR rows != excluded.rows OR tokens != excluded.tokens
"""

_THIN = """
DELETE FROM journal WHERE id IN (
    SELECT id FROM (
        SELECT id, ROW_NUMBER() OVER (PARTITION BY generation ORDER BY sample_index) AS place
        FROM journal WHERE run = ?)
    WHERE place % 2 = 0)
"""


class SqliteLedger(Ledger):
    """See ``Ledger``."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Raises ``ConfigError`` for a file that cannot be a ledger, and ``LedgerUnavailable``."""
        self._file = SqliteFile(path)
        self._clock = clock

    @property
    def description(self) -> str:
        return f"sqlite:///{self._file.path}"

    def check(self) -> None:
        mode, synchronous = self._file.settings()
        if mode != "wal" or synchronous < 2:
            raise LedgerUnsafe(
                f"{self.description}: found journal_mode={mode}, synchronous={synchronous}; expected wal and 2 (FULL) "
                f"or more. Put the ledger on a local disk, or use redis://."
            )
        with self._file.writing():
            pass

    def close(self) -> None:
        self._file.close()

    # Writes.

    def _execute(self, command: Command) -> int:
        with self._file.writing() as connection:
            return self._execute_in(connection, command)

    def _execute_in(self, connection: sqlite3.Connection, command: Command) -> int:
        run, head = self._head(connection, command)
        decision = decide(head, command)
        if not isinstance(decision, Writes):
            raise decision
        if decision.created is not None:
            self._create(connection, decision.created)
        elif head is not None:
            self._write(connection, run, head, command.stream, decision)
        return decision.answer

    def _head(self, connection: sqlite3.Connection, command: Command) -> tuple[int, Head | None]:
        """The run's number in this file, and its head; 0 and None where there is no such run."""
        row = None
        for which in (_BY_UID, _BY_FORMER_UID):
            row = row or connection.execute(_HEAD + which, (command.uid, command.stream)).fetchone()
        if row is None:
            return 0, None
        run, name, uid, epoch, generation, opening_mark, sample_index, digest, *lease = row
        return run, Head(
            now=self._clock(),
            name=name,
            uid=uid,
            epoch=epoch,
            lease=None if lease[0] is None else Lease(**_named(Lease, lease)),
            generation=generation,
            opening_mark=opening_mark,
            sample_index=sample_index or 0,
            digest=digest or "",
            **_items(connection, run, command),
        )

    def _create(self, connection: sqlite3.Connection, command: commands.Create) -> None:
        connection.execute(
            "INSERT INTO runs (name, stream, uid, epoch, generation, opening_mark, record) "
            "VALUES (?, ?, ?, 0, 0, '', ?)",
            (command.name, command.stream, command.uid, command.record),
        )

    def _write(self, connection: sqlite3.Connection, run: int, head: Head, stream: str, writes: Writes) -> None:
        if writes.run:
            assignments = ", ".join(f"{column} = ?" for column in writes.run)
            connection.execute(f"UPDATE runs SET {assignments} WHERE id = ?", (*writes.run.values(), run))
        if "uid" in writes.run:
            connection.execute("DELETE FROM former_uids WHERE uid = ? AND stream = ?", (writes.run["uid"], stream))
            connection.execute("INSERT INTO former_uids (uid, stream, run) VALUES (?, ?, ?)", (head.uid, stream, run))
        if writes.lease is not None:
            _put(connection, "leases", run, writes.lease)
        if writes.opening is not None:
            _put(connection, "openings", run, writes.opening)
            connection.execute("DELETE FROM slots WHERE run = ?", (run,))
        if writes.committed is not None:
            _put_committed(connection, run, writes.committed, head.now)
        if writes.journal_entry is not None:
            _put_journal(connection, run, writes.journal_entry)
        if writes.thin_journal:
            connection.execute(_THIN, (run,))
        if writes.slot is not None:
            connection.execute("INSERT OR REPLACE INTO slots (run, rank, nonce) VALUES (?, ?, ?)", (run, *writes.slot))
        if writes.revision is not None:
            _put(connection, "revisions", run, writes.revision)
        if writes.drop_revisions is not None:
            connection.execute("DELETE FROM revisions WHERE run = ? AND number >= ?", (run, writes.drop_revisions))
        if writes.snapshot is not None:
            _put(connection, "snapshots", run, writes.snapshot)

    # Runs by name.

    def create_run(self, name: str, stream: str, uid: str, record: str) -> StoredRun:
        with self._file.writing() as connection:
            stored = _stored_run(connection, name, stream)
            if stored is not None:
                return stored
            self._execute_in(connection, commands.Create(uid, stream, name, record))
            created = _stored_run(connection, name, stream)
        assert created is not None
        return created

    def read_run(self, name: str, stream: str) -> StoredRun | None:
        with self._file.reading() as connection:
            return _stored_run(connection, name, stream)

    def run_names(self) -> Sequence[tuple[str, str]]:
        with self._file.reading() as connection:
            return connection.execute("SELECT name, stream FROM runs ORDER BY 1, 2").fetchall()

    # A run's lists.

    def openings(self, uid: str, stream: str) -> Sequence[Opening]:
        with self._file.reading() as connection:
            return _all(connection, Opening, "openings", "ORDER BY generation", _run(connection, uid, stream))

    def journal(self, uid: str, stream: str, generation: int, at_most: int) -> JournalEntry | None:
        with self._file.reading() as connection:
            row = connection.execute(
                "SELECT sample_index, state FROM journal WHERE run = ? AND generation = ? AND sample_index <= ? "
                "ORDER BY sample_index DESC LIMIT 1",
                (_run(connection, uid, stream), generation, at_most),
            ).fetchone()
        return None if row is None else JournalEntry(generation=generation, sample_index=row[0], state=row[1])

    def journal_size(self, uid: str, stream: str) -> tuple[int, int]:
        with self._file.reading() as connection:
            entries, size_bytes = connection.execute(
                "SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM journal WHERE run = ?", (_run(connection, uid, stream),)
            ).fetchone()
        return entries, size_bytes

    def revisions(self, uid: str, stream: str) -> Sequence[StoredRevision]:
        with self._file.reading() as connection:
            return _all(connection, StoredRevision, "revisions", "ORDER BY number", _run(connection, uid, stream))

    def snapshots(self, uid: str, stream: str) -> Sequence[StoredSnapshot]:
        newest_first = "ORDER BY saved_at DESC, sample_index DESC, id"
        with self._file.reading() as connection:
            return _all(connection, StoredSnapshot, "snapshots", newest_first, _run(connection, uid, stream))

    def snapshot(self, uid: str, stream: str, snapshot_id: str) -> StoredSnapshot | None:
        with self._file.reading() as connection:
            run = _run(connection, uid, stream)
            return next(iter(_all(connection, StoredSnapshot, "snapshots", "AND id = ?", run, snapshot_id)), None)


def _run(connection: sqlite3.Connection, uid: str, stream: str) -> int:
    """The number of a run in this file. Raises ``NotFound``, or ``NotLeader`` where it took another uid."""
    row = None
    for which in (_BY_UID, _BY_FORMER_UID):
        row = row or connection.execute(f"SELECT id, uid FROM runs {which}", (uid, stream)).fetchone()
    run, actual_uid = row or (0, None)
    refusal = refuse_uid(uid, stream, actual_uid)
    if refusal is not None:
        raise refusal
    return int(run)


def _items(connection: sqlite3.Connection, run: int, command: Command) -> dict[str, Any]:
    """The fields of ``Head`` that say what the run's lists hold of the command's own item."""

    def one(query: str, *key: str | int) -> Any:
        row = connection.execute(query, key).fetchone()
        return None if row is None else row[0]

    match command:
        case commands.Open(opening=opening):
            query = "SELECT generation FROM openings WHERE run = ? AND attempt = ?"
            return {"attempt_generation": one(query, run, opening.attempt)}
        case commands.ClaimSlot(rank=rank):
            return {"slot_nonce": one("SELECT nonce FROM slots WHERE run = ? AND rank = ?", run, rank)}
        case commands.SaveSnapshot(snapshot=snapshot):
            return {"snapshot_text": one("SELECT text FROM snapshots WHERE run = ? AND id = ?", run, snapshot.id)}
        case commands.Adopt(new_uid=new_uid, stream=stream):
            return {"uid_holder": one("SELECT name FROM runs WHERE uid = ? AND stream = ?", new_uid, stream)}
        case commands.Revise(revision=revision):
            newest = _all(connection, StoredRevision, "revisions", "ORDER BY number DESC LIMIT 1", run)
            same = _all(connection, StoredRevision, "revisions", "AND number = ?", run, revision.number)
            return {"newest_revision": next(iter(newest), None), "same_number": next(iter(same), None)}
    return {}


def _put_committed(connection: sqlite3.Connection, run: int, commit: Commit, committed_at: float) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO committed (run, sample_index, total_tokens, digest, committed_at, state) "
        "VALUES (?, ?, ?, ?, ?, ?)",
        (run, commit.sample_index, commit.total_tokens, commit.digest, committed_at, commit.state),
    )
    rows = [(run, spec, each.samples, each.rows, each.tokens) for spec, each in commit.counters.items()]
    connection.executemany(_PUT_COUNTERS, rows)
    (count,) = connection.execute("SELECT COUNT(*) FROM counters WHERE run = ?", (run,)).fetchone()
    if count != len(rows):  # specs that are no longer counted
        connection.execute("DELETE FROM counters WHERE run = ?", (run,))
        connection.executemany(_PUT_COUNTERS, rows)


def _put_journal(connection: sqlite3.Connection, run: int, entry: JournalEntry) -> None:
    connection.execute(
        "INSERT INTO journal (run, generation, sample_index, bytes, state) VALUES (?, ?, ?, ?, ?)",
        (run, entry.generation, entry.sample_index, len(entry.state.encode()), entry.state),
    )


def _stored_run(connection: sqlite3.Connection, name: str, stream: str) -> StoredRun | None:
    row = connection.execute(
        "SELECT id, uid, epoch, generation, pin, record FROM runs WHERE name = ? AND stream = ?", (name, stream)
    ).fetchone()
    if row is None:
        return None
    run, uid, epoch, generation, pin, record = row
    committed = connection.execute(
        "SELECT sample_index, total_tokens, digest, state, committed_at FROM committed WHERE run = ?", (run,)
    ).fetchone()
    counters = connection.execute(
        "SELECT spec, samples, rows, tokens FROM counters WHERE run = ? ORDER BY spec", (run,)
    ).fetchall()
    return StoredRun(
        name=name,
        stream=stream,
        uid=uid,
        record=record,
        epoch=epoch,
        opening=next(iter(_all(connection, Opening, "openings", "AND generation = ?", run, generation)), None),
        committed=None
        if committed is None
        else Commit(
            sample_index=committed[0],
            total_tokens=committed[1],
            digest=committed[2],
            state=committed[3],
            counters={
                spec: Counters(samples=samples, rows=rows, tokens=tokens) for spec, samples, rows, tokens in counters
            },
        ),
        committed_at=None if committed is None else committed[4],
        pin=pin,
        lease=next(iter(_all(connection, Lease, "leases", "", run)), None),
    )


# Records whose fields are the columns of a table, beside the run.


def _columns(record: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(record))


def _named(record: type[Any], row: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(_columns(record), row, strict=True))


def _put(
    connection: sqlite3.Connection, table: str, run: int, record: Lease | Opening | StoredRevision | StoredSnapshot
) -> None:
    """Appends a record; a run has one lease, which is replaced."""
    columns, verb = _columns(type(record)), "REPLACE" if isinstance(record, Lease) else "INSERT"
    connection.execute(
        f"{verb} INTO {table} (run, {', '.join(columns)}) VALUES (?{', ?' * len(columns)})",
        (run, *astuple(record)),
    )


def _all(
    connection: sqlite3.Connection, record: type[_Record], table: str, which: str, run: int, *key: str | int
) -> list[_Record]:
    """A run's records. ``which`` narrows or orders them, by ``key``."""
    query = f"SELECT {', '.join(_columns(record))} FROM {table} WHERE run = ? {which}"
    return [record(**_named(record, row)) for row in connection.execute(query, (run, *key))]
