"""What a run asks of the ledger. SQLite and Redis keep it, with one contract (``tests/ledger/test_contract.py``)."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from tokenloom_server.errors import LedgerUnavailable, TokenloomError
from tokenloom_server.ledger import records
from tokenloom_server.ledger.commands import Command
from tokenloom_server.ledger.records import (
    JournalEntry,
    Opening,
    StoredRevision,
    StoredRun,
    StoredSnapshot,
)

# What a run's history is stored as: entries of a few kinds, beside the ledger.
#
# Unlike the ledger it may lose what was written last, and nothing of a run waits for it.


#: Points of the curves; events that are rare, and those that may be frequent; up to where events were recorded.
Kind = Literal["points", "events", "frequent", "mark"]
KINDS: tuple[Kind, ...] = ("points", "events", "frequent", "mark")


class HistoryEntry(NamedTuple):
    """One of a run's entries of a kind, which count from 0."""

    kind: Kind
    number: int
    #: Unix time, seconds.
    time: float
    #: JSON; empty where only the others were asked for.
    text: str = ""


class HistoryStore(ABC):
    """Where the history of a ledger's runs lies. Any thread may call. All methods raise the ledger's errors where the
    store or the ledger cannot be used now."""

    @abstractmethod
    def write(
        self,
        uid: str,
        stream: str,
        epoch: int,
        put: Sequence[HistoryEntry],
        drop: Sequence[HistoryEntry],
    ) -> bool:
        """Adds or replaces entries, and removes others, as a whole; False, and nothing is written, where the run in the
        ledger has another uid or server epoch."""

    @abstractmethod
    def entries(self, uid: str, stream: str, *kinds: Kind) -> list[HistoryEntry]:
        """The entries of some kinds, by number and without their texts."""

    @abstractmethod
    def read(self, uid: str, stream: str, wanted: Sequence[HistoryEntry]) -> list[HistoryEntry]:
        """Entries with their texts; those that are gone by now are left out."""

    @abstractmethod
    def close(self) -> None: ...


class Ledger(ABC):
    """Where committed state lives. Methods are atomic, may be called from any thread, and return
    only when the write is durable. All raise ``LedgerUnavailable`` when the store cannot be reached
    or cannot write now. Of a write the outcome is then unknown, and the same command may be repeated:
    what was done already is not done again (``Acquire`` gives a further epoch, ``ThinJournal`` thins
    once more, and both do no harm).

    A run is (uid, stream). All but ``create_run`` and ``read_run`` raise ``NotFound`` where the ledger has no such
    run, and ``NotLeader`` where the run has taken another uid since (``Adopt``). Commands with an epoch raise
    ``LedgerRolledBack`` where the run is gone, or its epoch or generation is lower than the caller's: the
    ledger forgot what it had acknowledged. All integers are at most 2^53 - 1; ``LedgerError`` where one is not.
    """

    @property
    @abstractmethod
    def description(self) -> str:
        """For people, without secrets: ``sqlite:///path`` or ``redis://host:port/0``."""

    def identity(self) -> object:
        """Which store this is: another value once its file was deleted or replaced, and a lease in it counts for
        nothing. Cheap, since it is asked for before each message."""
        return None

    def clock(self) -> float:
        """Unix time in seconds, by the clock of leases where servers can read that."""
        return time.time()

    @abstractmethod
    def check(self) -> None:
        """Raises ``LedgerUnavailable`` or ``LedgerUnsafe`` (with the setting as it is, and the remedy)."""

    @abstractmethod
    def close(self) -> None: ...

    def abandon(self) -> None:
        """Closes it, and leaves nothing of a store that was made as it was opened, and has no run."""
        self.close()

    def history(self) -> HistoryStore | None:
        """Where the history of its runs lies; None where it keeps none."""
        return None

    @abstractmethod
    def execute(self, command: Command) -> int:
        """Writes what the rules (``rules.decide``) make of a command, as a whole or not at all.

        Returns the new epoch for ``Acquire``, the committed sample index for ``Commit``, how many changes of the
        revisions there are for ``Revise`` and ``DropRevisions``, else 0. Raises what the command says, and what every
        command may raise (see above).
        """

    def execute_all(self, some: Sequence[Command]) -> list[int | TokenloomError]:
        """Executes several commands, each as ``execute`` does; where the store can, in one durable write. Returns, in
        order, what ``execute`` returns of each, or the refusal that it raises. Raises ``LedgerUnavailable``: then the
        outcome of each is unknown."""
        return outcomes(self.execute, some)

    # Runs by name.

    @abstractmethod
    def create_run(self, name: str, stream: str, uid: str, record: str) -> StoredRun:
        """Creates the run if the name is new; returns the run that is there now, whoever made it.

        Raises ``NotLeader`` where it is in another ledger, and ``LedgerError`` where another run has the uid.
        """

    @abstractmethod
    def read_run(self, name: str, stream: str) -> StoredRun | None: ...

    @abstractmethod
    def read_all(self, name: str, stream: str) -> records.RunContents | None:
        """All of a run, read at one moment."""

    @abstractmethod
    def store_faults(self) -> Sequence[str]:
        """What is wrong with the store beside its runs and its settings (``check``), a line each, with what to do."""

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
    def snapshot_count(self, uid: str, stream: str) -> int:
        """How many saved snapshots there are."""

    @abstractmethod
    def snapshot(self, uid: str, stream: str, snapshot_id: str) -> StoredSnapshot | None: ...


def outcomes(
    execute: Callable[[Command], int], some: Iterable[Command]
) -> list[int | TokenloomError]:
    """What each of several commands returns, or the refusal that it raises. Raises ``LedgerUnavailable``."""
    answers: list[int | TokenloomError] = []
    for command in some:
        try:
            answers.append(execute(command))
        except LedgerUnavailable:
            raise
        except TokenloomError as refusal:  # which has written nothing
            answers.append(refusal)
    return answers
