"""The ranks' streams: whose each is, what it gets next, and what its rank has used. Commands of their threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tokenloom_server import errors
from tokenloom_server.ledger.commands import ClaimSlot
from tokenloom_server.run.active_generation import ActiveGeneration
from tokenloom_server.run.context import Bell, RunContext
from tokenloom_server.run.generation import Delivery, EndOfData, Waiting
from tokenloom_server.run.head import Head
from tokenloom_server.run.lease import Lease
from tokenloom_server.run.present_generation import PresentGeneration
from tokenloom_server.run.silent_ranks import SilentRanks
from tokenloom_server.run.slot_claims import SlotClaims


class Session(NamedTuple):
    """A rank's stream: the generation that it is of, and which of the rank's streams it is."""

    active: ActiveGeneration
    rank: int
    number: int


@dataclass(eq=False)
class Sessions:
    """Those of one run. Thread-safe."""

    _context: RunContext
    _head: Head
    _present: PresentGeneration
    _lease: Lease
    _claims: SlotClaims
    _silent_ranks: SilentRanks
    #: What production or delivery waits for.
    _waiting: Callable[[], Waiting]

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
        context = self._context
        if epoch > self._lease.state.epoch and self._lease.state.held:
            self._ask_who_leads(rank, epoch)
        with self._context.lock:
            active = self._active_for(uid, generation, attempt, committed_through)
            slots = active.generation.slots
            is_unknown = rank < len(slots) and slots[rank].nonce is None
        if is_unknown:
            # After a restart of the server only the ledger knows whose slot it is.
            self._claims.write(
                ClaimSlot(self._head.uid, context.stream, active.epoch, generation, rank, nonce)
            )
        with self._context.lock:
            active = self._active_for(uid, generation, attempt, committed_through)
            if stream_number < active.stream_numbers.get(nonce, 0):
                raise self._fenced(
                    f"a newer stream of rank {rank} has taken this one's place, which came late"
                )
            try:
                number = active.generation.attach(
                    rank,
                    nonce,
                    received_through,
                    committed_through,
                    context.clock(),
                    received_digest,
                )
            except (errors.LedgerRolledBack, errors.OrderMismatch) as error:
                self._present.alarm(error)
                raise
            active.note_stream(nonce, stream_number, "" if rank else process)
            context.measures.reconnects.add(number > 1 or active.taken_up)
            self._context.wakes.ranks[rank].notify_all()
            self._present.wake_producer()
            return Session(active, rank, number)

    def require_generation(self, uid: str, generation: int, attempt: str) -> None:
        """Passes a call of the present generation that belongs to no stream. Raises ``NotLeader``, ``Fenced``,
        ``NotFound`` before the first generation, ``LedgerRolledBack``."""
        with self._context.lock:
            self._active_for(uid, generation, attempt, 0)

    def detach(self, session: Session) -> None:
        """The stream is over."""
        with self._context.lock:
            session.active.generation.detach(session.rank, session.number)
            self._context.wakes.changed.notify_all()

    def leave(self, session: Session) -> None:
        """The client said goodbye: nobody has to wait for it to be silent."""
        with self._context.lock:
            session.active.generation.leave(session.rank, session.number)

    def progress(
        self,
        session: Session,
        consumed_through: int,
        credit_micro_steps: int,
        digest: str = "",
        waited_s: float = 0.0,
    ) -> None:
        """A rank consumed up to a sample index, takes so many micro-steps beyond it, and has waited so long for data.

        Raises ``Fenced`` where the session's generation, or stream, is over."""
        clock, present = self._context.clock, self._present
        with self._context.lock:
            generation = self._current(session).generation
            try:
                generation.progress(
                    *session[1:], consumed_through, credit_micro_steps, clock(), digest
                )
            except errors.OrderMismatch as error:
                present.alarm(error)
                raise
            generation.slots[session.rank].note_wait(waited_s, clock())
            present.wake_committer()
            present.wake_rank(session.rank)
            present.wake_producer()

    def next_for(
        self, session: Session, timeout_s: float, interrupted: Callable[[], bool]
    ) -> Delivery | EndOfData | Waiting:
        """What a slot gets next; waits for it at most ``timeout_s``, or until ``interrupted`` (see ``wake``).

        Raises ``Fenced``, ``ServerStopping``, or the error that stopped the run (after all that was
        produced before it).
        """
        clock = self._context.clock
        deadline = clock() + timeout_s
        with self._context.lock:
            while (item := self._next_for(session)) is None:
                left_s = deadline - clock()
                if left_s <= 0 or interrupted():
                    return self._watch(session)
                self._context.wakes.ranks[session.rank].wait(left_s)
            return item

    def next_now(self, session: Session) -> Delivery | EndOfData | None:
        """As ``next_for``, without waiting; None where there is nothing yet."""
        with self._context.lock:
            return self._next_for(session)

    def waiting(self, session: Session) -> Waiting:
        """Why a slot gets nothing for so long. Notes, too, which ranks hold the others back."""
        with self._context.lock:
            return self._watch(session)

    def ring_for(self, session: Session, ring: Callable[[], None]) -> None:
        """From now on ``ring`` is called, under the lock, where there may be something for a slot; and once at once."""
        active = session.active
        with self._context.lock:
            if (
                self._present.active is active
                and session.number == active.generation.slots[session.rank].session
            ):
                self._context.wakes.ranks[session.rank] = Bell(self._context.lock, ring)
            ring()

    def wake(self, session: Session) -> None:
        """Makes a waiting ``next_for`` of the session look at what interrupts it."""
        with self._context.lock:
            if self._present.active is session.active:
                self._context.wakes.ranks[session.rank].notify_all()

    def finish(self, session: Session, timeout_s: float) -> bool:
        """Waits, bounded, until all that every rank acknowledged is committed, or cannot be; returns whether."""
        present = self._present
        with self._context.lock:
            return self._context.wakes.changed.wait_for(
                lambda: (
                    session.active.generation.all_committed()
                    or isinstance(present.error, errors.LedgerError)
                    or present.ending is not None
                    or present.active is not session.active
                ),
                timeout_s,
            )

    def await_detached(self, timeout_s: float) -> None:
        """Waits, bounded, until no rank has a stream."""
        present = self._present
        with self._context.lock:
            self._context.wakes.changed.wait_for(
                lambda: present.active is None or not present.active.generation.slots.connected,
                timeout_s,
            )

    def _next_for(self, session: Session) -> Delivery | EndOfData | None:
        present = self._present
        if (ending := present.ending) is not None:
            raise type(ending)(
                str(ending)
            )  # one that is kept must not keep the calls that raised it
        if isinstance(
            present.error, errors.LedgerError | errors.JoinRefused | errors.SnapshotInvalid
        ):
            raise present.error
        self._lease.require()
        generation = self._current(session).generation
        # After an error nothing more is produced: what is there goes out as it is, then the error.
        item = generation.next_for(session.rank, session.number, flush=present.error is not None)
        if item is not None:
            present.wake_producer()
            present.note_batch()
            present.wake_rank(session.rank)  # for what comes after it
        # Only once it is consumed, too: the stream that ends with the error carries the reports till then.
        elif present.error is not None and generation.consumed_all(session.rank):
            raise present.error
        return item

    def _watch(self, session: Session) -> Waiting:
        self._silent_ranks.watch(*session)
        return self._waiting()

    # --- whose stream it is ------------------------------------------------------------------------

    def _active_for(
        self, uid: str, generation: int, attempt: str, committed_through: int
    ) -> ActiveGeneration:
        """The present generation, for a client that says which it is of and which commit it has seen."""
        # A server that has just lost the lease holds no generation: that is no loss of the ledger's.
        self._lease.require()
        name, own_uid, active = self._context.name, self._head.uid, self._present.active
        if isinstance(self._present.error, errors.LedgerRolledBack):
            raise self._present.error
        number = active.generation.number if active is not None else 0
        if generation > number or (uid != own_uid and committed_through > 0):
            # Only for this client: its like get the same, and others may have begun anew since.
            raise errors.LedgerRolledBack(
                f"this rank trains generation {generation} of run_uid {uid} (sample {committed_through} was "
                f"committed), but the ledger is at generation {number} of {own_uid}: it lost data. "
                f"{errors.LedgerRolledBack.remedy}"
            )
        if active is None:
            raise errors.NotFound(f"run {name!r} has no generation; join first")
        after = f"generation {number} (attempt {active.generation.attempt!r}) has taken its place"
        is_present = (
            uid == own_uid and generation == number and attempt in ("", active.generation.attempt)
        )
        if is_present and active.closed:
            if self._present.held_at is not None:
                raise errors.NotLeader(
                    f"run {name!r} is being revised, which may close generation {number}; ask again"
                )
            after = "a revision closed it while nobody trained, or a backup of the ledger was restored; restart the "
            after += "training job from its last checkpoint"
        if not is_present or active.closed:
            raise self._fenced(
                f"generation {generation} of run {name!r} (attempt {attempt!r}) is over: {after}"
            )
        return active

    def _current(self, session: Session) -> ActiveGeneration:
        """The present generation, for a stream of it."""
        name, active, number = (
            self._context.name,
            self._present.active,
            session.active.generation.number,
        )
        if active is session.active:
            return session.active
        if active is None or active.generation.number == number:
            raise errors.NotLeader(
                f"run {name!r} was taken up anew, here or by another server; the stream begins again"
            )
        raise self._fenced(
            f"generation {number} of run {name!r} is over: generation {active.generation.number} "
            f"(attempt {active.generation.attempt!r}) has taken its place"
        )

    def _fenced(self, why: str) -> errors.Fenced:
        self._context.measures.fences.add()
        return errors.Fenced(why)

    def _ask_who_leads(self, rank: int, epoch: int) -> None:
        """A client met a newer server epoch: no need to wait for the next renewal to tell that another server leads.
        Until then nothing is sent, unless the ledger says that this server leads still.

        Raises ``LedgerRolledBack`` where the ledger knows of no newer epoch than this server's, so it forgot one.
        """
        context, own, newest = self._context, self._lease.state.epoch, epoch
        try:
            stored = context.ledger.read_run(context.name, context.stream)
            newest = 0 if stored is None else stored.epoch
        finally:
            with context.lock:
                if newest > own == self._lease.state.epoch:
                    self._lease.doubt(
                        f"rank {rank} was served at server epoch {epoch} already, and this is {own}"
                    )
        if newest <= own:
            # Only for this client, as in ``_active_for``.
            raise errors.LedgerRolledBack(
                f"rank {rank} was served at server epoch {epoch}, but the ledger has given out none beyond {newest}: "
                f"it lost data. {errors.LedgerRolledBack.remedy}"
            )
