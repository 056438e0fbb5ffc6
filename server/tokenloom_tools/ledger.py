"""A ledger's runs backed up, restored, moved to another ledger, and checked.

A backup is a gzip file of lines of JSON: what it is, a line for each run (``RunContents``), and the SHA-256 of all
lines before the last. It is there whole or not at all."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from tokenloom_proto.seal import unseal
from tokenloom_server.errors import ConfigError, LedgerError, NotFound, TokenloomError
from tokenloom_server.ledger import refusals
from tokenloom_server.ledger.base import Ledger
from tokenloom_server.ledger.commands import Acquire, Import, Move, Release
from tokenloom_server.ledger.records import CommittedState, RunContents, StoredRun, date_of
from tokenloom_server.ledger.rules import refuse_elsewhere
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


#: Many times what one run takes, seconds. Where it is over meanwhile, and a server has taken the lease, 3. is refused.
LEASE_S = 60.0


def copy_run(source: Ledger, target: Ledger, name: str, stream: str) -> bool:
    """Moves a run, which is in one of the ledgers at any moment, wherever this is interrupted:

    1. The lease is taken where the run is: no server leads it, and none can until it is lost or let go.
    2. The run is written to the other ledger, which says that it is still elsewhere: nobody can lead it there.
    3. The first ledger says that the run is in the other one.
    4. The other one no longer says that it is elsewhere.

    Until 3. the first one has it, and from then on the other. Returns whether it was still to be moved. Raises
    ``LeaseHeld`` where a server leads it, and the errors of both ledgers: then the run is where it was, or, after 3.,
    this goes on from there when called again.
    """
    stored, present = read_whole(source, name, stream).run, target.read_run(name, stream)
    if stored.elsewhere == target.description:
        return _arrive(source, target, stored, present)
    refusal = refuse_elsewhere(name, stored.elsewhere)
    if refusal is not None:
        raise refusal
    of_run = stored.uid, stream
    # Two at once: the one that comes later has the higher epoch, and 3. refuses the other.
    holder, beyond = (
        f"tokenloom ledger copy to {target.description}",
        present.epoch if present is not None else 0,
    )
    epoch = source.execute(Acquire(*of_run, holder, LEASE_S, beyond))
    try:
        contents = read_whole(source, name, stream)
        there = target.execute(Import(*of_run, contents, elsewhere=source.description))
        source.execute(Move(*of_run, epoch, target.description))
    except TokenloomError:
        with suppress(TokenloomError):
            source.execute(Release(*of_run, epoch))
        raise
    target.execute(Move(*of_run, there, ""))
    return True


def _arrive(source: Ledger, target: Ledger, stored: StoredRun, present: StoredRun | None) -> bool:
    """Goes on after 3.; returns whether 4. was still to be done."""
    if present is None or present.uid != stored.uid:
        raise LedgerError(
            f"run {stored.name!r} was moved from {source.description} to {target.description}, which does not have it "
            f"(any more). What it was when it moved can be saved (tokenloom ledger backup) and restored there"
        )
    if present.elsewhere != source.description:
        return False
    target.execute(Move(stored.uid, stored.stream, present.epoch, ""))
    return True


_REMEDY = (
    "Restore the run from a backup (tokenloom ledger restore --replace), or begin an empty ledger and resume from a "
    "trainer's checkpoint"
)

#: Of what is not as servers write it.
_UNREADABLE = (AttributeError, KeyError, TypeError, ValueError)


def store_faults(ledger: Ledger) -> Iterator[str]:
    """What is wrong with the store itself, its settings included, a line each, with what to do."""
    looks: tuple[Callable[[], Any], ...] = (ledger.check, ledger.store_faults)
    for look in looks:
        try:
            yield from look() or ()
        except (TokenloomError, *_UNREADABLE) as error:
            yield f"{type(error).__name__}: {error}"


def run_faults(ledger: Ledger, name: str, stream: str) -> Iterator[str]:
    """What is wrong with a run, a line each, with what to do."""
    try:
        contents = read_whole(ledger, name, stream)
        faults = [*_of_lists(contents), *_of_states(contents), *_of_snapshots(contents)]
    except TokenloomError as error:
        yield f"{error.name}: {error}"
        return
    except _UNREADABLE as error:
        faults = [f"it cannot be read: {type(error).__name__}: {error}"]
    yield from (f"run {name!r}, stream {stream}: {fault}. {_REMEDY}" for fault in faults)


def _of_lists(contents: RunContents) -> list[str]:
    run, openings, revisions = contents.run, contents.openings, contents.revisions
    present, world_size = (
        (run.opening.generation, run.opening.world_size) if run.opening is not None else (0, 0)
    )
    index = run.committed.sample_index if run.committed is not None else 0
    generations = [each.generation for each in openings]
    journal = {(entry.generation, entry.sample_index): entry.state for entry in contents.journal}
    # A restore passes over samples from where it goes back to, whatever revisions hold after that.
    places = [
        each.sample_index for each in revisions if "skips" not in (_decoded(each.content) or ())
    ]
    objects = [("record", run.record), ("pin", run.pin or "{}")]
    objects += [(f"revision {each.number}", each.content) for each in revisions]
    for each in openings:
        objects += [
            (f"generation {each.generation}", text or "{}")
            for text in (each.batch_plans, each.parent_run)
        ]
    facts = {
        f"its generations {generations} are out of order, or go on from later ones": generations
        == sorted({each.generation for each in openings if each.parent < each.generation}),
        "its present generation is not the newest": [*openings[-1:]] == [run.opening]
        or run.opening is None,
        "it has a committed state or a present generation, but not both": (run.committed is None)
        == (run.opening is None),
        f"a slot is of a rank beyond its {world_size}": all(
            0 <= rank < world_size for rank in contents.slots
        ),
        "the journal lacks the start of a generation": all(
            journal.get((each.generation, each.start_index)) == each.start_state
            for each in openings
        ),
        "the journal goes beyond the committed sample": all(
            entry <= index for of, entry in journal if of == present
        ),
        "its revisions are not numbered 1, 2, …": [each.number for each in revisions]
        == [*range(1, 1 + len(revisions))],
        f"its revisions, from samples {places} on, are out of order": places == sorted(places),
        f"it has {len(revisions)} revisions, but counts fewer changes": run.revision_changes
        >= len(revisions),
    }
    no_json = [
        f"its {name} holds no JSON object" for name, text in objects if _decoded(text) is None
    ]
    return [*no_json, *(fault for fault, holds in facts.items() if not holds)]


def _of_states(contents: RunContents) -> Iterator[str]:
    """Each state has to lie in a range of sample indices."""
    begins = {opening.generation: opening.start_index for opening in contents.openings}
    states = []
    for entry in contents.journal:  # which has the openings' own
        begin = begins.get(entry.generation, entry.sample_index + 1)
        states.append(
            (
                f"the journal of generation {entry.generation}",
                begin,
                entry.sample_index,
                entry.state,
            )
        )
    committed, opening = contents.run.committed, contents.run.opening
    if committed is not None and opening is not None:
        states.append(
            ("the committed state", opening.start_index, committed.sample_index, committed.state)
        )
    for name, least, most, text in states:
        state = _decoded(text)
        if (
            state is None
            or not {"sample_index", "digest", "total_tokens", "datasets"} <= state.keys()
        ):
            yield f"{name} cannot be decoded"
        elif not least <= state["sample_index"] <= most:
            yield f"{name} has a state of sample index {state['sample_index']}; expected {least} to {most}"
        elif committed is not None and text is committed.state:
            yield from _of_counters(committed, state)
            held = {revision.sample_index for revision in contents.revisions}
            for one in state.get("revisions", ()):
                index = one["sample_index"]
                if (
                    index <= state["sample_index"]
                    and index not in held
                    and "skips" not in one["content"]
                ):
                    yield f"the committed state is under a revision from sample {index} on, and there is none"


def _of_counters(committed: CommittedState, state: dict[str, Any]) -> Iterator[str]:
    """The committed counters are those of the state and of the samples after it."""
    samples = committed.sample_index - state["sample_index"]
    left = {"samples": samples, "rows": 0, "tokens": committed.total_tokens - state["total_tokens"]}
    if not samples and state["digest"] != committed.digest:
        yield f"the committed state has digest {state['digest']}, but {committed.digest} is committed"
    sources = {source["spec"]: source for source in state["datasets"] if not source.get("unknown")}
    others = sources.keys() ^ committed.counters.keys()
    for spec in others:
        yield f"source {spec!r} is in the committed state or has counters, but not both"
    for spec in sources.keys() & committed.counters.keys():
        for name, field in (("samples", "samples"), ("rows", "rows"), ("tokens", "token_offset")):
            # What was passed over is in no counter.
            least = sources[spec].get(field, 0) - sources[spec].get(f"skipped_{name}", 0)
            actual = getattr(committed.counters[spec], name)
            left[name] -= actual - least
            if actual < least or (not samples and actual != least):
                yield f"source {spec!r} has {actual} committed {name}, but its state says {least}"
    if not others and (left["samples"] or left["tokens"]):
        yield f"of the samples and tokens after the committed state, {left} are in no source's counters"


def _of_snapshots(contents: RunContents) -> Iterator[str]:
    for snapshot in contents.snapshots:
        expected = [contents.run.name, contents.run.stream, snapshot.sample_index]
        try:
            actual = [
                unseal(snapshot.text).get(field) for field in ("run", "stream", "sample_index")
            ]
            if actual != expected:
                yield f"snapshot {snapshot.id} is of {actual}; expected {expected}"
        except ValueError as error:
            yield f"snapshot {snapshot.id}: {error}"


def _decoded(text: str) -> dict[str, Any] | None:
    """A JSON object; None where the text is none."""
    try:
        document = json.loads(text)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None
