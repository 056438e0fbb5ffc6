"""The committer: the thread that writes what all ranks acknowledged into the ledger.

It always writes the newest state, so that any number of micro-steps costs one write, and nobody waits for
it until the window is full.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from tokenloom_proto.threads import Loop

from tokenloom_server.core.state import State
from tokenloom_server.errors import (
    LedgerError,
    LedgerRolledBack,
    LedgerUnavailable,
    NotLeader,
    TokenloomError,
)
from tokenloom_server.ledger.commands import Commit, ThinJournal
from tokenloom_server.ledger.records import CommittedState
from tokenloom_server.order.steps import StepGroup
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.run.active_generation import ActiveGeneration
from tokenloom_server.run.context import RunContext
from tokenloom_server.run.head import Head, commit_of
from tokenloom_server.run.leadership import Leadership
from tokenloom_server.run.present_generation import PresentGeneration

_log = logging.getLogger(__name__)

#: Past states that the ledger keeps per run; every second one goes when they take more.
JOURNAL_BYTES = 16 * 2**20
#: Waits between attempts to reach a ledger that is away, seconds.
_LEDGER_BACKOFF_S = (0.1, 0.2, 0.5, 1.0, 2.0)


class CommitTask(NamedTuple):
    """What the committer has to write now: the state after the generation's first ``steps`` micro-steps, the last of
    which is in ``group``."""

    active: ActiveGeneration
    timeline: Timeline
    uid: str
    group: StepGroup
    steps: int
    #: The sample index that this server knows to be committed.
    known_index: int


class Committer(Loop):
    """Ends when the server stops and everything that was acknowledged is committed, or cannot be."""

    def __init__(
        self, context: RunContext, head: Head, present: PresentGeneration, leadership: Leadership
    ) -> None:
        super().__init__("committer", self.step, context.name)
        self._context, self._head, self._present, self._leadership = (
            context,
            head,
            present,
            leadership,
        )
        self._not_before_s = 0.0
        self._failures = 0
        # The present generation, where its newest journal entry stands, and every how many groups one is due.
        self._active: ActiveGeneration | None = None
        self._journalled = 0
        self._journal_stride = 1

    def step(self) -> bool:
        """Waits until there is something to commit, and commits it; False where the server stops and all is
        committed."""
        task = self._await_task()
        if task is not None:
            self._commit(task)
        return task is not None

    def _await_task(self) -> CommitTask | None:
        """Waits for what is to be committed: not before a time, unless the server stops or the window would fill up
        meanwhile; a ledger that is away is left alone for a while, however much there is to write. None where the
        server stops and all is committed."""
        head, present = self._head, self._present
        with self._context.lock:
            while (
                rest_s := present.commit_rest_s(self._not_before_s, may_hurry=not self._failures)
            ) is None or rest_s > 0:
                self._context.wakes.committer.wait(rest_s)
            active, steps = present.active, present.commit_due()
            if active is None or not steps:
                return None
            group = active.generation.group_of(steps - 1)
            return CommitTask(active, head.timeline, head.uid, group, steps, head.committed_through)

    def _commit(self, task: CommitTask) -> None:
        context = self._context
        self._not_before_s = context.clock() + context.timeouts.commit_every_s
        if task.active is not self._active:
            self._active, self._journalled = task.active, task.active.base.sample_index
        try:
            self._write(task)
        except TokenloomError as error:
            self._fail(task.active, error)
        except Exception as error:
            _log.exception("%s: committing failed", context.name)
            self._fail(
                task.active, LedgerError(f"committing failed: {type(error).__name__}: {error}")
            )

    def _write(self, task: CommitTask) -> None:
        context, active, group = self._context, task.active, task.group
        state = group.state_after(task.steps - 1 - group.first_step)
        commit = commit_of(task.timeline, state, group.resume_state)
        journal = group.begin - self._journalled >= self._journal_stride * group.plan.group_samples
        run, known_changes = (task.uid, context.stream, active.epoch), self._head.revision_changes
        try:
            with context.measures.commits.timing(context.clock):
                context.ledger.execute(
                    Commit(
                        *run,
                        active.generation.number,
                        commit,
                        journal,
                        task.known_index,
                        known_changes=known_changes,
                    )
                )
            if journal:
                self._journalled = group.begin
                self._bound_journal(task)
        except LedgerUnavailable as error:
            self._note_absence(commit.sample_index, error)
            return
        self._failures = 0
        self._note_commit(task, commit, state)

    def _note_commit(self, task: CommitTask, commit: CommittedState, state: State) -> None:
        """The ledger holds what the task asked for."""
        context = self._context
        with self._context.lock:
            if self._head.ledger_error is not None:
                _log.info(
                    "%s: the ledger is back; committed through sample %d",
                    context.name,
                    commit.sample_index,
                )
            self._head.miss_ledger(None)
            if task.active is not self._present.active:
                return
            task.active.generation.set_committed(task.steps)
            self._head.advance(task.timeline, commit, state, context.lease_clock(), context.clock())
            self._context.wakes.changed.notify_all()
            self._present.wake_producer()

    def _note_absence(self, sample_index: int, error: LedgerUnavailable) -> None:
        """A commit waits for the ledger. Raises ``LedgerError`` where the server stops, and cannot wait."""
        context = self._context
        with context.lock:
            self._head.miss_ledger(str(error))
            context.measures.ledger_failures.add()
            if self._present.ending is not None:
                raise LedgerError(f"stopped with sample {sample_index} uncommitted: {error}")
        if not self._failures:
            _log.warning("%s: the ledger is away; commits wait for it: %s", context.name, error)
        backoff_s = _LEDGER_BACKOFF_S[min(self._failures, len(_LEDGER_BACKOFF_S) - 1)]
        self._not_before_s = context.clock() + backoff_s
        self._failures += 1

    def _fail(self, active: ActiveGeneration, error: TokenloomError) -> None:
        """The ledger refused a commit of a generation for good."""
        with self._context.lock:
            is_present, is_lost = (
                active is self._present.active,
                isinstance(error, NotLeader | LedgerRolledBack),
            )
            if is_present and not is_lost:
                self._present.stop(error)
        if is_present and is_lost:
            self._leadership.lose(error)

    def _bound_journal(self, task: CommitTask) -> None:
        context = self._context
        _, size = context.ledger.journal_size(task.uid, context.stream)
        if size > JOURNAL_BYTES:
            context.ledger.execute(ThinJournal(task.uid, context.stream, task.active.epoch))
            self._journal_stride *= 2
