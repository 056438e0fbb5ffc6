"""Documents at which a tokeniser crashes: they are found, named, and encoded apart, and the run goes on.

A tokeniser is native code: a document that makes it crash takes the server along, and again after each restart. So
before rows are encoded their place is noted in a mapped file: a write to memory that outlives the process. The process
that starts next finds the file and suspects what is noted there; what was noted at two deaths is encoded in a
process of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import mmap
import signal
import struct
import threading
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from tokenloom_server.errors import ConfigError, TokenizerError
from tokenloom_server.sources import arrays
from tokenloom_server.sources.base import BadRow
from tokenloom_server.storage.file import replaced
from tokenloom_server.tokenizer.choose import EngineRecord, load_engine, other_engine
from tokenloom_server.tokenizer.definition import find_tokenizer
from tokenloom_server.tokenizer.engine import Encoded, Engine, SpecialTokensInText, ragged
from tokenloom_server.workers.transforms import Transform, TransformFailed

_log = logging.getLogger(__name__)

#: Documents of one block at which the tokeniser may crash: each costs seconds, and so many are no accident.
MAX_CULPRITS = 20
#: For one text. What takes longer is no crash, and ends the run.
SECONDS = 120.0
#: What native code dies of by its own fault. A process that is killed, for want of memory or by us, says nothing of
#: the document at which it was.
CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGBUS})
#: Rows are encoded apart once the process has died at them so often. One death may have another reason: a kill, or a
#: machine without memory.
DEATHS = 2

#: Source + 1 (0: nothing is noted), shard, first row, rows.
_NOTE = struct.Struct("<4q")
#: Notes in the file: more than there are threads that encode, over all pipelines of a run.
_NOTES = 64


class EngineDescription(NamedTuple):
    """What another process needs to load a run's engine, or the other one. ``chat``: whether the tokeniser has its chat
    template."""

    tokenizer: str
    base_dir: str
    chat: bool
    special_tokens_in_text: SpecialTokensInText
    record: tuple[str, str, str]
    other: bool = False


class CrashGuard:
    """Encodes texts of one source: notes rows before they are encoded, and encodes those at which the process died
    before in a process of their own, one by one."""

    def __init__(
        self,
        engine: Engine,
        description: EngineDescription,
        crash_records: CrashRecords | None,
        *,
        source_id: int,
        spec: str,
        shard_paths: Sequence[str],
        skip_bad: bool,
    ) -> None:
        """``crash_records``: None where a process has died at these very rows, in whichever process that was.
        ``skip_bad``: a document at which both engines crash is a bad row, not an error."""
        self._engine = engine
        self._description = description
        self._crash_records = crash_records
        self._source_id = source_id
        self._spec = spec
        self._paths = shard_paths
        self._skip_bad = skip_bad

    def encode(
        self, texts: pa.LargeStringArray, first_row: int, shard: int
    ) -> tuple[Encoded, list[BadRow]]:
        """Ids of texts that begin at a shard's row, and those of them at which both engines crash."""
        rows = (self._source_id, shard, first_row, first_row + len(texts))
        records = self._crash_records
        if records is not None and not records.suspected(*rows):
            with records.noting(*rows):
                return self._engine.encode(texts), []
        where, last = f"{self._spec}: {self._paths[shard]}", rows[3] - 1
        _log.warning(
            "%s: rows %d to %d: a process died here before; they are encoded apart",
            where,
            first_row,
            last,
        )
        apart = _Apart(self._description, first_row, where, skip_bad=self._skip_bad)
        with closing(apart.process):
            try:
                for text in texts.to_pylist():
                    apart.encode(text)
            finally:
                if records is not None:
                    records.settle(
                        self._source_id, shard, first_row, apart.next_row, apart.culprits
                    )
        if not apart.culprits:
            _log.info(
                "%s: rows %d to %d: nothing died of any of them; no longer suspected",
                where,
                first_row,
                last,
            )
        return ragged(apart.ids), apart.bad


