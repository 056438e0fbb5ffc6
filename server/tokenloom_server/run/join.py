"""Answering Joins: rank 0 opens the attempt's generation, and the other ranks wait for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokenloom_server import errors
from tokenloom_server.core.state import State
from tokenloom_server.ledger.records import Opening
from tokenloom_server.run import join_call
from tokenloom_server.run.coordinator import RunCoordinator
from tokenloom_server.run.fork import ForkHandler
from tokenloom_server.run.join_call import JoinCall
from tokenloom_server.run.opening import GenerationOpener
from tokenloom_server.run.resume_points import ResumePoints
from tokenloom_server.run.revise import RevisionHandler

#: How long the other ranks' Joins wait for rank 0's, seconds: as long as clients by default try to join at all.
RANK_0_WAIT_S = 300.0
#: Where rank 0 was refused because the run is busy, the other ranks ask so much longer than it does, seconds: it may be
#: cut off for a while.
RANK_0_MARGIN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """What a Join is answered with, beside what the order says."""

    uid: str
    opening: Opening
    start: State


class JoinHandler:
    """Answers the Joins of one run. Thread-safe."""

    def __init__(
        self,
        coordinator: RunCoordinator,
        points: ResumePoints,
        revisions: RevisionHandler,
        forks: ForkHandler,
    ) -> None:
        self._coordinator = coordinator
        self._points = points
        self._forks = forks
        self._opener = GenerationOpener(coordinator, points, revisions)

    def join(self, call: JoinCall) -> Joined:
        """Takes a slot; rank 0 opens the attempt's generation, the others wait for it, bounded.

        Raises ``JoinRefused``, ``AttemptUsed``, ``RunBusy``, ``ResumePointNeeded``, ``SnapshotInvalid``, ``NotFound``
        (an unknown snapshot id) and the ledger's errors.
        """
        try:
            with self._coordinator.measures.joins.timing(self._coordinator.clock):
                return self._join(call)
        except (errors.JoinRefused, errors.SnapshotInvalid) as error:
            self._coordinator.attempts.refuse_rank(call.attempt, call.rank, error)
            raise

    def _join(self, call: JoinCall) -> Joined:
        coordinator, config = self._coordinator, self._coordinator.order.config
        deadline = coordinator.clock() + RANK_0_WAIT_S
        call = join_call.with_global_batch_size(call, coordinator.name, config.global_batch_size)
        while True:
            coordinator.attempts.require_free(call.attempt, call.rank, call.nonce)
            join_call.check(call, coordinator.timeline.sample_bytes, config.window_micro_steps)
            coordinator.require_lead()
            call = self._as_own(call)
            opening = self._open(call) if call.rank == 0 else self._opened_by_rank_0(call)
            if opening is not None:
                coordinator.attempts.claim_slot(
                    opening.generation, call.rank, call.nonce, call.release
                )
                start = coordinator.timeline.decode(opening.start_state)
                return Joined(uid=coordinator.uid, opening=opening, start=start)
            left_s = deadline - coordinator.clock()
            if left_s <= 0:
                raise no_rank_0(call)
            coordinator.attempts.await_rank_0(call.attempt, self._opener.choice_of(call), left_s)

    def _as_own(self, call: JoinCall) -> JoinCall:
        """A call whose state is one of this run: of a fork it is made from the other run's."""
        if not call.state or not call.fork:
            return call
        opening = self._coordinator.stored().opening
        if opening is not None and opening.attempt != call.attempt:
            raise errors.JoinRefused(
                f"run {self._coordinator.name!r} has begun (generation {opening.generation}), and a fork is a new run: "
                "leave fork_from out and load this run's own checkpoint with load_state_dict, or say resume='fresh' to "
                "begin again where it was forked"
            )
        return replace(call, state=self._forks.fork(call.state).encode(), fork=False)

    def _open(self, call: JoinCall) -> Opening:
        """Rank 0's part."""
        try:
            coordinator = self._coordinator
            with (
                coordinator.attempts.opening(call.attempt),
                coordinator.measures.openings.timing(coordinator.clock),
            ):
                return self._opener.open(call)
        except (errors.LedgerUnavailable, errors.NotLeader, errors.ServerStopping):
            # Rank 0 tries again, perhaps because its call broke off, so the others go on waiting for it.
            raise
        except errors.TokenloomError as error:
            self._refuse_attempt(call, error)
            raise

    def _refuse_attempt(self, call: JoinCall, error: errors.TokenloomError) -> None:
        try:
            choice = self._opener.choice_of(call)
        except errors.TokenloomError:
            # Rank 0's state cannot be read; the other ranks' own Joins meet the same.
            return
        self._coordinator.attempts.refuse(call.attempt, choice, error)

    def _opened_by_rank_0(self, call: JoinCall) -> Opening | None:
        """The opening that rank 0 wrote; None while there is none. Raises what rank 0 was refused with."""
        coordinator = self._coordinator
        try:
            has_opened = coordinator.attempts.has_opened(call.attempt, self._opener.choice_of(call))
        except errors.RunBusy as error:
            # Rank 0 asks again, and may take longer than this one to be heard.
            raise errors.RunBusy(str(error), (error.retry_for_s or 0.0) + RANK_0_MARGIN_S) from None
        if not has_opened:
            if any(
                opening.attempt == call.attempt for opening in self._points.past.openings()[:-1]
            ):
                raise errors.AttemptUsed(
                    f"attempt {call.attempt!r} opened an earlier generation of run {coordinator.name!r}. "
                    f"{errors.AttemptUsed.remedy}"
                )
            return None
        opening = coordinator.stored().opening
        if opening is None:
            raise errors.LedgerRolledBack(
                f"attempt {call.attempt!r} opened a generation of run {coordinator.name!r}, but "
                f"{coordinator.ledger.description} has none: it lost data. {errors.LedgerRolledBack.remedy}"
            )
        if opening.attempt != call.attempt:
            raise errors.AttemptUsed(
                f"attempt {call.attempt!r} was superseded by {opening.attempt!r} while it was joining. "
                f"{errors.AttemptUsed.remedy}"
            )
        self._opener.check_agreement(call, opening)
        return opening


def no_rank_0(call: JoinCall) -> errors.JoinRefused:
    """Why a rank stops waiting for rank 0, after ``RANK_0_WAIT_S``."""
    return errors.JoinRefused(
        f"rank {call.rank} waited {RANK_0_WAIT_S:.0f} s for rank 0 of attempt {call.attempt!r}; "
        "it has not joined: see its log, and check that all ranks share one attempt id"
    )
