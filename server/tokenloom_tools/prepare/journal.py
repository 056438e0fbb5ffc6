"""A folder of prepared shards: which are there, and which of them are whole.

``job.json`` says what the shards are made from. ``journal.jsonl`` has a line for each that is done. A shard is written
by an attempt under a name of its own, brought to disk, renamed, and then journalled: whatever a kill leaves is either
whole and journalled, or made again.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

from tokenloom_server.config.order_fields import changes, shown
from tokenloom_server.errors import ConfigError
from tokenloom_server.sources.files import in_threads
from tokenloom_server.storage.file import checksum

from tokenloom_tools.prepare.folder import Folder
from tokenloom_tools.prepare.job import Job, Task

_log = logging.getLogger(__name__)

JOURNAL = "journal.jsonl"
#: The folder in which attempts write: what lies there belongs to a process that is at work, or to nobody.
ATTEMPTS = ".attempts"
#: Differences to what was prepared that an error lists at most.
LISTED = 10


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard that is done. ``bad_rows`` and ``filtered_rows`` are among its rows, as empty ones. ``checksum``:
    XXH3-128 of all of its bytes; ``signature``: what an object store says of them."""

    name: str
    rows: int
    bad_rows: int
    filtered_rows: int
    tokens: int
    bytes: int
    checksum: str
    signature: str = ""

    @property
    def content(self) -> dict[str, Any]:
        """What it holds, wherever it lies."""
        return {
            key: value for key, value in asdict(self).items() if key not in ("name", "signature")
        }


@dataclass(frozen=True, slots=True)
class Attempts:
    """Where the attempts of one process write. Who finds its mark there sees the folder that the process sees, and it
    is at work still."""

    folder: Folder
    name: str

    def is_open(self) -> bool:
        """Whether the mark is there."""
        return self.folder.read(f"{self.name}/mark") is not None

    def named(self, name: str, number: int) -> str:
        """The file of one attempt at a shard."""
        return f"{self.name}/{number}-{name.replace('/', '-')}"


class Journal:
    """The folder of one job, while it is worked on. Thread-safe; one process at a time has it: of two that prepare into
    the same URL, the second takes it from the first."""

    def __init__(self, attempts: Attempts, done: dict[str, Shard]) -> None:
        self.attempts = attempts
        self.folder = attempts.folder
        #: The shards that are whole, by name.
        self.done = done

    @classmethod
    @contextmanager
    def open(
        cls, folder: Folder, job: Job, on_kept: Callable[[Task, Shard], None]
    ) -> Iterator[Journal]:
        """Locks the folder, and keeps the shards that lie there whole: of a disk verified to the byte, of an object
        store by size and signature. ``on_kept`` is called with each, from any thread.

        Raises ``ConfigError`` where something else was prepared there, or lies there, or another process is at work.
        """
        refuse_others(folder)
        with folder.exclusive(JOURNAL):
            _refuse_other_job(folder, job)
            folder.remove(ATTEMPTS)
            done = _verified(folder, job, _read(folder), on_kept)
            attempts = Attempts(folder, f"{ATTEMPTS}/{secrets.token_hex(8)}")
            folder.write(f"{attempts.name}/mark", b"")
            try:
                yield cls(attempts, done)
            finally:
                # Below a URL, others may be of who came later.
                folder.remove(ATTEMPTS if folder.is_local else attempts.name)

    def add(self, shard: Shard, attempt: str) -> Shard:
        """A shard that an attempt wrote: the attempt's file becomes the shard's, and then it is journalled. Raises
        ``ConfigError`` where another process has taken the folder."""
        if not self.attempts.is_open():
            raise ConfigError(
                f"{self.folder.place}: another command prepares into it now, and took it from this one"
            )
        shard = replace(shard, signature=self.folder.move(attempt, shard.name))
        self.folder.append(JOURNAL, shard.name, json.dumps(asdict(shard)).encode())
        self.done[shard.name] = shard
        return shard


def refuse_others(folder: Folder) -> None:
    """Raises ``ConfigError`` for a folder that has something in it, and nothing that was prepared."""
    if folder.read("job.json") is not None:
        return
    # What a call leaves that was killed before it had written what it makes.
    ours = (JOURNAL, ".index", ".job.json.draft")
    others = sorted(folder.names() - {*ours})
    if others:
        raise ConfigError(
            f"{folder.place}: holds {', '.join(others[:5])} already, and nothing that was prepared; give an empty "
            "folder, or a new one"
        )


def _refuse_other_job(folder: Folder, job: Job) -> None:
    present, text = job.document(), folder.read("job.json")
    if text is None:
        folder.write("job.json", json.dumps(present, indent=1).encode() + b"\n")
        return
    try:
        recorded = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"{folder.at('job.json')}: cannot be read ({error}); prepare into another folder, or remove this one"
        ) from None
    different = [
        f"{path}: it was {shown(old)}, it is {shown(new)}"
        for path, old, new in changes(recorded, present)
    ]
    if different:
        different[LISTED:] = (
            [f"and {len(different) - LISTED} more"] if len(different) > LISTED else []
        )
        lines = "\n  ".join(["was prepared from something else:", *different])
        raise ConfigError(f"{folder.place}: {lines}\nput that back, or prepare into another folder")


def _read(folder: Folder) -> dict[str, Shard]:
    """The shards that are journalled."""
    shards = {}
    for line in folder.lines(JOURNAL):
        try:
            shard = Shard(**json.loads(line))
        except (ValueError, TypeError):
            continue
        shards[shard.name] = shard
    return shards


def _verified(
    folder: Folder, job: Job, journalled: dict[str, Shard], on_kept: Callable[[Task, Shard], None]
) -> dict[str, Shard]:
    """Of the job's shards, those that lie there as they were journalled."""
    tasks, present = {task.name: task for task in job.tasks}, folder.entries("sources")
    for name in present:
        if name.endswith(".draft"):
            folder.remove(name)
        elif name not in tasks:
            raise ConfigError(
                f"{folder.at(name)}: is no shard of this job, and would be served with them; take it away"
            )

    def is_whole(shard: Shard) -> bool:
        if fault := _fault(folder, shard, present.get(shard.name)):
            _log.warning("%s %s: it is made again", folder.at(shard.name), fault)
        else:
            on_kept(tasks[shard.name], shard)
        return fault is None

    known = [shard for name, shard in journalled.items() if name in tasks]
    whole = in_threads(is_whole, known)
    return {shard.name: shard for shard in compress(known, whole)}


def _fault(folder: Folder, shard: Shard, present: tuple[int, str] | None) -> str | None:
    if present is None:
        return "cannot be read (No such file or directory)"
    size, signature = present
    if size != shard.bytes:
        return f"has {size} bytes, but it was written with {shard.bytes}"
    if signature != shard.signature:
        return f"has signature {signature}, but it was written with {shard.signature}"
    if folder.is_local and (actual := checksum(Path(folder.at(shard.name)))) != shard.checksum:
        return f"has checksum {actual}, but it was written with {shard.checksum}"
    return None
