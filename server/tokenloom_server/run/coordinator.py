"""One live run: its parts, each with fields of its own, around one lock (``context``).

    producer   pipeline → group         (``producer``)
    streams    group → messages         (``sessions``, on the caller's threads)
    committer  acknowledged → ledger    (``committer``)

``head``, ``present_generation``, ``lease`` and ``silent_ranks`` know no lock, and are for the other parts alone. All
that the coordinator shows takes the lock by itself, or is a value that never changes. Slow things happen outside of it,
but one: nothing is sent while an opening is written (``attempts``).
"""

from __future__ import annotations

import time
from typing import Any

from tokenloom_proto.threads import Background

from tokenloom_server.errors import LedgerError, TokenloomError
from tokenloom_server.ledger.records import StoredRun
from tokenloom_server.order.steps import StepGroup
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.run.active_generation import GenerationView
from tokenloom_server.run.attempts import Attempts
from tokenloom_server.run.committer import Committer
from tokenloom_server.run.context import RunContext
from tokenloom_server.run.generation import Waiting
from tokenloom_server.run.head import Head, commit_of
from tokenloom_server.run.leadership import Leadership
from tokenloom_server.run.lease import Lease, LeaseState
from tokenloom_server.run.pins import Pins
from tokenloom_server.run.present_generation import PresentGeneration
from tokenloom_server.run.producer import Producer
from tokenloom_server.run.sessions import Sessions
from tokenloom_server.run.silent_ranks import SilentRanks
from tokenloom_server.run.slot_claims import SlotClaims
from tokenloom_server.run.takeover import Takeover
from tokenloom_server.run.timeline_changes import TimelineChanges
from tokenloom_server.run.views import RunView


