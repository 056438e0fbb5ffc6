"""One run at work: what its threads share around a ``Generation``, and how they wait for each other.

    producer   pipeline → group         (``producer``, outside the lock)
    streams    group → messages         (the caller's threads, one per rank)
    committer  acknowledged → ledger    (``committer``, outside the lock)

Everything that changes is guarded by one lock; the slow things happen outside it. The exception is the
opening write: while it is under way nothing is sent, so that nothing reaches an older generation
once the new one is durable.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from tokenloom_server.core.state import State, digest_hex
from tokenloom_server.errors import (
    Fenced,
    LedgerError,
    LedgerRolledBack,
    NotFound,
    NotLeader,
    OrderMismatch,
    RankStalled,
    ServerStopping,
    SourceError,
    StorageError,
    TokenloomError,
)
from tokenloom_server.ledger.base import Commit, Counters, Ledger, Opening, StoredRun, date_of
from tokenloom_server.order.batch_schedule import Ramp
from tokenloom_server.order.pipeline import BatchPlan, StepGroup
from tokenloom_server.order.record import Order
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.run.generation import Delivery, EndOfData, Generation

_log = logging.getLogger(__name__)

#: A message to a rank is about this large: that is where gRPC is cheap.
MESSAGE_BYTES = 512 * 1024
#: Steps of a message are at most this many.
MESSAGE_STEPS = 64
#: Between two state boundaries lies a full message, and one more for so many sources: a state costs what its
#: sources cost. The steps between them take at most this much memory.
SOURCES_PER_MESSAGE = 64
GROUP_BYTES = 64 * 2**20
#: The default window: groups of this much together, but so few and so many at least and at most. A fast
#: trainer acknowledges hundreds of steps until the next commit, and must not wait for it. (What is acknowledged and
#: not yet committed takes no memory to speak of: its ids are gone.)
WINDOW_BYTES = 64 * 2**20
WINDOW_GROUPS = (4, 64)
#: After so long a wait for another rank the log names it, and again after each further, seconds.
RANK_WARNING_S = 30.0
#: A wait for storage of so long is named to the ranks, seconds.
STORAGE_WAIT_S = 2.0
#: Commits are remembered this far apart, seconds, for rates and window shares.
RECENT_EVERY_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long what lasts, seconds."""

    #: A server that could not renew its lease for so long has lost it.
    lease_s: float = 15.0
    #: A run whose every rank was heard within this time is busy.
    liveness_s: float = 15.0
    #: After so long a wait for a rank that does not go on, the others get an error.
    rank_timeout_s: float = 300.0
    #: After so long a wait for storage: an error.
    storage_timeout_s: float = 300.0


class Session(NamedTuple):
    """A stream's place: which generation, slot and stream of that slot it is."""

    generation: Generation
    rank: int
    number: int


class Waiting(NamedTuple):
    """Nothing to send within the time; what the run waits for, for people."""

    waiting_for: str


@dataclass(slots=True)
class ActiveGeneration:
    """The present generation with what belongs to it."""

    generation: Generation
    #: The state at which production begins.
    base: State
    slots: list[threading.Condition] = field(default_factory=list)
    #: The committed digest that production has to meet again after a restart; None once met.
    expected_digest: str | None = None
    #: The server epoch at which it was opened or taken up.
    epoch: int = 0
    #: Unix time, and rank 0's process, as far as known; for people, and for a process that starts anew.
    opened_at: float = 0.0
    process: str = ""


