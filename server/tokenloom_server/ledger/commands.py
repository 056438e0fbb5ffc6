"""The commands that write to the ledger: what each asks for, and the errors that refuse it (``rules.py`` decides).

What every command may raise stands at ``Ledger``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tokenloom_server.ledger.records import (
    CommittedState,
    Opening,
    RunContents,
    StoredRevision,
    StoredSnapshot,
)


@dataclass(frozen=True, slots=True)
class Command:
    """A write to one run, which is (uid, stream)."""

    uid: str
    stream: str

    @property
    def verb(self) -> str:
        """Its name in lower case with underscores, such as ``save_snapshot``: that of its Redis script, too."""
        return re.sub(r"\B(?=[A-Z])", "_", type(self).__name__).lower()


@dataclass(frozen=True, slots=True)
class LeaderCommand(Command):
    """A write that only the server which acquired the run last may make: the one of this epoch. The epoch, and the
    generation of commands that name one, are checked in the same atomic operation as the write.

    ``known_changes``: how many changes of the run's revisions (one made, or some dropped) the server knows as
    acknowledged. Raises ``NotLeader``, and ``LedgerRolledBack`` where the ledger has fewer of them.
    """

    epoch: int
    known_changes: int = field(default=0, kw_only=True)


@dataclass(frozen=True, slots=True)
class Create(Command):
    """Makes a run of a name that the ledger does not have yet. Raises ``LedgerError`` where another run has the uid,
    ``NotLeader`` where the run is in another ledger."""

    name: str
    record: str


@dataclass(frozen=True, slots=True)
class Acquire(Command):
    """Takes the lease for ``lease_s`` seconds and raises the server epoch to a number greater than the ledger's and
    than ``beyond_epoch``: older epochs can no longer write.

    Raises ``LeaseHeld`` while another holder's lease has not lapsed. The same holder's own is taken over at once. Where
    the former was not released, a ``heard_at`` of 0 is unknown again.
    """

    holder: str
    lease_s: float
    beyond_epoch: int = 0


@dataclass(frozen=True, slots=True)
class Renew(LeaderCommand):
    """Makes the lease last ``lease_s`` seconds from now; ``heard_at`` is kept for a server that takes over.

    ``known_index``: the sample index that the server knows as committed in ``generation`` (0: none). Raises
    ``NotLeader`` also where the lease is another holder's (a ledger that went back gave the epoch out twice), and
    ``LedgerRolledBack`` where the ledger has a lower one.
    """

    holder: str
    lease_s: float
    heard_at: float | None
    generation: int
    known_index: int


@dataclass(frozen=True, slots=True)
class Release(LeaderCommand):
    """Lets the lease lapse now."""


@dataclass(frozen=True, slots=True)
class Adopt(LeaderCommand):
    """Gives a run that never opened a generation the uid of a trainer's state, so that a run can move to an empty
    ledger. Name, epoch, pin, revisions and snapshots stay; the former uid is of no use any more.

    Raises ``LedgerError`` where a generation was opened or another run has the uid.
    """

    new_uid: str


@dataclass(frozen=True, slots=True)
class Open(LeaderCommand):
    """The opening write: makes ``opening`` the current generation, sets the committed state and all counters to
    ``committed`` (replacing them), removes the pin, records the attempt, forgets the slots of the generation before,
    journals the start state, appends ``revision`` where the pin asked for one; the lease's ``heard_at`` is unknown
    again. All or nothing.

    The same opening again, by the same epoch and while it is the current one, changes nothing (``opened_at`` may
    differ). Raises ``AttemptUsed`` where the attempt id opened a generation before, naming which; ``LedgerError``
    where ``opening.generation`` is not the current one plus one or more, or the revisions changed since.
    """

    opening: Opening
    committed: CommittedState
    revision: StoredRevision | None = None


@dataclass(frozen=True, slots=True)
class ClaimSlot(LeaderCommand):
    """Binds a rank of the generation to a client process; the same nonce may claim again.

    Raises ``Fenced`` (other generation), ``AttemptUsed`` (the rank is bound to another nonce).
    """

    generation: int
    rank: int
    nonce: str


@dataclass(frozen=True, slots=True)
class Commit(LeaderCommand):
    """Moves the committed state of the generation forward; with ``journal`` it is kept as a journal entry, too.
    ``known_index``: the sample index that the server knows as committed.

    At the committed index with the same digest, or below the committed index, it changes nothing. Raises ``Fenced``,
    ``LedgerRolledBack`` where the committed index is below ``known_index``, and ``OrderMismatch`` where it has another
    digest.
    """

    generation: int
    committed: CommittedState
    journal: bool
    known_index: int = 0


@dataclass(frozen=True, slots=True)
class ThinJournal(LeaderCommand):
    """Removes every second entry of each generation's journal, never its first."""


@dataclass(frozen=True, slots=True)
class Pin(LeaderCommand):
    """Sets the pinned resume point; None removes it. ``number`` counts the server's changes of it.

    The same one again changes nothing. Raises ``LedgerError`` where a change with a higher number, or an opening, came
    first: a call that was given up may reach the ledger long after it.
    """

    pin: str | None
    number: int


@dataclass(frozen=True, slots=True)
class Revise(LeaderCommand):
    """Appends a revision, as the change of the revisions that follows ``known_changes``. The same one again changes
    nothing, as long as it is there.

    Raises ``LedgerError`` where another change came first, where its number is not the newest one's plus one (1 for the
    first), or its sample index is below the newest one's. ``generation``: the one that it closes, since nobody trains
    (0: none); raises ``Fenced`` where that is not the present one.
    """

    revision: StoredRevision
    generation: int = 0


@dataclass(frozen=True, slots=True)
class DropRevisions(LeaderCommand):
    """Removes the revision of this number and all after it, as the change of the revisions that follows
    ``known_changes``. Where another change came first it changes nothing: this one was done before that, and what it
    dropped may have been replaced since."""

    number: int


@dataclass(frozen=True, slots=True)
class SaveSnapshot(Command):
    """Keeps a snapshot; the same id with the same text may be saved again. It names no epoch, so the ledger takes it
    from any server; only the leading one asks for it.

    Raises ``LedgerError`` where the id has another text.
    """

    snapshot: StoredSnapshot


@dataclass(frozen=True, slots=True)
class Import(Command):
    """Writes a run as another ledger or a backup held it, without its lease, at an epoch above that one's and this
    ledger's, so that all servers of before are shut out. All or nothing.

    ``from_backup``: what was acknowledged since may be lost. So all generations that this ledger or the backup knows
    are closed, the epoch is far above those that may have been given out since, and the pin is left out.
    ``elsewhere``: the ledger that still has the run; nobody may lead it here until ``Move`` says so.

    ``replace``: a run of this name may be there. One that was brought here from ``elsewhere`` before, at a lower
    epoch, and was not let go there, may be, too. Raises ``LeaseHeld`` where a server leads it, ``NotLeader`` where it
    is in another ledger, and ``LedgerError`` where it may not be there, or another run has the uid.
    """

    contents: RunContents
    from_backup: bool = False
    elsewhere: str = ""
    replace: bool = False


@dataclass(frozen=True, slots=True)
class Move(LeaderCommand):
    """Says in which ledger the run is from now on, and lets the lease lapse; empty: in this one. While it is elsewhere
    every other command of the run raises ``NotLeader``, which says where it is."""

    elsewhere: str