class _Apart:
    """Consecutive rows that are encoded by a process that may die of each: their ids, those at which both engines
    crash, and all at which the run's own does. ``next_row``: all before it are known."""

    def __init__(
        self, engine: EngineDescription, first_row: int, where: str, *, skip_bad: bool
    ) -> None:
        name = "tokenloom_server.workers.crashes:encoded"
        try:
            self.process = Transform(name, seconds=SECONDS, memory_mb=0)
        except ConfigError as error:
            raise _not_started(first_row, 0, error) from None
        #: The engines that its present process has loaded, by whether each is the other one.
        self._loaded: set[bool] = set()
        self.ids: list[list[int]] = []
        self.bad: list[BadRow] = []
        self.culprits: list[int] = []
        self.next_row = first_row
        self._engine = engine
        self._where = where
        self._skip_bad = skip_bad

    def encode(self, text: str) -> None:
        """The next row. Raises ``TokenizerError`` where it has no ids and is no bad row, and for too many culprits."""
        number, (engine, version) = len(self.ids), self._engine.record[1:]
        ids, death = self._try(self._engine, text)
        if death:
            self.culprits.append(self.next_row)
            if len(self.culprits) > MAX_CULPRITS:
                raise TokenizerError(
                    f"rows {', '.join(map(str, self.culprits))}: {engine} {version} crashes at each of them; install "
                    "another version of it, and begin a new run",
                    number,
                )
            fault = f"row {self.next_row}: a process that encodes this document with {engine} {version} {death}"
            ids, other_death = self._try(self._engine._replace(other=True), text)
            if other_death:
                fault = f"{fault}, and one that does so with the other engine {other_death}"
                if not self._skip_bad:
                    self.next_row += 1
                    remedy = (
                        "take the row out of the file, and begin a new run, or set on_bad_row: skip"
                    )
                    raise TokenizerError(f"{fault}; {remedy}", number)
                self.bad.append(BadRow(number, fault))
            else:
                _log.warning("%s: %s; its ids come from the other engine", self._where, fault)
        self.ids.append(ids)
        self.next_row += 1

    def _try(self, engine: EngineDescription, text: str) -> tuple[list[int], str]:
        """The ids, or how the process died of the text. Raises ``TokenizerError`` where it failed otherwise."""
        if engine.other not in self._loaded:
            # What a process dies of while it loads a tokeniser is no fault of the text that is next.
            _, death = self._ask(engine, "")
            if death:
                raise TokenizerError(
                    f"row {self.next_row}: a process that loads the tokeniser {death}, so no row can be encoded apart; "
                    "install another version of its library, and begin a new run",
                    len(self.ids),
                )
            self._loaded.add(engine.other)
        return self._ask(engine, text)

    def _ask(self, engine: EngineDescription, text: str) -> tuple[list[int], str]:
        try:
            (ids,) = self.process.made_of(arrays.strings([json.dumps([text, engine])])).to_pylist()
        except TransformFailed as error:
            if error.signal not in CRASHES:
                raise TokenizerError(
                    f"row {self.next_row}: a tokeniser in a process of its own failed: {error}; where it was killed or "
                    "late, give it memory and time, or take the row out of the file, and begin a new run",
                    len(self.ids),
                ) from None
            self._loaded.clear()
            return [], f"was ended by {signal.Signals(error.signal).name}"
        except ConfigError as error:
            raise _not_started(self.next_row, len(self.ids), error) from None
        return json.loads(ids), ""


def _not_started(row: int, number: int, error: ConfigError) -> TokenizerError:
    return TokenizerError(
        f"row {row}: a process died at it before, and none starts in which it could be encoded apart: {error}",
        number,
    )


def encoded(batch: Any) -> Any:
    """What the worker calls: of each text and ``EngineDescription``, as JSON, the ids as JSON."""
    return arrays.strings([_ids(*json.loads(each)) for each in batch.column(0).to_pylist()])


def _ids(text: str, engine: list[Any]) -> str:
    return json.dumps(_loaded(json.dumps(engine)).encode(arrays.strings([text])).values.tolist())


@lru_cache(maxsize=2)
def _loaded(text: str) -> Engine:
    engine = EngineDescription(*json.loads(text))
    definition = find_tokenizer(engine.tokenizer, Path(engine.base_dir), chat=engine.chat)
    record = EngineRecord(*engine.record)
    if engine.other:
        return other_engine(definition, record, engine.special_tokens_in_text)
    return load_engine(definition, record, engine.special_tokens_in_text, check_one_in=0)


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
