"""What a run asks of the ledger. SQLite and Redis keep it, with one contract (``tests/ledger/test_contract.py``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from tokenloom_server.ledger import commands
from tokenloom_server.ledger.commands import Command
from tokenloom_server.ledger.records import (
    Commit,
    JournalEntry,
    Opening,
    StoredRevision,
    StoredRun,
    StoredSnapshot,
)


class Ledger(ABC):
    """Where committed state lives. Methods are atomic, may be called from any thread, and return
    only when the write is durable. All raise ``LedgerUnavailable`` when the store cannot be reached
    or cannot write now. Of a write the outcome is then unknown, and the same call may be repeated:
    what was done already is not done again (``acquire`` gives a further epoch, ``thin_journal`` thins
    once more, and both do no harm).

    A run is (uid, stream). Every write after ``acquire`` but ``save_snapshot`` names the server epoch, and every write
    inside a generation names that too; both are checked in the same atomic operation as the write.

    All but ``create_run`` and ``read_run`` raise ``NotFound`` where the ledger has no such run, and
    ``NotLeader`` where the run has taken another uid since (``adopt``). Calls with an epoch raise
    ``LedgerRolledBack`` where the run is gone, or its epoch or generation is lower than the caller's: the
    ledger forgot what it had acknowledged. All integers are at most 2^53 - 1; ``LedgerError`` where one is not.
    """

    @property
    @abstractmethod
    def description(self) -> str:
        """For people, without secrets: ``sqlite:///path`` or ``redis://host:port/0``."""

    @abstractmethod
    def check(self) -> None:
        """Raises ``LedgerUnavailable`` or ``LedgerUnsafe`` (with the setting as it is, and the remedy)."""

    @abstractmethod
    def close(self) -> None: ...

    # Writes: each is a command, and the rules (``rules.py``) say what becomes of it.

    @abstractmethod
    def _execute(self, command: Command) -> int:
        """Does what ``decide`` says, as a whole or not at all, and returns its answer. Raises its refusal."""

    def acquire(self, uid: str, stream: str, holder: str, lease_s: float, above: int = 0) -> int:
        """Takes the lease for ``lease_s`` seconds and raises the server epoch, beyond ``above`` too; returns it:
        older epochs can no longer write.

        Raises ``LeaseHeld`` while another holder's lease has not lapsed. The same holder's own is taken over at once.
        """
        return self._execute(commands.Acquire(uid, stream, holder, lease_s, above))

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
        where the ledger has less than what is known.
        """
        self._execute(commands.Renew(uid, stream, epoch, holder, lease_s, heard_at, generation, known))

    def release(self, uid: str, stream: str, epoch: int) -> None:
        """Lets the lease lapse now. Raises ``NotLeader``."""
        self._execute(commands.Release(uid, stream, epoch))

    def adopt(self, uid: str, stream: str, epoch: int, new_uid: str) -> None:
        """Gives a run that never opened a generation the uid of a trainer's state, so that a run can move to
        an empty ledger. Name, epoch, pin, revisions and snapshots stay; the former uid is of no use any more.

        Raises ``NotLeader``, or ``LedgerError`` where a generation was opened or another run has the uid.
        """
        self._execute(commands.Adopt(uid, stream, epoch, new_uid))

    def open(self, uid: str, stream: str, epoch: int, opening: Opening, committed: Commit) -> None:
        """The opening write: makes ``opening`` the current generation, sets the committed state and all
        counters to ``committed`` (replacing them), removes the pin, records the attempt, forgets the
        slots of the generation before, journals the start state. All or nothing.

        The same opening again, by the same epoch and while it is the current one, changes nothing
        (``opened_at`` may differ).

        Raises ``NotLeader``; ``AttemptUsed`` where the attempt id opened a generation before, naming
        which; ``LedgerError`` where ``opening.generation`` is not the current one plus one or more.
        """
        self._execute(commands.Open(uid, stream, epoch, opening, committed))

    def claim_slot(self, uid: str, stream: str, epoch: int, generation: int, rank: int, nonce: str) -> None:
        """Binds a slot to a client process for the generation; the same nonce may claim again.

        Raises ``NotLeader``, ``Fenced`` (other generation), ``AttemptUsed`` (slot bound to another nonce).
        """
        self._execute(commands.ClaimSlot(uid, stream, epoch, generation, rank, nonce))

    def commit(
        self, uid: str, stream: str, epoch: int, generation: int, commit: Commit, journal: bool, known: int = 0
    ) -> int:
        """Makes ``commit`` the committed state; with ``journal`` also keeps it as a journal entry. ``known`` is what
        the caller knows as committed.

        Returns the committed sample index after the call. At the committed index with the same digest,
        or below the committed index, it changes nothing. Raises ``NotLeader``, ``Fenced``, ``LedgerRolledBack``
        where the committed index is below ``known``, and ``OrderMismatch`` where it has another digest.
        """
        return self._execute(commands.Commit(uid, stream, epoch, generation, commit, journal, known))

    def thin_journal(self, uid: str, stream: str, epoch: int) -> None:
        """Removes every second entry of each generation, never its first. Raises ``NotLeader``."""
        self._execute(commands.ThinJournal(uid, stream, epoch))

    def pin(self, uid: str, stream: str, epoch: int, pin: str | None) -> None:
        """Sets or removes the pinned resume point. Raises ``NotLeader``."""
        self._execute(commands.Pin(uid, stream, epoch, pin))

    def revise(self, uid: str, stream: str, epoch: int, revision: StoredRevision) -> None:
        """Appends a revision. The same one again changes nothing, as long as it is there.

        Raises ``NotLeader``; ``LedgerError`` where its number is not the newest one's plus one (1 for the first), or
        its sample index is below the newest one's.
        """
        self._execute(commands.Revise(uid, stream, epoch, revision))

    def drop_revisions(self, uid: str, stream: str, epoch: int, number: int) -> None:
        """Removes the revision with this number and all after it; none is left out in the middle. Where there is none
        of them it changes nothing. Raises ``NotLeader``."""
        self._execute(commands.DropRevisions(uid, stream, epoch, number))

    def save_snapshot(self, uid: str, stream: str, snapshot: StoredSnapshot) -> None:
        """Keeps a snapshot; the same id with the same text may be saved again.

        Raises ``LedgerError`` where the id has another text.
        """
        self._execute(commands.SaveSnapshot(uid, stream, snapshot))

    # Runs by name.

    @abstractmethod
    def create_run(self, name: str, stream: str, uid: str, record: str) -> StoredRun:
        """Creates the run if the name is new; returns the run that is there now, whoever made it.

        Raises ``LedgerError`` where another run has the uid.
        """

    @abstractmethod
    def read_run(self, name: str, stream: str) -> StoredRun | None: ...

    @abstractmethod
    def run_names(self) -> Sequence[tuple[str, str]]:
        """(name, stream) of every run, sorted."""

    # A run's lists, each read at one moment.

    @abstractmethod
    def openings(self, uid: str, stream: str) -> Sequence[Opening]:
        """All generations, oldest first."""

    @abstractmethod
    def journal(self, uid: str, stream: str, generation: int, at_most: int) -> JournalEntry | None:
        """The newest entry of a generation at or below a sample index."""

    @abstractmethod
    def journal_size(self, uid: str, stream: str) -> tuple[int, int]:
        """(entries, bytes of their states) of a run, all generations."""

    @abstractmethod
    def revisions(self, uid: str, stream: str) -> Sequence[StoredRevision]:
        """All revisions of a run, oldest first. They outlast generations."""

    @abstractmethod
    def snapshots(self, uid: str, stream: str) -> Sequence[StoredSnapshot]:
        """All saved snapshots, newest first."""

    @abstractmethod
    def snapshot(self, uid: str, stream: str, snapshot_id: str) -> StoredSnapshot | None: ...
