"""The commands that write to the ledger: what each says, and nothing of what it does (``rules.py`` says that)."""

from __future__ import annotations

from dataclasses import dataclass

from tokenloom_server.ledger import records
from tokenloom_server.ledger.records import Opening, StoredRevision, StoredSnapshot


@dataclass(frozen=True, slots=True)
class Command:
    """A write to one run, which is (uid, stream)."""

    uid: str
    stream: str


@dataclass(frozen=True, slots=True)
class LeaderCommand(Command):
    """A write that only the server which acquired the run last may make: the one of this epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Create(Command):
    """Makes a run of a name that the ledger does not have yet."""

    name: str
    record: str


@dataclass(frozen=True, slots=True)
class Acquire(Command):
    """Takes the lease and raises the epoch, beyond ``above`` too."""

    holder: str
    lease_s: float
    above: int


@dataclass(frozen=True, slots=True)
class Renew(LeaderCommand):
    """Makes the lease last longer. ``known`` is what the server knows as committed in its generation."""

    holder: str
    lease_s: float
    heard_at: float | None
    generation: int
    known: int


@dataclass(frozen=True, slots=True)
class Release(LeaderCommand):
    """Ends the lease now."""


@dataclass(frozen=True, slots=True)
class Adopt(LeaderCommand):
    """Gives a run that never opened a generation another uid."""

    new_uid: str


@dataclass(frozen=True, slots=True)
class Open(LeaderCommand):
    """Begins a generation at a committed state."""

    opening: Opening
    committed: records.Commit


@dataclass(frozen=True, slots=True)
class ClaimSlot(LeaderCommand):
    """Binds a rank of the generation to a client process."""

    generation: int
    rank: int
    nonce: str


@dataclass(frozen=True, slots=True)
class Commit(LeaderCommand):
    """Moves the committed state of the generation forward. ``known`` is what the server knows as committed."""

    generation: int
    commit: records.Commit
    #: Whether the state is kept in the journal, too.
    journal: bool
    known: int


@dataclass(frozen=True, slots=True)
class ThinJournal(LeaderCommand):
    """Removes every second entry of each generation's journal, never its first."""


@dataclass(frozen=True, slots=True)
class Pin(LeaderCommand):
    """Sets the pinned resume point; None removes it."""

    pin: str | None


@dataclass(frozen=True, slots=True)
class Revise(LeaderCommand):
    """Appends a revision."""

    revision: StoredRevision


@dataclass(frozen=True, slots=True)
class DropRevisions(LeaderCommand):
    """Removes the revision of this number and all after it."""

    number: int


@dataclass(frozen=True, slots=True)
class SaveSnapshot(Command):
    """Keeps a snapshot. Any server may."""

    snapshot: StoredSnapshot
