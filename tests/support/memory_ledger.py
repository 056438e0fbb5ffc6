"""A ledger in memory: the contract's plainest form, for worlds that are simulated in one process.

What it holds is a ``Store``, which outlives the ledgers that servers open on it, and can be copied: a store that
went back to a copy has lost what was written since.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tokenloom_server.errors import NotFound
from tokenloom_server.ledger import refusals
from tokenloom_server.ledger.base import (
    Commit,
    JournalEntry,
    Lease,
    Opening,
    StoredRevision,
    StoredRun,
    StoredSnapshot,
)


@dataclass(slots=True)
class Run:
    """One run, as the store has it."""

    name: str
    stream: str
    uid: str
    record: str
    epoch: int = 0
    #: What the last opening was made of, so that a repetition is known.
    mark: str = ""
    committed: Commit | None = None
    committed_at: float | None = None
    pin: str | None = None
    lease: Lease | None = None
    openings: list[Opening] = field(default_factory=list)
    slots: dict[int, str] = field(default_factory=dict)
    #: By generation, by sample index.
    journal: dict[int, dict[int, str]] = field(default_factory=dict)
    snapshots: dict[str, StoredSnapshot] = field(default_factory=dict)
    revisions: list[StoredRevision] = field(default_factory=list)

    @property
    def generation(self) -> int:
        return self.openings[-1].generation if self.openings else 0

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
        #: By a uid of before and stream: the run's name.
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

    def run(self, uid: str, stream: str) -> Run:
        """Raises ``NotFound``, or ``NotLeader`` where the run has another uid by now."""
        for run in self.runs.values():
            if (run.uid, run.stream) == (uid, stream):
                return run
        name = self.former.get((uid, stream))
        found = self.runs.get((name, stream)) if name is not None else None
        raise refusals.no_such_run(uid, stream) if found is None else refusals.renamed(uid, stream, found.uid)


class MemoryLedger:
    """See ``Ledger``."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock

    @property
    def description(self) -> str:
        return "memory"

    def check(self) -> None:
        """Memory is as safe as the process."""

    def create_run(self, name: str, stream: str, uid: str, record: str) -> StoredRun:
        with self._store.lock:
            run = self._store.runs.get((name, stream))
            if run is None:
                self._refuse_taken(uid, stream, name)
                run = self._store.runs[name, stream] = Run(name, stream, uid, record)
            return self._stored(run)

    def read_run(self, name: str, stream: str) -> StoredRun | None:
        with self._store.lock:
            run = self._store.runs.get((name, stream))
            return None if run is None else self._stored(run)

    def run_names(self) -> Sequence[tuple[str, str]]:
        with self._store.lock:
            return sorted(self._store.runs)

    def acquire(self, uid: str, stream: str, holder: str, lease_s: float, above: int = 0) -> int:
        with self._store.lock:
            run, now = self._store.run(uid, stream), self._clock()
            lease = run.lease
            if lease is not None and lease.holder != holder and lease.left_s(now):
                raise refusals.lease_held(uid, stream, lease.holder, lease.acquired_at, lease.left_s(now))
            run.epoch = max(run.epoch, above) + 1
            heard_at = None if lease is None else lease.heard_at
            run.lease = Lease(
                holder=holder, acquired_at=now, lapses_at=now + lease_s, lasts_s=lease_s, heard_at=heard_at
            )
            return run.epoch

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
        with self._store.lock:
            run = self._led(uid, stream, epoch)
            found = run.generation, run.committed.sample_index if run.committed is not None else 0
            if found[0] < generation or (found[0] == generation and found[1] < known):
                raise refusals.rolled_back(uid, stream, *found, generation, known)
            if run.lease is None or run.lease.holder != holder:
                raise refusals.given_out_twice(run.name, epoch, None if run.lease is None else run.lease.holder)
            run.lease = replace(run.lease, lapses_at=self._clock() + lease_s, lasts_s=lease_s, heard_at=heard_at)

    def release(self, uid: str, stream: str, epoch: int) -> None:
        with self._store.lock:
            run = self._led(uid, stream, epoch)
            if run.lease is not None:
                run.lease = replace(run.lease, lapses_at=0.0)

    def adopt(self, uid: str, stream: str, epoch: int, new_uid: str) -> None:
        with self._store.lock:
            former = self._store.former.get((uid, stream))
            now = self._store.runs.get((former, stream)) if former is not None else None
            if now is not None and now.uid == new_uid:  # a repetition
                self._led(new_uid, stream, epoch)
                return
            run = self._led(uid, stream, epoch)
            if run.generation:
                raise refusals.opened_already(uid, stream, run.generation, new_uid)
            if new_uid == uid:
                return
            self._refuse_taken(new_uid, stream, run.name)
            run.uid = new_uid
            self._store.former.pop((new_uid, stream), None)
            self._store.former[uid, stream] = run.name

    def open(self, uid: str, stream: str, epoch: int, opening: Opening, committed: Commit) -> None:
        refusals.check_commit(uid, stream, committed)
        mark = refusals.opening_mark(epoch, opening, committed)
        with self._store.lock:
            run = self._led(uid, stream, epoch)
            if opening.generation == run.generation and mark == run.mark:  # a repetition
                return
            for used in run.openings:
                if used.attempt == opening.attempt:
                    raise refusals.attempt_used(uid, stream, opening.attempt, used.generation)
            if opening.generation <= run.generation:
                raise refusals.generation_too_low(uid, stream, run.generation, opening.generation)
            run.openings.append(opening)
            run.mark, run.pin = mark, None
            run.slots.clear()
            run.committed, run.committed_at = committed, self._clock()
            run.journal[opening.generation] = {opening.start_index: opening.start_state}

    def claim_slot(self, uid: str, stream: str, epoch: int, generation: int, rank: int, nonce: str) -> None:
        with self._store.lock:
            run = self._led(uid, stream, epoch)
            self._fence(run, generation)
            if run.slots.setdefault(rank, nonce) != nonce:
                raise refusals.slot_taken(uid, stream, generation, rank)

    def commit(
        self, uid: str, stream: str, epoch: int, generation: int, commit: Commit, journal: bool, known: int = 0
    ) -> int:
        refusals.check_commit(uid, stream, commit)
        with self._store.lock:
            run = self._led(uid, stream, epoch)
            self._fence(run, generation)
            assert run.committed is not None
            index, digest = run.committed.sample_index, run.committed.digest
            if index < known:
                raise refusals.rolled_back(uid, stream, generation, index, generation, known)
            if commit.sample_index == index and commit.digest != digest:
                raise refusals.order_mismatch(uid, stream, index, digest, commit.digest)
            if self._is_done(commit, index):
                return index
            run.committed, run.committed_at = commit, self._clock()
            if journal:
                run.journal[generation][commit.sample_index] = commit.state
        return commit.sample_index

    def openings(self, uid: str, stream: str) -> Sequence[Opening]:
        with self._store.lock:
            return list(self._store.run(uid, stream).openings)

    def journal(self, uid: str, stream: str, generation: int, at_most: int) -> JournalEntry | None:
        with self._store.lock:
            entries = self._store.run(uid, stream).journal.get(generation, {})
            index = max((index for index in entries if index <= at_most), default=None)
            if index is None:
                return None
            return JournalEntry(generation=generation, sample_index=index, state=entries[index])

    def journal_size(self, uid: str, stream: str) -> tuple[int, int]:
        with self._store.lock:
            run = self._store.run(uid, stream)
            states = [state for entries in run.journal.values() for state in entries.values()]
            return len(states), sum(len(state.encode()) for state in states)

    def thin_journal(self, uid: str, stream: str, epoch: int) -> None:
        with self._store.lock:
            run = self._led(uid, stream, epoch)
            for generation, entries in run.journal.items():
                run.journal[generation] = dict(sorted(entries.items())[::2])

    def pin(self, uid: str, stream: str, epoch: int, pin: str | None) -> None:
        with self._store.lock:
            self._led(uid, stream, epoch).pin = pin

    def revise(self, uid: str, stream: str, epoch: int, revision: StoredRevision) -> None:
        refusals.check_revision(uid, stream, revision)
        with self._store.lock:
            run = self._led(uid, stream, epoch)
            if revision in run.revisions:  # a repetition
                return
            newest = run.revisions[-1].number if run.revisions else 0
            if revision.number != newest + 1:
                raise refusals.revision_number(uid, stream, newest, revision.number)
            if run.revisions and revision.sample_index < (found := run.revisions[-1].sample_index):
                raise refusals.revision_too_early(uid, stream, newest, found, revision.sample_index)
            run.revisions.append(revision)

    def revisions(self, uid: str, stream: str) -> Sequence[StoredRevision]:
        with self._store.lock:
            return list(self._store.run(uid, stream).revisions)

    def drop_revisions(self, uid: str, stream: str, epoch: int, number: int) -> None:
        with self._store.lock:
            run = self._led(uid, stream, epoch)
            run.revisions = [revision for revision in run.revisions if revision.number < number]

    def save_snapshot(self, uid: str, stream: str, snapshot: StoredSnapshot) -> None:
        with self._store.lock:
            saved = self._store.run(uid, stream).snapshots.setdefault(snapshot.id, snapshot)
            if saved.text != snapshot.text:
                raise refusals.snapshot_differs(uid, stream, snapshot.id)

    def snapshots(self, uid: str, stream: str) -> Sequence[StoredSnapshot]:
        with self._store.lock:
            found = self._store.run(uid, stream).snapshots.values()
            return sorted(found, key=lambda saved: (-saved.saved_at, -saved.sample_index, saved.id))

    def snapshot(self, uid: str, stream: str, snapshot_id: str) -> StoredSnapshot | None:
        with self._store.lock:
            return self._store.run(uid, stream).snapshots.get(snapshot_id)

    def close(self) -> None:
        """The store stays."""

    # What the writes check; mutants leave one out.

    def _led(self, uid: str, stream: str, epoch: int) -> Run:
        try:
            run = self._store.run(uid, stream)
        except NotFound:
            raise refusals.gone(uid, stream) from None
        if run.epoch != epoch:
            raise refusals.not_leader(uid, stream, run.epoch, epoch)
        return run

    def _fence(self, run: Run, generation: int) -> None:
        if not run.generation or run.generation != generation:
            raise refusals.fenced(run.uid, run.stream, run.generation, generation)

    def _is_done(self, commit: Commit, committed: int) -> bool:
        return commit.sample_index <= committed

    def _refuse_taken(self, uid: str, stream: str, name: str) -> None:
        for run in self._store.runs.values():
            if (run.uid, run.stream) == (uid, stream):
                raise refusals.uid_taken(uid, stream, name, run.name)

    def _stored(self, run: Run) -> StoredRun:
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
        )
