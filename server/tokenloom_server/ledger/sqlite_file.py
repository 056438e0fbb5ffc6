"""A SQLite file that is a ledger: its layout, how it is opened, its transactions and their errors."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

from tokenloom_server.errors import (
    ConfigError,
    LedgerError,
    LedgerUnavailable,
    LedgerUnsafe,
    reason,
)
from tokenloom_server.ledger import refusals

# The clock of a ledger that all its servers open on one machine: leases must not move with the wall clock.
#
# Since the machine's start its processes share a monotonic clock, which nobody sets (those of a container may have one
# of their own, by a time namespace). The first of them notes in the ledger what Unix time it had when that clock began,
# and all reckon from there; after another start the wall clock says so anew.


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TIME_NAMESPACE = Path("/proc/self/ns/time")


def boot_id() -> str:
    """Equal for all processes of a machine until it starts anew; empty where the system does not say (it is Linux that
    does, and its ``time.monotonic`` that all processes share)."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def boot_clock(connection: sqlite3.Connection) -> Callable[[], float]:
    """Unix time in seconds, equal for all who have this ledger open since the machine's start."""
    boot = boot_id()
    if not boot:
        return time.time
    clock = f"{boot} {_TIME_NAMESPACE.readlink()}" if _TIME_NAMESPACE.is_symlink() else boot
    connection.execute("DELETE FROM boots WHERE id NOT LIKE ?", (f"{boot}%",))
    began = time.time() - time.monotonic()
    connection.execute("INSERT OR IGNORE INTO boots (id, unix_s) VALUES (?, ?)", (clock, began))
    (unix_s,) = connection.execute("SELECT unix_s FROM boots WHERE id = ?", (clock,)).fetchone()
    return lambda: float(unix_s) + time.monotonic()


# Where a SQLite ledger lies: file systems that several machines share are recognised, and refused.
#
# The write-ahead log works within one machine alone, since its index is memory that all processes map
# (sqlite.org/wal.html). Nor is there a safe mode for the others: every journal mode trusts the file
# system's locks, which network file systems get wrong or leave out (sqlite.org/howtocorrupt.html,
# section 2), and a lock that is not one lets two servers commit at once. What is given up is small: a
# ledger on a node's own disk that is not there after a move is taken up from the trainer's state.


#: Linux's table of mounts. Other systems have none, and are not looked at.
MOUNTS = Path("/proc/self/mountinfo")

#: As the kernel calls them: file systems whose files other machines, or the host of a virtual one, may open, too.
_SHARED = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "ncpfs", "afs", "coda", "9p", "virtiofs"),
        *(
            "lustre",
            "gpfs",
            "beegfs",
            "fhgfs",
            "ceph",
            "glusterfs",
            "orangefs",
            "pvfs2",
            "panfs",
            "wekafs",
        ),
        *("gfs2", "ocfs2", "vboxsf", "vmhgfs", "prl_fs", "drvfs"),
    }
)
#: The root of a container that no administrator set up; all other programs that serve FUSE (sshfs, s3fs, gcsfuse,
#: rclone, …) may keep their files anywhere.
_LOCAL_FUSE = "fuse.fuse-overlayfs"


class Mount(NamedTuple):
    """What is mounted where: a folder, the file system's type, and what it is mounted from."""

    point: str
    kind: str
    device: str


def refuse_shared(path: Path) -> None:
    """Raises ``LedgerUnsafe``, with the remedy, for a file on a file system that several machines share."""
    try:
        table = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return
    mount = mount_of(path, table)
    if mount is not None and is_shared(mount.kind):
        raise LedgerUnsafe(
            f"The ledger {path} lies on a file system of type {mount.kind} ({mount.device}, mounted at {mount.point}), "
            "which other machines may share; SQLite is safe on a local disk only, since network file systems have no "
            "locks to trust. Name a file on a disk of this machine (--ledger sqlite:////var/lib/tokenloom/ledger.db; "
            "where a job moves, an empty ledger goes on from the trainer's checkpoint), or use redis://."
        )


def is_shared(kind: str) -> bool:
    """Whether other machines may have files of such a file system open."""
    return kind in _SHARED or kind == "fuse" or (kind.startswith("fuse.") and kind != _LOCAL_FUSE)


