"""Attempts at a run: what their ranks were refused with, what they wait for, and the write that opens one.

Commands of Joins (``join``, ``opening``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tokenloom_server.core.state import State
from tokenloom_server.errors import (
    JoinRefused,
    LedgerUnavailable,
    NotLeader,
    ServerStopping,
    SnapshotInvalid,
    TokenloomError,
)
from tokenloom_server.ledger.commands import ClaimSlot, Open
from tokenloom_server.ledger.records import CommittedState, Opening
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.run.context import RunContext
from tokenloom_server.run.head import Head
from tokenloom_server.run.join_call import MAX_NAME, RankRefusal, ResumeChoice
from tokenloom_server.run.lease import Lease
from tokenloom_server.run.pins import Pins
from tokenloom_server.run.present_generation import PresentGeneration
from tokenloom_server.run.slot_claims import SlotClaims

#: Refused attempts that are remembered, so that waiting ranks hear why.
_REMEMBERED_REFUSALS = 64
#: What is remembered of a refusal, characters; a request may make it say much.
_MAX_TEXT = 4000


@dataclass(eq=False)
class Attempts:
    """Those of one run. Thread-safe."""

    _context: RunContext
    _head: Head
    _present: PresentGeneration
    _lease: Lease
    _claims: SlotClaims
    _pins: Pins
    #: What rank 0 of one was refused with, by what it asked for: the same id may be tried again with another resume
    #: point. The oldest are forgotten.
    _refused: dict[tuple[str, ResumeChoice], TokenloomError] = field(default_factory=dict)
    #: By attempt.
    _refused_ranks: dict[str, RankRefusal] = field(default_factory=dict)
    #: Whose rank 0 is at the opening.
    _openings: set[str] = field(default_factory=set)
    #: Whether an opening is on its way to the ledger: the run's lock is not to be had then.
    writes: bool = False

    @property
    def is_opening(self) -> bool:
        """Whether rank 0 of one is at the opening."""
        return bool(self._openings)

    # --- refused, and waited for -------------------------------------------------------------------

    def refuse_rank(self, attempt: str, rank: int, error: JoinRefused | SnapshotInvalid) -> None:
        """A rank was refused for good, so that its launch cannot train: the other ranks hear that now, whether they
        wait, train or are still to join. A rank that has its place already is another process's, and trains on."""
        refusal = type(error)(
            f"rank {rank} of attempt {attempt!r} was refused, so its launch cannot begin: {error}"[
                :_MAX_TEXT
            ]
        )
        with self._context.lock:
            active = self._present.active
            if active is not None and self._present.is_open(attempt):
                slots = active.generation.slots
                if self._present.error is None and rank < len(slots) and slots[rank].is_free:
                    self._present.stop(refusal)
                return
            if len(attempt) <= MAX_NAME:
                self._refused_ranks.setdefault(attempt, RankRefusal(refusal, {rank}))
            _forget_oldest(self._refused_ranks)
            self._context.wakes.changed.notify_all()

    def refuse(self, attempt: str, choice: ResumeChoice, error: TokenloomError) -> None:
        """Rank 0 of an attempt was refused: the other ranks hear the same."""
        error.of_launch = True
        with self._context.lock:
            self._refused[attempt, choice] = error
            _forget_oldest(self._refused)
            self._context.wakes.changed.notify_all()

    def require_free(self, attempt: str, rank: int, nonce: str) -> None:
        """Raises ``AttemptUsed`` where another process has the slot, whatever that one asked for, and what another rank
        of the attempt was refused with."""
        with self._context.lock:
            active = self._present.active
            if active is not None and self._present.is_open(attempt):
                active.generation.require_own_slot(rank, nonce)
            self._require_unrefused(attempt, rank)

    def _require_unrefused(self, attempt: str, rank: int) -> None:
        refusal = self._refused_ranks.get(attempt)
        if refusal is not None and rank in refusal.heard_by:
            del self._refused_ranks[attempt]
        elif refusal is not None:
            refusal.heard_by.add(rank)
            raise type(refusal.error)(
                str(refusal.error)
            )  # one that is kept must not keep the calls that raised it

    def has_opened(self, attempt: str, choice: ResumeChoice) -> bool:
        """Whether rank 0 of an attempt opened the present generation. Raises ``ServerStopping``, and what rank 0 was
        refused with."""
        with self._context.lock:
            if self._present.ending is not None:
                raise ServerStopping("the server is stopping; join again when it is back")
            is_open, refusal = self._present.is_open(attempt), self._refused.get((attempt, choice))
            if not is_open and refusal is not None:
                raise refusal
            return is_open

    def await_rank_0(self, attempt: str, choice: ResumeChoice, timeout_s: float) -> None:
        """Waits, bounded, until rank 0 opened the attempt, was refused, or cannot."""

        def is_decided() -> bool:
            present, is_refused = (
                self._present,
                (attempt, choice) in self._refused or attempt in self._refused_ranks,
            )
            return (
                present.ending is not None
                or not self._lease.leads()
                or present.is_open(attempt)
                or is_refused
            )

        with self._context.lock:
            self._context.wakes.changed.wait_for(is_decided, timeout_s)

    # --- opened ------------------------------------------------------------------------------------

    @contextmanager
    def opening(self, attempt: str) -> Iterator[None]:
        """While rank 0 of an attempt opens it: going forward to where it begins may take a while, and stats say so."""
        with self._context.lock:
            self._openings.add(attempt)
        try:
            yield
        finally:
            with self._context.lock:
                self._openings.discard(attempt)

    def open(
        self,
        epoch: int,
        uid: str,
        opening: Opening,
        start: State,
        commit: CommittedState,
        timeline: Timeline,
    ) -> None:
        """Writes an opening, with the revision that ``timeline`` may have more, and makes its generation the present
        one. Nothing is sent meanwhile, so that nothing reaches an older one afterwards.

        Raises ``NotLeader`` where ``epoch``, at which it was worked out, is over, what another rank was refused with
        meanwhile, and the ledger's errors."""
        context, head = self._context, self._head
        with self._context.lock:
            self._require_unrefused(opening.attempt, 0)
            if epoch != self._lease.state.epoch:
                raise self._taken_up()
            revision = next(iter(timeline.revisions[len(head.timeline.revisions) :]), None)
            known = head.revision_changes
            try:
                context.ledger.execute(
                    Open(uid, context.stream, epoch, opening, commit, revision, known_changes=known)
                )
            except LedgerUnavailable as error:
                self._lease.await_ledger("a generation was opened", error)
                raise
            head.adopt(uid)
            head.revise(timeline, known + (revision is not None), begun=True)
            self._pins.take()
            context.measures.revisions.add(revision is not None)
            self._refused.clear()
            self._present.begin(opening, start, commit, context.lease_clock(), epoch)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self.writes = True
        try:
            yield
        finally:
            self.writes = False

    def reopen(self, opening: Opening) -> None:
        """Rank 0 asks again for what it opened. Raises ``NotLeader`` where that is being taken up anew."""
        with self._context.lock:
            active = self._present.active
            if active is None or active.generation.number != opening.generation:
                raise self._taken_up()
            self._refused.clear()

    def _taken_up(self) -> NotLeader:
        return NotLeader(f"run {self._context.name!r} is being taken up anew; join again")

    def claim_slot(self, generation: int, rank: int, nonce: str, release: str = "") -> None:
        """A rank joined: its slot is this process's. Raises ``AttemptUsed`` and the ledger's errors."""
        context, epoch = self._context, self._lease.state.epoch
        self._claims.write(
            ClaimSlot(self._head.uid, context.stream, epoch, generation, rank, nonce)
        )
        with self._context.lock:
            active = self._present.active
            if active is not None and active.generation.number == generation:
                slots = active.generation.slots
                slots.join(slots[rank], context.clock(), release)


def _forget_oldest(refusals: dict[Any, Any]) -> None:
    while len(refusals) > _REMEMBERED_REFUSALS:
        refusals.pop(next(iter(refusals)))
