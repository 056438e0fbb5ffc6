"""A folder of prepared shards: which are there, and which of them are whole.

``job.json`` says what the shards are made from. ``journal.jsonl`` has a line for each that is done. A shard is written
under a temporary name, brought to disk, renamed, and then journalled: whatever a kill leaves is either whole and
journalled, or made again.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import compress
from pathlib import Path
from typing import IO, Any

from tokenloom_server.errors import ConfigError
from tokenloom_server.prepare.job import Job, Task
from tokenloom_server.sources.files import in_threads
from tokenloom_server.storage.drafts import checksum, draft_of, publish, write_whole

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard that is done. ``bad_rows`` and ``filtered_rows`` are among its rows, as empty ones. ``checksum``:
    XXH3-128 of all of its bytes."""

    name: str
    rows: int
    bad_rows: int
    filtered_rows: int
    tokens: int
    bytes: int
    checksum: str

    @property
    def content(self) -> dict[str, Any]:
        """All but its name."""
        return {key: value for key, value in asdict(self).items() if key != "name"}


class Journal:
    """The folder of one job, while it is worked on. Thread-safe; one process at a time has it."""

    def __init__(self, folder: Path, file: IO[bytes], done: dict[str, Shard]) -> None:
        self.folder = folder
        self._file = file
        self._done = done
        self._lock = threading.Lock()

    @classmethod
    @contextmanager
    def open(cls, folder: Path, job: Job, on_kept: Callable[[Task, Shard], None]) -> Iterator[Journal]:
        """Locks the folder, and keeps the shards that lie there whole, verified to the byte; ``on_kept`` is called with
        each, from any thread.

        Raises ``ConfigError`` where something else was prepared there, or lies there, or another process is at work.
        """
        refuse_others(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "journal.jsonl").open("a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError(f"{folder}: another process prepares into it now; wait for it, or end it") from None
            _refuse_other_job(folder, job)
            yield cls(folder, file, _verified(folder, job, _read(file), on_kept))

    def is_done(self, task: Task) -> bool:
        return task.name in self._done

    def shard(self, task: Task) -> Shard:
        return self._done[task.name]

    @contextmanager
    def draft(self, task: Task) -> Iterator[Path]:
        """Where a task's shard is to be written; what lies there at the end, and was not added, is removed."""
        path = self.folder / task.name
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = draft_of(path)
        try:
            yield draft
        finally:
            draft.unlink(missing_ok=True)

    def add(self, shard: Shard, draft: Path) -> None:
        """A shard that is written: its draft becomes its file, and then it is journalled."""
        publish(draft, self.folder / shard.name)
        with self._lock:
            self._file.write(json.dumps(asdict(shard)).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
            self._done[shard.name] = shard


def refuse_others(folder: Path) -> None:
    """Raises ``ConfigError`` for a folder that has something in it, and nothing that was prepared."""
    if not folder.is_dir() or (folder / "job.json").exists():
        return
    # What a call leaves that was killed before it had written what it makes.
    ours = ("journal.jsonl", ".index", ".job.json.draft")
    others = sorted(entry.name for entry in folder.iterdir() if entry.name not in ours)
    if others:
        raise ConfigError(
            f"{folder}: holds {', '.join(others[:5])} already, and nothing that was prepared; give an empty folder, or "
            "a new one"
        )


def _refuse_other_job(folder: Path, job: Job) -> None:
    path = folder / "job.json"
    present = job.document()
    if not path.exists():
        write_whole(path, json.dumps(present, indent=1) + "\n")
        return
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({error}); prepare into another folder, or remove this one"
        ) from None
    differences = list(_differences(recorded, present, ""))
    if differences:
        more = f"\n  and {len(differences) - 10} more" if len(differences) > 10 else ""
        raise ConfigError(
            f"{folder}: was prepared from something else:\n  "
            + "\n  ".join(differences[:10])
            + f"{more}\nput that back, or prepare into another folder"
        )


def _differences(recorded: Any, present: Any, path: str) -> Iterator[str]:
    if isinstance(recorded, dict) and isinstance(present, dict):
        for key in sorted(recorded.keys() | present.keys()):
            yield from _differences(recorded.get(key), present.get(key), f"{path}.{key}" if path else key)
    elif isinstance(recorded, list) and isinstance(present, list) and len(recorded) == len(present):
        for i, (old, new) in enumerate(zip(recorded, present, strict=True)):
            yield from _differences(old, new, f"{path}.{i}")
    elif recorded != present:
        yield f"{path}: it was {_short(recorded)}, it is {_short(present)}"


def _short(value: Any) -> str:
    if isinstance(value, list):
        names = [str(each.get("path") or each.get("source")) if isinstance(each, dict) else str(each) for each in value]
        return f"{len(value)}: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
    return "nothing" if value is None else json.dumps(value, ensure_ascii=False)


def _read(file: IO[bytes]) -> dict[str, Shard]:
    """The lines of a journal; a partly written last one is cut off."""
    file.seek(0)
    shards, end = {}, 0
    for line in file.read().splitlines(keepends=True):
        try:
            shard = Shard(**json.loads(line))
        except (ValueError, TypeError):
            break
        if not line.endswith(b"\n"):
            break
        shards[shard.name] = shard
        end += len(line)
    file.truncate(end)
    file.seek(end)
    return shards


def _verified(
    folder: Path, job: Job, journalled: dict[str, Shard], on_kept: Callable[[Task, Shard], None]
) -> dict[str, Shard]:
    """Of the job's shards, those that lie there as they were journalled."""
    tasks = {task.name: task for task in job.tasks}
    for prepared in job.sources:
        for path in sorted((folder / prepared.folder).glob("*")):
            if path.name.endswith(".draft"):
                path.unlink()
            elif f"{prepared.folder}/{path.name}" not in tasks:
                raise ConfigError(f"{path}: is no shard of this job, and would be served with them; take it away")

    def is_whole(shard: Shard) -> bool:
        if fault := _fault(folder, shard):
            _log.warning("%s %s: it is made again", folder / shard.name, fault)
        else:
            on_kept(tasks[shard.name], shard)
        return fault is None

    known = [shard for name, shard in journalled.items() if name in tasks]
    whole = in_threads(is_whole, known)
    return {shard.name: shard for shard in compress(known, whole)}


def _fault(folder: Path, shard: Shard) -> str | None:
    path = folder / shard.name
    try:
        size = path.stat().st_size
        if size != shard.bytes:
            return f"has {size} bytes, but it was written with {shard.bytes}"
        actual = checksum(path)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if actual == shard.checksum else f"has checksum {actual}, but it was written with {shard.checksum}"
