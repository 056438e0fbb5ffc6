"""Commands of a run's own threads: the producer and the committer."""

from __future__ import annotations

import logging

from tokenloom_server.core.state import State
from tokenloom_server.errors import LedgerError, LedgerUnavailable, OrderMismatch
from tokenloom_server.ledger.base import Commit
from tokenloom_server.order.pipeline import StepGroup
from tokenloom_server.run.run_state import RunState
from tokenloom_server.run.views import CommitTask, ProductionTask

_log = logging.getLogger(__name__)

#: Commits are remembered this far apart, seconds, for rates and window shares.
RECENT_EVERY_S = 0.25


class WorkCommands(RunState):
    """A part of ``RunCoordinator``."""

    # --- production --------------------------------------------------------------------------------

    def await_production(self) -> ProductionTask | None:
        """Waits until steps are wanted; None where the server stops."""
        with self._lock:
            self._wakes.producer.wait_for(lambda: self._stopping or self._steps_wanted())
            return None if self._stopping else self._production_task()

    def production_task(self) -> ProductionTask | None:
        """The steps that are wanted now; None for none."""
        with self._lock:
            return self._production_task()

    def _production_task(self) -> ProductionTask | None:
        active, steps = self._active, self._steps_wanted()
        if active is None or not steps:
            return None
        produced = active.generation.produced
        plan = active.generation.ramp.at_step(produced)
        return ProductionTask(active, self._timeline, plan, steps, produced - plan.group_begin(produced))

    def publish(self, task: ProductionTask, group: StepGroup, ended: str | None, dropped_samples: int) -> None:
        """The group got steps, or the data ended: for the ranks, if the generation is still the present one."""
        with self._lock:
            active, generation = task.active, task.active.generation
            if active is not self._active:
                return
            if not task.published:
                generation.add_group(group)
            generation.filled(ended, dropped_samples)
            try:
                active.check_order(ended is not None)
            except OrderMismatch as error:
                self._alarm(error)
                return
            if ended is not None:
                _log.info("%s: end of data at sample %d: %s", self.name, group.end, ended)
            for rank in range(len(generation.slots)):
                self._wake_rank(rank)
            self._wake_committer()

    # --- commits -----------------------------------------------------------------------------------

    def await_commit(self, not_before_s: float, may_hurry: bool) -> CommitTask | None:
        """Waits as ``commit_rest_s`` says; None where the server stops and all is written."""
        with self._lock:
            while (rest_s := self._commit_rest_s(not_before_s, may_hurry)) is None or rest_s > 0:
                self._wakes.committer.wait(rest_s)
            return self._commit_task()

    def commit_task(self) -> CommitTask | None:
        """What is to be committed now; None for nothing new."""
        with self._lock:
            return self._commit_task()

    def commit_rest_s(self, not_before_s: float, may_hurry: bool) -> float | None:
        """How long the committer rests before it writes, seconds: 0 where a commit is due, None until it is woken.

        Not before a time, unless the server stops or, with ``may_hurry``, the window would fill up meanwhile.
        """
        with self._lock:
            return self._commit_rest_s(not_before_s, may_hurry)

    def _commit_rest_s(self, not_before_s: float, may_hurry: bool) -> float | None:
        self._committer_idle = not self._commit_due_steps() and not self._stopping
        if self._committer_idle:
            return None
        if self._stopping or (may_hurry and self._is_backlog()):
            return 0.0
        return max(0.0, not_before_s - self.clock())

    def _commit_task(self) -> CommitTask | None:
        active, steps = self._active, self._commit_due_steps()
        if active is None or not steps:
            return None
        group = active.generation.group_of(steps - 1)
        return CommitTask(active, self._timeline, self._uid, group, steps, self.committed_through)

    def on_committed(self, task: CommitTask, commit: Commit, state: State) -> None:
        """The ledger holds what the task asked for."""
        with self._lock:
            if self._ledger_error is not None:
                _log.info("%s: the ledger is back; committed through sample %d", self.name, commit.sample_index)
            self._ledger_error = None
            if task.active is not self._active:
                return
            task.active.generation.set_committed(task.steps)
            self._committed, self._committed_state, self._committed_at = commit, state, self.wall_clock()
            now = self.clock()
            if now - self._recent[-1][0] >= RECENT_EVERY_S:
                self._recent.append((now, commit))
            self._wakes.changed.notify_all()
            self._wake_producer()

    def on_ledger_away(self, sample_index: int, error: LedgerUnavailable) -> None:
        """A commit waits for the ledger. Raises ``LedgerError`` where the server stops, and cannot wait."""
        with self._lock:
            self._ledger_error = str(error)
            if self._stopping:
                raise LedgerError(f"stopped with sample {sample_index} uncommitted: {error}")
