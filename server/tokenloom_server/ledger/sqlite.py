"""The ledger in one SQLite file: the embedded default, beside the mixture file.

Write-ahead log with ``synchronous=FULL``: a transaction that returned is on the disk. Several server
processes may share the file; SQLite lets one write at a time, and the epochs decide who may.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from tokenloom_server.errors import LedgerUnsafe, TokenloomError
from tokenloom_server.ledger import commands
from tokenloom_server.ledger.base import Ledger
from tokenloom_server.ledger.commands import Command
from tokenloom_server.ledger.records import (
    CommittedState,
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
#: Tables whose columns are the fields of a record, beside the run.
_TABLES: dict[type[Any], str] = {
    Lease: "leases",
    Opening: "openings",
    StoredRevision: "revisions",
    StoredSnapshot: "snapshots",
}

_HEAD = """
SELECT runs.id, name, uid, epoch, generation, opening_mark, revision_changes,
       closed_generation,
       COALESCE(sample_index, 0) AS sample_index, COALESCE(digest, '') AS digest
FROM runs LEFT JOIN committed ON committed.run = runs.id
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

    def __init__(self, path: Path, clock: Callable[[], float] | None = None) -> None:
        """``clock``: see ``SqliteFile``. Raises ``ConfigError`` for a file that cannot be a ledger, and
        ``LedgerUnavailable``."""
        self._file = SqliteFile(path, clock)

    @property
    def description(self) -> str:
        return f"sqlite:///{self._file.path}"

    def forget_path(self) -> None:
        """See ``SqliteFile``."""
        self._file.forget_path()

    def identity(self) -> object:
        return self._file.identity()

    def clock(self) -> float:
        return self._file.clock()

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

    def execute(self, command: Command) -> int:
        with self._file.writing() as connection:
            return self._execute_in(connection, command)

    def execute_all(self, some: Sequence[Command]) -> list[int | TokenloomError]:
        answers: list[int | TokenloomError] = []
        with self._file.writing() as connection:
            for command in some:
                try:
                    answers.append(self._execute_in(connection, command))
                except TokenloomError as refusal:  # which has written nothing
                    answers.append(refusal)
        return answers

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
        row = _row_of(connection, _HEAD, command.uid, command.stream)
        if row is None:
            return 0, None
        fields = dict(row)
        run = fields.pop("id")
        return run, Head(now=self.clock(), **fields, **_items(connection, run, command))

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
        for record in (writes.lease, writes.opening, writes.revision, writes.snapshot):
            if record is not None:
                _put(connection, run, record)
        if writes.opening is not None:
            connection.execute("DELETE FROM slots WHERE run = ?", (run,))
        if writes.committed is not None:
            _put_committed(connection, run, writes.committed, head.now)
        if writes.journal_entry is not None:
            _put_journal(connection, run, writes.journal_entry)
        if writes.thin_journal:
            connection.execute(_THIN, (run,))
        if writes.slot is not None:
            connection.execute("INSERT OR REPLACE INTO slots (run, rank, nonce) VALUES (?, ?, ?)", (run, *writes.slot))
        if writes.drop_revisions is not None:
            connection.execute("DELETE FROM revisions WHERE run = ? AND number >= ?", (run, writes.drop_revisions))

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
            rows = connection.execute("SELECT name, stream FROM runs ORDER BY 1, 2")
            return [(name, stream) for name, stream in rows]

    # A run's lists.

    def openings(self, uid: str, stream: str) -> Sequence[Opening]:
        with self._file.reading() as connection:
            return _all(connection, Opening, _run(connection, uid, stream), "ORDER BY generation")

    def journal(self, uid: str, stream: str, generation: int, at_most: int) -> JournalEntry | None:
        with self._file.reading() as connection:
            row = connection.execute(
                "SELECT generation, sample_index, state FROM journal "
                "WHERE run = ? AND generation = ? AND sample_index <= ? ORDER BY sample_index DESC LIMIT 1",
                (_run(connection, uid, stream), generation, at_most),
            ).fetchone()
        return None if row is None else JournalEntry(**row)

    def journal_size(self, uid: str, stream: str) -> tuple[int, int]:
        with self._file.reading() as connection:
            entries, size_bytes = connection.execute(
                "SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM journal WHERE run = ?", (_run(connection, uid, stream),)
            ).fetchone()
        return entries, size_bytes

    def revisions(self, uid: str, stream: str) -> Sequence[StoredRevision]:
        with self._file.reading() as connection:
            return _all(connection, StoredRevision, _run(connection, uid, stream), "ORDER BY number")

    def snapshots(self, uid: str, stream: str) -> Sequence[StoredSnapshot]:
        newest_first = "ORDER BY saved_at DESC, sample_index DESC, id"
        with self._file.reading() as connection:
            return _all(connection, StoredSnapshot, _run(connection, uid, stream), newest_first)

    def snapshot_count(self, uid: str, stream: str) -> int:
        with self._file.reading() as connection:
            counted = "SELECT COUNT(*) FROM snapshots WHERE run = ?"
            return int(connection.execute(counted, (_run(connection, uid, stream),)).fetchone()[0])

    def snapshot(self, uid: str, stream: str, snapshot_id: str) -> StoredSnapshot | None:
        with self._file.reading() as connection:
            return _first(connection, StoredSnapshot, _run(connection, uid, stream), "AND id = ?", snapshot_id)


