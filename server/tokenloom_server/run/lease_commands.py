"""Commands of who keeps a run's lease (``leadership``)."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tokenloom_server.errors import LedgerRolledBack, TokenloomError
from tokenloom_server.ledger.base import StoredRun
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.run.run_state import RunState
from tokenloom_server.run.views import Heard

_log = logging.getLogger(__name__)


class LeaseCommands(RunState):
    """A part of ``RunCoordinator``."""

    def lead(self, epoch: int, stored: StoredRun, timeline: Timeline, since: float, until: float) -> None:
        """This server leads from now on, at a new epoch; takes up what the ledger has, revisions included."""
        with self._lock:
            self._lease = self._lease.taken(epoch, until)
            self._timeline, self._revising_at, self._uid = timeline, None, stored.uid
            self._wakes.everyone()
            self._drop_generation()
            self._committed = self._committed_at = self._ledger_error = None
            self._committed_state = timeline.initial()
            # Whoever still trains hears of a loss until a trainer's state makes the ledger right again, perhaps by
            # another server.
            is_lost = isinstance(self._error, LedgerRolledBack) and not self._loss.made_right(stored)
            error = self._error if is_lost else None
            self._take_up(stored)
            self._error = error
            self._up_since = since if self._up_since is None else min(since, self._up_since)
            self._wakes.everyone()
        if stored.opening is not None and stored.committed is not None:
            _log.info(
                "%s: leads at server epoch %d; generation %d goes on after sample %d",
                self.name, epoch, stored.opening.generation, stored.committed.sample_index,
            )  # fmt: skip

    def _take_up(self, stored: StoredRun) -> None:
        """The generation that the ledger has."""
        if stored.opening is None or stored.committed is None:
            return
        base = self._timeline.decode(stored.committed.state)
        self._committed_state, self._committed_at = base, stored.committed_at
        active = self._install(stored.opening, base, stored.committed, resumed=True)
        if stored.lease is not None and stored.lease.heard_at is not None:
            active.generation.slots.all_heard(self.clock() - max(0.0, self.wall_clock() - stored.lease.heard_at))

    def extend(self, until: float) -> None:
        """The lease was renewed."""
        with self._lock:
            self._lease = self._lease.renewed(until)

    def stand_by(self, reason: str) -> None:
        """Another server leads; ``reason`` names it."""
        with self._lock:
            self._lease = self._lease.standing_by(reason)

    def suspend(self, reason: str) -> None:
        """The lease lapsed, and nobody knows whether another server has it: streams end until it is renewed."""
        with self._lock:
            is_news = self._lease.stands_by_for != reason
            self._lease = self._lease.standing_by(reason)
            self._wakes.everyone()
        if is_news:
            _log.error(
                "%s: the lease lapsed, so nothing is sent until the ledger is back, for another server may lead: %s",
                self.name, reason,
            )  # fmt: skip

    def on_lease_lost(self, error: TokenloomError) -> None:
        """Another server leads, or the ledger lost the run: this one writes and sends nothing more."""
        _log.error("%s: leads no longer: %s: %s", self.name, error.name, error)
        with self._lock:
            if isinstance(error, LedgerRolledBack):
                self._error = error
                self._note_loss(self.committed_through)
            self._end_leading(self._lease.lost(str(error)))

    def heard(self) -> Heard:
        """What a renewal of the lease says of the present generation."""
        with self._lock:
            if self._active is None or self._committed is None:
                return Heard(0, 0, None)
            heard = self._active.generation.slots.heard_at()
            heard_at = None if heard is None else self.wall_clock() - (self.clock() - heard)
            return Heard(self._active.generation.number, self._committed.sample_index, heard_at)

    def await_lease_work(self, ledger_waits: int, ended: Callable[[], bool], timeout_s: float) -> None:
        """Waits, bounded, until the lease has to be taken anew more often than ``ledger_waits`` times, or until
        ``ended`` (see ``wake_lease``)."""
        with self._lock:
            self._wakes.lease.wait_for(lambda: ended() or self._lease.ledger_waits != ledger_waits, timeout_s)

    def wake_lease(self) -> None:
        """Makes ``await_lease_work`` look whether it has ended."""
        with self._lock:
            self._wakes.lease.notify_all()