class RunCoordinator:
    """Owns one run of this server. Thread-safe."""

    def __init__(
        self,
        order: Order,
        ledger: Ledger,
        uid: str,
        timeouts: Timeouts,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        #: The order that the run's record gives, and that under its phases and revisions.
        self.order = order
        order.io_stats.wait_at_most(timeouts.storage_timeout_s)
        self.timeline = Timeline(order)
        #: Production waits before this sample index: a revision from there on is being written.
        self.revising_at: int | None = None
        self.ledger = ledger
        self.uid = uid
        self.timeouts = timeouts
        self.stream = "train"
        #: The newest server epoch that this server had; whether it has it still; and until when by its own clock.
        self.epoch = 0
        self.epoch_held = False
        self.leads_until = -math.inf
        #: Whether the lease is only to be taken anew, because an opening may have been written (``await_ledger``).
        self.awaits_ledger = False
        self.ledger_waits = 0
        #: Who leads where this server does not, or why it may not go on; for people.
        self.stands_by_for = "another server"
        #: Openings and revisions: one at a time, since each builds on what the one before made.
        self.one_change = threading.Lock()
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.active: ActiveGeneration | None = None
        self.committed: Commit | None = None
        self.committed_at: float | None = None
        #: The state at the committed index (after a restart: at the boundary before it), for the figures.
        self.committed_state: State = self.timeline.initial()
        self.error: TokenloomError | None = None
        #: What the ledger lost last: generation and sample index that it is behind, and when that was found, Unix time.
        self.lost: tuple[int, float, float] = (0, 0, 0.0)
        self.ledger_error: str | None = None
        #: (time, commit) over the last minute or so, for rates and window shares.
        self.recent: deque[tuple[float, Commit]] = deque(maxlen=512)
        self.clock = clock
        self.wall_clock = wall_clock
        self.stopping = False
        self.producer_wakes = threading.Condition(self.lock)
        self.committer_wakes = threading.Condition(self.lock)
        self.lease_wakes = threading.Condition(self.lock)
        #: Whether the committer sleeps until a commit is due; it alone sets this.
        self.committer_idle = False
        self._workers: tuple[threading.Thread, ...] = ()
        # When this server, or its leading, began: until the first batch went out.
        self._up_since: float | None = None
        self._warn_at = -math.inf

    @property
    def name(self) -> str:
        return self.order.name

    def start(self, *workers: threading.Thread) -> None:
        """Starts the run's own threads; ``stop`` ends them."""
        self._workers = workers
        for worker in workers:
            worker.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends streams with ``ServerStopping``, commits what is acknowledged, ends the threads; bounded."""
        with self.lock:
            self.stopping = True
            self.wake_all()
        self.order.io_stats.stop()
        deadline = time.monotonic() + timeout_s
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))

    def dead_worker(self) -> str | None:
        """The name of a thread of the run that ended by itself: a fault of ours; None if all is well."""
        if self.stopping:
            return None
        return next((worker.name for worker in self._workers if not worker.is_alive()), None)

    # --- the lease (``leadership`` keeps it) ---------------------------------------------------------

    def lead(self, epoch: int, stored: StoredRun, timeline: Timeline, since: float, until: float) -> None:
        """This server leads from now on, at a new epoch; takes up what the ledger has, revisions included."""
        with self.lock:
            self.timeline, self.revising_at = timeline, None
            self.epoch, self.epoch_held, self.leads_until, self.awaits_ledger = epoch, True, until, False
            self.uid = stored.uid
            self.wake_all()
            self.active = self.committed = self.committed_at = self.ledger_error = None
            self.committed_state = timeline.initial()
            # What was lost is told to whoever still trains, until a trainer's state makes the ledger right again,
            # perhaps by another server.
            lost = None if self._made_right(stored) else self.error
            self.recover(stored)
            self.error = lost
            self._up_since = since if self._up_since is None else min(since, self._up_since)
            self.wake_all()
        if stored.opening is not None and stored.committed is not None:
            _log.info(
                "%s: leads at server epoch %d; generation %d goes on behind sample %d",
                self.name, epoch, stored.opening.generation, stored.committed.sample_index,
            )  # fmt: skip

    def extend(self, until: float) -> None:
        """The lease was renewed."""
        with self.lock:
            self.leads_until = until

    def suspend(self, reason: str) -> None:
        """The lease lapsed, and nobody knows whether another server has it: streams end until it is renewed."""
        with self.lock:
            news = self.stands_by_for != reason
            self.stands_by_for = reason
            self.wake_all()
        if news:
            _log.error(
                "%s: the lease lapsed, so nothing is sent until the ledger is back, for another server may lead: %s",
                self.name, reason,
            )  # fmt: skip

    def on_lease_lost(self, error: TokenloomError) -> None:
        """Another server leads, or the ledger lost the run: this one writes and sends nothing more."""
        _log.error("%s: leads no longer: %s: %s", self.name, error.name, error)
        with self.lock:
            self.epoch_held, self.leads_until, self.awaits_ledger = False, -math.inf, False
            self.stands_by_for = str(error)
            if isinstance(error, LedgerRolledBack):
                self.error = error
                index = self.committed.sample_index if self.committed is not None else 0
                self._note_loss(index)
            self.wake_all()
            self.active = None

    def await_ledger(self, what: str, error: TokenloomError) -> None:
        """Nobody knows whether an opening or a revision was written, or will be yet (the caller holds the lock).
        Nothing is sent until the lease is taken anew: that shuts out a write that is still on its way, and shows one
        that was done."""
        _log.warning("%s: nothing is sent until the ledger tells whether %s: %s", self.name, what, error)
        self.epoch_held, self.leads_until, self.awaits_ledger = False, -math.inf, True
        self.ledger_waits += 1
        self.lease_wakes.notify_all()
        self.stands_by_for = f"the ledger did not say whether {what}: {error}"
        self.wake_all()
        self.active = None

    def stand_by(self, reason: str) -> None:
        """Another server leads; ``reason`` names it."""
        with self.lock:
            self.stands_by_for = reason

    def standing(self) -> tuple[int, int, float | None]:
        """(generation, what is committed in it, Unix time at which all of its ranks had been heard)."""
        with self.lock:
            if self.active is None or self.committed is None:
                return 0, 0, None
            heard = self.active.generation.slots.heard_at()
            heard_at = None if heard is None else self.wall_clock() - (self.clock() - heard)
            return self.active.generation.number, self.committed.sample_index, heard_at

    def leads(self) -> bool:
        """Whether the lease is this server's by its own clock."""
        return self.epoch_held and self.clock() < self.leads_until

    def require_lead(self) -> None:
        """Raises ``NotLeader`` where the lease is not, or perhaps no longer, this server's."""
        if self.leads():
            return
        what = "its lease lapsed" if self.epoch_held else "it stands by"
        raise NotLeader(f"this server does not lead run {self.name!r}: {what}: {self.stands_by_for}")

    def require_generation(self, uid: str, generation: int, attempt: str) -> None:
        """Passes a call of the present generation that belongs to no stream. Raises ``NotLeader``, ``Fenced``,
        ``NotFound`` before the first generation, ``LedgerRolledBack``."""
        self.require_lead()
        with self.lock:
            self._active_of(uid, generation, attempt, 0)

    def busy(self, process: str) -> str | None:
        """Who trains on the run, if every rank of it was heard within ``liveness_s`` and rank 0 is of another process;
        None where nobody does."""
        with self.lock:
            active = self.active
            if active is None or self.error is not None or (process and active.process == process):
                return None
            generation = active.generation
            heard = generation.slots.heard_at()
            over = generation.end is not None and generation.committed == generation.produced
            if heard is None or over or self.clock() - heard >= self.timeouts.liveness_s:
                return None
            process = f", rank 0 in process {active.process}" if active.process else ""
            return (
                f"generation {generation.number} (attempt {generation.attempt!r}, {len(generation.slots)} ranks"
                f"{process}) trains on it since {date_of(active.opened_at)}, and each rank of it was heard "
                f"{self.clock() - heard:.1f} s ago or later"
            )

    # --- generations -------------------------------------------------------------------------------

    def ramp(self, opening: Opening) -> Ramp:
        """The steps of a generation."""
        first = BatchPlan(
            start_index=opening.start_index,
            world_size=opening.world_size,
            batch_size=opening.batch_size,
            group_steps=opening.group_steps,
        )
        return Ramp.read(opening.ramp, first)

    def message_steps(self, batch_size: int) -> int:
        """Steps of a full message to a rank."""
        return max(1, min(MESSAGE_BYTES // (batch_size * self.timeline.sample_bytes), MESSAGE_STEPS))

    def group_steps(self, world_size: int, batch_size: int) -> int:
        """Steps between two state boundaries: full messages for each rank, or less than one where many ranks
        would make that too large."""
        message = self.message_steps(batch_size)
        most = GROUP_BYTES // (batch_size * self.timeline.sample_bytes * world_size)
        messages = min(1 + len(self.timeline.segments[-1].order.specs) // SOURCES_PER_MESSAGE, most // message)
        return messages * message if messages else max(1, most)

    def window_steps(self, plan: BatchPlan) -> int:
        """Steps that are produced ahead of the committed one where the mixture file says nothing."""
        fewest, most = WINDOW_GROUPS
        groups = WINDOW_BYTES // (plan.group_samples * self.timeline.sample_bytes)
        return min(max(groups, fewest), most) * plan.group_steps

    def recover(self, stored: StoredRun) -> None:
        """Takes up the generation that the ledger has (the caller holds the lock)."""
        if stored.opening is None or stored.committed is None:
            return
        base = self.timeline.decode(stored.committed.state)
        self.committed_state, self.committed_at = base, stored.committed_at
        self.install(stored.opening, base, stored.committed, resumed=True)
        if stored.lease is not None and stored.lease.heard_at is not None and self.active is not None:
            heard = self.clock() - max(0.0, self.wall_clock() - stored.lease.heard_at)
            for slot in self.active.generation.slots:
                slot.last_heard = heard

    def install(self, opening: Opening, base: State, committed: Commit, *, resumed: bool, process: str = "") -> None:
        """Makes a generation the present one (the caller holds the lock). ``resumed``: after a restart
        of the server, where production has to meet the committed digest again."""
        ramp = self.ramp(opening)
        steps, rest = ramp.steps_until(committed.sample_index)
        generation = Generation(
            opening.generation,
            opening.attempt,
            ramp,
            # A client may hold all steps of an optimiser step, and has more to go on with.
            [
                max(self.order.config.window_steps or self.window_steps(plan), 2 * ramp.accumulate)
                for plan in ramp.plans
            ],
            [self.message_steps(plan.batch_size) for plan in ramp.plans],
            pads_last_step=self.order.config.last_step == "pad",
            committed=steps + bool(rest),
        )
        self.wake_all()
        self.active = ActiveGeneration(
            generation,
            base,
            slots=[threading.Condition(self.lock) for _ in range(ramp.world_size)],
            expected_digest=committed.digest if resumed else None,
            epoch=self.epoch,
            opened_at=opening.opened_at,
            process=process,
        )
        self.committed = committed
        self.recent.clear()
        self.recent.append((self.clock(), committed))
        self.error = None
        self.wake_all()

    # --- streams -----------------------------------------------------------------------------------

    def attach(
        self,
        uid: str,
        generation: int,
        rank: int,
        nonce: str,
        received_through: int,
        committed_through: int,
        received_digest: str = "",
        epoch: int = 0,
        attempt: str = "",
        process: str = "",
    ) -> Session:
        """Begins a stream. ``epoch`` is the newest server epoch that the client has met. ``received_digest`` and
        ``attempt`` are checked where they are not empty; ``process`` is the client's, if it says.

        Raises ``NotLeader``, ``Fenced`` for another generation, and what ``Generation.attach`` raises.
        """
        if epoch > self.epoch and self.epoch_held:
            self._ask_who_leads(rank, epoch)
        with self.lock:
            self.require_lead()
            active = self._active_of(uid, generation, attempt, committed_through)
            known = rank < len(active.slots) and active.generation.slots[rank].nonce is not None
        if not known and rank < len(active.slots):
            # After a restart of the server only the ledger knows whose slot it is.
            self.ledger.claim_slot(self.uid, self.stream, active.epoch, generation, rank, nonce)
        with self.lock:
            active = self._active_of(uid, generation, attempt, committed_through)
            try:
                number = active.generation.attach(
                    rank, nonce, received_through, committed_through, self.clock(), received_digest
                )
            except (LedgerRolledBack, OrderMismatch) as error:
                self._alarm(error)
                raise
            if rank == 0 and process:
                active.process = process  # which a restarted server did not know
            active.slots[rank].notify_all()
            self._wake_producer()
            return Session(active.generation, rank, number)

    def _ask_who_leads(self, rank: int, epoch: int) -> None:
        """A client met a newer server epoch: no need to wait for the next renewal to tell that another server leads.

        Raises ``LedgerRolledBack`` where the ledger knows of no newer epoch than this server's, so it forgot one.
        """
        own = self.epoch
        try:
            stored = self.ledger.read_run(self.name, self.stream)
            found = 0 if stored is None else stored.epoch
        except TokenloomError:
            self._wait_for_renewal(own, rank, epoch)
            raise
        if found > own:
            self._wait_for_renewal(own, rank, epoch)
        else:
            # Only for this client, as in ``_active_of``.
            raise LedgerRolledBack(
                f"rank {rank} was served at server epoch {epoch}, but the ledger has given out none beyond {found}: it "
                f"lost data. {LedgerRolledBack.remedy}"
            )

    def _wait_for_renewal(self, own: int, rank: int, epoch: int) -> None:
        """Nothing is sent until the ledger says that this server leads still."""
        with self.lock:
            if self.epoch == own:
                self.leads_until = -math.inf
                self.stands_by_for = f"rank {rank} was served at server epoch {epoch} already, and this is {own}"

    def detach(self, session: Session) -> None:
        with self.lock:
            session.generation.detach(session.rank, session.number)
            self.changed.notify_all()

    def leave(self, session: Session) -> None:
        """The client said goodbye: nobody has to wait for it to be silent."""
        with self.lock:
            session.generation.leave(session.rank, session.number)

    def heard(self, generation: int, rank: int) -> None:
        """A rank joined."""
        with self.lock:
            if self.active is not None and self.active.generation.number == generation:
                slot = self.active.generation.slots[rank]
                slot.last_heard, slot.left = self.clock(), False

    def progress(self, session: Session, consumed_through: int, credit_steps: int, digest: str = "") -> None:
        """Raises ``Fenced`` where the session's generation, or stream, is over."""
        with self.lock:
            active = self._live_for(session)
            generation = active.generation
            try:
                generation.progress(session.rank, session.number, consumed_through, credit_steps, self.clock(), digest)
            except OrderMismatch as error:
                self._alarm(error)
                raise
            self._wake_committer()
            self._wake_stream(active, session.rank)
            self._wake_producer()

    def next_for(
        self, session: Session, timeout_s: float, interrupted: Callable[[], bool]
    ) -> Delivery | EndOfData | Waiting:
        """What a slot gets next; waits for it at most ``timeout_s``, or until ``interrupted`` (see ``wake``).

        Raises ``Fenced``, ``ServerStopping``, or the error that stopped the run (after all that was
        produced before it).
        """
        deadline = self.clock() + timeout_s
        with self.lock:
            while True:
                if self.stopping:
                    raise ServerStopping("the server is stopping; it goes on where it was when it is back")
                if isinstance(self.error, LedgerError):
                    raise self.error
                self.require_lead()
                active = self._live_for(session)
                # Behind an error nothing more is produced: what is there goes out as it is, then the error.
                found = active.generation.next_for(session.rank, session.number, flush=self.error is not None)
                if found is not None:
                    self._wake_producer()
                    if self._up_since is not None:
                        self._log_first_batch()
                    return found
                # Only once it is consumed, too: the stream that ends with the error carries the reports till then.
                if self.error is not None and active.generation.consumed_all(session.rank):
                    raise self.error
                left = deadline - self.clock()
                if left <= 0 or interrupted():
                    self._watch(active, session)
                    return Waiting(self.waiting_for() or self._slow_work(active))
                active.slots[session.rank].wait(left)

    def _slow_work(self, active: ActiveGeneration) -> str:
        """What is at work where nobody waits for anything; for people."""
        if not active.generation.steps_wanted():
            return ""
        io_stats = self.order.io_stats
        # What cannot be asked for a second time, a mount that hangs, never gives up by itself.
        if self.error is None and io_stats.waits_too_long():
            self._stop_for_all(StorageError(io_stats.given_up()))
        return io_stats.longest_wait(STORAGE_WAIT_S) or "samples to be read and tokenised"

    def _stop_for_all(self, error: TokenloomError) -> None:
        _log.error("%s: stopped: %s: %s", self.name, error.name, error)
        self.error = error
        self.wake_all()

    def wake(self, session: Session) -> None:
        """Makes a waiting ``next_for`` of the session look at what interrupts it."""
        with self.lock:
            if self.active is not None and self.active.generation is session.generation:
                self.active.slots[session.rank].notify_all()

    def finish(self, session: Session, timeout_s: float) -> None:
        """Waits, bounded, until all that every rank acknowledged is committed."""
        generation = session.generation
        with self.lock:
            self.changed.wait_for(
                lambda: (
                    generation.all_committed()
                    or isinstance(self.error, LedgerError)
                    or self.stopping
                    or self.active is None
                    or self.active.generation is not generation
                ),
                timeout_s,
            )

    def resume_state(self, group: StepGroup) -> str:
        """``resume_state`` at a group's begin; made once per group (twice at worst, and equal)."""
        if group.resume_state is None:
            group.resume_state = self.timeline.encode(group.base)
        return group.resume_state

    def waiting_for(self) -> str:
        """What production or delivery waits for (the caller holds the lock)."""
        if not self.leads():
            return f"the lease: {self.stands_by_for}"
        if self.active is None:
            return "a trainer"
        generation = self.active.generation
        if self.ledger_error is not None:
            return f"the ledger: {self.ledger_error}"
        if generation.end is not None or generation.steps_wanted():
            return ""
        absent = [slot.rank for slot in generation.slots if not slot.connected]
        if absent:
            named = ", ".join(map(str, absent[:8])) + (", …" if len(absent) > 8 else "")
            return f"rank {named} to connect"
        slot = next(generation.slots.laggards())
        return f"rank {slot.rank} to go on from sample {generation.index_of(slot.consumed)}"

    def _watch(self, active: ActiveGeneration, session: Session) -> None:
        """Names the ranks that hold the others back: in the log, and after ``rank_timeout_s`` as an error for all."""
        now = self.clock()
        waited_s = active.generation.stalled(session.rank, session.number, now)
        if waited_s < min(RANK_WARNING_S, self.timeouts.rank_timeout_s) or self.error is not None:
            return
        named = active.generation.describe_laggards(now)
        if waited_s >= self.timeouts.rank_timeout_s:
            error = RankStalled(
                f"the other ranks waited {waited_s:.0f} s for {named}; look at its log and its machine, and restart "
                "the training job from its last checkpoint (--rank-timeout sets how long they wait)"
            )
            self._stop_for_all(error)
        elif now >= self._warn_at:
            self._warn_at = now + RANK_WARNING_S
            _log.warning("%s: ranks have waited %.0f s for %s", self.name, waited_s, named)

    def _log_first_batch(self) -> None:
        assert self._up_since is not None
        _log.info("%s: first batch %.2f s after the server was up", self.name, self.clock() - self._up_since)
        self._up_since = None

    # --- what the producer and the committer ask and tell (the caller holds the lock) ----------------

    def steps_wanted(self) -> int:
        """How many steps to produce now; 0 to wait."""
        if self.active is None or self.error is not None:
            return 0
        generation = self.active.generation
        steps = generation.steps_wanted()
        if steps and self.revising_at is not None:
            # Nothing at the index itself, and no group that it lies in, may be there before the revision is.
            begin = generation.ramp.boundary(self.revising_at + 1)
            limit = begin - (begin == self.revising_at)
            return min(steps, max(0, generation.ramp.steps_until(limit)[0] - generation.produced))
        return steps

    def first_revisable(self) -> int:
        """The first sample index from which on a revision may hold: the first state boundary behind all that may have
        been produced, and not before the newest revision (the caller holds the lock)."""
        revisions = self.timeline.revisions
        newest = revisions[-1].sample_index if revisions else 0
        return max(newest, self.first_unproduced())

    def first_unproduced(self) -> int:
        """The first state boundary behind all that may have been produced (the caller holds the lock)."""
        if self.active is None or self.committed is None:
            return 0
        generation = self.active.generation
        # Ranks may hold more than this server has produced again, and than its own window allows, behind a restart.
        sent = max(slot.sent for slot in generation.slots)
        return generation.ramp.boundary_behind(generation.index_of(max(generation.produced, sent, generation.horizon)))

    def revise(self, epoch: int, timeline: Timeline | None = None) -> None:
        """What the ledger has is in force, and production goes on; None: nothing was changed."""
        with self.lock:
            if self.epoch != epoch:
                return  # the run was taken up anew since, with what the ledger has
            self.revising_at = None
            if timeline is not None:
                self.timeline = timeline
                if self.active is None:
                    self.committed_state = timeline.initial()
            self.wake_all()

    def publish(self, active: ActiveGeneration, group: StepGroup, fresh: bool, ended: str | None, dropped: int) -> None:
        """The group got steps, or the data ended; ``fresh``: they are its first."""
        generation = active.generation
        if fresh:
            generation.add_group(group)
        generation.filled(ended, dropped)
        try:
            if active.expected_digest is not None and (
                generation.produced >= generation.committed or ended is not None
            ):
                generation.check_digest(active.expected_digest)
                active.expected_digest = None
            if generation.claims:
                generation.check_claims()
        except OrderMismatch as error:
            self._alarm(error)
            return
        if ended is not None:
            _log.info("%s: end of data at sample %d: %s", self.name, group.end, ended)
        for rank in range(len(active.slots)):
            self._wake_stream(active, rank)
        self._wake_committer()

    # A thread is only woken where it would act: waking it costs more than what most events bring it.

    def _wake_stream(self, active: ActiveGeneration, rank: int) -> None:
        if active.generation.has_for(rank) or self.error is not None:
            active.slots[rank].notify_all()

    def _wake_producer(self) -> None:
        if self.steps_wanted():
            self.producer_wakes.notify()

    def _wake_committer(self) -> None:
        if (self.committer_idle and self.commit_due_steps()) or self.backlog():
            self.committer_wakes.notify()

    def backlog(self) -> bool:
        """Whether the steps to commit are so many that the window may fill up behind them."""
        due = self.commit_due_steps()
        if not due or self.active is None:
            return False
        generation = self.active.generation
        return 4 * (due - generation.committed) >= generation.window_steps

    def commit_of(self, state: State, resume_state: str) -> Commit:
        """The ledger's view of a state; ``resume_state`` is at the boundary to go forward from. The counters are of
        what was consumed: what a restore jumped over is not in them, but in ``total_tokens``, the order's position."""
        return Commit(
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
                for spec, source in zip(self.timeline.at(state.sample_index).specs, state.sources, strict=True)
            },
        )

    def commit_due_steps(self) -> int:
        """How many steps to commit; 0 for nothing new (the caller holds the lock)."""
        # What the ranks acknowledge behind a bad row is still committed; behind a ledger's refusal nothing is.
        if self.active is None or isinstance(self.error, LedgerError) or self.active.expected_digest is not None:
            return 0
        return self.active.generation.commit_due() or 0

    def set_committed(self, active: ActiveGeneration, steps: int, commit: Commit, state: State) -> None:
        """The ledger holds the generation's first ``steps`` steps."""
        active.generation.set_committed(steps)
        self.committed, self.committed_state, self.committed_at = commit, state, self.wall_clock()
        now = self.clock()
        if now - self.recent[-1][0] >= RECENT_EVERY_S:
            self.recent.append((now, commit))
        self.changed.notify_all()
        self._wake_producer()

    # -----------------------------------------------------------------------------------------------

    def _active_of(self, uid: str, generation: int, attempt: str, committed_through: int) -> ActiveGeneration:
        """The present generation, for a client that says which it is of and which commit it has seen."""
        active = self.active
        if isinstance(self.error, LedgerRolledBack):
            raise self.error
        number = active.generation.number if active is not None else 0
        if generation > number or (uid != self.uid and committed_through > 0):
            # Only for this client: its like get the same, and others may have begun anew since.
            raise LedgerRolledBack(
                f"this rank trains generation {generation} of run_uid {uid} (sample {committed_through} was "
                f"committed), but the ledger is at generation {number} of {self.uid}: it lost data. "
                f"{LedgerRolledBack.remedy}"
            )
        if active is None:
            raise NotFound(f"run {self.name!r} has no generation; join first")
        if uid != self.uid or generation != number or attempt not in ("", active.generation.attempt):
            raise Fenced(
                f"generation {generation} of run {self.name!r} (attempt {attempt!r}) is over: generation {number} "
                f"(attempt {active.generation.attempt!r}) has taken its place"
            )
        return active

    def _live_for(self, session: Session) -> ActiveGeneration:
        """The present generation, for a stream of it."""
        active = self.active
        if active is not None and active.generation is session.generation:
            return active
        if active is None or active.generation.number == session.generation.number:
            raise NotLeader(f"run {self.name!r} was taken up anew, here or by another server; the stream begins again")
        raise Fenced(
            f"generation {session.generation.number} of run {self.name!r} is over: generation "
            f"{active.generation.number} "
            f"(attempt {active.generation.attempt!r}) has taken its place"
        )

    def _alarm(self, error: TokenloomError) -> None:
        """Stops the run for all ranks (the caller holds the lock)."""
        if isinstance(error, LedgerRolledBack):
            self._note_loss(math.inf)  # a rank knows more than this server does
        self._stop_for_all(error)

    def _note_loss(self, known_index: float) -> None:
        """The ledger is behind a commit (the caller holds the lock)."""
        generation = self.active.generation.number if self.active is not None else self.lost[0]
        self.lost = generation, known_index, self.wall_clock()

    def _made_right(self, stored: StoredRun) -> bool:
        """Whether the ledger is not, or no longer, behind what it had acknowledged."""
        if not isinstance(self.error, LedgerRolledBack):
            return True
        if stored.opening is None or stored.committed is None:
            return False
        generation, index, found_at = self.lost
        back = (stored.opening.generation, stored.committed.sample_index) >= (generation, index)
        return back or stored.opening.opened_at > found_at

    def fail(self, active: ActiveGeneration, error: TokenloomError) -> None:
        """Stops the run with an error, if the generation is still the present one. Takes the lock."""
        with self.lock:
            if active is self.active:
                _log.error("%s: stopped: %s: %s", self.name, error.name, error)
                self.error = error
            self.wake_all()

    def end_with_interpreter(self, active: ActiveGeneration) -> None:
        """As ``fail``, where this process is ending, which is nobody's fault. Takes the lock."""
        with self.lock:
            if active is self.active:
                self.error = SourceError(
                    "this process ends with its main thread, so no more samples are read: let that wait for the one "
                    "that trains"
                )
            self.wake_all()

    def wake_all(self) -> None:
        self.producer_wakes.notify_all()
        self.committer_wakes.notify_all()
        self.changed.notify_all()
        if self.active is not None:
            for slot in self.active.slots:
                slot.notify_all()
