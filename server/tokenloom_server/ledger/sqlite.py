"""The ledger in one SQLite file: the embedded default, beside the mixture file.

Write-ahead log with ``synchronous=FULL``: a transaction that returned is on the disk. Several server
processes may share the file; SQLite lets one write at a time, and the epochs decide who may.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tokenloom_server.errors import LedgerUnsafe, TokenloomError
from tokenloom_server.ledger import commands, records, sqlite_rows
from tokenloom_server.ledger.base import HistoryStore, Ledger, outcomes
from tokenloom_server.ledger.commands import Command
from tokenloom_server.ledger.rules import Head, Writes, decide, refuse_elsewhere, refuse_uid
from tokenloom_server.ledger.sqlite_file import LEDGER, SqliteFile
from tokenloom_server.ledger.sqlite_rows import (
    Record,
    SqliteHistory,
    all_of,
    first_of,
    put,
    stored_run,
)

_HEAD = """
SELECT runs.id, name, uid, epoch, generation, opening_mark, revision_changes,
       closed_generation, elsewhere, pin_number,
       COALESCE(sample_index, 0) AS sample_index, COALESCE(digest, '') AS digest
FROM runs LEFT JOIN committed ON committed.run = runs.id
"""
_BY_UID = "WHERE uid = ? AND stream = ?"
_BY_FORMER_UID = "WHERE runs.id = (SELECT run FROM former_uids WHERE uid = ? AND stream = ?)"

_HOLDER = "SELECT name FROM runs WHERE uid = ? AND stream = ?"

_THIN = """
DELETE FROM journal WHERE id IN (
    SELECT id FROM (
        SELECT id, ROW_NUMBER() OVER (PARTITION BY generation ORDER BY sample_index) AS place
        FROM journal WHERE run = ?)
    WHERE place % 2 = 0)
