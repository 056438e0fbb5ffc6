"""This server takes a run up from the one before, keeps its lease, and loses it. Commands of the lease's thread
(``leadership``)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from tokenloom_server.errors import LedgerRolledBack, TokenloomError
from tokenloom_server.ledger.records import StoredRun
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.run.context import RunContext
from tokenloom_server.run.head import Head
from tokenloom_server.run.lease import Lease
from tokenloom_server.run.pins import Pins
from tokenloom_server.run.present_generation import PresentGeneration
from tokenloom_server.run.silent_ranks import SilentRanks

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Failover:
    """That of one run. Thread-safe."""

    _context: RunContext
    _head: Head
    _present: PresentGeneration
    _lease: Lease
    _pins: Pins
    _silent_ranks: SilentRanks

    def lead(
        self, epoch: int, stored: StoredRun, timeline: Timeline, since: float, until: float, store: object = None
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

    def extend(self, until: float) -> None:
        """The lease was renewed."""
        with self._context.lock:
            self._lease.renew(until)

    def stand_by(self, reason: str) -> None:
        """Another server leads; ``reason`` names it."""
        with self._context.lock:
            self._lease.stand_by(reason)

    def suspend(self, reason: str) -> None:
        """The lease lapsed, and nobody knows whether another server has it: streams end until it is renewed."""
        with self._context.lock:
            is_news = self._lease.state.stands_by_for != reason
            self._lease.stand_by(reason)
            self._context.wakes.everyone()
        if is_news:
            _log.error(
                "%s: the lease lapsed, so nothing is sent until the ledger is back, for another server may lead: %s",
                self._context.name, reason,
            )  # fmt: skip

    def lose(self, error: TokenloomError) -> None:
        """Another server leads, or the ledger lost the run: this one writes and sends nothing more."""
        _log.error("%s: leads no longer: %s: %s", self._context.name, error.name, error)
        self._context.measures.lease_losses.add()
        with self._context.lock:
            if isinstance(error, LedgerRolledBack):
                self._present.lose(error, self._head.committed_through)
            self._lease.give_up(str(error))

    def await_work(self, ledger_waits: int, ended: Callable[[], bool], timeout_s: float) -> None:
        """Waits, bounded, until the lease has to be taken anew more often than ``ledger_waits`` times, or until
        ``ended`` (see ``wake``). Notes meanwhile that the server runs."""
        context, lease = self._context, self._lease
        deadline = context.clock() + timeout_s
        with self._context.lock:
            while (
                not ended() and lease.state.ledger_waits == ledger_waits and (left_s := deadline - context.clock()) > 0
            ):
                self._silent_ranks.note_running()
                self._context.wakes.lease.wait(min(left_s, context.timeouts.tick_s))

    def wake(self) -> None:
        """Makes ``await_work`` look whether it has ended."""
        with self._context.lock:
            self._context.wakes.lease.notify_all()
