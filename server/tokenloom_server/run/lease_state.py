"""Who leads a run, and until when: immutable data; each change gives a new one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


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

    def taken(self, epoch: int, until: float, store: object) -> LeaseState:
        """The ledger gave this server the lease, at a new epoch."""
        return replace(self, epoch=epoch, held=True, until=until, store=store, awaits_ledger=False)

    def renewed(self, until: float) -> LeaseState:
        """The ledger extended it."""
        return replace(self, until=until)

    def standing_by(self, reason: str) -> LeaseState:
        """The same lease, with another word for people."""
        return replace(self, stands_by_for=reason)

    def doubted(self, reason: str) -> LeaseState:
        """It counts for nothing until the ledger renews it."""
        return replace(self, until=-math.inf, stands_by_for=reason)

    def lost(self, reason: str) -> LeaseState:
        """Another server has it, or nobody."""
        return replace(self, held=False, until=-math.inf, awaits_ledger=False, stands_by_for=reason)

    def awaiting_ledger(self, reason: str) -> LeaseState:
        """Given up until it is taken anew, which shows what the ledger has."""
        lost = self.lost(reason)
        return replace(lost, awaits_ledger=True, ledger_waits=self.ledger_waits + 1)
