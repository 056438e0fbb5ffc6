"""The committer: the thread that writes what all ranks acknowledged into the ledger.

It always writes the newest state, so that any number of steps costs one write, and nobody waits for
it until the window is full.
"""

from __future__ import annotations

import logging
import threading

from tokenloom_server.errors import LedgerError, LedgerRolledBack, LedgerUnavailable, NotLeader, TokenloomError
from tokenloom_server.ledger.base import Commit
from tokenloom_server.order.pipeline import Group
from tokenloom_server.run.coordinator import Host, Live

_log = logging.getLogger(__name__)

#: Commits come at most this often, seconds, unless the window would fill up: each covers all steps until then.
COMMIT_EVERY_S = 0.02
#: Past states that the ledger keeps per run; every second one goes when they take more.
JOURNAL_BYTES = 16 * 2**20
#: Waits between attempts to reach a ledger that is away, seconds.
_LEDGER_BACKOFF_S = (0.1, 0.2, 0.5, 1.0, 2.0)


class Committer(threading.Thread):
    """Ends when the host stops and everything that was acknowledged is committed, or cannot be."""

    def __init__(self, host: Host) -> None:
        super().__init__(name=f"{host.name}-committer", daemon=True)
        self._host = host
        self._commit_at_s = 0.0
        self._failures = 0
        # The present generation, where its newest journal entry stands, and every how many groups one is due.
        self._live: Live | None = None
        self._journalled = 0
        self._journal_stride = 1

    def run(self) -> None:
        host = self._host
        while True:
            with host.lock:
                while (rest_s := self.rest_s()) is None or rest_s > 0:
                    host.committer_wakes.wait(rest_s)
                if host.stopping and not host.commit_due_steps():
                    return
            self.step()

    def rest_s(self) -> float | None:
        """How long to rest before the next ``step``, seconds: 0 where it is due, None until this thread is woken
        (the caller holds the lock)."""
        host = self._host
        due = host.commit_due_steps()
        host.committer_idle = not due and not host.stopping
        if host.committer_idle:
            return None
        # More steps may join the commit, unless the window would fill up meanwhile; and a ledger that is away is
        # left alone for a while.
        if host.stopping or (host.backlog() and not self._failures):
            return 0.0
        return max(0.0, self._commit_at_s - host.clock())

    def step(self) -> bool:
        """Commits what every rank acknowledged, if that is news; whether it was. Does not wait for it."""
        host = self._host
        with host.lock:
            live, steps = host.live, host.commit_due_steps()
            if live is None or not steps:
                return False
            group = live.generation.group_of(steps - 1)
            known = host.committed.sample_index if host.committed is not None else 0
            self._commit_at_s = host.clock() + COMMIT_EVERY_S
        if live is not self._live:
            self._live, self._journalled = live, live.base.sample_index
        try:
            self._commit(live, group, steps, known)
        except (NotLeader, LedgerRolledBack) as error:
            if live is host.live:
                host.lose(error)
        except TokenloomError as error:
            host.fail(live, error)
        except Exception as error:
            _log.exception("%s: committing failed", host.name)
            host.fail(live, LedgerError(f"committing failed: {type(error).__name__}: {error}"))
        return True

    def _commit(self, live: Live, group: Group, steps: int, known: int) -> None:
        host = self._host
        state = group.state_behind(steps - 1 - group.first_step)
        commit = host.commit_of(state, host.resume_state(group))
        journal = group.begin - self._journalled >= self._journal_stride * group.plan.group_samples
        try:
            host.ledger.commit(host.uid, host.stream, live.epoch, live.generation.number, commit, journal, known)
            if journal:
                self._journalled = group.begin
                self._bound_journal(live)
        except LedgerUnavailable as error:
            self._ledger_is_away(commit, error)
            return
        self._failures = 0
        with host.lock:
            if host.ledger_error is not None:
                _log.info("%s: the ledger is back; committed through sample %d", host.name, commit.sample_index)
            host.ledger_error = None
            if live is host.live:
                host.set_committed(live, steps, commit, state)

    def _ledger_is_away(self, commit: Commit, error: LedgerUnavailable) -> None:
        host = self._host
        with host.lock:
            host.ledger_error = str(error)
            if host.stopping:
                raise LedgerError(f"stopped with sample {commit.sample_index} uncommitted: {error}")
            if not self._failures:
                _log.warning("%s: the ledger is away; commits wait for it: %s", host.name, error)
            self._commit_at_s = host.clock() + _LEDGER_BACKOFF_S[min(self._failures, len(_LEDGER_BACKOFF_S) - 1)]
        self._failures += 1

    def _bound_journal(self, live: Live) -> None:
        host = self._host
        _, size = host.ledger.journal_size(host.uid, host.stream)
        if size > JOURNAL_BYTES:
            host.ledger.thin_journal(host.uid, host.stream, live.epoch)
            self._journal_stride *= 2
