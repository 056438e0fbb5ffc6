"""A ledger in memory: the rules and nothing else, for worlds that are simulated in one process.

What it holds is a ``Store``, which outlives the ledgers that servers open on it, and can be copied: a store that
went back to a copy has lost what was written since.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from tokenloom_server.ledger import commands
from tokenloom_server.ledger.base import Ledger
from tokenloom_server.ledger.commands import Command
from tokenloom_server.ledger.records import (
    CommittedState,
    JournalEntry,
    Lease,
    Opening,
    RunContents,
    StoredRevision,
    StoredRun,
    StoredSnapshot,
)
from tokenloom_server.ledger.rules import Head, Writes, decide, refuse_elsewhere, refuse_uid


@dataclass(slots=True)
class Run:
    """One run, as the store has it."""

    name: str
    stream: str
    uid: str
    record: str
    epoch: int = 0
    generation: int = 0
    opening_mark: str = ""
    committed: CommittedState | None = None
    committed_at: float | None = None
    pin: str | None = None
    pin_number: int = 0
    revision_changes: int = 0
    closed_generation: int = 0
    elsewhere: str = ""
    lease: Lease | None = None
    openings: list[Opening] = field(default_factory=list)
    slots: dict[int, str] = field(default_factory=dict)
    #: By generation, by sample index.
    journal: dict[int, dict[int, str]] = field(default_factory=dict)
    snapshots: dict[str, StoredSnapshot] = field(default_factory=dict)
    revisions: list[StoredRevision] = field(default_factory=list)

    def copy(self) -> Run:
        return replace(
            self,
            openings=list(self.openings),
            slots=dict(self.slots),
            journal={generation: dict(entries) for generation, entries in self.journal.items()},
            snapshots=dict(self.snapshots),
            revisions=list(self.revisions),
        )


class Store:
    """What would lie on a disk."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.runs: dict[tuple[str, str], Run] = {}
        #: By a former uid and stream: the run's name.
        self.former: dict[tuple[str, str], str] = {}

    def copy(self) -> Store:
        """The store as it is now; nothing is shared."""
        made = Store()
        made.runs = {key: run.copy() for key, run in self.runs.items()}
        made.former = dict(self.former)
        return made

    def become(self, other: Store) -> None:
        """Takes the content of a copy: all that was written since is lost."""
        again = other.copy()
        self.runs, self.former = again.runs, again.former

    def run(self, uid: str, stream: str) -> Run | None:
        """The run that has the uid, or had it."""
        for run in self.runs.values():
            if (run.uid, run.stream) == (uid, stream):
                return run
        return self.runs.get((self.former.get((uid, stream), ""), stream))


