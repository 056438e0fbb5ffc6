"""A live run's lock, all that it guards, and what of that others see.

The commands beside this module are methods of the same object. A method with an underscore is called under the lock.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from tokenloom_proto.threads import Background

from tokenloom_server.config.stream import TRAIN
from tokenloom_server.core.measures import Measures
from tokenloom_server.core.state import State
from tokenloom_server.errors import LedgerError, LedgerRolledBack, NotLeader, ServerStopping, TokenloomError
from tokenloom_server.ledger.base import Ledger
from tokenloom_server.ledger.commands import Pin
from tokenloom_server.ledger.records import CommittedState, Opening, StoredRun
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.steps import StepGroup
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.run import sizing
from tokenloom_server.run.active_generation import ActiveGeneration, GenerationView, LedgerLoss
from tokenloom_server.run.commits import commit_of
from tokenloom_server.run.delivery import Waiting
from tokenloom_server.run.generation import Generation
from tokenloom_server.run.join_call import RankRefusal, ResumeChoice
from tokenloom_server.run.lease_state import LeaseState
from tokenloom_server.run.pins import PinnedPoint
from tokenloom_server.run.slot_claims import SlotClaims
from tokenloom_server.run.timeouts import Timeouts
from tokenloom_server.run.views import RecentCommit, RunView
from tokenloom_server.run.wakes import Wakes

_log = logging.getLogger(__name__)


class RunState:
    """See the module."""

    _workers: tuple[Background, ...] = ()

    def __init__(
        self,
        order: PipelineFactory,
        ledger: Ledger,
        uid: str,
        timeouts: Timeouts,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        wakes: Callable[[threading.Lock], Wakes] = Wakes,
        lease_clock: Callable[[], float] | None = None,
    ) -> None:
        """``order`` is what the run's record gives. ``wall_clock`` gives the dates that people read; times that a
        server leaves to the next one are by the ``lease_clock``, from which it may be far: it may be set."""
        # These never change.
        self.order = order
        self.name = order.name
        self.stream = TRAIN
        self.ledger = ledger
        self._claims = SlotClaims(ledger)
        self.timeouts = timeouts
        order.resources.io_stats.wait_at_most(timeouts.storage_timeout_s)
        self.measures = Measures(threading.Lock(), order.resources.io_stats.measures)
        self.clock = clock
        self.wall_clock = wall_clock
        self.lease_clock = lease_clock or wall_clock
        self._lock = threading.Lock()
        self._wakes = wakes(self._lock)
        #: Openings, revisions and forks: one at a time, since each builds on what the one before made.
        self.one_change = threading.Lock()
        # What others may read: each a value that never changes, replaced by another one.
        #: The order under its phases and revisions.
        self.timeline = Timeline(order)
        self.uid = uid
        #: How many changes of the revisions the ledger has acknowledged to this server: every write says so.
        self.revision_changes = 0
        #: Where the next launch begins; None where nothing is pinned.
        self.pin: PinnedPoint | None = None
        self.lease = LeaseState()
        self.stopping = False
        #: What streams hear once it is stopping.
        self._ending: TokenloomError = ServerStopping("the server is stopping; it goes on where it was when it is back")
        self._active: ActiveGeneration | None = None
        # Production waits before this sample index: a revision from there on is being written.
        self._revising_at: int | None = None
        self._committed: CommittedState | None = None
        self._committed_at: float | None = None
        # The state at the committed index (after a restart: at the boundary before it), for the stats.
        self._committed_state: State = self.timeline.initial()
        # What stopped the run for all ranks, and why commits wait.
        self._error: TokenloomError | None = None
        self._ledger_error: str | None = None
        self._ledger_loss = LedgerLoss(0, 0, 0, 0.0)
        # For rates and window shares.
        self._recent: deque[RecentCommit] = deque(maxlen=512)
        # What rank 0 of an attempt was refused with, by what it asked for: the same id may be tried again with another
        # resume point. The oldest are forgotten.
        self._refused: dict[tuple[str, ResumeChoice], TokenloomError] = {}
        #: By attempt.
        self._refused_ranks: dict[str, RankRefusal] = {}
        #: How the way forward to a far sample stands that is asked for; empty where there is none.
        self.going_forward = ""
        #: Attempts whose rank 0 is at the opening.
        self._openings: set[str] = set()
        # Whether the committer sleeps until a commit is due.
        self._committer_idle = False
        # When the server ran last, as far as is noted: time in which it was paused is no silence of its ranks.
        self._ran_at = clock()
        # When this server, or its leading, began: until the first batch went out.
        self._up_since: float | None = None
        self._warn_at = -math.inf

    @property
    def committed_through(self) -> int:
        """The sample index up to which the ledger has the run."""
        committed = self._committed
        return committed.sample_index if committed is not None else 0

    def leads(self) -> bool:
        """Whether the lease is this server's by its own clock, in the ledger that others find, too."""
        return self.lease.leads(self.clock()) and self.has_store()

    def has_store(self) -> bool:
        """Whether the ledger is the one in which the lease was taken: beside a server that finds another one at its
        path nothing may be sent."""
        return self.lease.store == self.ledger.identity()

    def require_lead(self) -> None:
        """Raises ``NotLeader`` where the lease is not, or perhaps no longer, this server's."""
        if self.leads():
            return
        lease = self.lease
        reason = f"{'its lease lapsed' if lease.held else 'it stands by'}: {lease.stands_by_for}"
        if lease.held and not self.has_store():
            reason = "its ledger was deleted or replaced"
        raise NotLeader(f"this server does not lead run {self.name!r}: {reason}")

    def stored(self) -> StoredRun:
        """What the ledger has of the run, now. Raises ``LedgerError`` where that is gone, and the ledger's errors."""
        stored = self.ledger.read_run(self.name, self.stream)
        if stored is None:
            raise LedgerError(f"run {self.name!r} is gone from {self.ledger.description}; restart the server")
        return stored

    def set_pin(self, pin: PinnedPoint | None, timeline: Timeline | None = None) -> bool:
        """Writes where the next launch begins; None takes it back. Writes nothing, and returns False, where the run has
        another timeline by now than the pin was worked out for. Raises the ledger's errors."""
        with self.one_change:
            if timeline is not None and timeline is not self.timeline:
                return False
            text, epoch, known = pin.text if pin is not None else None, self.lease.epoch, self.revision_changes
            self.ledger.execute(Pin(self.uid, self.stream, epoch, text, known_changes=known))
            self.pin = pin
            return True

    def template(self, uid: str = "", generation: int = 0) -> dict[str, Any]:
        """What every snapshot of a generation says beside its position and state."""
        return self.order.record.template(uid, self.stream, generation)

    def message_steps(self, batch_size: int) -> int:
        """Micro-steps of a full message to a rank."""
        return sizing.message_steps(self.timeline.sample_bytes, batch_size)

    def group_micro_steps(self, world_size: int, batch_size: int) -> int:
        """Micro-steps between two state boundaries."""
        timeline = self.timeline
        sources = len(timeline.segments[-1].factory.record.specs)
        return sizing.group_micro_steps(timeline.sample_bytes, world_size, batch_size, sources)

    def view(self) -> RunView:
        with self._lock:
            return self._view()

    def _note_running(self) -> float:
        """Where the server did not run for a while, its ranks' silence begins anew; returns the time."""
        now = self.clock()
        if self._active is not None and now - self._ran_at > 2 * self.timeouts.tick_s:
            self._active.since = now
        self._ran_at = now
        return now

    def _view(self) -> RunView:
        active, now = self._active, self._note_running()
        return RunView(
            timeline=self.timeline,
            lease=self.lease,
            leads=self.leads(),
            commit=self._committed or commit_of(self.timeline, self.timeline.initial(), ""),
            state=self._committed_state,
            committed_at=self._committed_at,
            recent=tuple(self._recent),
            now=now,
            error=self._error or self._failing_thread(),
            ledger_error=self._ledger_error if self.lease.held or self.lease.awaits_ledger else None,
            waiting=self._waiting(),
            opening=bool(self._openings),
            pin=self.pin,
            generation=active.view(now, self.timeouts.liveness_s) if active is not None else GenerationView(),
        )

    def point_at(self, sample_index: int) -> tuple[StepGroup, int] | None:
        """(group of the boundary before it, how many of its micro-steps lie before it) of a sample index of the present
        generation; None where that is not in memory."""
        with self._lock:
            return self._active.point_at(sample_index) if self._active is not None else None

    def _failing_thread(self) -> TokenloomError | None:
        """What stands still without an error of its own: a thread of the run that fails."""
        bad = next((worker for worker in self._workers if worker.fault), None)
        if bad is None or self.stopping:
            return None
        return TokenloomError(f"its thread {bad.name} fails, and goes on: {bad.fault}; report its log")

    def _waiting(self) -> Waiting:
        """What production or delivery waits for."""
        if not self.leads():
            return Waiting(f"the lease: {self.lease.stands_by_for}", "lease")
        if self._active is None:
            return Waiting("the launch that is being opened" if self._openings else "a trainer", "ranks")
        if self._ledger_error is not None:
            return Waiting(f"the ledger: {self._ledger_error}", "ledger")
        if ranks := self._active.waiting_for():
            return Waiting(ranks, "ranks")
        if self._error is not None or not self._active.generation.steps_wanted():
            return Waiting()
        if wait := self.order.resources.io_stats.longest_wait():
            return Waiting(wait.text(), wait.reason)
        return Waiting("samples to be read and tokenised", "rows") if self._active.starves() else Waiting()

    # --- changes that several commands make ----------------------------------------------------------

    def _install(self, opening: Opening, base: State, committed: CommittedState, *, resumed: bool) -> ActiveGeneration:
        """Makes a generation the present one. ``resumed``: after a restart of the server, where production has to meet
        the committed digest again."""
        batch_plans, config = sizing.batch_plans_of(opening), self.order.config
        window, size, accumulate = config.window_micro_steps, self.timeline.sample_bytes, batch_plans.accumulate
        steps, rest = batch_plans.steps_until(committed.sample_index)
        generation = Generation(
            opening.generation,
            opening.attempt,
            batch_plans,
            # A client may hold all micro-steps of an optimiser step, and has more to go on with.
            [max(window or sizing.window_micro_steps(size, plan), 2 * accumulate) for plan in batch_plans.plans],
            [min(self.message_steps(plan.batch_size), plan.group_micro_steps) for plan in batch_plans.plans],
            pads_last_micro_step=config.last_micro_step == "pad",
            committed=steps + bool(rest),
        )
        expected_digest, epoch, now = committed.digest if resumed else None, self.lease.epoch, self.clock()
        active = ActiveGeneration(
            generation, base, expected_digest, epoch, opening.opened_at, opening.process, now, resumed
        )
        self._wakes.everyone()
        self._active = active
        self._wakes.set_ranks(len(active.generation.slots))
        self._committed = committed
        self._recent.clear()
        consumed = self.timeline.at(base.sample_index).config.consumed(base)
        self._recent.append(RecentCommit(now, committed.total_tokens, consumed))
        self._error = None
        self._wakes.everyone()
        return active

    def _end_leading(self, lease: LeaseState) -> None:
        """Nothing is sent or written until the lease is taken anew."""
        self.lease = lease
        self._wakes.everyone()
        self._drop_generation()

    def _drop_generation(self) -> None:
        self._active = None
        self._wakes.set_ranks(0)

    def _await_ledger(self, possibly: str, error: TokenloomError) -> None:
        """Nobody knows whether an opening or a revision was written, or will be yet. Nothing is sent until the lease is
        taken anew: that shuts out a write that is still on its way, and shows one that was done."""
        _log.warning("%s: nothing is sent until the ledger tells whether %s: %s", self.name, possibly, error)
        self._wakes.lease.notify_all()
        self._end_leading(self.lease.awaiting_ledger(f"the ledger did not say whether {possibly}: {error}"))

    def _stop_for_all(self, error: TokenloomError, level: int = logging.ERROR) -> None:
        """All ranks get the error, once they have consumed what is produced."""
        _log.log(level, "%s: stopped: %s: %s", self.name, error.name, error)
        error.of_launch = True
        self._error = error
        self._wakes.everyone()

    def _alarm(self, error: TokenloomError) -> None:
        """A rank, or production, has something else than the ledger or this server."""
        if isinstance(error, LedgerRolledBack):
            self._note_ledger_loss(math.inf)  # a rank knows more than this server does
        self._stop_for_all(error)

    def _note_ledger_loss(self, known_index: float) -> None:
        """Notes that the ledger lost commits; ``known_index``: up to there it had the run, as far as is known."""
        generation = self._active.generation.number if self._active is not None else self._ledger_loss.generation
        self._ledger_loss = LedgerLoss(generation, known_index, self.revision_changes, self.wall_clock())

    def _loss_under(self, epoch: int, stored: StoredRun) -> TokenloomError | None:
        """What the ledger lost, if it did: that stops all ranks, also under a new lease, until a launch from a
        trainer's state has made it right again; that launch may have joined another server."""
        if isinstance(self._error, LedgerRolledBack):
            return None if self._ledger_loss.made_right(stored) else self._error
        # Where another server led meanwhile, that one knew what the ledger had, and has seen to it.
        if epoch != self.lease.epoch + 1 or stored.revision_changes >= self.revision_changes:
            return None
        # While nobody knew whether a write was done: no renewal has found it out.
        self._note_ledger_loss(self.committed_through)
        error = LedgerRolledBack(
            f"run {self.name!r}: {self.ledger.description} has {stored.revision_changes} changes of its revisions "
            f"(made or dropped), but had acknowledged {self.revision_changes}. {LedgerRolledBack.remedy}"
        )
        self._stop_for_all(error)
        return error

    def _steps_wanted(self) -> int:
        """How many micro-steps to produce now; 0 to wait."""
        if self._active is None or self._error is not None:
            return 0
        return self._active.steps_wanted(self._revising_at)

    def _commit_due_steps(self) -> int:
        """How many micro-steps to commit; 0 for nothing new."""
        # What the ranks acknowledge after a bad row is still committed; after a ledger's refusal nothing is.
        if self._active is None or isinstance(self._error, LedgerError) or self._active.expected_digest is not None:
            return 0
        return self._active.generation.commit_due() or 0

    def _is_backlog(self) -> bool:
        """Whether the micro-steps to commit are so many that the window may fill up meanwhile."""
        due = self._commit_due_steps()
        if not due or self._active is None:
            return False
        generation = self._active.generation
        return 4 * (due - generation.committed) >= generation.window_micro_steps

    # --- who is woken: only where it would act, for waking costs more than what most events bring ------------------

    def _wake_rank(self, rank: int) -> None:
        if self._active is not None and (self._active.generation.has_for(rank) or self._error is not None):
            self._wakes.ranks[rank].notify_all()

    def _wake_producer(self) -> None:
        if self._steps_wanted():
            self._wakes.producer.notify()

    def _wake_committer(self) -> None:
        if (self._committer_idle and self._commit_due_steps()) or self._is_backlog():
            self._wakes.committer.notify()
