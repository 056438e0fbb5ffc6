"""The history of the runs of a SQLite ledger, in a file of its own beside the ledger's.

So what it writes waits for no commit, and no commit for it. ``synchronous=NORMAL``: a power cut may take the newest
entries, and damages nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from tokenloom_server.ledger.history import HistoryEntry, HistoryStore, Kind
from tokenloom_server.ledger.sqlite_file import Layout, SqliteFile

_TABLES = """
CREATE TABLE history (
    uid TEXT NOT NULL, stream TEXT NOT NULL, kind TEXT NOT NULL, number INTEGER NOT NULL, time REAL NOT NULL,
    text TEXT NOT NULL);
CREATE UNIQUE INDEX entries ON history (uid, stream, kind, number, time)
"""
#: "TKLH". All runs wait in one line where another process holds the file: briefly, for what is lost may be lost.
HISTORY = Layout("history", 0x544B4C48, 1, _TABLES, "NORMAL", busy_timeout_s=0.1)
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