class MemoryLedger(Ledger):
    """See ``Ledger``."""

    description = "memory"

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock

    def check(self) -> None:
        """Memory is as safe as the process."""

    def close(self) -> None:
        """The store stays."""

    # Writes.

    def execute(self, command: Command) -> int:
        with self._store.lock:
            return self._execute_alone(command)

    def _execute_alone(self, command: Command) -> int:
        run = self._store.run(command.uid, command.stream)
        if isinstance(command, commands.Import):
            run = self._store.runs.get((command.contents.run.name, command.stream)) or run
        head = None if run is None else self.head(run, command)
        decision = decide(head, command)
        if not isinstance(decision, Writes):
            raise decision
        if decision.created is not None:
            made = decision.created
            self._store.runs[made.name, made.stream] = Run(
                made.name, made.stream, made.uid, made.record
            )
        elif run is not None and head is not None:
            self._write(run, head, decision)
        if decision.contents is not None:
            self._put_contents(decision.contents)
        return decision.answer

    def head(self, run: Run, command: Command) -> Head:
        """What the rules look at."""
        items: dict[str, Any] = {}
        match command:
            case commands.Open(opening=opening):
                generations = {used.attempt: used.generation for used in run.openings}
                items = {"attempt_generation": generations.get(opening.attempt)}
            case commands.ClaimSlot(rank=rank):
                items = {"slot_nonce": run.slots.get(rank)}
            case commands.SaveSnapshot(snapshot=snapshot) if snapshot.id in run.snapshots:
                items = {"snapshot_text": run.snapshots[snapshot.id].text}
            case commands.Adopt(new_uid=uid) | commands.Import(uid=uid):
                holder = self._store.run(uid, run.stream)
                items = {
                    "uid_holder": holder.name if holder is not None and holder.uid == uid else None
                }
            case commands.Revise(revision=revision):
                numbers = {each.number: each for each in run.revisions}
                newest = run.revisions[-1] if run.revisions else None
                items = {"newest_revision": newest, "same_number": numbers.get(revision.number)}
        return Head(
            now=self._clock(),
            name=run.name,
            uid=run.uid,
            epoch=run.epoch,
            lease=run.lease,
            generation=run.generation,
            opening_mark=run.opening_mark,
            sample_index=run.committed.sample_index if run.committed is not None else 0,
            digest=run.committed.digest if run.committed is not None else "",
            revision_changes=run.revision_changes,
            closed_generation=run.closed_generation,
            elsewhere=run.elsewhere,
            pin_number=run.pin_number,
            **items,
        )

    def _put_contents(self, contents: RunContents) -> None:
        stored = contents.run
        run = self._store.runs[stored.name, stored.stream]
        for name in ("record", "epoch", "committed", "committed_at", "pin", "lease"):
            setattr(run, name, getattr(stored, name))
        run.revision_changes, run.closed_generation = (
            stored.revision_changes,
            stored.closed_generation,
        )
        run.elsewhere, run.opening_mark = stored.elsewhere, ""
        run.generation = stored.opening.generation if stored.opening is not None else 0
        run.openings, run.slots = list(contents.openings), dict(contents.slots)
        run.revisions, run.snapshots = (
            list(contents.revisions),
            {each.id: each for each in contents.snapshots},
        )
        run.journal = {}
        for entry in contents.journal:
            run.journal.setdefault(entry.generation, {})[entry.sample_index] = entry.state

    def _write(self, run: Run, head: Head, writes: Writes) -> None:
        if "uid" in writes.run:
            self._store.former.pop((writes.run["uid"], run.stream), None)
            self._store.former[run.uid, run.stream] = run.name
        for name, value in writes.run.items():
            setattr(run, name, value)
        run.lease = writes.lease or run.lease
        if writes.opening is not None:
            run.openings.append(writes.opening)
            run.slots.clear()
        if writes.committed is not None:
            run.committed, run.committed_at = writes.committed, head.now
        if (entry := writes.journal_entry) is not None:
            run.journal.setdefault(entry.generation, {})[entry.sample_index] = entry.state
        if writes.thin_journal:
            run.journal = {
                each: dict(sorted(entries.items())[::2]) for each, entries in run.journal.items()
            }
        if writes.slot is not None:
            run.slots.update([writes.slot])
        if writes.revision is not None:
            run.revisions.append(writes.revision)
        if writes.drop_revisions is not None:
            run.revisions = [
                revision for revision in run.revisions if revision.number < writes.drop_revisions
            ]
        if writes.snapshot is not None:
            run.snapshots[writes.snapshot.id] = writes.snapshot

    # Runs by name.

    def create_run(self, name: str, stream: str, uid: str, record: str) -> StoredRun:
        with self._store.lock:
            run = self._store.runs.get((name, stream))
            if run is not None and (refusal := refuse_elsewhere(name, run.elsewhere)) is not None:
                raise refusal
            if run is None:
                self._execute_alone(commands.Create(uid, stream, name, record))
            return _stored(self._store.runs[name, stream])

    def read_run(self, name: str, stream: str) -> StoredRun | None:
        with self._store.lock:
            run = self._store.runs.get((name, stream))
            return None if run is None else _stored(run)

    def read_all(self, name: str, stream: str) -> RunContents | None:
        with self._store.lock:
            run = self._store.runs.get((name, stream))
            if run is None:
                return None
            return RunContents(
                run=_stored(run),
                openings=list(run.openings),
                slots=dict(sorted(run.slots.items())),
                journal=[
                    JournalEntry(generation=generation, sample_index=index, state=state)
                    for generation, entries in sorted(run.journal.items())
                    for index, state in sorted(entries.items())
                ],
                revisions=list(run.revisions),
                snapshots=sorted(
                    run.snapshots.values(),
                    key=lambda each: (each.saved_at, each.sample_index, each.id),
                ),
            )

    def store_faults(self) -> Sequence[str]:
        return []

    def run_names(self) -> Sequence[tuple[str, str]]:
        with self._store.lock:
            return sorted(self._store.runs)

    # A run's lists.

    def openings(self, uid: str, stream: str) -> Sequence[Opening]:
        with self._reading(uid, stream) as run:
            return list(run.openings)

    def journal(self, uid: str, stream: str, generation: int, at_most: int) -> JournalEntry | None:
        with self._reading(uid, stream) as run:
            entries = run.journal.get(generation, {})
            index = max((index for index in entries if index <= at_most), default=None)
            if index is None:
                return None
            return JournalEntry(generation=generation, sample_index=index, state=entries[index])

    def journal_size(self, uid: str, stream: str) -> tuple[int, int]:
        with self._reading(uid, stream) as run:
            states = [state for entries in run.journal.values() for state in entries.values()]
            return len(states), sum(len(state.encode()) for state in states)

    def revisions(self, uid: str, stream: str) -> Sequence[StoredRevision]:
        with self._reading(uid, stream) as run:
            return list(run.revisions)

    def snapshots(self, uid: str, stream: str) -> Sequence[StoredSnapshot]:
        with self._reading(uid, stream) as run:
            return sorted(
                run.snapshots.values(),
                key=lambda saved: (-saved.saved_at, -saved.sample_index, saved.id),
            )

    def snapshot_count(self, uid: str, stream: str) -> int:
        return len(self.snapshots(uid, stream))

    def snapshot(self, uid: str, stream: str, snapshot_id: str) -> StoredSnapshot | None:
        with self._reading(uid, stream) as run:
            return run.snapshots.get(snapshot_id)

    @contextmanager
    def _reading(self, uid: str, stream: str) -> Iterator[Run]:
        with self._store.lock:
            run = self._store.run(uid, stream)
            refusal = refuse_uid(uid, stream, None if run is None else run.uid)
            if refusal is not None:
                raise refusal
            assert run is not None
            yield run


def _stored(run: Run) -> StoredRun:
    return StoredRun(
        name=run.name,
        stream=run.stream,
        uid=run.uid,
        record=run.record,
        epoch=run.epoch,
        opening=run.openings[-1] if run.openings else None,
        committed=run.committed,
        committed_at=run.committed_at,
        pin=run.pin,
        lease=run.lease,
        revision_changes=run.revision_changes,
        closed_generation=run.closed_generation,
        elsewhere=run.elsewhere,
    )
