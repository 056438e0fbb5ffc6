"""The committer: the thread that writes what all ranks acknowledged into the ledger.

It always writes the newest state, so that any number of steps costs one write, and nobody waits for
it until the window is full.
"""

from __future__ import annotations

import logging
import threading

from tokenloom_server.errors import LedgerError, LedgerRolledBack, LedgerUnavailable, NotLeader, TokenloomError
from tokenloom_server.ledger.base import Commit
from tokenloom_server.order.pipeline import StepGroup
from tokenloom_server.run.coordinator import ActiveGeneration, RunCoordinator

_log = logging.getLogger(__name__)

#: Commits come at most this often, seconds, unless the window would fill up: each covers all steps until then.
COMMIT_EVERY_S = 0.02
#: Past states that the ledger keeps per run; every second one goes when they take more.
JOURNAL_BYTES = 16 * 2**20
#: Waits between attempts to reach a ledger that is away, seconds.
_LEDGER_BACKOFF_S = (0.1, 0.2, 0.5, 1.0, 2.0)


class Committer(threading.Thread):
    """Ends when the host stops and everything that was acknowledged is committed, or cannot be."""

    def __init__(self, coordinator: RunCoordinator) -> None:
        super().__init__(name=f"{coordinator.name}-committer", daemon=True)
        self._coordinator = coordinator
        self._commit_at_s = 0.0
        self._failures = 0
        # The present generation, where its newest journal entry stands, and every how many groups one is due.
        self._active: ActiveGeneration | None = None
        self._journalled = 0
        self._journal_stride = 1

    def run(self) -> None:
        coordinator = self._coordinator
        while True:
            with coordinator.lock:
                while (rest_s := self.rest_s()) is None or rest_s > 0:
                    coordinator.committer_wakes.wait(rest_s)
                if coordinator.stopping and not coordinator.commit_due_steps():
                    return
            self.step()

    def rest_s(self) -> float | None:
        """How long to rest before the next ``step``, seconds: 0 where it is due, None until this thread is woken
        (the caller holds the lock)."""
        coordinator = self._coordinator
        due = coordinator.commit_due_steps()
        coordinator.committer_idle = not due and not coordinator.stopping
        if coordinator.committer_idle:
            return None
        # More steps may join the commit, unless the window would fill up meanwhile; and a ledger that is away is
        # left alone for a while.
        if coordinator.stopping or (coordinator.backlog() and not self._failures):
            return 0.0
        return max(0.0, self._commit_at_s - coordinator.clock())

    def step(self) -> bool:
        """Commits what every rank acknowledged, if that is news; whether it was. Does not wait for it."""
        coordinator = self._coordinator
        with coordinator.lock:
            active, steps = coordinator.active, coordinator.commit_due_steps()
            if active is None or not steps:
                return False
            group = active.generation.group_of(steps - 1)
            known = coordinator.committed.sample_index if coordinator.committed is not None else 0
            self._commit_at_s = coordinator.clock() + COMMIT_EVERY_S
        if active is not self._active:
            self._active, self._journalled = active, active.base.sample_index
        try:
            self._commit(active, group, steps, known)
        except (NotLeader, LedgerRolledBack) as error:
            if active is coordinator.active:
                coordinator.on_lease_lost(error)
        except TokenloomError as error:
            coordinator.fail(active, error)
        except Exception as error:
            _log.exception("%s: committing failed", coordinator.name)
            coordinator.fail(active, LedgerError(f"committing failed: {type(error).__name__}: {error}"))
        return True

    def _commit(self, active: ActiveGeneration, group: StepGroup, steps: int, known: int) -> None:
        coordinator = self._coordinator
        state = group.state_behind(steps - 1 - group.first_step)
        commit = coordinator.commit_of(state, coordinator.resume_state(group))
        journal = group.begin - self._journalled >= self._journal_stride * group.plan.group_samples
        try:
            coordinator.ledger.commit(
                coordinator.uid, coordinator.stream, active.epoch, active.generation.number, commit, journal, known
            )
            if journal:
                self._journalled = group.begin
                self._bound_journal(active)
        except LedgerUnavailable as error:
            self._ledger_is_away(commit, error)
            return
        self._failures = 0
        with coordinator.lock:
            if coordinator.ledger_error is not None:
                _log.info("%s: the ledger is back; committed through sample %d", coordinator.name, commit.sample_index)
            coordinator.ledger_error = None
            if active is coordinator.active:
                coordinator.set_committed(active, steps, commit, state)

    def _ledger_is_away(self, commit: Commit, error: LedgerUnavailable) -> None:
        coordinator = self._coordinator
        with coordinator.lock:
            coordinator.ledger_error = str(error)
            if coordinator.stopping:
                raise LedgerError(f"stopped with sample {commit.sample_index} uncommitted: {error}")
            if not self._failures:
                _log.warning("%s: the ledger is away; commits wait for it: %s", coordinator.name, error)
            self._commit_at_s = coordinator.clock() + _LEDGER_BACKOFF_S[min(self._failures, len(_LEDGER_BACKOFF_S) - 1)]
        self._failures += 1

    def _bound_journal(self, active: ActiveGeneration) -> None:
        coordinator = self._coordinator
        _, size = coordinator.ledger.journal_size(coordinator.uid, coordinator.stream)
        if size > JOURNAL_BYTES:
            coordinator.ledger.thin_journal(coordinator.uid, coordinator.stream, active.epoch)
            self._journal_stride *= 2
