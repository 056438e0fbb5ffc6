"""Answering Joins: rank 0 opens the attempt's generation by one write, the other ranks wait for it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokenloom_server import errors
from tokenloom_server.core.state import State, digest_hex
from tokenloom_server.errors import JoinRefused, ResumePointNeeded, SnapshotInvalid
from tokenloom_server.ledger.commands import Adopt
from tokenloom_server.ledger.records import Opening, StoredRun
from tokenloom_server.order.batch_plans import BatchPlans
from tokenloom_server.order.notes import position_lines
from tokenloom_server.order.segments import refuse_unfilled
from tokenloom_server.order.snapshot import ResumePoint
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.run import join_call
from tokenloom_server.run.coordinator import RunCoordinator
from tokenloom_server.run.fork import ForkHandler
from tokenloom_server.run.head import commit_of
from tokenloom_server.run.join_call import JoinCall, ResumeChoice, position_of
from tokenloom_server.run.pins import PinnedPoint
from tokenloom_server.run.resume_points import ResumePoints
from tokenloom_server.run.revise import RevisionHandler, brings
from tokenloom_server.run.sizing import batch_plans_of

_log = logging.getLogger(__name__)

#: How long the other ranks' Joins wait for rank 0's, seconds: as long as clients by default try to join at all.
RANK_0_WAIT_S = 300.0
#: Where rank 0 was refused because the run is busy, the other ranks ask so much longer than it does, seconds: it may be
#: cut off for a while.
RANK_0_MARGIN_S = 60.0


class GenerationOpener:
    """Opens the generations of one run, for rank 0 of each attempt. Thread-safe."""

    def __init__(
        self, coordinator: RunCoordinator, points: ResumePoints, revisions: RevisionHandler
    ) -> None:
        self._coordinator = coordinator
        self._points = points
        self._revisions = revisions
        # The attempt that opened last (or tried to), and what its rank 0 asked for.
        self._newest: tuple[str, ResumeChoice] | None = None

    def choice_of(self, call: JoinCall) -> ResumeChoice:
        """What a rank asks to resume from. Raises ``SnapshotInvalid`` for a state that cannot be read."""
        if not call.state:
            return ResumeChoice(None, call.resume)
        try:
            point = self._points.parse(call.state)
        except SnapshotInvalid:
            # Revisions that only the state knows are rank 0's to bring; the others must stand where it does.
            foreign = brings(self._coordinator.name, call.state)
            if call.rank == 0 or foreign is None:
                raise
            return ResumeChoice.of_state(foreign.sample_index, foreign.digest)
        return ResumeChoice.of_state(point.sample_index, point.digest)

    def open(self, call: JoinCall) -> Opening:
        """The generation of rank 0's attempt; written, unless it was already. Raises what ``JoinHandler.join`` does."""
        coordinator = self._coordinator
        # The slow part is outside of the run's own lock, which is held for the write alone.
        with coordinator.one_change:
            # Before the ledger is read: under a later epoch it may hold something else, and the write is refused.
            epoch = coordinator.lease.epoch
            stored = coordinator.stored()
            if stored.opening is not None and stored.opening.attempt == call.attempt:
                # The same process asking again (its answer was lost), or another one: the slot tells.
                self.check_agreement(call, stored.opening)
                coordinator.attempts.reopen(stored.opening)
                return stored.opening
            coordinator.takeover.refuse_busy(call)
            if stored.opening is None and not call.state:
                refuse_unfilled(coordinator.timeline.segments)
            # The trainer's state carries its revisions; a ledger that lost some takes them from it.
            pin = PinnedPoint.read(stored.pin) if stored.pin is not None else None
            self._revisions.take_over(call.state or (pin.snapshot if pin is not None else ""))
            choice, opened_at = self.choice_of(call), coordinator.wall_clock()
            timeline = self._points.pinned(pin, opened_at)
            point = self._resolve(call, stored, pin)
            start = self._points.forward(point, timeline=timeline)
            timeline = timeline.with_clock(start.clock_offset)
            uid = self._adopt(epoch, point, stored)
            opening = self._lay(call, stored, point, timeline, start, opened_at)
            # Noted before the write: where its answer is lost, the same rank asks again.
            self._newest = call.attempt, choice
            committed = commit_of(timeline, start, opening.start_state)
            coordinator.attempts.open(epoch, uid, opening, start, committed, timeline)
        resources = coordinator.order.resources
        resources.changed = tuple(dict.fromkeys((*resources.changed, *point.changed)))
        for text in resources.changed:
            _log.warning("%s: %s", coordinator.name, text)
        self._log_opening(call, opening, start, point.notes)
        return opening

    def _lay(
        self,
        call: JoinCall,
        stored: StoredRun,
        point: ResumePoint,
        timeline: Timeline,
        start: State,
        opened_at: float,
    ) -> Opening:
        """What is to be written."""
        coordinator = self._coordinator
        batch_plans = BatchPlans.lay(
            call.schedule,
            start_index=start.sample_index,
            start_tokens=start.total_tokens,
            # A phase of another length ends the generation.
            sample_tokens=timeline.at(start.sample_index).config.sequence_length,
            world_size=call.world_size,
            group_micro_steps=lambda batch_size: coordinator.group_micro_steps(
                call.world_size, batch_size
            ),
        )
        origin = timeline.origin if stored.opening is None else None
        present = stored.opening.generation if stored.opening else 0
        return Opening(
            generation=max(present, stored.closed_generation, point.generation) + 1,
            parent=point.generation,
            attempt=call.attempt,
            world_size=call.world_size,
            batch_size=batch_plans.plans[0].batch_size,
            group_micro_steps=batch_plans.plans[0].group_micro_steps,
            start_index=start.sample_index,
            start_state=timeline.encode(start),
            opened_at=opened_at,
            parent_run=origin.to_json() if origin is not None else "",
            batch_plans=batch_plans.text,
            process=call.process,
        )

    def check_agreement(self, call: JoinCall, opening: Opening) -> None:
        """Every rank must want what the opening has. Raises ``JoinRefused`` naming both values."""
        batch_plans = batch_plans_of(opening)
        for field, theirs, ours in (
            ("world size", call.world_size, opening.world_size),
            ("accumulate", call.accumulate, batch_plans.accumulate),
            ("batch size", call.schedule, batch_plans.schedule),
        ):
            if theirs != ours:
                raise JoinRefused(
                    f"rank {call.rank} has {field} {theirs}, but rank 0 of attempt {call.attempt!r} "
                    f"opened it with {ours}"
                )
        choice, opened_with = self.choice_of(call), self._choice_of_opening(call, opening)
        if opened_with is not None and choice != opened_with:
            raise JoinRefused(
                f"rank {call.rank} resumes from {choice}, but rank 0 of attempt {call.attempt!r} from {opened_with}: "
                "load the same checkpoint on every rank"
            )

    def _choice_of_opening(self, call: JoinCall, opening: Opening) -> ResumeChoice | None:
        """What rank 0 asked for; None where that is forgotten."""
        if self._newest is not None and self._newest[0] == call.attempt:
            return self._newest[1]
        if not call.state:
            return None
        # Opened before a restart of the server: what rank 0 asked for is forgotten, where it led is not.
        start = self._coordinator.timeline.decode(opening.start_state)
        is_known = self._points.parse(call.state).digest is not None
        return ResumeChoice.of_state(
            start.sample_index, digest_hex(start.digest) if is_known else None
        )

    def _resolve(self, call: JoinCall, stored: StoredRun, pin: PinnedPoint | None) -> ResumePoint:
        """Where the generation starts."""
        points = self._points
        if call.state and call.resume:
            raise JoinRefused(
                f"rank {call.rank} brings a loaded state and resume={call.resume!r}: give one of them"
            )
        wanted = points.asked_for(stored, call.state, call.resume)
        if pin is not None:
            pinned = points.parse(pin.snapshot)
            if wanted is not None and not _same_place(wanted, pinned):
                raise JoinRefused(
                    f"a restore pinned {position_of(pinned.sample_index, pinned.digest)} as the next resume point, but "
                    f"rank {call.rank} resumes from {position_of(wanted.sample_index, wanted.digest)}: join "
                    "without a state to take the pin, restore to the trainer's own state, or take the pin back "
                    "(tokenloom restore --cancel)"
                )
            return pinned
        if wanted is not None:
            return wanted
        committed = stored.committed
        if committed is not None and committed.sample_index > 0:
            raise ResumePointNeeded(
                f"run {self._coordinator.name!r} has progress (sample {committed.sample_index}) and the trainer "
                "brought no state; between checkpoints the ledger is ahead of the weights, so where to begin is not "
                "guessed. Two lines may stay in a script, since a loaded state wins: RemoteDataset(…, resume='fresh') "
                "begins at sample 0 without a checkpoint, and load_state_dict(…) goes on from one. Or say "
                "resume='latest' (go on at that sample) or resume=<snapshot id>"
            )
        return points.beginning()

    def _adopt(self, epoch: int, point: ResumePoint, stored: StoredRun) -> str:
        """The run's uid: a trainer's state brings its own to a ledger that never opened the run."""
        if point.run_uid is None or point.run_uid == stored.uid:
            return stored.uid
        coordinator = self._coordinator
        coordinator.ledger.execute(Adopt(stored.uid, coordinator.stream, epoch, point.run_uid))
        _log.info(
            "%s: an empty ledger goes on with the trainer's run_uid %s",
            coordinator.name,
            point.run_uid,
        )
        return point.run_uid

    def _log_opening(
        self, call: JoinCall, opening: Opening, start: State, notes: Sequence[str]
    ) -> None:
        coordinator = self._coordinator
        _log.info(
            "%s: generation %d (attempt %s, client %s): %d ranks × %d samples from sample %d, digest %s",
            coordinator.name, opening.generation, opening.attempt, call.release or "of an unknown release",
            opening.world_size, opening.batch_size, start.sample_index, digest_hex(start.digest),
        )  # fmt: skip
        for plan in batch_plans_of(opening).plans[1:]:
            _log.info(
                "%s: %d samples per rank from sample %d on",
                coordinator.name,
                plan.batch_size,
                plan.start_index,
            )
        for line in coordinator.timeline.skips_from(start):
            _log.info("%s: %s", coordinator.name, line)
        for revision in coordinator.timeline.revisions:
            if revision.sample_index > start.sample_index:
                _log.info(
                    "%s: revision %d applies at sample %d (%s)",
                    coordinator.name, revision.number, revision.sample_index, revision.reason,
                )  # fmt: skip
        for note in notes:
            _log.info(note)
        if notes or not start.sample_index:
            return
        for line in position_lines(coordinator.timeline.at(start.sample_index).record, start):
            _log.info("resume: %s", line)


def _same_place(a: ResumePoint, b: ResumePoint) -> bool:
    """An older payload may know no digest; then its sample index is all that it says."""
    return a.sample_index == b.sample_index and (
        None in (a.digest, b.digest) or a.digest == b.digest
    )


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