def mount_of(path: Path, table: str) -> Mount | None:
    """The mount that a path (its links followed) lies on, by a table in the form of ``/proc/self/mountinfo``."""
    resolved = path.resolve()
    mount_of_path: Mount | None = None
    for line in table.splitlines():
        # ID, parent, device number, root, mount point, options, any number of optional fields, "-", type, source, …
        mounted, _, file_system = line.partition(" - ")
        fields, (kind, device, *_) = mounted.split(" "), [*file_system.split(" "), "", ""]
        mount = Mount(_unescaped(fields[4]), kind, _unescaped(device))
        # Of two at one place the later one covers the earlier.
        inner = mount_of_path is None or len(mount.point) >= len(mount_of_path.point)
        if resolved.is_relative_to(mount.point) and inner:
            mount_of_path = mount
    return mount_of_path


def _unescaped(text: str) -> str:
    """Blanks and the like stand as octal numbers there."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


_log = logging.getLogger(__name__)

#: How long a call waits for another process's transaction; those take milliseconds.
BUSY_TIMEOUT_S = 5.0

#: "TKLM": tells a ledger from other SQLite files.
APPLICATION_ID = 0x544B4C4D

#: Another layout takes the next number, and none is used again: a file of any other is refused.
SCHEMA_VERSION = 12
#: What a commit rewrites stands apart from the run's record, so that a commit writes few pages.
_TABLES = """
CREATE TABLE runs (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL, stream TEXT NOT NULL, uid TEXT NOT NULL, epoch INTEGER NOT NULL,
    generation INTEGER NOT NULL, opening_mark TEXT NOT NULL, pin TEXT, record TEXT NOT NULL,
    revision_changes INTEGER NOT NULL DEFAULT 0, closed_generation INTEGER NOT NULL DEFAULT 0,
    elsewhere TEXT NOT NULL DEFAULT '', pin_number INTEGER NOT NULL DEFAULT 0,
    UNIQUE (name, stream), UNIQUE (uid, stream));
CREATE TABLE former_uids (
    uid TEXT NOT NULL, stream TEXT NOT NULL, run INTEGER NOT NULL, PRIMARY KEY (uid, stream)) WITHOUT ROWID;
CREATE TABLE committed (
    run INTEGER PRIMARY KEY, sample_index INTEGER NOT NULL, total_tokens INTEGER NOT NULL, digest TEXT NOT NULL,
    committed_at REAL NOT NULL, state TEXT NOT NULL);
CREATE TABLE counters (
    run INTEGER NOT NULL, spec TEXT NOT NULL, samples INTEGER NOT NULL, rows INTEGER NOT NULL, tokens INTEGER NOT NULL,
    PRIMARY KEY (run, spec)) WITHOUT ROWID;
CREATE TABLE openings (
    run INTEGER NOT NULL, generation INTEGER NOT NULL, parent INTEGER NOT NULL, attempt TEXT NOT NULL,
    world_size INTEGER NOT NULL, batch_size INTEGER NOT NULL, group_micro_steps INTEGER NOT NULL,
    start_index INTEGER NOT NULL, opened_at REAL NOT NULL, start_state TEXT NOT NULL, parent_run TEXT NOT NULL,
    batch_plans TEXT NOT NULL, process TEXT NOT NULL, PRIMARY KEY (run, generation), UNIQUE (run, attempt));
CREATE TABLE slots (
    run INTEGER NOT NULL, rank INTEGER NOT NULL, nonce TEXT NOT NULL, PRIMARY KEY (run, rank)) WITHOUT ROWID;
CREATE TABLE journal (
    id INTEGER PRIMARY KEY, run INTEGER NOT NULL, generation INTEGER NOT NULL, sample_index INTEGER NOT NULL,
    bytes INTEGER NOT NULL, state TEXT NOT NULL, UNIQUE (run, generation, sample_index));
CREATE TABLE snapshots (
    run INTEGER NOT NULL, id TEXT NOT NULL, sample_index INTEGER NOT NULL, saved_at REAL NOT NULL, text TEXT NOT NULL,
    PRIMARY KEY (run, id));
CREATE TABLE leases (
    run INTEGER PRIMARY KEY, holder TEXT NOT NULL, acquired_at REAL NOT NULL, lapses_at REAL NOT NULL,
    lasts_s REAL NOT NULL, heard_at REAL);
CREATE TABLE revisions (
    run INTEGER NOT NULL, number INTEGER NOT NULL, sample_index INTEGER NOT NULL, made_at REAL NOT NULL,
    author TEXT NOT NULL, reason TEXT NOT NULL, content TEXT NOT NULL, PRIMARY KEY (run, number));
