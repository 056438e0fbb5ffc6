"""Commands of the ranks' streams, each on a thread of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tokenloom_server import errors
from tokenloom_server.ledger.commands import ClaimSlot
from tokenloom_server.run.active_generation import ActiveGeneration
from tokenloom_server.run.delivery import Delivery, EndOfData, Waiting
from tokenloom_server.run.run_state import RunState
from tokenloom_server.run.views import Session
from tokenloom_server.run.wakes import Bell

_log = logging.getLogger(__name__)

#: After so long a wait for another rank the log names it, and again after each further, seconds.
RANK_WARNING_S = 30.0


class StreamCommands(RunState):
    """A part of ``RunCoordinator``."""

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
        stream_number: int = 0,
    ) -> Session:
        """Begins a stream. ``epoch`` is the newest server epoch that the client has met. ``received_digest`` and
        ``attempt`` are checked where they are not empty; ``process`` is the client's, if it says, and
        ``stream_number`` rises with each of its streams.

        Raises ``NotLeader``, ``Fenced`` for another generation, and what ``Generation.attach`` raises.
        """
        if epoch > self.lease.epoch and self.lease.held:
            self._ask_who_leads(rank, epoch)
        with self._lock:
            active = self._active_for(uid, generation, attempt, committed_through)
            slots = active.generation.slots
            is_unknown = rank < len(slots) and slots[rank].nonce is None
        if is_unknown:
            # After a restart of the server only the ledger knows whose slot it is.
            self._claims.write(ClaimSlot(self.uid, self.stream, active.epoch, generation, rank, nonce))
        with self._lock:
            active = self._active_for(uid, generation, attempt, committed_through)
            if stream_number < active.stream_numbers.get(nonce, 0):
                raise self._fenced(f"a newer stream of rank {rank} has taken this one's place, which came late")
            try:
                number = active.generation.attach(
                    rank, nonce, received_through, committed_through, self.clock(), received_digest
                )
            except (errors.LedgerRolledBack, errors.OrderMismatch) as error:
                self._alarm(error)
                raise
            active.stream_numbers[nonce] = stream_number
            self.measures.reconnects.add(number > 1 or active.taken_up)
            if rank == 0 and process:
                active.process = process  # which a restarted server did not know
            self._wakes.ranks[rank].notify_all()
            self._wake_producer()
            return Session(active, rank, number)

    def require_generation(self, uid: str, generation: int, attempt: str) -> None:
        """Passes a call of the present generation that belongs to no stream. Raises ``NotLeader``, ``Fenced``,
        ``NotFound`` before the first generation, ``LedgerRolledBack``."""
        with self._lock:
            self._active_for(uid, generation, attempt, 0)

    def detach(self, session: Session) -> None:
        """The stream is over."""
        with self._lock:
            session.active.generation.detach(session.rank, session.number)
            self._wakes.changed.notify_all()

    def leave(self, session: Session) -> None:
        """The client said goodbye: nobody has to wait for it to be silent."""
        with self._lock:
            session.active.generation.leave(session.rank, session.number)

    def progress(
        self, session: Session, consumed_through: int, credit_micro_steps: int, digest: str = "", waited_s: float = 0.0
    ) -> None:
        """A rank consumed up to a sample index, takes so many micro-steps beyond it, and has waited so long for data.

        Raises ``Fenced`` where the session's generation, or stream, is over."""
        with self._lock:
            generation = self._current(session).generation
            try:
                generation.progress(
                    session.rank, session.number, consumed_through, credit_micro_steps, self.clock(), digest
                )
            except errors.OrderMismatch as error:
                self._alarm(error)
                raise
            generation.slots[session.rank].note_wait(waited_s, self.clock())
            self._wake_committer()
            self._wake_rank(session.rank)
            self._wake_producer()

    def next_for(
        self, session: Session, timeout_s: float, interrupted: Callable[[], bool]
    ) -> Delivery | EndOfData | Waiting:
        """What a slot gets next; waits for it at most ``timeout_s``, or until ``interrupted`` (see ``wake``).

        Raises ``Fenced``, ``ServerStopping``, or the error that stopped the run (after all that was
        produced before it).
        """
        deadline = self.clock() + timeout_s
        with self._lock:
            while (item := self._next_for(session)) is None:
                left_s = deadline - self.clock()
                if left_s <= 0 or interrupted():
                    return self._watch(session)
                self._wakes.ranks[session.rank].wait(left_s)
            return item

    def next_now(self, session: Session) -> Delivery | EndOfData | None:
        """As ``next_for``, without waiting; None where there is nothing yet."""
        with self._lock:
            return self._next_for(session)

    def waiting(self, session: Session) -> Waiting:
        """Why a slot gets nothing for so long. Notes, too, which ranks hold the others back."""
        with self._lock:
            return self._watch(session)

    def ring_for(self, session: Session, ring: Callable[[], None]) -> None:
        """From now on ``ring`` is called, under the lock, where there may be something for a slot; and once at once."""
        with self._lock:
            if (
                self._active is session.active
                and session.number == session.active.generation.slots[session.rank].session
            ):
                self._wakes.ranks[session.rank] = Bell(self._lock, ring)
            ring()

    def _next_for(self, session: Session) -> Delivery | EndOfData | None:
        if self.stopping:
            raise type(self._ending)(str(self._ending))  # one that is kept must not keep the calls that raised it
        if isinstance(self._error, errors.LedgerError | errors.JoinRefused | errors.SnapshotInvalid):
            raise self._error
        self.require_lead()
        active = self._current(session)
        # After an error nothing more is produced: what is there goes out as it is, then the error.
        item = active.generation.next_for(session.rank, session.number, flush=self._error is not None)
        if item is not None:
            self._wake_producer()
            if self._up_since is not None:
                self._log_first_batch(self._up_since)
        # Only once it is consumed, too: the stream that ends with the error carries the reports till then.
        elif self._error is not None and active.generation.consumed_all(session.rank):
            raise self._error
        return item

    def _watch(self, session: Session) -> Waiting:
        self._watch_ranks(session)
        self._watch_storage(session.active)
        return self._waiting()

    def _log_first_batch(self, up_since: float) -> None:
        _log.info(
            "%s: first batch %.2f s after the server was up, the wait for trainers included",
            self.name,
            self.clock() - up_since,
        )
        self._up_since = None

    def wake(self, session: Session) -> None:
        """Makes a waiting ``next_for`` of the session look at what interrupts it."""
        with self._lock:
            if self._active is session.active:
                self._wakes.ranks[session.rank].notify_all()

    def finish(self, session: Session, timeout_s: float) -> bool:
        """Waits, bounded, until all that every rank acknowledged is committed, or cannot be; returns whether."""
        with self._lock:
            return self._wakes.changed.wait_for(
                lambda: (
                    session.active.generation.all_committed()
                    or isinstance(self._error, errors.LedgerError)
                    or self.stopping
                    or self._active is not session.active
                ),
                timeout_s,
            )

    # --- whose stream it is ------------------------------------------------------------------------

    def _active_for(self, uid: str, generation: int, attempt: str, committed_through: int) -> ActiveGeneration:
        """The present generation, for a client that says which it is of and which commit it has seen."""
        # A server that has just lost the lease holds no generation: that is no loss of the ledger's.
        self.require_lead()
        active = self._active
        if isinstance(self._error, errors.LedgerRolledBack):
            raise self._error
        number = active.generation.number if active is not None else 0
        if generation > number or (uid != self.uid and committed_through > 0):
            # Only for this client: its like get the same, and others may have begun anew since.
            raise errors.LedgerRolledBack(
                f"this rank trains generation {generation} of run_uid {uid} (sample {committed_through} was "
                f"committed), but the ledger is at generation {number} of {self.uid}: it lost data. "
                f"{errors.LedgerRolledBack.remedy}"
            )
        if active is None:
            raise errors.NotFound(f"run {self.name!r} has no generation; join first")
        after = f"generation {number} (attempt {active.generation.attempt!r}) has taken its place"
        is_present = uid == self.uid and generation == number and attempt in ("", active.generation.attempt)
        if is_present and active.closed:
            if self._revising_at is not None:
                raise errors.NotLeader(
                    f"run {self.name!r} is being revised, which may close generation {number}; ask again"
                )
            after = "a revision closed it while nobody trained, or a backup of the ledger was restored; restart the "
            after += "training job from its last checkpoint"
        if not is_present or active.closed:
            raise self._fenced(f"generation {generation} of run {self.name!r} (attempt {attempt!r}) is over: {after}")
        return active

    def _current(self, session: Session) -> ActiveGeneration:
        """The present generation, for a stream of it."""
        active, number = self._active, session.active.generation.number
        if active is session.active:
            return session.active
        if active is None or active.generation.number == number:
            raise errors.NotLeader(
                f"run {self.name!r} was taken up anew, here or by another server; the stream begins again"
            )
        raise self._fenced(
            f"generation {number} of run {self.name!r} is over: generation {active.generation.number} "
            f"(attempt {active.generation.attempt!r}) has taken its place"
        )

    def _fenced(self, why: str) -> errors.Fenced:
        self.measures.fences.add()
        return errors.Fenced(why)

    def _ask_who_leads(self, rank: int, epoch: int) -> None:
        """A client met a newer server epoch: no need to wait for the next renewal to tell that another server leads.

        Raises ``LedgerRolledBack`` where the ledger knows of no newer epoch than this server's, so it forgot one.
        """
        own = self.lease.epoch
        try:
            stored = self.ledger.read_run(self.name, self.stream)
            newest = 0 if stored is None else stored.epoch
        except errors.TokenloomError:
            self._doubt_lease(own, rank, epoch)
            raise
        if newest <= own:
            # Only for this client, as in ``_active_for``.
            raise errors.LedgerRolledBack(
                f"rank {rank} was served at server epoch {epoch}, but the ledger has given out none beyond {newest}: "
                f"it lost data. {errors.LedgerRolledBack.remedy}"
            )
        self._doubt_lease(own, rank, epoch)

    def _doubt_lease(self, own: int, rank: int, epoch: int) -> None:
        """Nothing is sent until the ledger says that this server leads still."""
        with self._lock:
            if self.lease.epoch == own:
                reason = f"rank {rank} was served at server epoch {epoch} already, and this is {own}"
                self.lease = self.lease.doubted(reason)

    # --- what a stream waits for -------------------------------------------------------------------

    def _watch_storage(self, active: ActiveGeneration) -> None:
        """Stops the run where storage is waited for too long that cannot be asked a second time: a mount that hangs
        never gives up by itself."""
        overdue = active.generation.steps_wanted() and self.order.resources.io_stats.overdue()
        if self._error is None and overdue:
            self._stop_for_all(errors.StorageError(overdue))

    def _watch_ranks(self, session: Session) -> None:
        """Names the ranks that hold the others back: in the log, and after ``rank_timeout_s`` as an error for all."""
        now, generation = self.clock(), session.active.generation
        waited_s = generation.stalled(session.rank, session.number, now)
        if waited_s < min(RANK_WARNING_S, self.timeouts.rank_timeout_s) or self._error is not None:
            return
        named = generation.describe_laggards(now)
        if waited_s >= self.timeouts.rank_timeout_s:
            error = errors.RankStalled(
                f"the other ranks waited {waited_s:.0f} s for {named}; look at its log and its machine, and restart "
                "the training job from its last checkpoint (--rank-timeout sets how long they wait)"
            )
            self._stop_for_all(error)
        elif now >= self._warn_at:
            self._warn_at = now + RANK_WARNING_S
            _log.warning("%s: ranks have waited %.0f s for %s", self.name, waited_s, named)
