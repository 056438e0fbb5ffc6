"""What is to be committed, and what was. Commands of the ``committer``; and a state as the ledger keeps it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

from tokenloom_server.core.state import State, digest_hex
from tokenloom_server.errors import LedgerError, LedgerRolledBack, LedgerUnavailable, NotLeader, TokenloomError
from tokenloom_server.ledger.records import CommittedState, Counters
from tokenloom_server.order.steps import StepGroup
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.run.active_generation import ActiveGeneration
from tokenloom_server.run.context import RunContext
from tokenloom_server.run.failover import Failover
from tokenloom_server.run.head import Head
from tokenloom_server.run.present_generation import PresentGeneration

_log = logging.getLogger(__name__)


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


@dataclass(eq=False)
class Commits:
    """Those of one run. Thread-safe."""

    _context: RunContext
    _head: Head
    _present: PresentGeneration
    _failover: Failover

    def await_task(self, not_before_s: float, may_hurry: bool) -> CommitTask | None:
        """Waits for what is to be committed: not before a time, unless the server stops or, with ``may_hurry``, the
        window would fill up meanwhile. None where the server stops and all is committed."""
        head, present = self._head, self._present
        with self._context.lock:
            while (rest_s := present.commit_rest_s(not_before_s, may_hurry)) is None or rest_s > 0:
                self._context.wakes.committer.wait(rest_s)
            active, steps = present.active, present.commit_due()
            if active is None or not steps:
                return None
            group = active.generation.group_of(steps - 1)
            return CommitTask(active, head.timeline, head.uid, group, steps, head.committed_through)

    def made(self, task: CommitTask, commit: CommittedState, state: State) -> None:
        """The ledger holds what the task asked for."""
        context = self._context
        with self._context.lock:
            if self._head.ledger_error is not None:
                _log.info("%s: the ledger is back; committed through sample %d", context.name, commit.sample_index)
            self._head.miss_ledger(None)
            if task.active is not self._present.active:
                return
            task.active.generation.set_committed(task.steps)
            self._head.advance(task.timeline, commit, state, context.lease_clock(), context.clock())
            self._context.wakes.changed.notify_all()
            self._present.wake_producer()

    def await_ledger(self, sample_index: int, error: LedgerUnavailable) -> None:
        """A commit waits for the ledger. Raises ``LedgerError`` where the server stops, and cannot wait."""
        with self._context.lock:
            self._head.miss_ledger(str(error))
            self._context.measures.ledger_failures.add()
            if self._present.ending is not None:
                raise LedgerError(f"stopped with sample {sample_index} uncommitted: {error}")

    def fail(self, active: ActiveGeneration, error: TokenloomError) -> None:
        """The ledger refused a commit of a generation for good."""
        with self._context.lock:
            is_present, is_lost = active is self._present.active, isinstance(error, NotLeader | LedgerRolledBack)
            if is_present and not is_lost:
                self._present.stop(error)
        if is_present and is_lost:
            self._failover.lose(error)


def commit_of(timeline: Timeline, state: State, resume_state: str) -> CommittedState:
    """The ledger's view of a state; ``resume_state`` is at the boundary to go forward from. The counters are of what
    was consumed: what a restore jumped over is not in them, but in ``total_tokens``, the order's position."""
    return CommittedState(
        sample_index=state.sample_index,
        total_tokens=state.total_tokens,
        digest=digest_hex(state.digest),
        state=resume_state,
        counters={
            spec: Counters(
                samples=source.samples - source.skipped_samples,
                rows=source.rows - source.skipped_rows,
                tokens=source.tokens - source.skipped_tokens,
            )
            for spec, source in zip(timeline.at(state.sample_index).record.specs, state.sources, strict=True)
        },
    )