CREATE TABLE boots (id TEXT PRIMARY KEY, unix_s REAL NOT NULL)
"""


class Layout(NamedTuple):
    """What a file holds, as people call it; how it is recognised, made, and written."""

    name: str
    application_id: int
    version: int
    tables: str
    synchronous: str
    #: How long a call waits for another process's transaction, seconds; ``BUSY_TIMEOUT_S`` at most.
    busy_timeout_s: float = math.inf


LEDGER = Layout("ledger", APPLICATION_ID, SCHEMA_VERSION, _TABLES, "FULL")


class SqliteFile:
    """One connection to a ledger's file, guarded by a lock: any thread may call. Where another file has taken the path
    since, or none is there, the connection is opened anew, and whoever finds it gets ``LedgerRolledBack``."""

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] | None = None,
        layout: Layout = LEDGER,
        reads_only: bool = False,
    ) -> None:
        """``clock``: Unix time in seconds; where none is given, the one that all servers of this machine share.
        ``reads_only``: a file that cannot be written now, since its disk is full perhaps, is opened all the same."""
        self.path = path
        self._reads_only = reads_only
        self._layout = layout
        self._fixed_clock = clock
        self._busy_timeout_s = min(layout.busy_timeout_s, BUSY_TIMEOUT_S)
        self._lock = threading.Lock()
        self._closed = False
        self._reopened = 0
        #: Which file is open; None while none is.
        self._opened: tuple[int, ...] | None = None
        #: Why it can only be read.
        self._unwritable: LedgerUnavailable | None = None
        self._open()

    def _open(self) -> None:
        self._opened = None
        if not self.path.parent.is_dir():
            raise ConfigError(
                f"The ledger's folder {self.path.parent} does not exist. Create it, or give another path with --ledger."
            )
        if self.path.is_dir():
            name = self._layout.name
            raise ConfigError(
                f"The {name} {self.path} is a folder; expected a file. Give another path with --ledger."
            )
        # Before anything is written there.
        refuse_shared(self.path)
        file = self.path.resolve()
        # Where the path is a link, SQLite keeps the log beside the file that it leads to.
        self._log_path = file.with_name(f"{file.name}-wal")
        self._is_made = False
        with contextlib.suppress(OSError):  # it is there, or SQLite will say why it cannot be
            # SQLite gives the write-ahead log and its index the mode of the file.
            os.close(os.open(file, os.O_CREAT | os.O_EXCL, 0o600))
            self._is_made = True
        self._connect("rwc")
        try:
            self._make_ready()
        except BaseException as error:
            self.abandon()
            if not (self._reads_only and isinstance(error, LedgerUnavailable)):
                raise
            # Without a log nobody writes, and none needs to be made.
            has_log = self._log_path.exists() and self._log_path.stat().st_size
            self._connect("ro" if has_log else "ro&immutable=1")
            self.clock, self._unwritable = time.time, error
        self._opened = self.identity()

    def _connect(self, mode: str) -> None:
        uri = f"{self.path.absolute().as_uri()}?mode={mode}"
        with self._translated():
            self._connection = sqlite3.connect(
                uri,
                timeout=self._busy_timeout_s,
                isolation_level=None,
                check_same_thread=False,
                uri=True,
            )
            self._connection.row_factory = sqlite3.Row

    def abandon(self) -> None:
        """Closes it, and leaves nothing of a file that was not there before."""
        self._connection.close()
        for path in _parts(self.path.resolve()) if self._is_made else ():
            path.unlink(missing_ok=True)

    def _make_ready(self) -> None:
        with self._transaction("BEGIN"):
            self._refuse_other_files()
        _keep_private(self.path.resolve())
        self._write_ahead()
        with self._transaction("BEGIN IMMEDIATE") as connection:
            if self._refuse_other_files():  # on a full disk nothing can be written
                for statement in self._layout.tables.split(";"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {self._layout.application_id}")
                connection.execute(f"PRAGMA user_version = {self._layout.version}")
            self.clock = self._fixed_clock or boot_clock(connection)

    def identity(self) -> tuple[int, ...]:
        """Which file is at the path now, and how often that was opened anew: device, inode and whether it has a name,
        also of its write-ahead log, which holds the newest commits; empty where one is not there."""
        try:
            statuses = [path.stat() for path in (self.path, self._log_path)]
        except OSError:
            return ()
        # A file that is mounted by itself keeps its path when it is deleted.
        numbers = (
            number
            for status in statuses
            for number in (status.st_dev, status.st_ino, status.st_nlink > 0)
        )
        return (self._reopened, *numbers)

    def forget_path(self) -> None:
        """The file was removed on purpose: the connection has it open, for this process alone."""
        self._opened = self.identity()

    def settings(self) -> tuple[str, int]:
        """(journal mode, synchronous) as they are. Raises ``LedgerUnavailable`` where it can be read only."""
        if self._unwritable is not None:
            raise self._unwritable
        with self._lock, self._translated():
            (mode,) = self._connection.execute("PRAGMA journal_mode").fetchone()
            (synchronous,) = self._connection.execute("PRAGMA synchronous").fetchone()
        return str(mode), int(synchronous)

    def reading(self) -> AbstractContextManager[sqlite3.Connection]:
        """A transaction that sees one moment."""
        return self._locked("BEGIN")

    def writing(self) -> AbstractContextManager[sqlite3.Connection]:
        """A transaction that is alone from its start, and on the disk when it ends without an exception."""
        return self._locked("BEGIN IMMEDIATE")

    def close(self) -> None:
        self._closed = True  # before the lock: who stands in line for it does nothing any more
        with self._lock:
            self._connection.close()

    def _refuse_other_files(self) -> bool:
        """Whether nothing is in the file yet; raises where it has something else's, or another layout."""
        (application,) = self._connection.execute("PRAGMA application_id").fetchone()
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        (tables,) = self._connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        if (application, version, tables) == (0, 0, 0):
            return True
        if application != self._layout.application_id:
            raise ConfigError(
                f"{self.path} is a SQLite database, but not a {self._layout.name}. Give another path with --ledger."
            )
        if version != self._layout.version:
            raise refusals.other_schema(str(self.path), version, self._layout.version)
        return False

    def _write_ahead(self) -> None:
        """Two processes that make a file a write-ahead one at once may collide without SQLite's own
        waiting: hence the loop.
        """
        deadline_s = time.monotonic() + self._busy_timeout_s
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                break
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline_s:
                    with self._translated():
                        raise
                time.sleep(0.01)
        self._connection.execute(f"PRAGMA synchronous = {self._layout.synchronous}")
        # On macOS a plain fsync leaves the data in the disk's cache; elsewhere these two do nothing.
        self._connection.execute("PRAGMA fullfsync = ON")
        self._connection.execute("PRAGMA checkpoint_fullfsync = ON")

    @contextmanager
    def _locked(self, begin: str) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._closed:
                self._connection.close()
            elif self._opened != self.identity():
                # First, since a new file may get the number of the one that nobody has open any more.
                self._reopened += 1
                self._connection.close()
                self._open()
                raise refusals.replaced(self.path)
            with self._transaction(begin) as connection:
                yield connection

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        with self._translated():
            self._connection.execute(begin)
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    with contextlib.suppress(sqlite3.Error):
                        self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _translated(self) -> Iterator[None]:
        this = f"The {self._layout.name} {self.path}"
        try:
            yield
        except sqlite3.OperationalError as error:
            rights = reason(PermissionError(0, "the file's permissions", str(self.path)))
            raise LedgerUnavailable(
                f"{this} cannot be used now: {error}. Look at its disk's free space, at {rights}, and for another "
                "process that holds it locked."
            ) from error
        except sqlite3.ProgrammingError as error:
            raise LedgerUnavailable(f"{this} cannot be used now: {error}") from error
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB:
                raise ConfigError(
                    f"{self.path} is not a SQLite database. Give another path with --ledger, or move that file away."
                ) from error
            raise LedgerError(
                f"{this} is damaged or refuses: {error}. Restore it from a copy, or begin an empty "
                f"one and resume from a trainer's checkpoint."
            ) from error


def _parts(path: Path) -> list[Path]:
    """A file, its write-ahead log, and the index of that."""
    return [path.with_name(f"{path.name}{part}") for part in ("", "-wal", "-shm")]


def _keep_private(path: Path) -> None:
    """Makes a ledger, its write-ahead log and its index their owner's alone where they are not; the log says so."""
    for file in _parts(path):
        with contextlib.suppress(OSError):
            mode = file.stat().st_mode & 0o777
            if mode & 0o077:
                _log.warning(
                    "the ledger's file %s has mode %04o, so others may use it: it is made 0600",
                    file,
                    mode,
                )
                file.chmod(0o600)
