"""A ledger's backup: one file with whole runs in it, which is there whole or not at all.

It is a gzip file of lines of JSON: what it is, a line for each run (``RunContents``), and the SHA-256 of all lines
before the last.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pydantic import TypeAdapter
from tokenloom_server.errors import ConfigError, LedgerError, NotFound
from tokenloom_server.ledger import refusals
from tokenloom_server.ledger.base import Ledger
from tokenloom_server.ledger.commands import Import
from tokenloom_server.ledger.records import RunContents, date_of
from tokenloom_server.storage.file import draft_of, publish

#: What the first line says.
FORMAT, VERSION = "tokenloom ledger backup", 2
_RUN = TypeAdapter(RunContents)


def run_names(ledger: Ledger, run: str | None) -> Sequence[tuple[str, str]]:
    """(name, stream) of every run, or of all streams of one. Raises ``NotFound`` where it is not there."""
    names = ledger.run_names()
    chosen = [name for name in names if run in (None, name[0])]
    if run is not None and not chosen:
        raise NotFound(
            f"{ledger.description} has no run {run!r}; it has {sorted({name for name, _ in names})}"
        )
    return chosen


def read_whole(ledger: Ledger, name: str, stream: str) -> RunContents:
    """All of a run. Raises ``NotFound`` where it is not there, and ``LedgerError`` where it cannot be read."""
    try:
        contents = ledger.read_all(name, stream)
        if contents is not None:
            # A SQLite column takes values of any type.
            _RUN.validate_json(_RUN.dump_json(contents, warnings=False))
    except (KeyError, TypeError, ValueError) as error:
        raise LedgerError(
            f"run {name!r}, stream {stream}, cannot be read: {type(error).__name__}: {error}. Restore it from a backup "
            "(tokenloom ledger restore)"
        ) from error
    if contents is None:
        raise NotFound(f"{ledger.description} has no run {name!r}, stream {stream}")
    return contents


def back_up(ledger: Ledger, names: Iterable[tuple[str, str]], path: Path) -> None:
    """Writes runs to a new file of mode 0600, each as it is at one moment. Raises ``ConfigError`` where the file is
    there or cannot be written, and the ledger's errors."""
    if path.exists():
        raise ConfigError(f"{path} exists, and a backup replaces no file: name another one")
    draft, digest = draft_of(path), hashlib.sha256()
    try:
        draft.unlink(missing_ok=True)
        with (
            os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as raw,
            gzip.GzipFile("", "wb", fileobj=raw) as file,
        ):
            for line in _lines(ledger, names):
                digest.update(line)
                file.write(line)
            file.write(json.dumps({"sha256": digest.hexdigest()}).encode())
        publish(draft, path)
    except OSError as error:
        raise ConfigError(
            f"the backup {path} cannot be written: {error}; name a file in an existing folder"
        ) from error
    finally:
        if draft.parent.is_dir():
            draft.unlink(missing_ok=True)


def _lines(ledger: Ledger, names: Iterable[tuple[str, str]]) -> Iterator[bytes]:
    head = {
        "format": FORMAT,
        "version": VERSION,
        "ledger": ledger.description,
        "made": date_of(ledger.clock()),
    }
    yield json.dumps(head).encode() + b"\n"
    for name, stream in names:
        yield _RUN.dump_json(read_whole(ledger, name, stream)) + b"\n"


def saved_runs(path: Path, run: str | None) -> Iterator[RunContents]:
    """The runs of a backup, or all streams of one, once the whole file has been found to be as it was written. Raises
    ``LedgerError`` for a file that is not."""
    try:
        digest, last, count = hashlib.sha256(), b"", 0
        with gzip.open(path) as file:
            digest.update(first := file.readline())
            for line in file:
                digest.update(last)
                last, count = line, count + 1
        head = json.loads(first)
        if head["format"] != FORMAT or json.loads(last)["sha256"] != digest.hexdigest():
            raise ValueError("its checksum is another one")
        if head["version"] != VERSION:
            raise LedgerError(
                f"{path} is a backup of version {head['version']}, this release has {VERSION}: restore it with the "
                "Tokenloom release that wrote it"
            )
        with gzip.open(path) as file:
            saved = (
                _RUN.validate_json(line) for number, line in enumerate(file) if 0 < number < count
            )
            chosen = (contents for contents in saved if run in (None, contents.run.name))
            yield from chosen
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise LedgerError(
            f"{path} is not a whole backup of a ledger: {error}. Take another one"
        ) from error


def restore(path: Path, run: str | None, ledger: Ledger, *, replace: bool) -> Iterator[RunContents]:
    """Writes the runs of a backup, or one, to a ledger, each as a whole; gives each that is written. Nothing is written
    where the ledger has one of them, but with ``replace``. Raises what ``Import`` does, and ``NotFound``."""
    count = 0
    for contents in saved_runs(path, run):
        count, stored = count + 1, contents.run
        if not replace and (present := ledger.read_run(stored.name, stored.stream)) is not None:
            index = present.committed.sample_index if present.committed is not None else 0
            raise refusals.is_there(Import(stored.uid, stored.stream, contents), present.uid, index)
    if run is not None and not count:
        raise NotFound(f"{path} has no run {run!r}")
    for contents in saved_runs(path, run):
        stored = contents.run
        ledger.execute(
            Import(stored.uid, stored.stream, contents, from_backup=True, replace=replace)
        )
        yield contents
