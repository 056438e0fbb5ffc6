"""The lease on a run: the thread that takes it, keeps it, and says when it is lost.

A lease is for liveness, not for safety: each write that moves the run names the server epoch, and the ledger checks it
in the same transaction. What the lease brings is that a server which may have been replaced stops sending, by its own
monotonic clock, before another one begins; so that ranks are not split between two servers (Gray and Cheriton,
*Leases*, SOSP 1989).
"""

from __future__ import annotations

import logging
import time

from tokenloom_proto.threads import Loop

from tokenloom_server.errors import LeaseHeld, LedgerRolledBack, LedgerUnavailable, NotLeader, TokenloomError
from tokenloom_server.ledger import refusals
from tokenloom_server.ledger.commands import Acquire, Release, Renew
from tokenloom_server.order.origin import Origin
from tokenloom_server.run.coordinator import RunCoordinator

_log = logging.getLogger(__name__)

#: The lease is renewed so many times before it would lapse.
RENEWALS = 3
#: How often a server that stands by asks for the lease, as a part of it.
_ASK_PART = 4
#: Beyond the lease of a server that was killed, a start waits this much longer, seconds.
_MARGIN_S = 1.0


class Leadership(Loop):
    """Owns whether this server leads a run. ``holder`` is equal for a server and its own restart, and for no other."""

    def __init__(self, coordinator: RunCoordinator, holder: str) -> None:
        super().__init__("lease", self._keep, coordinator.name)
        self._coordinator = coordinator
        #: What names this server in the ledger.
        self.holder = self._holder = holder
        self._lease_s = coordinator.timeouts.lease_s
        self._away_since: float | None = None

    def wait_to_lead(self) -> None:
        """Takes the lease; waits, bounded, for that of a server that was killed to lapse.

        Raises ``LeaseHeld`` where another server goes on renewing it, and the ledger's errors.
        """
        coordinator = self._coordinator
        deadline = time.monotonic() + self._lease_s + _MARGIN_S
        is_logged = False
        while True:
            try:
                self._acquire()
                return
            except LeaseHeld as error:
                if time.monotonic() >= deadline:
                    raise
                if not is_logged:
                    _log.info(
                        "%s: waiting up to %.0f s for the lease to lapse: %s", coordinator.name, self._lease_s, error
                    )
                is_logged = True
                coordinator.failover.stand_by(str(error))
            time.sleep(min(0.25, self._lease_s / _ASK_PART))

    def _keep(self) -> bool:
        if self.ending.is_set():
            self.let_go()
            return False
        ledger_waits = self._coordinator.lease.ledger_waits
        self._coordinator.failover.await_work(ledger_waits, self.ending.is_set, self.step())
        return True

    def step(self) -> float:
        """Renews the lease, or asks for it; returns when to do so again, in seconds from now."""
        try:
            return self._renew() if self._coordinator.lease.held else self._ask()
        except TokenloomError as error:
            if self.ending.is_set():
                self._away_since = self._coordinator.clock()  # nobody would hear that the lease is let go
                return 0.0
            return self._note_failure(error)

    def end(self, timeout_s: float) -> None:
        """Stops renewing, and lets the lease lapse at once, so that nobody has to wait for it; waits for that at most
        ``timeout_s``."""
        self.ending.set()
        self._coordinator.failover.wake()
        super().end(timeout_s)

    def let_go(self) -> None:
        """Lets the lease lapse now. By the thread that renews: no renewal comes after it, and who ends a server need
        not wait for a ledger."""
        coordinator = self._coordinator
        if not coordinator.lease.held or self._away_since is not None:
            return  # nothing to let go, or nobody who would hear it in time
        try:
            self._renew()  # with what is known by now of who trains
            coordinator.ledger.execute(Release(coordinator.uid, coordinator.stream, coordinator.lease.epoch))
        except TokenloomError as error:
            _log.info("%s: the lease is left to lapse: %s", coordinator.name, error)

    def _acquire(self) -> None:
        """Raises ``LeaseHeld``."""
        coordinator = self._coordinator
        name, stream, ledger = coordinator.name, coordinator.stream, coordinator.ledger
        began, store = coordinator.clock(), ledger.identity()
        stored = ledger.read_run(name, stream)
        if stored is None:
            # A ledger that came back empty: the run is new to it, and takes its uid from the trainer's state.
            stored = ledger.create_run(name, stream, coordinator.uid, coordinator.order.record.to_json())
        epoch = ledger.execute(Acquire(stored.uid, stream, self._holder, self._lease_s, coordinator.lease.epoch))
        # Read after the acquisition: nobody else can write any more.
        stored = ledger.read_run(name, stream)
        if stored is None:
            raise LedgerRolledBack(f"run {name!r} is gone from {ledger.description}, right after its lease was taken")
        openings = ledger.openings(stored.uid, stream)
        timeline = coordinator.timeline
        if openings:
            timeline = timeline.with_origin(Origin.from_json(openings[0].parent_run))
        timeline = timeline.with_revisions(ledger.revisions(stored.uid, stream))
        timeline = timeline.of_state(stored.committed.state if stored.committed is not None else "")
        coordinator.failover.lead(epoch, stored, timeline, began, began + self._lease_s, store)
        self._away_since = None

    def _ask(self) -> float:
        lease = self._coordinator.lease
        if lease.epoch and not lease.held and not lease.awaits_ledger:
            # A server that lost its lease must not look like a restart of the present holder: it takes another name and
            # waits like any other.
            self._holder = f"{self.holder} (was at epoch {lease.epoch})"
        try:
            self._acquire()
        except LeaseHeld as error:
            self._coordinator.failover.stand_by(str(error))
            self._away_since = None
            return self._lease_s / _ASK_PART
        return self._lease_s / RENEWALS

    def _renew(self) -> float:
        coordinator = self._coordinator
        began = coordinator.clock()
        view = coordinator.view()
        generation, known_changes = view.generation, coordinator.revision_changes
        known_index = view.commit.sample_index if generation.number else 0
        heard_at = generation.heard_at
        if generation.stands_still:
            heard_at = 0.0  # a server that takes over could not tell that from silence
        elif heard_at is not None:
            heard_at = coordinator.lease_clock() - (view.now - heard_at)
        run, lease = (coordinator.uid, coordinator.stream, coordinator.lease.epoch), (self._holder, self._lease_s)
        try:
            if not coordinator.has_store():
                raise refusals.replaced(coordinator.ledger.description)
            coordinator.ledger.execute(
                Renew(*run, *lease, heard_at, generation.number, known_index, known_changes=known_changes)
            )
        except (NotLeader, LedgerRolledBack) as error:
            coordinator.failover.lose(error)
            return 0.0 if isinstance(error, LedgerRolledBack) else self._lease_s / _ASK_PART
        coordinator.failover.extend(began + self._lease_s)
        if self._away_since is not None:
            _log.info("%s: the lease is renewed after %.1f s", coordinator.name, coordinator.clock() - self._away_since)
            self._away_since = None
        return self._lease_s / RENEWALS

    def _note_failure(self, error: TokenloomError) -> float:
        """How long to wait before the next try, seconds."""
        coordinator = self._coordinator
        if isinstance(error, LedgerUnavailable):
            self._note_absence(error)
            # Calls to a ledger that is away take long enough to be a pause by themselves, mostly.
            return min(0.5, self._lease_s / RENEWALS)
        _log.error("%s: the lease: %s: %s", coordinator.name, error.name, error)
        return self._lease_s / RENEWALS

    def _note_absence(self, error: LedgerUnavailable) -> None:
        coordinator = self._coordinator
        now = coordinator.clock()
        if self._away_since is None:
            self._away_since = now
            _log.warning("%s: the lease cannot be renewed: %s", coordinator.name, error)
        if not coordinator.lease.held:
            coordinator.failover.stand_by(str(error))  # who led when it was last heard may be gone
        elif now >= coordinator.lease.until:
            coordinator.failover.suspend(str(error))