class RunCoordinator:
    """Owns one run of this server. Thread-safe."""

    def __init__(self, context: RunContext, uid: str, holder: str) -> None:
        self._context = context
        self.name, self.stream, self.order, self.ledger = (
            context.name,
            context.stream,
            context.order,
            context.ledger,
        )
        self.timeouts, self.measures, self.one_change = (
            context.timeouts,
            context.measures,
            context.one_change,
        )
        self.clock, self.wall_clock, self.lease_clock = (
            context.clock,
            context.wall_clock,
            context.lease_clock,
        )
        self._head = head = Head(context.order, uid)
        self._present = present = PresentGeneration(context, head)
        self._lease = lease = Lease(context, present)
        claims = SlotClaims(context.ledger)
        self._silent_ranks = silent_ranks = SilentRanks(context, present)
        self.pins = Pins(context, head, lease)
        self.attempts = Attempts(context, head, present, lease, claims, self.pins)
        self.takeover = Takeover(context, present)
        self.leadership = Leadership(
            holder, context, head, present, lease, self.pins, silent_ranks, self.view
        )
        self.changes = TimelineChanges(context, head, present, lease, self._view)
        self.sessions = Sessions(context, head, present, lease, claims, silent_ranks, self._waiting)
        self.producer = Producer(context, head, present)
        self.committer = Committer(context, head, present, self.leadership)
        self._workers: tuple[Background, ...] = (self.producer, self.committer)

    # --- its threads -------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the run's own threads, when this server leads it or stands by; ``stop`` ends the first two."""
        for worker in (*self._workers, self.leadership):
            worker.start()

    def stop(self, timeout_s: float = 5.0, why: TokenloomError | None = None) -> None:
        """Ends streams with ``ServerStopping``, or with ``why``, commits what is acknowledged, ends the threads;
        bounded."""
        with self._context.lock:
            self._present.end(why)
        self.order.resources.io_stats.stop()
        deadline = time.monotonic() + timeout_s
        for worker in filter(Background.is_alive, self._workers):
            worker.join(max(0.0, deadline - time.monotonic()))

    def _failing_thread(self) -> TokenloomError | None:
        """What stands still without an error of its own: a thread of the run that fails."""
        bad = next((worker for worker in self._workers if worker.fault), None)
        if bad is None or self.stopping:
            return None
        return TokenloomError(
            f"its thread {bad.name} fails, and goes on: {bad.fault}; report its log"
        )

    # --- what others see: values that never change, each replaced by another one -------------------

    @property
    def stopping(self) -> bool:
        return self._present.ending is not None

    @property
    def timeline(self) -> Timeline:
        """The order under its phases and revisions."""
        return self._head.timeline

    @property
    def uid(self) -> str:
        return self._head.uid

    @property
    def committed_through(self) -> int:
        """The sample index up to which the ledger has the run."""
        return self._head.committed_through

    @property
    def lease(self) -> LeaseState:
        return self._lease.state

    def leads(self) -> bool:
        """See ``Lease``."""
        return self._lease.leads()

    def require_lead(self) -> None:
        """Raises ``NotLeader``."""
        self._lease.require()

    def not_ready(self) -> str | None:
        """Why nobody can train on this server now; None where one can.

        An error that stopped the run does not count: the attempt that cures it has to reach this server, and so have
        other runs' ranks. Stats, metrics and log tell of it.
        """
        if not self.leads():
            return f"stands by: {self.lease.stands_by_for}"
        if (ended := self._failing_thread()) is not None:
            return str(ended)
        return (
            f"the ledger is away: {self._head.ledger_error}"
            if self._head.ledger_error is not None
            else None
        )

    def view(self) -> RunView:
        """The run at this moment."""
        with self._context.lock:
            return self._view()

    def _view(self) -> RunView:
        head, lease, active, now = (
            self._head,
            self._lease.state,
            self._present.active,
            self._silent_ranks.note_running(),
        )
        liveness_s = self.timeouts.liveness_s
        return RunView(
            timeline=head.timeline,
            lease=lease,
            leads=self._lease.leads(),
            commit=head.commit or commit_of(head.timeline, head.timeline.initial(), ""),
            state=head.state,
            committed_at=head.committed_at,
            recent=tuple(head.recent),
            now=now,
            error=self._present.error or self._failing_thread(),
            ledger_error=head.ledger_error if lease.held or lease.awaits_ledger else None,
            waiting=self._waiting(),
            opening=self.attempts.is_opening,
            pin=self.pins.pin,
            generation=active.view(now, liveness_s) if active is not None else GenerationView(),
        )

    def _waiting(self) -> Waiting:
        """What production or delivery waits for."""
        active, io_stats = self._present.active, self.order.resources.io_stats
        if not self._lease.leads():
            return Waiting(f"the lease: {self._lease.state.stands_by_for}", "lease")
        if active is None:
            return Waiting(
                "the launch that is being opened" if self.attempts.is_opening else "a trainer",
                "ranks",
            )
        if self._head.ledger_error is not None:
            return Waiting(f"the ledger: {self._head.ledger_error}", "ledger")
        if ranks := active.waiting_for():
            return Waiting(ranks, "ranks")
        if self._present.error is not None or not active.generation.steps_wanted():
            return Waiting()
        if wait := io_stats.longest_wait():
            return Waiting(wait.text(), wait.reason)
        return (
            Waiting("samples to be read and tokenised", "rows") if active.starves() else Waiting()
        )

    def point_at(self, sample_index: int) -> tuple[StepGroup, int] | None:
        """(group of the boundary before it, how many of its micro-steps lie before it) of a sample index of the present
        generation; None where that is not in memory."""
        with self._context.lock:
            active = self._present.active
            return active.point_at(sample_index) if active is not None else None

    def stored(self) -> StoredRun:
        """What the ledger has of the run, now. Raises ``LedgerError`` where that is gone, and the ledger's errors."""
        stored = self.ledger.read_run(self.name, self.stream)
        if stored is None:
            raise LedgerError(
                f"run {self.name!r} is gone from {self.ledger.description}; restart the server"
            )
        return stored

    def template(self, uid: str = "", generation: int = 0) -> dict[str, Any]:
        """What every snapshot of a generation says beside its position and state."""
        return self.order.record.template(uid, self.stream, generation)

    def message_steps(self, batch_size: int) -> int:
        """Micro-steps of a full message to a rank."""
        return self._context.message_steps(self.timeline.sample_bytes, batch_size)

    def group_micro_steps(self, world_size: int, batch_size: int) -> int:
        """Micro-steps between two state boundaries."""
        timeline = self.timeline
        sources = len(timeline.segments[-1].factory.record.specs)
        return self._context.group_micro_steps(
            timeline.sample_bytes, world_size, batch_size, sources
        )