"""


class SqliteLedger(Ledger):
    """See ``Ledger``."""

    def __init__(
        self, path: Path, clock: Callable[[], float] | None = None, reads_only: bool = False
    ) -> None:
        """``clock``, ``reads_only``: see ``SqliteFile``. Raises ``ConfigError`` for a file that cannot be a ledger, and
        ``LedgerUnavailable``."""
        self._file = SqliteFile(path, clock, LEDGER, reads_only)
        self._history: SqliteHistory | None = SqliteHistory(self._file)

    @property
    def description(self) -> str:
        return f"sqlite:///{self._file.path}"

    def forget_path(self) -> None:
        """See ``SqliteFile``. Nothing is kept beside it, so it has no history."""
        self._file.forget_path()
        self._history = None

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
        if self._history is not None:
            self._history.close()
        self._file.close()

    def abandon(self) -> None:
        if not self.run_names():
            self._file.abandon()

    def history(self) -> HistoryStore | None:
        return self._history

    # Writes.

    def execute(self, command: Command) -> int:
        with self._file.writing() as connection:
            return self._execute_in(connection, command)

    def execute_all(self, some: Sequence[Command]) -> list[int | TokenloomError]:
        with self._file.writing() as connection:
            return outcomes(partial(self._execute_in, connection), some)

    def _execute_in(self, connection: sqlite3.Connection, command: Command) -> int:
        run, head = self._head(connection, command)
        decision = decide(head, command)
        if not isinstance(decision, Writes):
            raise decision
        if decision.created is not None:
            run = self._create(connection, decision.created)
        elif head is not None:
            self._write(connection, run, head, command.stream, decision)
        if decision.contents is not None:
            sqlite_rows.put_contents(connection, run, decision.contents)
        return decision.answer

    def _head(self, connection: sqlite3.Connection, command: Command) -> tuple[int, Head | None]:
        """The run's number in this file, and its head; 0 and None where there is no such run."""
        row = None
        if isinstance(command, commands.Import):
            named = (command.contents.run.name, command.stream)
            row = connection.execute(f"{_HEAD} {sqlite_rows.BY_NAME}", named).fetchone()
        row = row or _row_of(connection, _HEAD, command.uid, command.stream)
        if row is None:
            return 0, None
        fields = dict(row)
        run = fields.pop("id")
        return run, Head(now=self.clock(), **fields, **_items(connection, run, command))

    def _create(self, connection: sqlite3.Connection, command: commands.Create) -> int:
        """The run's number in this file."""
        created = connection.execute(
            "INSERT INTO runs (name, stream, uid, epoch, generation, opening_mark, record) "
            "VALUES (?, ?, ?, 0, 0, '', ?)",
            (command.name, command.stream, command.uid, command.record),
        )
        return created.lastrowid or 0

    def _write(
        self, connection: sqlite3.Connection, run: int, head: Head, stream: str, writes: Writes
    ) -> None:
        if writes.run:
            sqlite_rows.put_fields(connection, run, writes.run)
        if "uid" in writes.run:
            connection.execute(
                "DELETE FROM former_uids WHERE uid = ? AND stream = ?", (writes.run["uid"], stream)
            )
            connection.execute(
                "INSERT INTO former_uids (uid, stream, run) VALUES (?, ?, ?)",
                (head.uid, stream, run),
            )
        for record in (
            writes.lease,
            writes.opening,
            writes.revision,
            writes.snapshot,
            writes.journal_entry,
        ):
            if record is not None:
                put(connection, run, record)
        if writes.opening is not None:
            connection.execute("DELETE FROM slots WHERE run = ?", (run,))
        if writes.committed is not None:
            sqlite_rows.put_committed(connection, run, writes.committed, head.now)
        if writes.thin_journal:
            connection.execute(_THIN, (run,))
        if writes.slot is not None:
            connection.execute(
                "INSERT OR REPLACE INTO slots (run, rank, nonce) VALUES (?, ?, ?)",
                (run, *writes.slot),
            )
        if writes.drop_revisions is not None:
            connection.execute(
                "DELETE FROM revisions WHERE run = ? AND number >= ?", (run, writes.drop_revisions)
            )

    # Runs by name.

    def create_run(self, name: str, stream: str, uid: str, record: str) -> records.StoredRun:
        with self._file.writing() as connection:
            stored = stored_run(connection, name, stream)
            if stored is not None:
                if (refusal := refuse_elsewhere(name, stored.elsewhere)) is not None:
                    raise refusal
                return stored
            self._execute_in(connection, commands.Create(uid, stream, name, record))
            created = stored_run(connection, name, stream)
        assert created is not None
        return created

    def read_run(self, name: str, stream: str) -> records.StoredRun | None:
        with self._file.reading() as connection:
            return stored_run(connection, name, stream)

    def read_all(self, name: str, stream: str) -> records.RunContents | None:
        with self._file.reading() as connection:
            return sqlite_rows.run_contents(connection, name, stream)

    def store_faults(self) -> Sequence[str]:
        with self._file.reading() as connection:
            faults = [
                line for (line,) in connection.execute("PRAGMA integrity_check") if line != "ok"
            ]
            for table in (*sqlite_rows.OF_A_RUN, "former_uids"):
                query = f"SELECT COUNT(*) FROM {table} WHERE run NOT IN (SELECT id FROM runs)"
                if count := connection.execute(query).fetchone()[0]:
                    faults.append(f"table {table} has {count} rows of no run")
        return [
            f"{fault}. Restore a backup to another file (tokenloom ledger restore)"
            for fault in faults
        ]

    def run_names(self) -> Sequence[tuple[str, str]]:
        with self._file.reading() as connection:
            rows = connection.execute("SELECT name, stream FROM runs ORDER BY 1, 2")
            return [(name, stream) for name, stream in rows]

    # A run's lists.

    def openings(self, uid: str, stream: str) -> Sequence[records.Opening]:
        return self._all(records.Opening, uid, stream, "ORDER BY generation")

    def journal(
        self, uid: str, stream: str, generation: int, at_most: int
    ) -> records.JournalEntry | None:
        newest = "AND generation = ? AND sample_index <= ? ORDER BY sample_index DESC LIMIT 1"
        return next(
            iter(self._all(records.JournalEntry, uid, stream, newest, generation, at_most)), None
        )

    def journal_size(self, uid: str, stream: str) -> tuple[int, int]:
        with self._file.reading() as connection:
            entries, size_bytes = connection.execute(
                "SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM journal WHERE run = ?",
                (_run(connection, uid, stream),),
            ).fetchone()
        return entries, size_bytes

    def revisions(self, uid: str, stream: str) -> Sequence[records.StoredRevision]:
        return self._all(records.StoredRevision, uid, stream, "ORDER BY number")

    def snapshots(self, uid: str, stream: str) -> Sequence[records.StoredSnapshot]:
        return self._all(
            records.StoredSnapshot, uid, stream, "ORDER BY saved_at DESC, sample_index DESC, id"
        )

    def snapshot_count(self, uid: str, stream: str) -> int:
        with self._file.reading() as connection:
            counted = "SELECT COUNT(*) FROM snapshots WHERE run = ?"
            return int(connection.execute(counted, (_run(connection, uid, stream),)).fetchone()[0])

    def snapshot(self, uid: str, stream: str, snapshot_id: str) -> records.StoredSnapshot | None:
        return next(
            iter(self._all(records.StoredSnapshot, uid, stream, "AND id = ?", snapshot_id)), None
        )

    def _all(
        self, record: type[Record], uid: str, stream: str, which: str, *key: str | int
    ) -> list[Record]:
        with self._file.reading() as connection:
            return all_of(connection, record, _run(connection, uid, stream), which, *key)


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
        case commands.Acquire() | commands.Renew() | commands.Release() | commands.Move():
            return {"lease": first_of(connection, records.Lease, run)}
        case commands.Open(opening=opening):
            query = "SELECT generation FROM openings WHERE run = ? AND attempt = ?"
            lease = first_of(connection, records.Lease, run)
            return {"lease": lease, "attempt_generation": one(query, run, opening.attempt)}
        case commands.ClaimSlot(rank=rank):
            return {
                "slot_nonce": one("SELECT nonce FROM slots WHERE run = ? AND rank = ?", run, rank)
            }
        case commands.SaveSnapshot(snapshot=snapshot):
            return {
                "snapshot_text": one(
                    "SELECT text FROM snapshots WHERE run = ? AND id = ?", run, snapshot.id
                )
            }
        case commands.Adopt(new_uid=new_uid, stream=stream):
            return {"uid_holder": one(_HOLDER, new_uid, stream)}
        case commands.Import(uid=uid, stream=stream):
            return {
                "lease": first_of(connection, records.Lease, run),
                "uid_holder": one(_HOLDER, uid, stream),
            }
        case commands.Revise(revision=revision):
            return {
                "newest_revision": first_of(
                    connection, records.StoredRevision, run, "ORDER BY number DESC LIMIT 1"
                ),
                "same_number": first_of(
                    connection, records.StoredRevision, run, "AND number = ?", revision.number
                ),
            }
    return {}
