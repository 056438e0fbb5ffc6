"""One live run: what its threads do together, as commands, and what others see of it, as immutable views.

    producer   pipeline → group         (``producer``, outside the lock)
    streams    group → messages         (the caller's threads, one per rank)
    committer  acknowledged → ledger    (``committer``, outside the lock)

One lock guards all that changes (``run_state``), and nobody but the coordinator takes it. Slow things happen outside
it, but one: nothing is sent while an opening is written, so that nothing reaches an older generation afterwards.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tokenloom_proto.process import is_gone
from tokenloom_proto.threads import Background

from tokenloom_server import errors
from tokenloom_server.core.state import State
from tokenloom_server.ledger.commands import ClaimSlot, Open
from tokenloom_server.ledger.records import CommittedState, Opening, StoredRun
from tokenloom_server.order.steps import StepGroup
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.run.active_generation import ActiveGeneration
from tokenloom_server.run.join_commands import JoinCommands
from tokenloom_server.run.pins import PinnedPoint
from tokenloom_server.run.views import CommitTask, ProductionTask, RecentCommit, RunView

_log = logging.getLogger(__name__)

#: Commits before the newest are remembered this far apart, seconds, for rates and window shares.
RECENT_EVERY_S = 0.25


class RunCoordinator(JoinCommands):
    """Owns one run of this server. Thread-safe."""

    def start(self, *workers: Background) -> None:
        """Starts the run's own threads; ``stop`` ends them."""
        self._workers = workers
        for worker in workers:
            worker.start()

    def stop(self, timeout_s: float = 5.0, why: errors.TokenloomError | None = None) -> None:
        """Ends streams with ``ServerStopping``, or with ``why``, commits what is acknowledged, ends the threads;
        bounded."""
        with self._lock:
            self._ending = why or self._ending
            self.stopping = True
            self._wakes.everyone()
        self.order.resources.io_stats.stop()
        deadline = time.monotonic() + timeout_s
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))

    def await_detached(self, timeout_s: float) -> None:
        """Waits, bounded, until no rank has a stream."""
        with self._lock:
            self._wakes.changed.wait_for(
                lambda: self._active is None or not self._active.generation.slots.connected, timeout_s
            )

    def not_ready(self) -> str | None:
        """Why nobody can train on this server now; None where one can.

        An error that stopped the run does not count: the attempt that cures it has to reach this server, and so have
        other runs' ranks. Stats, metrics and log tell of it.
        """
        if not self.leads():
            return f"stands by: {self.lease.stands_by_for}"
        if (ended := self._failing_thread()) is not None:
            return str(ended)
        return f"the ledger is away: {self._ledger_error}" if self._ledger_error is not None else None

    # --- the lease (``leadership``) ----------------------------------------------------------------

    def lead(
        self, epoch: int, stored: StoredRun, timeline: Timeline, since: float, until: float, store: object = None
    ) -> None:
        """This server leads from now on, at a new epoch, by a lease in ``store``; takes up what the ledger has,
        revisions included."""
        with self._lock:
            error = self._loss_under(epoch, stored)
            self.lease = self.lease.taken(epoch, until, store)
            self.timeline, self._revising_at, self.uid = timeline, None, stored.uid
            self.revision_changes = stored.revision_changes
            self.pin = PinnedPoint.read(stored.pin) if stored.pin is not None else None
            self._wakes.everyone()
            self._drop_generation()
            self._recent.clear()
            self._committed = self._committed_at = self._ledger_error = None
            self._committed_state = timeline.initial()
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
        base = self.timeline.decode(stored.committed.state)
        self._committed_state, self._committed_at = base, stored.committed_at
        active = self._install(stored.opening, base, stored.committed, resumed=True)
        active.closed = stored.closed_generation >= stored.opening.generation
        if stored.lease is not None and (heard_at := stored.lease.heard_at) is not None:
            silent_s = max(0.0, self.lease_clock() - heard_at)
            active.generation.slots.all_heard(self.clock() - silent_s if heard_at else None)

    def extend(self, until: float) -> None:
        """The lease was renewed."""
        with self._lock:
            self.lease = self.lease.renewed(until)

    def stand_by(self, reason: str) -> None:
        """Another server leads; ``reason`` names it."""
        with self._lock:
            self.lease = self.lease.standing_by(reason)

    def suspend(self, reason: str) -> None:
        """The lease lapsed, and nobody knows whether another server has it: streams end until it is renewed."""
        with self._lock:
            is_news = self.lease.stands_by_for != reason
            self.lease = self.lease.standing_by(reason)
            self._wakes.everyone()
        if is_news:
            _log.error(
                "%s: the lease lapsed, so nothing is sent until the ledger is back, for another server may lead: %s",
                self.name, reason,
            )  # fmt: skip

    def on_lease_lost(self, error: errors.TokenloomError) -> None:
        """Another server leads, or the ledger lost the run: this one writes and sends nothing more."""
        _log.error("%s: leads no longer: %s: %s", self.name, error.name, error)
        self.measures.lease_losses.add()
        with self._lock:
            if isinstance(error, errors.LedgerRolledBack):
                self._error = error
                self._note_ledger_loss(self.committed_through)
            self._end_leading(self.lease.lost(str(error)))

    def await_lease_work(self, ledger_waits: int, ended: Callable[[], bool], timeout_s: float) -> None:
        """Waits, bounded, until the lease has to be taken anew more often than ``ledger_waits`` times, or until
        ``ended`` (see ``wake_lease``). Notes meanwhile that the server runs."""
        deadline = self.clock() + timeout_s
        with self._lock:
            while not ended() and self.lease.ledger_waits == ledger_waits and (left_s := deadline - self.clock()) > 0:
                self._note_running()
                self._wakes.lease.wait(min(left_s, self.timeouts.tick_s))

    def wake_lease(self) -> None:
        """Makes ``await_lease_work`` look whether it has ended."""
        with self._lock:
            self._wakes.lease.notify_all()

    # --- openings (``join``) -----------------------------------------------------------------------

    def busy(self, process: str) -> str | None:
        """Who trains on the run, if every rank of it was heard within ``liveness_s`` and rank 0 is of another process,
        which is not provably gone; None where nobody does."""
        with self._lock:
            active = self._active
            if active is None or self._error is not None or (process and active.process == process):
                return None
            if not active.generation.slots[0].connected and is_gone(active.process):
                return None
            return active.trained_on(self.clock(), self.timeouts.liveness_s)

    def open_generation(
        self, epoch: int, uid: str, opening: Opening, start: State, committed: CommittedState, timeline: Timeline
    ) -> None:
        """Writes an opening, with the revision that ``timeline`` may have more, and makes its generation the present
        one. Raises ``NotLeader`` where ``epoch``, at which it was worked out, is over, what another rank was refused
        with meanwhile, and the ledger's errors."""
        with self._lock:
            self._require_unrefused(opening.attempt, 0)
            if epoch != self.lease.epoch:
                raise errors.NotLeader(f"run {self.name!r} is being taken up anew; join again")
            revision = next(iter(timeline.revisions[len(self.timeline.revisions) :]), None)
            try:
                known = self.revision_changes
                self.ledger.execute(Open(uid, self.stream, epoch, opening, committed, revision, known_changes=known))
            except errors.LedgerUnavailable as error:
                self._await_ledger("a generation was opened", error)
                raise
            self.uid, self.timeline, self.pin = uid, timeline, None
            self.revision_changes += revision is not None
            self.measures.revisions.add(revision is not None)
            self._refused.clear()
            self._committed_state, self._committed_at = start, self.lease_clock()
            self._install(opening, start, committed, resumed=False)

    def reopen(self, opening: Opening) -> None:
        """Rank 0 asks again for what it opened. Raises ``NotLeader`` where that is being taken up anew."""
        with self._lock:
            active = self._active
            if active is None or active.generation.number != opening.generation:
                raise errors.NotLeader(f"run {self.name!r} is being taken up anew; join again")
            self._refused.clear()

    def claim_slot(self, generation: int, rank: int, nonce: str, release: str = "") -> None:
        """A rank joined: its slot is this process's. Raises ``AttemptUsed`` and the ledger's errors."""
        self._claims.write(ClaimSlot(self.uid, self.stream, self.lease.epoch, generation, rank, nonce))
        with self._lock:
            if self._active is not None and self._active.generation.number == generation:
                slot = self._active.generation.slots[rank]
                slot.last_heard, slot.left, slot.release = self.clock(), False, release

    # --- the timeline (``revise``, ``fork``) ---------------------------------------------------------

    @contextmanager
    def production_held(self, choose: Callable[[RunView], int]) -> Iterator[tuple[RunView, int]]:
        """Makes production wait before the first sample index that is certainly not produced, or that ``choose`` gives,
        until a new timeline is in force or an error ends the context: what is produced then knows of it. Raises
        ``NotLeader``, and what ``choose`` does."""
        with self._lock:
            self.require_lead()
            view = self._view()
            index = choose(view)
            self._revising_at = min(index, view.generation.first_unproduced)
            if self._active is not None and view.closed_by(index):
                self._active.closed = True  # no rank comes back while that is written
        try:
            yield view, index
        except BaseException:
            self._release_production(view.lease.epoch, view.generation.closed)
            raise

    def change_timeline(
        self, epoch: int, timeline: Timeline, write: Callable[[int], int], closed: StoredRun | None = None
    ) -> None:
        """Writes a change of the timeline, and puts it in force once the ledger has it. ``write`` gets how many changes
        of the revisions are acknowledged, and returns how many there are after it; ``closed``: what the ledger has
        after it, where it closes the generation. Raises what ``write`` does."""
        try:
            known = self.revision_changes
            changes = write(known)
        except errors.LedgerUnavailable as error:
            with self._lock:
                if self.lease.epoch == epoch:
                    self._await_ledger("a revision was written", error)
            raise
        self.measures.revisions.add(changes - known)
        self.adopt_timeline(epoch, timeline, changes, closed)

    def adopt_timeline(
        self, epoch: int, timeline: Timeline, changes: int | None = None, closed: StoredRun | None = None
    ) -> None:
        """Puts a timeline in force, and lets production go on under it. Changes nothing where the run was taken up
        since at a newer epoch, with what the ledger has."""
        with self._lock:
            if self.lease.epoch == epoch:
                self.revision_changes = self.revision_changes if changes is None else changes
                self._revising_at = None
                self.timeline = timeline
                if self._active is None:
                    self._committed_state = timeline.initial()
                elif closed is not None:
                    self._take_up(closed)
                self._wakes.everyone()

    def _release_production(self, epoch: int, was_closed: bool) -> None:
        """Lets production go on as before: the timeline stays. Changes nothing at a newer epoch."""
        with self._lock:
            if self.lease.epoch == epoch:
                self._revising_at = None
                if self._active is not None:
                    self._active.closed = was_closed
                self._wakes.everyone()

    # --- production (``producer``) -------------------------------------------------------------------

    def production_task(self) -> ProductionTask | None:
        """Waits for micro-steps that are wanted; None where the server stops."""
        with self._lock:
            self._wakes.producer.wait_for(lambda: self.stopping or self._steps_wanted())
            active, steps = self._active, self._steps_wanted()
            if self.stopping or active is None or not steps:
                return None
            produced = active.generation.produced
            active.asked_for = produced + steps
            plan = active.generation.batch_plans.at_step(produced)
            return ProductionTask(active, self.timeline, plan, steps, produced - plan.group_begin(produced))

    def publish(self, task: ProductionTask, group: StepGroup, ended: str | None, dropped_samples: int) -> None:
        """The group got micro-steps, or the data ended: for the ranks, if the generation is still the present one."""
        with self._lock:
            active, generation = task.active, task.active.generation
            if active is not self._active:
                return
            generation.filled(group, ended, dropped_samples)
            try:
                active.check_order(ended is not None)
            except errors.OrderMismatch as error:
                self._alarm(error)
                return
            if ended is not None:
                _log.info("%s: end of data at sample %d: %s", self.name, group.end, ended)
            for rank in range(len(generation.slots)):
                self._wake_rank(rank)
            self._wake_committer()

    # --- commits (``committer``) ---------------------------------------------------------------------

    def await_commit(self, not_before_s: float, may_hurry: bool) -> CommitTask | None:
        """Waits for what is to be committed: not before a time, unless the server stops or, with ``may_hurry``, the
        window would fill up meanwhile. None where the server stops and all is committed."""
        with self._lock:
            while (rest_s := self._commit_rest_s(not_before_s, may_hurry)) is None or rest_s > 0:
                self._wakes.committer.wait(rest_s)
            active, steps = self._active, self._commit_due_steps()
            if active is None or not steps:
                return None
            group = active.generation.group_of(steps - 1)
            return CommitTask(active, self.timeline, self.uid, group, steps, self.committed_through)

    def _commit_rest_s(self, not_before_s: float, may_hurry: bool) -> float | None:
        """How long the committer rests, seconds: 0 where a commit is due, None until it is woken."""
        self._committer_idle = not self._commit_due_steps() and not self.stopping
        if self._committer_idle:
            return None
        if self.stopping or (may_hurry and self._is_backlog()):
            return 0.0
        return max(0.0, not_before_s - self.clock())

    def on_committed(self, task: CommitTask, commit: CommittedState, state: State) -> None:
        """The ledger holds what the task asked for."""
        with self._lock:
            if self._ledger_error is not None:
                _log.info("%s: the ledger is back; committed through sample %d", self.name, commit.sample_index)
            self._ledger_error = None
            if task.active is not self._active:
                return
            task.active.generation.set_committed(task.steps)
            self._committed, self._committed_state, self._committed_at = commit, state, self.lease_clock()
            now = self.clock()
            if len(self._recent) > 1 and now - self._recent[-2].time < RECENT_EVERY_S:
                self._recent.pop()
            consumed = task.timeline.at(commit.sample_index).config.consumed(state)
            self._recent.append(RecentCommit(now, commit.total_tokens, consumed))
            self._wakes.changed.notify_all()
            self._wake_producer()

    def on_ledger_away(self, sample_index: int, error: errors.LedgerUnavailable) -> None:
        """A commit waits for the ledger. Raises ``LedgerError`` where the server stops, and cannot wait."""
        with self._lock:
            self._ledger_error = str(error)
            self.measures.ledger_failures.add()
            if self.stopping:
                raise errors.LedgerError(f"stopped with sample {sample_index} uncommitted: {error}")

    # --- failures ----------------------------------------------------------------------------------

    def fail(self, active: ActiveGeneration, error: errors.TokenloomError, level: int = logging.ERROR) -> None:
        """Stops the run with an error, if the generation is still the present one; ``level`` is the log's."""
        with self._lock:
            if active is self._active:
                self._stop_for_all(error, level)

    def on_commit_failed(self, active: ActiveGeneration, error: errors.TokenloomError) -> None:
        """The ledger refused a commit of a generation for good."""
        if not isinstance(error, errors.NotLeader | errors.LedgerRolledBack):
            self.fail(active, error)
        elif active is self._active:
            self.on_lease_lost(error)