def _run(connection: sqlite3.Connection, uid: str, stream: str) -> int:
    """The number of a run in this file. Raises ``NotFound``, or ``NotLeader`` where it took another uid."""
    run, actual_uid = _row_of(connection, "SELECT id, uid FROM runs", uid, stream) or (0, None)
    refusal = refuse_uid(uid, stream, actual_uid)
    if refusal is not None:
        raise refusal
    return int(run)


def _row_of(connection: sqlite3.Connection, select: str, uid: str, stream: str) -> Any:
    """What is selected of the run that has the uid, or had it; None where there is none."""
    for which in (_BY_UID, _BY_FORMER_UID):
        row = connection.execute(f"{select} {which}", (uid, stream)).fetchone()
        if row is not None:
            return row
    return None


def _items(connection: sqlite3.Connection, run: int, command: Command) -> dict[str, Any]:
    """The fields of ``Head`` that are there for the command alone: the lease, or its own item of the run's lists."""

    def one(query: str, *key: str | int) -> Any:
        row = connection.execute(query, key).fetchone()
        return None if row is None else row[0]

    match command:
        case commands.Acquire() | commands.Renew() | commands.Release():
            return {"lease": _first(connection, Lease, run)}
        case commands.Open(opening=opening):
            query = "SELECT generation FROM openings WHERE run = ? AND attempt = ?"
            lease = _first(connection, Lease, run)
            return {"lease": lease, "attempt_generation": one(query, run, opening.attempt)}
        case commands.ClaimSlot(rank=rank):
            return {"slot_nonce": one("SELECT nonce FROM slots WHERE run = ? AND rank = ?", run, rank)}
        case commands.SaveSnapshot(snapshot=snapshot):
            return {"snapshot_text": one("SELECT text FROM snapshots WHERE run = ? AND id = ?", run, snapshot.id)}
        case commands.Adopt(new_uid=new_uid, stream=stream):
            return {"uid_holder": one("SELECT name FROM runs WHERE uid = ? AND stream = ?", new_uid, stream)}
        case commands.Revise(revision=revision):
            return {
                "newest_revision": _first(connection, StoredRevision, run, "ORDER BY number DESC LIMIT 1"),
                "same_number": _first(connection, StoredRevision, run, "AND number = ?", revision.number),
            }
    return {}


def _put_committed(connection: sqlite3.Connection, run: int, commit: CommittedState, committed_at: float) -> None:
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
        "SELECT id, generation, name, stream, uid, record, epoch, pin, revision_changes, closed_generation FROM runs "
        "WHERE name = ? AND stream = ?",
        (name, stream),
    ).fetchone()
    if row is None:
        return None
    run, generation, *_ = row
    fields = dict(row)
    del fields["id"], fields["generation"]
    committed, committed_at = _committed(connection, run)
    return StoredRun(
        **fields,
        opening=_first(connection, Opening, run, "AND generation = ?", generation),
        committed=committed,
        committed_at=committed_at,
        lease=_first(connection, Lease, run),
    )


def _committed(connection: sqlite3.Connection, run: int) -> tuple[CommittedState | None, float | None]:
    """The committed state and its time; None before the first generation."""
    row = connection.execute(
        "SELECT sample_index, total_tokens, digest, state, committed_at FROM committed WHERE run = ?", (run,)
    ).fetchone()
    if row is None:
        return None, None
    fields = dict(row)
    committed_at = fields.pop("committed_at")
    counters = {
        spec: Counters(samples=samples, rows=rows, tokens=tokens)
        for spec, samples, rows, tokens in connection.execute(
            "SELECT spec, samples, rows, tokens FROM counters WHERE run = ? ORDER BY spec", (run,)
        )
    }
    return CommittedState(**fields, counters=counters), committed_at


# Records that are rows of a table.


def _put(connection: sqlite3.Connection, run: int, record: Lease | Opening | StoredRevision | StoredSnapshot) -> None:
    """Appends a record; a run has one lease, which is replaced."""
    columns = asdict(record)
    verb = "REPLACE" if isinstance(record, Lease) else "INSERT"
    connection.execute(
        f"{verb} INTO {_TABLES[type(record)]} (run, {', '.join(columns)}) VALUES (?{', ?' * len(columns)})",
        (run, *columns.values()),
    )


def _all(
    connection: sqlite3.Connection, record: type[_Record], run: int, which: str = "", *key: str | int
) -> list[_Record]:
    """A run's records. ``which`` narrows or orders them, by ``key``."""
    columns = ", ".join(field.name for field in fields(record))
    rows = connection.execute(f"SELECT {columns} FROM {_TABLES[record]} WHERE run = ? {which}", (run, *key))
    return [record(**row) for row in rows]


def _first(
    connection: sqlite3.Connection, record: type[_Record], run: int, which: str = "", *key: str | int
) -> _Record | None:
    return next(iter(_all(connection, record, run, which, *key)), None)
