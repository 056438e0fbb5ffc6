"""The committer: the thread that writes what all ranks acknowledged into the ledger.

It always writes the newest state, so that any number of micro-steps costs one write, and nobody waits for
it until the window is full.
"""

from __future__ import annotations

import logging

from tokenloom_proto.threads import Loop

from tokenloom_server.errors import LedgerError, LedgerUnavailable, TokenloomError
from tokenloom_server.ledger.commands import Commit, ThinJournal
from tokenloom_server.run.active_generation import ActiveGeneration
from tokenloom_server.run.commits import commit_of
from tokenloom_server.run.coordinator import RunCoordinator
from tokenloom_server.run.views import CommitTask

_log = logging.getLogger(__name__)

#: Past states that the ledger keeps per run; every second one goes when they take more.
JOURNAL_BYTES = 16 * 2**20
#: Waits between attempts to reach a ledger that is away, seconds.
_LEDGER_BACKOFF_S = (0.1, 0.2, 0.5, 1.0, 2.0)


class Committer(Loop):
    """Ends when the server stops and everything that was acknowledged is committed, or cannot be."""

    def __init__(self, coordinator: RunCoordinator) -> None:
        super().__init__("committer", self.step, coordinator.name)
        self._coordinator = coordinator
        self._not_before_s = 0.0
        self._failures = 0
        # The present generation, where its newest journal entry stands, and every how many groups one is due.
        self._active: ActiveGeneration | None = None
        self._journalled = 0
        self._journal_stride = 1

    def step(self) -> bool:
        """Waits until there is something to commit, and commits it; False where the server stops and all is
        committed."""
        # A ledger that is away is left alone for a while, however much there is to write.
        task = self._coordinator.await_commit(self._not_before_s, may_hurry=not self._failures)
        if task is not None:
            self._commit(task)
        return task is not None

    def _commit(self, task: CommitTask) -> None:
        coordinator = self._coordinator
        self._not_before_s = coordinator.clock() + coordinator.timeouts.commit_every_s
        if task.active is not self._active:
            self._active, self._journalled = task.active, task.active.base.sample_index
        try:
            self._write(task)
        except TokenloomError as error:
            coordinator.on_commit_failed(task.active, error)
        except Exception as error:
            _log.exception("%s: committing failed", coordinator.name)
            coordinator.fail(task.active, LedgerError(f"committing failed: {type(error).__name__}: {error}"))

    def _write(self, task: CommitTask) -> None:
        coordinator, active, group = self._coordinator, task.active, task.group
        state = group.state_after(task.steps - 1 - group.first_step)
        commit = commit_of(task.timeline, state, group.resume_state)
        journal = group.begin - self._journalled >= self._journal_stride * group.plan.group_samples
        run, known_changes = (task.uid, coordinator.stream, active.epoch), coordinator.revision_changes
        try:
            with coordinator.measures.commits.timing(coordinator.clock):
                coordinator.ledger.execute(
                    Commit(
                        *run, active.generation.number, commit, journal, task.known_index, known_changes=known_changes
                    )
                )
            if journal:
                self._journalled = group.begin
                self._bound_journal(task)
        except LedgerUnavailable as error:
            self._note_absence(commit.sample_index, error)
            return
        self._failures = 0
        coordinator.on_committed(task, commit, state)

    def _note_absence(self, sample_index: int, error: LedgerUnavailable) -> None:
        coordinator = self._coordinator
        coordinator.on_ledger_away(sample_index, error)
        if not self._failures:
            _log.warning("%s: the ledger is away; commits wait for it: %s", coordinator.name, error)
        backoff_s = _LEDGER_BACKOFF_S[min(self._failures, len(_LEDGER_BACKOFF_S) - 1)]
        self._not_before_s = coordinator.clock() + backoff_s
        self._failures += 1

    def _bound_journal(self, task: CommitTask) -> None:
        coordinator = self._coordinator
        _, size = coordinator.ledger.journal_size(task.uid, coordinator.stream)
        if size > JOURNAL_BYTES:
            coordinator.ledger.execute(ThinJournal(task.uid, coordinator.stream, task.active.epoch))
            self._journal_stride *= 2
