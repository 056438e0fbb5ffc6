"""A run in a SQLite ledger: from the rows of its tables to records, and back."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from itertools import chain
from typing import Any, TypeVar

from tokenloom_server.ledger import records
from tokenloom_server.ledger.base import HistoryEntry, HistoryStore, Kind
from tokenloom_server.ledger.records import CommittedState, Counters, JournalEntry, Lease, Opening
from tokenloom_server.ledger.sqlite_file import Layout, SqliteFile

Record = TypeVar(
    "Record", Lease, Opening, records.StoredRevision, records.StoredSnapshot, JournalEntry
)
#: Tables whose columns are the fields of a record, beside the run.
_TABLES: dict[type[Any], str] = {
    Lease: "leases",
    Opening: "openings",
    records.StoredRevision: "revisions",
    records.StoredSnapshot: "snapshots",
    JournalEntry: "journal",
}

#: All tables of what a run has.
OF_A_RUN = (
    "leases",
    "openings",
    "revisions",
    "snapshots",
    "committed",
    "counters",
    "slots",
    "journal",
)

BY_NAME = "WHERE name = ? AND stream = ?"

# Only changed counters are written, so that a commit costs what it moved.
_PUT_COUNTERS = """
INSERT INTO counters (run, spec, samples, rows, tokens) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (run, spec) DO UPDATE SET samples = excluded.samples, rows = excluded.rows, tokens = excluded.tokens
WHERE samples != excluded.samples OR rows != excluded.rows OR tokens != excluded.tokens
"""


def stored_run(connection: sqlite3.Connection, name: str, stream: str) -> records.StoredRun | None:
    row = connection.execute(f"SELECT * FROM runs {BY_NAME}", (name, stream)).fetchone()
    if row is None:
        return None
    of_run = dict(row)
    run, generation, *_ = map(of_run.pop, ("id", "generation", "opening_mark", "pin_number"))
    opening = first_of(connection, Opening, run, "AND generation = ?", generation)
    lease = first_of(connection, Lease, run)
    return records.StoredRun(**of_run, opening=opening, lease=lease, **_committed(connection, run))


def run_contents(
    connection: sqlite3.Connection, name: str, stream: str
) -> records.RunContents | None:
    """All of a run; None where there is none of this name."""
    stored = stored_run(connection, name, stream)
    if stored is None:
        return None
    (run,) = connection.execute(f"SELECT id FROM runs {BY_NAME}", (name, stream)).fetchone()
    return records.RunContents(
        run=stored,
        openings=all_of(connection, Opening, run, "ORDER BY generation"),
        slots=dict(
            connection.execute(
                "SELECT rank, nonce FROM slots WHERE run = ? ORDER BY 1", (run,)
            ).fetchall()
        ),
        journal=all_of(connection, JournalEntry, run, "ORDER BY generation, sample_index"),
        revisions=all_of(connection, records.StoredRevision, run, "ORDER BY number"),
        snapshots=all_of(
            connection, records.StoredSnapshot, run, "ORDER BY saved_at, sample_index, id"
        ),
    )


def put_contents(connection: sqlite3.Connection, run: int, contents: records.RunContents) -> None:
    """Writes a run, whose number is there, in place of all that is there of it."""
    stored = contents.run
    for table in OF_A_RUN:
        connection.execute(f"DELETE FROM {table} WHERE run = ?", (run,))
    generation = stored.opening.generation if stored.opening is not None else 0
    same = ("record", "epoch", "pin", "revision_changes", "closed_generation", "elsewhere")
    fields = {name: getattr(stored, name) for name in same}
    put_fields(connection, run, fields | {"opening_mark": "", "generation": generation})
    if stored.committed is not None:
        put_committed(connection, run, stored.committed, stored.committed_at or 0.0)
    for record in chain[Any](
        contents.openings, contents.revisions, contents.snapshots, contents.journal
    ):
        put(connection, run, record)
    slots = [(run, rank, nonce) for rank, nonce in contents.slots.items()]
    connection.executemany("INSERT INTO slots (run, rank, nonce) VALUES (?, ?, ?)", slots)


def put_fields(connection: sqlite3.Connection, run: int, fields: Mapping[str, Any]) -> None:
    """Sets columns of a run's own row."""
    assignments = ", ".join(f"{column} = ?" for column in fields)
    connection.execute(f"UPDATE runs SET {assignments} WHERE id = ?", (*fields.values(), run))


def put_committed(
    connection: sqlite3.Connection, run: int, commit: CommittedState, committed_at: float
) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO committed (run, sample_index, total_tokens, digest, committed_at, state) "
        "VALUES (?, ?, ?, ?, ?, ?)",
        (run, commit.sample_index, commit.total_tokens, commit.digest, committed_at, commit.state),
    )
    rows = [
        (run, spec, each.samples, each.rows, each.tokens) for spec, each in commit.counters.items()
    ]
    connection.executemany(_PUT_COUNTERS, rows)
    (count,) = connection.execute("SELECT COUNT(*) FROM counters WHERE run = ?", (run,)).fetchone()
    if count != len(rows):  # specs that are no longer counted
        connection.execute("DELETE FROM counters WHERE run = ?", (run,))
        connection.executemany(_PUT_COUNTERS, rows)


