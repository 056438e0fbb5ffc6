"""The ledger in one SQLite file: the embedded default, beside the mixture file.

Write-ahead log with ``synchronous=FULL``: a transaction that returned is on the disk. Several server
processes may share the file; SQLite lets one write at a time, and the epochs decide who may.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenloom_server.errors import LedgerUnsafe, NotFound
from tokenloom_server.ledger import refusals
from tokenloom_server.ledger.base import (
    Commit,
    Counters,
    JournalEntry,
    Lease,
    Opening,
    StoredRevision,
    StoredRun,
    StoredSnapshot,
)
from tokenloom_server.ledger.sqlite_file import SqliteFile

_OPENING = (
    "generation, parent, attempt, world_size, batch_size, group_steps, start_index, start_state, opened_at, skipped, "
    "parent_run, ramp"
)
_REVISION = "number, sample_index, made_at, author, reason, content"

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


class SqliteLedger:
    """See ``Ledger``."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
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

    def create_run(self, name: str, stream: str, uid: str, record: str) -> StoredRun:
        with self._file.writing() as connection:
            found = self._stored_run(connection, name, stream)
            if found is not None:
                return found
            holder = connection.execute("SELECT name FROM runs WHERE uid = ? AND stream = ?", (uid, stream)).fetchone()
            if holder is not None:
                raise refusals.uid_taken(uid, stream, name, holder[0])
            connection.execute(
                "INSERT INTO runs (name, stream, uid, epoch, generation, opening_mark, record) "
                "VALUES (?, ?, ?, 0, 0, '', ?)",
                (name, stream, uid, record),
            )
            created = self._stored_run(connection, name, stream)
        assert created is not None
        return created

    def read_run(self, name: str, stream: str) -> StoredRun | None:
        with self._file.reading() as connection:
            return self._stored_run(connection, name, stream)

    def run_names(self) -> Sequence[tuple[str, str]]:
        with self._file.reading() as connection:
            return [
                (name, stream) for name, stream in connection.execute("SELECT name, stream FROM runs ORDER BY 1, 2")
            ]

    def acquire(self, uid: str, stream: str, holder: str, lease_s: float, above: int = 0) -> int:
        with self._file.writing() as connection:
            run = self._run(connection, uid, stream)
            now = self._clock()
            lease = self._lease(connection, run)
            if lease is not None and lease.holder != holder and lease.left_s(now):
                raise refusals.lease_held(uid, stream, lease.holder, lease.acquired_at, lease.left_s(now))
            connection.execute("UPDATE runs SET epoch = MAX(epoch, ?) + 1 WHERE id = ?", (above, run))
            connection.execute(
                "INSERT OR REPLACE INTO leases (run, holder, acquired_at, lapses_at, lasts_s, heard_at) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (run, holder, now, now + lease_s, lease_s, None if lease is None else lease.heard_at),
            )
            (epoch,) = connection.execute("SELECT epoch FROM runs WHERE id = ?", (run,)).fetchone()
        return int(epoch)

    def renew(
        self,
        uid: str,
        stream: str,
        epoch: int,
        holder: str,
        lease_s: float,
        heard_at: float | None,
        generation: int,
        known: int,
    ) -> None:
        with self._file.writing() as connection:
            run, present = self._led_run(connection, uid, stream, epoch)
            found = connection.execute("SELECT sample_index FROM committed WHERE run = ?", (run,)).fetchone()
            self._refuse_rolled_back(uid, stream, (present, found[0] if found else 0), (generation, known))
            name, leads = connection.execute(
                "SELECT name, holder FROM runs LEFT JOIN leases ON leases.run = runs.id WHERE runs.id = ?", (run,)
            ).fetchone()
            if leads != holder:
                raise refusals.given_out_twice(name, epoch, leads)
            connection.execute(
                "UPDATE leases SET lapses_at = ?, lasts_s = ?, heard_at = ? WHERE run = ?",
                (self._clock() + lease_s, lease_s, heard_at, run),
            )

    def release(self, uid: str, stream: str, epoch: int) -> None:
        with self._file.writing() as connection:
            run, _ = self._led_run(connection, uid, stream, epoch)
            connection.execute("UPDATE leases SET lapses_at = 0 WHERE run = ?", (run,))

    def adopt(self, uid: str, stream: str, epoch: int, new_uid: str) -> None:
        with self._file.writing() as connection:
            former = connection.execute(
                "SELECT 1 FROM runs JOIN former_uids ON former_uids.run = runs.id "
                "WHERE former_uids.uid = ? AND former_uids.stream = ? AND runs.uid = ?",
                (uid, stream, new_uid),
            ).fetchone()
            if former is not None:  # a repetition
                self._led_run(connection, new_uid, stream, epoch)
                return
            run, generation = self._led_run(connection, uid, stream, epoch)
            (name,) = connection.execute("SELECT name FROM runs WHERE id = ?", (run,)).fetchone()
            if generation:
                raise refusals.opened_already(uid, stream, generation, new_uid)
            if new_uid == uid:
                return
            holder = connection.execute(
                "SELECT name FROM runs WHERE uid = ? AND stream = ?", (new_uid, stream)
            ).fetchone()
            if holder is not None:
                raise refusals.uid_taken(new_uid, stream, name, holder[0])
            connection.execute("UPDATE runs SET uid = ? WHERE id = ?", (new_uid, run))
            connection.execute("DELETE FROM former_uids WHERE uid = ? AND stream = ?", (new_uid, stream))
            connection.execute("INSERT INTO former_uids (uid, stream, run) VALUES (?, ?, ?)", (uid, stream, run))

    def open(self, uid: str, stream: str, epoch: int, opening: Opening, committed: Commit) -> None:
        refusals.check_commit(uid, stream, committed)
        mark = refusals.opening_mark(epoch, opening, committed)
        with self._file.writing() as connection:
            run, current = self._led_run(connection, uid, stream, epoch)
            (found_mark,) = connection.execute("SELECT opening_mark FROM runs WHERE id = ?", (run,)).fetchone()
            if opening.generation == current and mark == found_mark:  # a repetition
                return
            used = connection.execute(
                "SELECT generation FROM openings WHERE run = ? AND attempt = ?", (run, opening.attempt)
            ).fetchone()
            if used is not None:
                raise refusals.attempt_used(uid, stream, opening.attempt, used[0])
            if opening.generation <= current:
                raise refusals.generation_too_low(uid, stream, current, opening.generation)
            connection.execute(
                "UPDATE runs SET generation = ?, opening_mark = ?, pin = NULL WHERE id = ?",
                (opening.generation, mark, run),
            )
            connection.execute(
                f"INSERT INTO openings (run, {_OPENING}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    run,
                    opening.generation,
                    opening.parent,
                    opening.attempt,
                    opening.world_size,
                    opening.batch_size,
                    opening.group_steps,
                    opening.start_index,
                    opening.start_state,
                    opening.opened_at,
                    opening.skipped,
                    opening.parent_run,
                    opening.ramp,
                ),
            )
            connection.execute("DELETE FROM slots WHERE run = ?", (run,))
            self._put_committed(connection, run, committed)
            _put_journal(connection, run, opening.generation, opening.start_index, opening.start_state)

    def claim_slot(self, uid: str, stream: str, epoch: int, generation: int, rank: int, nonce: str) -> None:
        with self._file.writing() as connection:
            run, present = self._led_run(connection, uid, stream, epoch)
            self._fence(uid, stream, present, generation)
            connection.execute(
                "INSERT INTO slots (run, rank, nonce) VALUES (?, ?, ?) ON CONFLICT DO NOTHING", (run, rank, nonce)
            )
            (found,) = connection.execute("SELECT nonce FROM slots WHERE run = ? AND rank = ?", (run, rank)).fetchone()
            if found != nonce:
                raise refusals.slot_taken(uid, stream, generation, rank)

    def commit(
        self, uid: str, stream: str, epoch: int, generation: int, commit: Commit, journal: bool, known: int = 0
    ) -> int:
        refusals.check_commit(uid, stream, commit)
        with self._file.writing() as connection:
            run, present = self._led_run(connection, uid, stream, epoch)
            self._fence(uid, stream, present, generation)
            done = self._committed_already(connection, run, uid, stream, generation, commit, known)
            if done is not None:
                return done
            self._put_committed(connection, run, commit)
            if journal:
                _put_journal(connection, run, generation, commit.sample_index, commit.state)
        return commit.sample_index

    def openings(self, uid: str, stream: str) -> Sequence[Opening]:
        with self._file.reading() as connection:
            run = self._run(connection, uid, stream)
            rows = connection.execute(f"SELECT {_OPENING} FROM openings WHERE run = ? ORDER BY generation", (run,))
            return [_opening(row) for row in rows]

    def journal(self, uid: str, stream: str, generation: int, at_most: int) -> JournalEntry | None:
        with self._file.reading() as connection:
            run = self._run(connection, uid, stream)
            row = connection.execute(
                "SELECT sample_index, state FROM journal WHERE run = ? AND generation = ? AND sample_index <= ? "
                "ORDER BY sample_index DESC LIMIT 1",
                (run, generation, at_most),
            ).fetchone()
        return None if row is None else JournalEntry(generation=generation, sample_index=row[0], state=row[1])

    def journal_size(self, uid: str, stream: str) -> tuple[int, int]:
        with self._file.reading() as connection:
            run = self._run(connection, uid, stream)
            entries, size_bytes = connection.execute(
                "SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM journal WHERE run = ?", (run,)
            ).fetchone()
        return entries, size_bytes

    def thin_journal(self, uid: str, stream: str, epoch: int) -> None:
        with self._file.writing() as connection:
            run, _ = self._led_run(connection, uid, stream, epoch)
            connection.execute(_THIN, (run,))

    def pin(self, uid: str, stream: str, epoch: int, pin: str | None) -> None:
        with self._file.writing() as connection:
            run, _ = self._led_run(connection, uid, stream, epoch)
            connection.execute("UPDATE runs SET pin = ? WHERE id = ?", (pin, run))

    def revise(self, uid: str, stream: str, epoch: int, revision: StoredRevision) -> None:
        refusals.check_revision(uid, stream, revision)
        with self._file.writing() as connection:
            run, _ = self._led_run(connection, uid, stream, epoch)
            there = self._revisions(connection, run)
            if revision in there:  # a repetition
                return
            newest = there[-1].number if there else 0
            if revision.number != newest + 1:
                raise refusals.revision_number(uid, stream, newest, revision.number)
            if there and revision.sample_index < there[-1].sample_index:
                raise refusals.revision_too_early(uid, stream, newest, there[-1].sample_index, revision.sample_index)
            connection.execute(
                f"INSERT INTO revisions (run, {_REVISION}) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    run,
                    revision.number,
                    revision.sample_index,
                    revision.made_at,
                    revision.author,
                    revision.reason,
                    revision.content,
                ),
            )

    def revisions(self, uid: str, stream: str) -> Sequence[StoredRevision]:
        with self._file.reading() as connection:
            return self._revisions(connection, self._run(connection, uid, stream))

    def drop_revisions(self, uid: str, stream: str, epoch: int, number: int) -> None:
        with self._file.writing() as connection:
            run, _ = self._led_run(connection, uid, stream, epoch)
            connection.execute("DELETE FROM revisions WHERE run = ? AND number >= ?", (run, number))

    def save_snapshot(self, uid: str, stream: str, snapshot: StoredSnapshot) -> None:
        with self._file.writing() as connection:
            saved = connection.execute(
                "INSERT INTO snapshots (run, id, sample_index, saved_at, text) "
                "SELECT id, ?, ?, ?, ? FROM runs WHERE uid = ? AND stream = ? ON CONFLICT DO NOTHING",
                (snapshot.id, snapshot.sample_index, snapshot.saved_at, snapshot.text, uid, stream),
            )
            if saved.rowcount:
                return
            run = self._run(connection, uid, stream)
            (text,) = connection.execute(
                "SELECT text FROM snapshots WHERE run = ? AND id = ?", (run, snapshot.id)
            ).fetchone()
            if text != snapshot.text:
                raise refusals.snapshot_differs(uid, stream, snapshot.id)

    def snapshots(self, uid: str, stream: str) -> Sequence[StoredSnapshot]:
        with self._file.reading() as connection:
            rows = connection.execute(
                "SELECT id, sample_index, saved_at, text FROM snapshots WHERE run = ? "
                "ORDER BY saved_at DESC, sample_index DESC, id",
                (self._run(connection, uid, stream),),
            )
            return [_snapshot(row) for row in rows]

    def snapshot(self, uid: str, stream: str, snapshot_id: str) -> StoredSnapshot | None:
        with self._file.reading() as connection:
            row = connection.execute(
                "SELECT id, sample_index, saved_at, text FROM snapshots WHERE run = ? AND id = ?",
                (self._run(connection, uid, stream), snapshot_id),
            ).fetchone()
        return None if row is None else _snapshot(row)

    def close(self) -> None:
        self._file.close()

    # What every write checks, inside its transaction.

    def _run(self, connection: sqlite3.Connection, uid: str, stream: str) -> int:
        row = connection.execute("SELECT id FROM runs WHERE uid = ? AND stream = ?", (uid, stream)).fetchone()
        if row is not None:
            return int(row[0])
        now = connection.execute(
            "SELECT runs.uid FROM runs JOIN former_uids ON former_uids.run = runs.id "
            "WHERE former_uids.uid = ? AND former_uids.stream = ?",
            (uid, stream),
        ).fetchone()
        raise refusals.no_such_run(uid, stream) if now is None else refusals.renamed(uid, stream, now[0])

    def _led_run(self, connection: sqlite3.Connection, uid: str, stream: str, epoch: int) -> tuple[int, int]:
        """The run and its present generation, for the server of this epoch."""
        row = connection.execute(
            "SELECT id, epoch, generation FROM runs WHERE uid = ? AND stream = ?", (uid, stream)
        ).fetchone()
        if row is None:
            try:
                return self._run(connection, uid, stream), 0  # it raises
            except NotFound:
                raise refusals.gone(uid, stream) from None
        run, found, generation = row
        if found != epoch:
            raise refusals.not_leader(uid, stream, found, epoch)
        return run, generation

    def _refuse_rolled_back(self, uid: str, stream: str, found: tuple[int, int], known: tuple[int, int]) -> None:
        """Raises where (generation, committed index) is behind what the caller knows; a new generation may begin
        anywhere."""
        if found[0] < known[0] or (found[0] == known[0] and found[1] < known[1]):
            raise refusals.rolled_back(uid, stream, *found, *known)

    def _lease(self, connection: sqlite3.Connection, run: int) -> Lease | None:
        row = connection.execute(
            "SELECT holder, acquired_at, lapses_at, lasts_s, heard_at FROM leases WHERE run = ?", (run,)
        ).fetchone()
        if row is None:
            return None
        holder, acquired_at, lapses_at, lasts_s, heard_at = row
        return Lease(holder=holder, acquired_at=acquired_at, lapses_at=lapses_at, lasts_s=lasts_s, heard_at=heard_at)

    def _fence(self, uid: str, stream: str, found: int, generation: int) -> None:
        if found == 0 or found != generation:
            raise refusals.fenced(uid, stream, found, generation)

    def _committed_already(
        self,
        connection: sqlite3.Connection,
        run: int,
        uid: str,
        stream: str,
        generation: int,
        commit: Commit,
        known: int,
    ) -> int | None:
        """The committed index, where the commit is at or below it."""
        index, digest = connection.execute(
            "SELECT sample_index, digest FROM committed WHERE run = ?", (run,)
        ).fetchone()
        self._refuse_rolled_back(uid, stream, (generation, index), (generation, known))
        if commit.sample_index == index and commit.digest != digest:
            raise refusals.order_mismatch(uid, stream, index, digest, commit.digest)
        return int(index) if commit.sample_index <= index else None

    def _revisions(self, connection: sqlite3.Connection, run: int) -> list[StoredRevision]:
        rows = connection.execute(f"SELECT {_REVISION} FROM revisions WHERE run = ? ORDER BY number", (run,))
        return [_revision(row) for row in rows]

    def _put_committed(self, connection: sqlite3.Connection, run: int, commit: Commit) -> None:
        connection.execute(
            "INSERT OR REPLACE INTO committed (run, sample_index, total_tokens, digest, committed_at, state) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            (run, commit.sample_index, commit.total_tokens, commit.digest, self._clock(), commit.state),
        )
        rows = [(run, spec, each.samples, each.rows, each.tokens) for spec, each in commit.counters.items()]
        connection.executemany(_PUT_COUNTERS, rows)
        (count,) = connection.execute("SELECT COUNT(*) FROM counters WHERE run = ?", (run,)).fetchone()
        if count != len(rows):  # specs that are no longer counted
            connection.execute("DELETE FROM counters WHERE run = ?", (run,))
            connection.executemany(_PUT_COUNTERS, rows)

    def _stored_run(self, connection: sqlite3.Connection, name: str, stream: str) -> StoredRun | None:
        row = connection.execute(
            "SELECT id, uid, epoch, generation, pin, record FROM runs WHERE name = ? AND stream = ?", (name, stream)
        ).fetchone()
        if row is None:
            return None
        run, uid, epoch, generation, pin, record = row
        opening = connection.execute(
            f"SELECT {_OPENING} FROM openings WHERE run = ? AND generation = ?", (run, generation)
        ).fetchone()
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
            opening=None if opening is None else _opening(opening),
            committed=None
            if committed is None
            else Commit(
                sample_index=committed[0],
                total_tokens=committed[1],
                digest=committed[2],
                state=committed[3],
                counters={
                    spec: Counters(samples=samples, rows=rows, tokens=tokens)
                    for spec, samples, rows, tokens in counters
                },
            ),
            committed_at=None if committed is None else committed[4],
            pin=pin,
            lease=self._lease(connection, run),
        )


def _put_journal(connection: sqlite3.Connection, run: int, generation: int, sample_index: int, state: str) -> None:
    connection.execute(
        "INSERT INTO journal (run, generation, sample_index, bytes, state) VALUES (?, ?, ?, ?, ?)",
        (run, generation, sample_index, len(state.encode()), state),
    )


def _opening(row: tuple[int, int, str, int, int, int, int, str, float, int, str, str]) -> Opening:
    return Opening(
        generation=row[0],
        parent=row[1],
        attempt=row[2],
        world_size=row[3],
        batch_size=row[4],
        group_steps=row[5],
        start_index=row[6],
        start_state=row[7],
        opened_at=row[8],
        skipped=row[9],
        parent_run=row[10],
        ramp=row[11],
    )


def _revision(row: tuple[int, int, float, str, str, str]) -> StoredRevision:
    return StoredRevision(
        number=row[0], sample_index=row[1], made_at=row[2], author=row[3], reason=row[4], content=row[5]
    )


def _snapshot(row: tuple[str, int, float, str]) -> StoredSnapshot:
    return StoredSnapshot(id=row[0], sample_index=row[1], saved_at=row[2], text=row[3])
