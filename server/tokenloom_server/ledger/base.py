"""What a run asks of the ledger. Two implementations, one contract (``tests/contract/test_ledger.py``).

Every write after ``acquire`` names the server epoch, and every write inside a generation names that
too; both are checked in the same atomic operation as the write. A run is (uid, stream).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

#: By so much the ledger's clock may go back without a lease being taken for one of before, seconds.
CLOCK_SLACK_S = 1.0


def date_of(unix_s: float) -> str:
    """A Unix time as people read it."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """One generation of a run, as written by the opening. Generations count from 1."""

    generation: int
    #: The generation that the start state was taken in; 0 where there is none.
    parent: int
    attempt: str
    world_size: int
    batch_size: int
    #: Steps between two state boundaries.
    group_steps: int
    start_index: int
    #: Canonical JSON of the state at ``start_index``.
    start_state: str
    #: Unix time in seconds, for people.
    opened_at: float
    #: Samples of the order that were jumped over right before ``start_index``.
    skipped: int = 0
    #: Canonical JSON about the run that this one was forked from; empty where it was not.
    parent_run: str = ""
    #: How the batch size changes, and steps of an optimiser step, as JSON; empty where every step has ``batch_size``
    #: and is one. ``batch_size`` and ``group_steps`` are those of the first step.
    ramp: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Committed counters of one source, keyed by its spec."""

    samples: int
    rows: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A committed state. ``state`` is canonical JSON; ``counters`` are keyed by spec."""

    sample_index: int
    total_tokens: int
    digest: str
    state: str
    counters: Mapping[str, Counters]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Which server serves a run, and until when by the ledger's own clock (Unix time, seconds)."""

    holder: str
    acquired_at: float
    lapses_at: float
    #: For how long it was granted, seconds.
    lasts_s: float
    #: When every rank of the present generation had been heard last, as its server told; None where one was not.
    heard_at: float | None

    def left_s(self, now: float) -> float:
        """How long it still lasts, seconds. None of it where the clock has gone back so far that it would last longer
        than it was granted for: that is no reason to wait for hours."""
        left = self.lapses_at - now
        return left if 0 < left <= self.lasts_s + CLOCK_SLACK_S else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A run as the ledger holds it. ``record`` is canonical JSON that never changes."""

    name: str
    stream: str
    uid: str
    record: str
    epoch: int
    #: None before the first generation.
    opening: Opening | None
    committed: Commit | None
    #: Unix time of the last commit; None before the first.
    committed_at: float | None
    #: Canonical JSON of the pinned resume point; None where nothing is pinned.
    pin: str | None
    #: None before the first server.
    lease: Lease | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """A past committed state, from which later samples can be computed again."""

    generation: int
    sample_index: int
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRevision:
    """A change of the run from a sample index on. Revisions count from 1, and never go back in the order."""

    number: int
    sample_index: int
    #: Unix time in seconds, for people; so are the author and the reason.
    made_at: float
    author: str
    reason: str
    #: Canonical JSON of what changes; the ledger does not look into it.
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSnapshot:
    """A snapshot that was saved on request. ``text`` is the sealed JSON."""

    id: str
    sample_index: int
    saved_at: float
    text: str


class Ledger(Protocol):
    """Where committed state lives. Methods are atomic, may be called from any thread, and return
    only when the write is durable. All raise ``LedgerUnavailable`` when the store cannot be reached
    or cannot write now. Of a write the outcome is then unknown, and the same call may be repeated:
    what had happened is not done again (``acquire`` gives a further epoch, ``thin_journal`` thins
    once more, and both do no harm).

    All but ``create_run`` and ``read_run`` raise ``NotFound`` where the ledger has no such run, and
    ``NotLeader`` where the run has taken another uid since (``adopt``). Calls with an epoch raise
    ``LedgerRolledBack`` where the run is gone, or its epoch or generation is lower than the caller's: the
    ledger forgot what it had acknowledged. All integers are at most 2^53 - 1; ``LedgerError`` where one is not.
    """

    @property
    def description(self) -> str:
        """For people, without secrets: ``sqlite:///path`` or ``redis://host:port/0``."""

    def check(self) -> None:
        """Raises ``LedgerUnavailable`` or ``LedgerUnsafe`` (with the setting found, and the remedy)."""

    def create_run(self, name: str, stream: str, uid: str, record: str) -> StoredRun:
        """Creates the run if the name is new; returns the run that is there now, whoever made it.

        Raises ``LedgerError`` where another run has the uid.
        """

    def read_run(self, name: str, stream: str) -> StoredRun | None: ...

    def run_names(self) -> Sequence[tuple[str, str]]:
        """(name, stream) of every run, sorted."""

    def acquire(self, uid: str, stream: str, holder: str, lease_s: float, above: int = 0) -> int:
        """Takes the lease for ``lease_s`` seconds and raises the server epoch, beyond ``above`` too; returns it:
        older epochs can no longer write.

        Raises ``LeaseHeld`` while another holder's lease has not lapsed. The same holder's own is taken over at once.
        """

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
        """Makes the lease last ``lease_s`` seconds from now; ``heard_at`` is kept for a server that takes over.

        ``known`` is what the caller knows as committed in ``generation`` (0: none). Raises ``NotLeader``, also where
        the lease is another holder's (a ledger that went back gave the epoch out twice), and ``LedgerRolledBack``
        where the ledger is behind what is known.
        """

    def release(self, uid: str, stream: str, epoch: int) -> None:
        """Lets the lease lapse now. Raises ``NotLeader``."""

    def adopt(self, uid: str, stream: str, epoch: int, new_uid: str) -> None:
        """Gives a run that never opened a generation another uid, so that a trainer's state from elsewhere
        fits. Name, epoch, pin, revisions and snapshots stay; the uid of before is of no use any more.

        Raises ``NotLeader``, or ``LedgerError`` where a generation was opened or another run has the uid.
        """

    def open(self, uid: str, stream: str, epoch: int, opening: Opening, committed: Commit) -> None:
        """The opening write: makes ``opening`` the current generation, sets the committed state and all
        counters to ``committed`` (replacing them), removes the pin, records the attempt, forgets the
        slots of the generation before, journals the start state. All or nothing.

        The same opening again, by the same epoch and while it is the current one, changes nothing
        (``opened_at`` may differ).

        Raises ``NotLeader``; ``AttemptUsed`` where the attempt id opened a generation before, naming
        which; ``LedgerError`` where ``opening.generation`` is not the current one plus one or more.
        """

    def claim_slot(self, uid: str, stream: str, epoch: int, generation: int, rank: int, nonce: str) -> None:
        """Binds a slot to a client process for the generation; the same nonce may claim again.

        Raises ``NotLeader``, ``Fenced`` (other generation), ``AttemptUsed`` (slot bound to another nonce).
        """

    def commit(
        self, uid: str, stream: str, epoch: int, generation: int, commit: Commit, journal: bool, known: int = 0
    ) -> int:
        """Makes ``commit`` the committed state; with ``journal`` also keeps it as a journal entry. ``known`` is what
        the caller knows as committed.

        Returns the committed sample index after the call. At the committed index with the same digest,
        or below the committed index, it changes nothing. Raises ``NotLeader``, ``Fenced``, ``LedgerRolledBack``
        where the committed index is below ``known``, and ``OrderMismatch`` where it has another digest.
        """

    def openings(self, uid: str, stream: str) -> Sequence[Opening]:
        """All generations, oldest first."""

    def journal(self, uid: str, stream: str, generation: int, at_most: int) -> JournalEntry | None:
        """The newest entry of a generation at or below a sample index."""

    def journal_size(self, uid: str, stream: str) -> tuple[int, int]:
        """(entries, bytes of their states) of a run, all generations."""

    def thin_journal(self, uid: str, stream: str, epoch: int) -> None:
        """Removes every second entry of each generation, never its first. Raises ``NotLeader``."""

    def pin(self, uid: str, stream: str, epoch: int, pin: str | None) -> None:
        """Sets or removes the pinned resume point. Raises ``NotLeader``."""

    def revise(self, uid: str, stream: str, epoch: int, revision: StoredRevision) -> None:
        """Appends a revision. The same one again changes nothing, as long as it is there.

        Raises ``NotLeader``; ``LedgerError`` where its number is not the newest one's plus one (1 for the first), or
        its sample index is below the newest one's.
        """

    def revisions(self, uid: str, stream: str) -> Sequence[StoredRevision]:
        """All revisions of a run, oldest first. They outlast generations."""

    def drop_revisions(self, uid: str, stream: str, epoch: int, number: int) -> None:
        """Removes the revision with this number and all after it; none is left out in the middle. Where there is none
        of them it changes nothing. Raises ``NotLeader``."""

    def save_snapshot(self, uid: str, stream: str, snapshot: StoredSnapshot) -> None:
        """Keeps a snapshot; the same id with the same text may be saved again.

        Raises ``LedgerError`` where the id has another text.
        """

    def snapshots(self, uid: str, stream: str) -> Sequence[StoredSnapshot]:
        """All saved snapshots, newest first."""

    def snapshot(self, uid: str, stream: str, snapshot_id: str) -> StoredSnapshot | None: ...

    def close(self) -> None: ...
