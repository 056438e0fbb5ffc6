"""Records of rows at which the process may die: those that are encoded now, and those that an earlier process died at.

A tokeniser is native code: a document that makes it crash takes the server along, and again after each restart. So
before rows are encoded their place is noted in a mapped file: a write to memory that outlives the process. The process
that starts next finds the file and suspects what is noted there; what was noted at two deaths is encoded in a
process of its own (``crash_guard``).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import mmap
import struct
import threading
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tokenloom_server.storage.file import replaced

_log = logging.getLogger(__name__)

#: Rows are encoded apart once the process has died at them so often. One death may have another reason: a kill, or a
#: machine without memory.
DEATHS = 2

#: Source + 1 (0: nothing is noted), shard, first row, rows.
_NOTE = struct.Struct("<4q")
#: Notes in the file: more than there are threads that encode, over all pipelines of a run.
_NOTES = 64


@dataclass(frozen=True, slots=True)
class SuspectRows:
    """Rows [begin, end) of a shard. ``deaths``: how many processes ended while these were encoded. ``proven``: a
    process of its own died at this very row."""

    source: int
    shard: int
    begin: int
    end: int
    deaths: int = 1
    proven: bool = False

    def meets(self, other: SuspectRows) -> bool:
        """Whether they have a row in common."""
        same = (self.source, self.shard) == (other.source, other.shard)
        return same and self.begin < other.end and other.begin < self.end

    def without(self, other: SuspectRows) -> list[SuspectRows]:
        """What is left of it: blocks do not always begin at the same row."""
        if not self.meets(other):
            return [self]
        parts = (
            replace(self, end=min(self.end, other.begin)),
            replace(self, begin=max(self.begin, other.end)),
        )
        return [part for part in parts if part.begin < part.end]


class CrashRecords:
    """The suspect rows of one run, or of a stream with files of its own. Thread-safe."""

    def __init__(self, folder: Path, run: str) -> None:
        """Reads what processes that died left in ``folder``. Raises ``OSError`` where that cannot be written."""
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._list = folder / f"{run}@suspects.json"
        self._known = self._read()
        for noted in _notes_of_dead_processes(folder, run):
            self._known = _known_after_death(self._known, noted)
            self._write()
        self._path = folder / f"{run}@{uuid.uuid4().hex}.at-work"
        with self._path.open("x+b") as file:
            # Tells the others that this file is in use. The lock goes with the map, and so with the process.
            fcntl.flock(file, fcntl.LOCK_EX)
            file.truncate(_NOTES * _NOTE.size)
            self._notes = mmap.mmap(file.fileno(), _NOTES * _NOTE.size)
        self._free = deque(range(0, _NOTES * _NOTE.size, _NOTE.size))

    @contextmanager
    def noting(self, source: int, shard: int, begin: int, end: int) -> Iterator[None]:
        """Rows [begin, end) are being encoded; if the process dies meanwhile, the next one finds them noted."""
        try:
            note_offset = self._free.pop()
        except IndexError:  # more callers than there are notes: nothing but the note is lost
            yield
            return
        _NOTE.pack_into(self._notes, note_offset, source + 1, shard, begin, end)
        try:
            yield
        finally:
            _NOTE.pack_into(self._notes, note_offset, 0, 0, 0, 0)
            self._free.append(note_offset)

    def suspected(self, source: int, shard: int, begin: int, end: int) -> list[SuspectRows]:
        """Those among rows [begin, end) that are to be encoded apart."""
        if not self._known:  # the usual case
            return []
        rows = SuspectRows(source, shard, begin, end)
        with self._lock:
            return [known for known in self._known if known.deaths >= DEATHS and known.meets(rows)]

    def settle(self, source: int, shard: int, begin: int, end: int, culprits: list[int]) -> None:
        """Rows [begin, end) were encoded each by itself, and the process died at the ``culprits`` alone."""
        rows = SuspectRows(source, shard, begin, end)
        with self._lock:
            self._known = [rest for known in self._known for rest in known.without(rows)]
            self._known += [
                SuspectRows(source, shard, row, row + 1, DEATHS, True) for row in culprits
            ]
            self._write()

    def close(self) -> None:
        """An orderly end: the notes go, what is known stays."""
        self._path.unlink(missing_ok=True)

    def _read(self) -> list[SuspectRows]:
        try:
            return [
                SuspectRows(**entry) for entry in json.loads(self._list.read_text(encoding="utf-8"))
            ]
        except FileNotFoundError:
            return []
        except (ValueError, TypeError) as error:
            _log.warning("%s cannot be read (%s), and begins anew", self._list, error)
            return []

    def _write(self) -> None:
        if not self._known:
            self._list.unlink(missing_ok=True)
            return
        with replaced(self._list) as file:
            file.write(json.dumps([asdict(known) for known in self._known]).encode() + b"\n")


def _notes_of_dead_processes(folder: Path, run: str) -> Iterator[list[SuspectRows]]:
    """What each process that died was encoding; the files go."""
    for path in sorted(folder.glob(f"{run}@*.at-work")):
        with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            data = file.read()
            notes = _NOTE.iter_unpack(data[: len(data) // _NOTE.size * _NOTE.size])
            suspects = [
                SuspectRows(source - 1, shard, begin, end)
                for source, shard, begin, end in notes
                if source > 0
            ]
            path.unlink(missing_ok=True)
            if suspects:
                yield suspects


def _known_after_death(known: list[SuspectRows], noted: list[SuspectRows]) -> list[SuspectRows]:
    """Rows that were noted again are narrowed to what was so both times; others than proven ones are forgotten."""
    suspects = [suspect for suspect in known if suspect.proven]
    for new in noted:
        before = [old for old in known if old.meets(new) and not old.proven]
        suspects += [
            replace(
                new,
                begin=max(old.begin, new.begin),
                end=min(old.end, new.end),
                deaths=old.deaths + 1,
            )
            for old in before
        ] or [new]
    return suspects
