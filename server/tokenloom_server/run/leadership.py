"""The lease on a run: the thread that takes it, keeps it, and says when it is lost.

A lease is for liveness, not for safety: each write that moves the run names the server epoch, and the ledger checks it
in the same transaction. What the lease brings is that a server which may have been replaced stops sending, by its own
monotonic clock, before another one begins; so that ranks are not split between two servers (Gray and Cheriton,
*Leases*, SOSP 1989).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from tokenloom_proto.threads import Loop

from tokenloom_server.errors import (
    LeaseHeld,
    LedgerRolledBack,
    LedgerUnavailable,
    NotLeader,
    TokenloomError,
)
from tokenloom_server.ledger import refusals
from tokenloom_server.ledger.commands import Acquire, Release, Renew
from tokenloom_server.ledger.records import StoredRun
from tokenloom_server.order.segments import Origin
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.run.context import RunContext
from tokenloom_server.run.head import Head
from tokenloom_server.run.lease import Lease
from tokenloom_server.run.pins import Pins
from tokenloom_server.run.present_generation import PresentGeneration
from tokenloom_server.run.silent_ranks import SilentRanks
from tokenloom_server.run.views import RunView

_log = logging.getLogger(__name__)

#: The lease is renewed so many times before it would lapse.
RENEWALS = 3
#: How often a server that stands by asks for the lease, as a part of it.
_ASK_PART = 4
#: Beyond the lease of a server that was killed, a start waits this much longer, seconds.
_MARGIN_S = 1.0


class Leadership(Loop):
    """Owns whether this server leads a run. ``holder`` is equal for a server and its own restart, and for no other."""

    def __init__(
        self,
        holder: str,
        context: RunContext,
        head: Head,
        present: PresentGeneration,
        lease: Lease,
        pins: Pins,
        silent_ranks: SilentRanks,
        view: Callable[[], RunView],
    ) -> None:
        super().__init__("lease", self._keep, context.name)
        self._context, self._head, self._present, self._lease = context, head, present, lease
        self._pins, self._silent_ranks, self._view = pins, silent_ranks, view
        #: What names this server in the ledger.
        self.holder = self._holder = holder
        self._lease_s = context.timeouts.lease_s
        self._away_since: float | None = None

    def wait_to_lead(self) -> None:
        """Takes the lease; waits, bounded, for that of a server that was killed to lapse.

        Raises ``LeaseHeld`` where another server goes on renewing it, and the ledger's errors.
        """
        context = self._context
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
                        "%s: waiting up to %.0f s for the lease to lapse: %s",
                        context.name,
                        self._lease_s,
                        error,
                    )
                is_logged = True
                self._stand_by(str(error))
            time.sleep(min(0.25, self._lease_s / _ASK_PART))

    def _keep(self) -> bool:
        if self.ending.is_set():
            self.let_go()
            return False
        ledger_waits = self._lease.state.ledger_waits
        self._await_work(ledger_waits, self.step())
        return True

    def _await_work(self, ledger_waits: int, timeout_s: float) -> None:
        """Waits, bounded, until the lease has to be taken anew more often than ``ledger_waits`` times, or until this is
        to end. Notes meanwhile that the server runs."""
        context = self._context
        deadline = context.clock() + timeout_s
        with context.lock:
            while not self.ending.is_set() and self._lease.state.ledger_waits == ledger_waits:
                if (left_s := deadline - context.clock()) <= 0:
                    return
                self._silent_ranks.note_running()
                context.wakes.lease.wait(min(left_s, context.timeouts.tick_s))

    def step(self) -> float:
        """Renews the lease, or asks for it; returns when to do so again, in seconds from now."""
        try:
            return self._renew() if self._lease.state.held else self._ask()
        except TokenloomError as error:
            if self.ending.is_set():
                self._away_since = (
                    self._context.clock()
                )  # nobody would hear that the lease is let go
                return 0.0
            return self._note_failure(error)

    def end(self, timeout_s: float) -> None:
        """Stops renewing, and lets the lease lapse at once, so that nobody has to wait for it; waits for that at most
        ``timeout_s``."""
        self.ending.set()
        with self._context.lock:
            self._context.wakes.lease.notify_all()
        super().end(timeout_s)

    def let_go(self) -> None:
        """Lets the lease lapse now. By the thread that renews: no renewal comes after it, and who ends a server need
        not wait for a ledger."""
        context = self._context
        if not self._lease.state.held or self._away_since is not None:
            return  # nothing to let go, or nobody who would hear it in time
        try:
            self._renew()  # with what is known by now of who trains
            context.ledger.execute(Release(self._head.uid, context.stream, self._lease.state.epoch))
        except TokenloomError as error:
            _log.info("%s: the lease is left to lapse: %s", context.name, error)

    def _acquire(self) -> None:
        """Raises ``LeaseHeld``."""
        context = self._context
        name, stream, ledger = context.name, context.stream, context.ledger
        began, store = context.clock(), ledger.identity()
        stored = ledger.read_run(name, stream)
        if stored is None:
            # A ledger that came back empty: the run is new to it, and takes its uid from the trainer's state.
            stored = ledger.create_run(name, stream, self._head.uid, context.order.record.to_json())
        epoch = ledger.execute(
            Acquire(stored.uid, stream, self._holder, self._lease_s, self._lease.state.epoch)
        )
        # Read after the acquisition: nobody else can write any more.
        stored = ledger.read_run(name, stream)
        if stored is None:
            raise LedgerRolledBack(
                f"run {name!r} is gone from {ledger.description}, right after its lease was taken"
            )
        openings = ledger.openings(stored.uid, stream)
        timeline = self._head.timeline
        if openings:
            timeline = timeline.with_origin(Origin.from_json(openings[0].parent_run))
        timeline = timeline.with_revisions(ledger.revisions(stored.uid, stream))
        timeline = timeline.of_state(stored.committed.state if stored.committed is not None else "")
        self.lead(epoch, stored, timeline, began, began + self._lease_s, store)
        self._away_since = None

    def _ask(self) -> float:
        lease = self._lease.state
        if lease.epoch and not lease.held and not lease.awaits_ledger:
            # A server that lost its lease must not look like a restart of the present holder: it takes another name and
            # waits like any other.
            self._holder = f"{self.holder} (was at epoch {lease.epoch})"
        try:
            self._acquire()
        except LeaseHeld as error:
            self._stand_by(str(error))
            self._away_since = None
            return self._lease_s / _ASK_PART
        return self._lease_s / RENEWALS

    def _renew(self) -> float:
        context = self._context
        began = context.clock()
        view = self._view()
        generation, known_changes = view.generation, self._head.revision_changes
        known_index = view.commit.sample_index if generation.number else 0
        heard_at = generation.heard_at
        if generation.stands_still:
            heard_at = 0.0  # a server that takes over could not tell that from silence
        elif heard_at is not None:
            heard_at = context.lease_clock() - (view.now - heard_at)
        run, lease = (
            (self._head.uid, context.stream, self._lease.state.epoch),
            (self._holder, self._lease_s),
        )
        try:
            if not self._lease.has_store():
                raise refusals.replaced(context.ledger.description)
            context.ledger.execute(
                Renew(
                    *run,
                    *lease,
                    heard_at,
                    generation.number,
                    known_index,
                    known_changes=known_changes,
                )
            )
        except (NotLeader, LedgerRolledBack) as error:
            self.lose(error)
            return 0.0 if isinstance(error, LedgerRolledBack) else self._lease_s / _ASK_PART
        with context.lock:
            self._lease.renew(began + self._lease_s)
        if self._away_since is not None:
            _log.info(
                "%s: the lease is renewed after %.1f s",
                context.name,
                context.clock() - self._away_since,
            )
            self._away_since = None
        return self._lease_s / RENEWALS

    def _note_failure(self, error: TokenloomError) -> float:
        """How long to wait before the next try, seconds."""
        context = self._context
        if isinstance(error, LedgerUnavailable):
            self._note_absence(error)
            # Calls to a ledger that is away take long enough to be a pause by themselves, mostly.
            return min(0.5, self._lease_s / RENEWALS)
        _log.error("%s: the lease: %s: %s", context.name, error.name, error)
        return self._lease_s / RENEWALS

    def _note_absence(self, error: LedgerUnavailable) -> None:
        """Where the lease lapsed, nobody knows whether another server has it: streams end until it is renewed."""
        context, now = self._context, self._context.clock()
        if self._away_since is None:
            self._away_since = now
            _log.warning("%s: the lease cannot be renewed: %s", context.name, error)
        with context.lock:
            lease, reason = self._lease.state, str(error)
            if not lease.held:
                self._lease.stand_by(reason)  # who led when it was last heard may be gone
            elif now >= lease.until:
                self._lease.stand_by(reason)
                context.wakes.everyone()
                if lease.stands_by_for != reason:
                    _log.error(
                        "%s: the lease lapsed, so nothing is sent until the ledger is back, for another server may "
                        "lead: %s",
                        context.name, reason,
                    )  # fmt: skip

    # --- short, under the lock ---------------------------------------------------------------------

    def lead(
        self,
        epoch: int,
        stored: StoredRun,
        timeline: Timeline,
        since: float,
        until: float,
        store: object = None,
    ) -> None:
        """This server leads from now on, at a new epoch, by a lease in ``store``; takes up what the ledger has,
        revisions included."""
        with self._context.lock:
            error = self._present.loss_under(epoch == self._lease.state.epoch + 1, stored)
            self._lease.take(epoch, until, store)
            self._head.read(stored, timeline)
            self._pins.read(stored)
            self._present.lead(stored, epoch, error, since)
        if stored.opening is not None and stored.committed is not None:
            _log.info(
                "%s: leads at server epoch %d; generation %d goes on after sample %d",
                self._context.name, epoch, stored.opening.generation, stored.committed.sample_index,
            )  # fmt: skip

    def _stand_by(self, reason: str) -> None:
        """Another server leads; ``reason`` names it."""
        with self._context.lock:
            self._lease.stand_by(reason)

    def lose(self, error: TokenloomError) -> None:
        """Another server leads, or the ledger lost the run: this one writes and sends nothing more."""
        _log.error("%s: leads no longer: %s: %s", self._context.name, error.name, error)
        self._context.measures.lease_losses.add()
        with self._context.lock:
            if isinstance(error, LedgerRolledBack):
                self._present.lose(error, self._head.committed_through)
            self._lease.give_up(str(error))