def _committed(connection: sqlite3.Connection, run: int) -> dict[str, Any]:
    """The committed state and its time; None before the first generation."""
    columns = "committed_at, sample_index, total_tokens, digest, state"
    row = connection.execute(f"SELECT {columns} FROM committed WHERE run = ?", (run,)).fetchone()
    if row is None:
        return {"committed": None, "committed_at": None}
    counted = "SELECT spec, samples, rows, tokens FROM counters WHERE run = ? ORDER BY spec"
    counters = {
        spec: Counters(samples=samples, rows=rows, tokens=tokens)
        for spec, samples, rows, tokens in connection.execute(counted, (run,))
    }
    of_state = dict(row)
    committed_at = of_state.pop("committed_at")
    return {
        "committed": CommittedState(**of_state, counters=counters),
        "committed_at": committed_at,
    }


def put(
    connection: sqlite3.Connection,
    run: int,
    record: Lease | Opening | records.StoredRevision | records.StoredSnapshot | JournalEntry,
) -> None:
    """Appends a record; a run has one lease, which is replaced."""
    columns: dict[str, Any] = asdict(record)
    if isinstance(record, JournalEntry):
        columns["bytes"] = len(record.state.encode())
    verb = "REPLACE" if isinstance(record, Lease) else "INSERT"
    connection.execute(
        f"{verb} INTO {_TABLES[type(record)]} (run, {', '.join(columns)}) VALUES (?{', ?' * len(columns)})",
        (run, *columns.values()),
    )


def all_of(
    connection: sqlite3.Connection, record: type[Record], run: int, which: str, *key: str | int
) -> list[Record]:
    """A run's records. ``which`` narrows or orders them, by ``key``."""
    columns = ", ".join(field.name for field in fields(record))
    rows = connection.execute(
        f"SELECT {columns} FROM {_TABLES[record]} WHERE run = ? {which}", (run, *key)
    )
    return [record(**row) for row in rows]


def first_of(
    connection: sqlite3.Connection, record: type[Record], run: int, which: str = "", *key: str | int
) -> Record | None:
    return next(iter(all_of(connection, record, run, which, *key)), None)


# The history of the runs of a SQLite ledger, in a file of its own beside the ledger's.
#
# So what it writes waits for no commit, and no commit for it. ``synchronous=NORMAL``: a power cut may take the newest
# entries, and damages nothing.


_HISTORY_TABLES = """
CREATE TABLE history (
    uid TEXT NOT NULL, stream TEXT NOT NULL, kind TEXT NOT NULL, number INTEGER NOT NULL, time REAL NOT NULL,
    text TEXT NOT NULL);
CREATE UNIQUE INDEX entries ON history (uid, stream, kind, number, time)
"""
#: "TKLH". All runs wait in one line where another process holds the file: briefly, for what is lost may be lost.
HISTORY = Layout("history", 0x544B4C48, 1, _HISTORY_TABLES, "NORMAL", busy_timeout_s=0.1)
_ENTRY = "uid = ? AND stream = ? AND kind = ? AND number = ? AND time = ?"


class SqliteHistory(HistoryStore):
    """See ``HistoryStore``. The file is made by the first write, and another one where it is gone or replaced."""

    def __init__(self, ledger: SqliteFile) -> None:
        self._ledger = ledger
        self.path = ledger.path.with_name(f"{ledger.path.stem}.history{ledger.path.suffix}")
        self._lock = threading.Lock()
        # With what it was when it was opened.
        self._opened: tuple[SqliteFile, object] | None = None

    def write(
        self,
        uid: str,
        stream: str,
        epoch: int,
        put: Sequence[HistoryEntry],
        drop: Sequence[HistoryEntry],
    ) -> bool:
        with self._file().writing() as connection:
            # Within the transaction: a server that leads since has read this file before, or finds this write in it.
            with self._ledger.reading() as ledger:
                row = ledger.execute(
                    "SELECT epoch FROM runs WHERE uid = ? AND stream = ?", (uid, stream)
                ).fetchone()
            if row is None or row[0] != epoch:
                return False
            rows = [(uid, stream, *entry) for entry in put]
            connection.executemany("INSERT OR REPLACE INTO history VALUES (?, ?, ?, ?, ?, ?)", rows)
            gone = [(uid, stream, *entry[:3]) for entry in drop]
            connection.executemany(f"DELETE FROM history WHERE {_ENTRY}", gone)
        return True

    def entries(self, uid: str, stream: str, *kinds: Kind) -> list[HistoryEntry]:
        query = "SELECT kind, number, time FROM history WHERE uid = ? AND stream = ? AND kind = ?"
        if not self.path.exists():
            return []
        with self._file().reading() as connection:
            rows = [row for kind in kinds for row in connection.execute(query, (uid, stream, kind))]
        return sorted((HistoryEntry(*row) for row in rows), key=lambda entry: entry.number)

    def read(self, uid: str, stream: str, wanted: Sequence[HistoryEntry]) -> list[HistoryEntry]:
        query = f"SELECT text FROM history WHERE {_ENTRY}"
        with self._file().reading() as connection:
            rows = [
                (entry, connection.execute(query, (uid, stream, *entry[:3])).fetchone())
                for entry in wanted
            ]
        return [entry._replace(text=row[0]) for entry, row in rows if row is not None]

    def close(self) -> None:
        if self._opened is not None:
            self._opened[0].close()

    def _file(self) -> SqliteFile:
        with self._lock:
            if self._opened is None or self._opened[0].identity() != self._opened[1]:
                if self._opened is not None:
                    self._opened[0].close()
                self._opened = None
                file = SqliteFile(self.path, time.time, HISTORY)
                self._opened = file, file.identity()
            return self._opened[0]
