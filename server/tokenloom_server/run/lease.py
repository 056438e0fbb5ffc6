"""Who leads a run, and until when."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace

from tokenloom_server.errors import NotLeader, TokenloomError
from tokenloom_server.run.context import RunContext
from tokenloom_server.run.present_generation import PresentGeneration

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeaseState:
    """What this server knows of the lease on a run. Times are of its own monotonic clock, seconds."""

    #: The newest server epoch that this server had.
    epoch: int = 0
    #: Whether it still has that epoch, as far as it knows.
    held: bool = False
    until: float = -math.inf
    #: Which store it was taken in (``Ledger.identity``).
    store: object = None
    #: Whether the lease has to be taken anew because an opening or a revision may have been written.
    awaits_ledger: bool = False
    #: How many times it had to be, so far.
    ledger_waits: int = 0
    #: Who leads where this server does not, or why it may not go on; for people.
    stands_by_for: str = "another server"

    def leads(self, now: float) -> bool:
        """Whether this server may send and write."""
        return self.held and now < self.until


@dataclass(eq=False)
class Lease:
    """The lease on one run: may this server send and write? Changed under the run's lock; anybody may ask."""

    _context: RunContext
    _present: PresentGeneration
    state: LeaseState = LeaseState()

    def leads(self) -> bool:
        """Whether the lease is this server's by its own clock, in the ledger that others find, too."""
        return self.state.leads(self._context.clock()) and self.has_store()

    def has_store(self) -> bool:
        """Whether the ledger is the one in which the lease was taken: beside a server that finds another one at its
        path nothing may be sent."""
        return self.state.store == self._context.ledger.identity()

    def require(self) -> None:
        """Raises ``NotLeader`` where the lease is not, or perhaps no longer, this server's."""
        if self.leads():
            return
        lease = self.state
        reason = f"{'its lease lapsed' if lease.held else 'it stands by'}: {lease.stands_by_for}"
        if lease.held and not self.has_store():
            reason = "its ledger was deleted or replaced"
        raise NotLeader(f"this server does not lead run {self._context.name!r}: {reason}")

    def take(self, epoch: int, until: float, store: object) -> None:
        """The ledger gave this server the lease, at a new epoch."""
        self.state = replace(
            self.state, epoch=epoch, held=True, until=until, store=store, awaits_ledger=False
        )

    def renew(self, until: float) -> None:
        """The ledger extended it."""
        self.state = replace(self.state, until=until)

    def stand_by(self, reason: str) -> None:
        """The same lease, with another word for people."""
        self.state = replace(self.state, stands_by_for=reason)

    def doubt(self, reason: str) -> None:
        """It counts for nothing until the ledger renews it."""
        self.state = replace(self.state, until=-math.inf, stands_by_for=reason)

    def give_up(self, reason: str, *, awaits_ledger: bool = False) -> None:
        """Nothing is sent or written until the lease is taken anew."""
        waits = self.state.ledger_waits + awaits_ledger
        self.state = LeaseState(
            self.state.epoch,
            store=self.state.store,
            awaits_ledger=awaits_ledger,
            ledger_waits=waits,
            stands_by_for=reason,
        )
        self._present.drop()

    def await_ledger(self, possibly: str, error: TokenloomError) -> None:
        """Nobody knows whether an opening or a revision was written, or will be yet. Nothing is sent until the lease is
        taken anew: that shuts out a write that is still on its way, and shows one that was done."""
        _log.warning(
            "%s: nothing is sent until the ledger tells whether %s: %s",
            self._context.name,
            possibly,
            error,
        )
        self._context.wakes.lease.notify_all()
        self.give_up(f"the ledger did not say whether {possibly}: {error}", awaits_ledger=True)
