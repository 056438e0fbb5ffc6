"""Joining a run: who may, where it resumes, and the one write that opens a generation."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokenloom_server.core.state import State, digest_hex
from tokenloom_server.errors import (
    AttemptUsed,
    JoinRefused,
    LedgerError,
    LedgerRolledBack,
    LedgerUnavailable,
    NotLeader,
    ResumePointNeeded,
    RunBusy,
    ServerStopping,
    SnapshotInvalid,
    TokenloomError,
)
from tokenloom_server.ledger.base import Opening, StoredRun
from tokenloom_server.order.batch_schedule import BatchSchedule, Ramp
from tokenloom_server.order.snapshot import ResumePoint
from tokenloom_server.run.coordinator import RunCoordinator
from tokenloom_server.run.fork import Forking
from tokenloom_server.run.history import History
from tokenloom_server.run.revise import Revising, brings

_log = logging.getLogger(__name__)

#: How long the other ranks' Joins wait for rank 0's, seconds: as long as clients by default try to join at all.
RANK_0_WAIT_S = 300.0
#: Beyond the liveness, clients ask a busy run again for so long, seconds: their delays, and a slow machine's.
BUSY_MARGIN_S = 6.0
#: And so much longer ask the ranks that heard of it by rank 0's refusal, seconds: it may be cut off for a while.
RANK_0_MARGIN_S = 60.0
#: Each rank's stream has a thread; gRPC has room for so many, and their Joins (``grpc_service.server.MAX_CALLS``).
MAX_WORLD_SIZE = 4096
#: The largest step that the server makes room for, bytes.
MAX_STEP_BYTES = 2**30
#: The largest optimiser step that it makes room for, bytes.
MAX_ACCUMULATED_BYTES = 2**33
#: Refused attempts that are remembered, so that waiting ranks hear why.
_REMEMBERED_REFUSALS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinCall:
    """One rank's Join."""

    rank: int
    world_size: int
    batch_size: int
    attempt: str
    nonce: str
    #: "", "latest", "fresh" or a snapshot's id.
    resume: str
    #: A snapshot's text; empty where none is brought.
    state: bytes
    #: Which process this is; empty where it does not say. One may begin anew without waiting for itself.
    process: str = ""
    #: End an attempt that is still alive.
    takeover: bool = False
    #: Pairs (total tokens, batch size) instead of ``batch_size``; see ``ramp.BatchSchedule``.
    batch_sizes: tuple[tuple[int, int], ...] = ()
    #: Steps of an optimiser step.
    accumulate: int = 1
    #: ``state`` is another run's: this one, which has not begun, begins there.
    fork: bool = False

    @property
    def schedule(self) -> BatchSchedule:
        return BatchSchedule(self.batch_sizes or ((0, self.batch_size),), self.accumulate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """What a Join is answered with, beside what the order says."""

    uid: str
    opening: Opening
    start: State


class JoinHandler:
    """Answers the Joins of one run."""

    def __init__(self, coordinator: RunCoordinator, history: History, revising: Revising, forking: Forking) -> None:
        self._coordinator = coordinator
        self._history = history
        self._revising = revising
        self._forking = forking
        #: The attempt that opened last (or tried to), and what its rank 0 asked for.
        self._request: tuple[str, tuple[str, str]] | None = None
        # By attempt and by what rank 0 asked for: the same id may be tried again with another resume point.
        self._refused: OrderedDict[tuple[str, tuple[str, str]], TokenloomError] = OrderedDict()

    def join(self, call: JoinCall) -> Joined:
        """Takes a slot; rank 0 opens the attempt's generation, the others wait for it, bounded.

        Raises ``JoinRefused``, ``AttemptUsed``, ``RunBusy``, ``ResumePointNeeded``, ``SnapshotInvalid``, ``NotFound``
        (an unknown snapshot id) and the ledger's errors.
        """
        call = self._as_own(self._sized(call))
        joined = self.try_join(call)
        if joined is not None:
            return joined
        coordinator, asked = self._coordinator, self._ask_of(call)
        deadline = coordinator.clock() + RANK_0_WAIT_S
        while joined is None:
            with coordinator.lock:
                left_s = deadline - coordinator.clock()
                if left_s <= 0:
                    raise self.no_rank_0(call)
                coordinator.changed.wait_for(
                    lambda: coordinator.stopping or not coordinator.leads() or self._decided(call.attempt, asked),
                    left_s,
                )
            joined = self.try_join(call)
        return joined

    def try_join(self, call: JoinCall) -> Joined | None:
        """``join`` without waiting: None where rank 0 has to join first."""
        call = self._sized(call)
        _check(call, self._coordinator.timeline.sample_bytes, self._coordinator.order.config.window_steps)
        self._coordinator.require_lead()
        call = self._as_own(call)
        if call.rank == 0:
            try:
                opening = self._open(call)
            except (LedgerUnavailable, NotLeader):
                # Rank 0 tries again, so the others go on waiting for it.
                raise
            except TokenloomError as error:
                self._remember(call, error)
                raise
        else:
            found = self._find(call)
            if found is None:
                return None
            opening = found
            self._agree(call, opening)
        coordinator = self._coordinator
        coordinator.ledger.claim_slot(
            coordinator.uid, coordinator.stream, coordinator.epoch, opening.generation, call.rank, call.nonce
        )
        coordinator.heard(opening.generation, call.rank)
        return Joined(uid=coordinator.uid, opening=opening, start=coordinator.timeline.decode(opening.start_state))

    def _sized(self, call: JoinCall) -> JoinCall:
        """With the batch size that a run with ``batching`` has on so many ranks. Raises ``JoinRefused``."""
        config = self._coordinator.order.config
        size, world = config.global_batch_size, call.world_size
        if size is None or world < 1:
            return call
        if size % world:
            raise JoinRefused(
                f"run {self._coordinator.name!r} gives global batches of {size} samples, each from one bucket, and "
                f"{size} "
                f"cannot be divided among {world} ranks: launch a number of ranks that divides {size}, or begin a new "
                "run with another global_batch_size (which is another order)"
            )
        if call.batch_sizes:
            raise JoinRefused(
                f"batch size is {call.schedule}, but run {self._coordinator.name!r} gives global batches of {size} "
                f"samples, "
                "which are a part of its order, so the size cannot follow a schedule: leave batch_size out"
            )
        if call.batch_size not in (0, size // world):
            raise JoinRefused(
                f"batch size is {call.batch_size}, but run {self._coordinator.name!r} gives global batches of {size} "
                f"samples, "
                f"which are {size // world} for each of {world} ranks: leave batch_size out"
            )
        return replace(call, batch_size=size // world)

    def _as_own(self, call: JoinCall) -> JoinCall:
        """A call whose state is one of this run: of a fork it is made from the other run's. What it says of the run's
        revisions and its origin is taken over by a ledger that never opened the run."""
        if not call.state:
            return call
        if not call.fork:
            self._revising.adopt(call.state)
            return call
        stored = self._stored()
        if stored.opening is not None and stored.opening.attempt != call.attempt:
            raise JoinRefused(
                f"run {self._coordinator.name!r} has begun (generation {stored.opening.generation}), and a fork is a "
                f"new run: "
                "leave fork_from out and load this run's own checkpoint with load_state_dict, or say resume='fresh' to "
                "begin again where it was forked"
            )
        return replace(call, state=self._forking.fork(call.state).encode(), fork=False)

    def no_rank_0(self, call: JoinCall) -> JoinRefused:
        """Why a rank stops waiting for rank 0, after ``RANK_0_WAIT_S``."""
        return JoinRefused(
            f"rank {call.rank} waited {RANK_0_WAIT_S:.0f} s for rank 0 of attempt {call.attempt!r}; "
            "it has not joined: see its log, and check that all ranks share one attempt id"
        )

    def _open(self, call: JoinCall) -> Opening:
        coordinator = self._coordinator
        # The host's own lock is held only for the write itself.
        with coordinator.one_change:
            stored = self._stored()
            if stored.opening is not None and stored.opening.attempt == call.attempt:
                # The same process asking again (its answer was lost), or another one: the slot tells.
                self._agree(call, stored.opening)
                with coordinator.lock:
                    if coordinator.active is None or coordinator.active.generation.number != stored.opening.generation:
                        raise NotLeader(f"run {coordinator.name!r} is being taken up anew; join again")
                    # The ledger does not know which process that is.
                    coordinator.active.process = call.process
                    self._refused.clear()
                return stored.opening
            self._refuse_busy(call)
            # Of a ledger that lost a revision, too: what the trainer's state is under, it brings.
            self._revising.take_over(call.state or stored.pin or "")
            point, skipped, asked = self._resolve(call, stored)
            start = self._history.forward(point)
            uid = self._adopt(point, stored)
            number = max(stored.opening.generation if stored.opening else 0, point.generation) + 1
            ramp = Ramp.lay(
                call.schedule,
                start_index=start.sample_index,
                start_tokens=start.total_tokens,
                # A phase of another length ends the generation.
                sample_tokens=coordinator.timeline.at(start.sample_index).config.sequence_length,
                world_size=call.world_size,
                group_steps=lambda batch_size: coordinator.group_steps(call.world_size, batch_size),
            )
            text = coordinator.timeline.encode(start)
            opening = Opening(
                generation=number,
                parent=point.generation,
                attempt=call.attempt,
                world_size=call.world_size,
                batch_size=ramp.plans[0].batch_size,
                group_steps=ramp.plans[0].group_steps,
                start_index=start.sample_index,
                start_state=text,
                opened_at=coordinator.wall_clock(),
                skipped=skipped,
                parent_run=self._parent_run(stored),
                ramp=ramp.text,
            )
            committed = coordinator.commit_of(start, text)
            # Also where the answer of the write is lost: the same rank will ask again.
            self._request = call.attempt, asked
            with coordinator.lock:
                try:
                    coordinator.ledger.open(uid, coordinator.stream, coordinator.epoch, opening, committed)
                except LedgerUnavailable as error:
                    coordinator.await_ledger("a generation was opened", error)
                    raise
                coordinator.uid = uid
                # Older refusals are of no interest any more; nobody who joins from now on is to hear them.
                self._refused.clear()
                coordinator.committed_state, coordinator.committed_at = start, opening.opened_at
                coordinator.install(opening, start, committed, resumed=False, process=call.process)
        self._log_resume(opening, ramp, start, point.notes)
        return opening

    def _parent_run(self, stored: StoredRun) -> str:
        origin = self._coordinator.timeline.origin
        return origin.to_json() if stored.opening is None and origin is not None else ""

    def _refuse_busy(self, call: JoinCall) -> None:
        """A second launch, or a notebook, must not end a training run by mistake."""
        holder = self._coordinator.busy(call.process)
        if holder is None:
            return
        if call.takeover:
            _log.warning("%s: attempt %s takes over: %s", self._coordinator.name, call.attempt, holder)
            return
        raise RunBusy(
            f"run {self._coordinator.name!r} is busy: {holder}. Wait until it has ended "
            f"({self._coordinator.timeouts.liveness_s:g} s "
            "after its last sign of life another may begin), look at the run with a PeekDataset, or end it on purpose "
            "with takeover=True",
            self._coordinator.timeouts.liveness_s + BUSY_MARGIN_S,
        )

    def _decided(self, attempt: str, asked: tuple[str, str]) -> bool:
        """Whether rank 0 opened the attempt, or was refused (the caller holds the host's lock)."""
        active = self._coordinator.active
        return (active is not None and active.generation.attempt == attempt) or (attempt, asked) in self._refused

    def _find(self, call: JoinCall) -> Opening | None:
        """The opening that rank 0 wrote; None while there is none. Raises what rank 0 was refused with."""
        coordinator = self._coordinator
        asked = self._ask_of(call)
        with coordinator.lock:
            if coordinator.stopping:
                raise ServerStopping("the server is stopping; join again when it is back")
            opened = coordinator.active is not None and coordinator.active.generation.attempt == call.attempt
            if not opened and (call.attempt, asked) in self._refused:
                refused = self._refused[call.attempt, asked]
                if isinstance(refused, RunBusy):
                    # Rank 0 asks again, and may take longer than this one to be heard.
                    raise RunBusy(str(refused), (refused.retry_for_s or 0.0) + RANK_0_MARGIN_S)
                raise refused
        if not opened:
            if any(opening.attempt == call.attempt for opening in self._history.openings()[:-1]):
                raise AttemptUsed(
                    f"attempt {call.attempt!r} opened an earlier generation of run {coordinator.name!r}; "
                    "an attempt id is used once"
                )
            return None
        opening = self._stored().opening
        if opening is None:
            raise LedgerRolledBack(
                f"attempt {call.attempt!r} opened a generation of run {coordinator.name!r}, but "
                f"{coordinator.ledger.description} has "
                f"none: it lost data. {LedgerRolledBack.remedy}"
            )
        if opening.attempt != call.attempt:
            raise AttemptUsed(f"attempt {call.attempt!r} was superseded by {opening.attempt!r} while it was joining")
        return opening

    def _agree(self, call: JoinCall, opening: Opening) -> None:
        """Every rank must want what the opening has. Raises ``JoinRefused`` naming both values."""
        ramp = self._coordinator.ramp(opening)
        for what, theirs, ours in (
            ("world size", call.world_size, opening.world_size),
            ("accumulate", call.accumulate, ramp.accumulate),
            ("batch size", call.schedule, ramp.schedule),
        ):
            if theirs != ours:
                raise JoinRefused(
                    f"rank {call.rank} has {what} {theirs}, but rank 0 of attempt {call.attempt!r} "
                    f"opened it with {ours}"
                )
        theirs_asked = self._ask_of(call)
        if self._request is not None and self._request[0] == call.attempt:
            asked = self._request[1]
        elif call.state:
            # Opened before a restart of the server: what rank 0 asked for is forgotten, where it led is not.
            start = self._coordinator.timeline.decode(opening.start_state)
            index, digest = start.sample_index - opening.skipped, digest_hex(start.digest)
            if opening.skipped:
                digest = self._history.digest_at(index)
            known = self._history.parse(call.state).digest is not None
            asked = "state", _position(index, digest if known else None)
        else:
            return
        if theirs_asked != asked:
            raise JoinRefused(
                f"rank {call.rank} resumes from {_describe(theirs_asked)}, but rank 0 of attempt {call.attempt!r} "
                f"from {_describe(asked)}: load the same checkpoint on every rank"
            )

    def _ask_of(self, call: JoinCall) -> tuple[str, str]:
        if call.state:
            try:
                point = self._history.parse(call.state)
            except SnapshotInvalid:
                # Revisions that only the state knows are rank 0's to bring; the others must stand where it does.
                found = brings(self._coordinator.name, call.state)
                if call.rank == 0 or found is None:
                    raise
                return "state", _position(found.sample_index, found.digest)
            return "state", _position(point.sample_index, point.digest)
        return "resume", call.resume

    def _resolve(self, call: JoinCall, stored: StoredRun) -> tuple[ResumePoint, int, tuple[str, str]]:
        """Where the new generation starts, how many samples it jumps over right before, and what rank 0 asked for."""
        asked = self._ask_of(call)
        if call.state and call.resume:
            raise JoinRefused(f"rank {call.rank} brings a loaded state and resume={call.resume!r}: give one of them")
        brought = self._history.asked_for(stored, call.state, call.resume)
        if stored.pin is not None:
            pinned, start, skipped = self._history.pinned(stored.pin)
            if brought is not None and not _same_place(brought, pinned):
                raise JoinRefused(
                    f"a restore pinned {_position(pinned.sample_index, pinned.digest)} as the next resume point, but "
                    f"rank {call.rank} resumes from {_position(brought.sample_index, brought.digest)}: join "
                    "without a state to take the pin, or restore to the trainer's own state"
                )
            return start, skipped, asked
        if brought is not None:
            self._warn_of_skip(brought, stored.opening)
            return brought, 0, asked
        committed = stored.committed
        if committed is not None and committed.sample_index > 0:
            raise ResumePointNeeded(
                f"run {self._coordinator.name!r} has progress (sample {committed.sample_index}) and the trainer "
                f"brought no "
                "state; load its checkpoint with load_state_dict, or say resume='latest' (go on at that sample), "
                "resume='fresh' (begin again at sample 0) or resume=<snapshot id>. Between checkpoints the ledger is "
                "ahead of the trainer's weights, so this is not guessed"
            )
        return self._history.beginning(), 0, asked

    def _warn_of_skip(self, brought: ResumePoint, present: Opening | None) -> None:
        """A skip holds for the launch that began with it: a state from before it brings the skipped samples back."""
        if present is not None and brought.sample_index < present.start_index <= brought.sample_index + present.skipped:
            _log.warning(
                "%s: generation %d jumped over the %d samples before sample %d, and this launch, which resumes from "
                "sample %d, will be given those; to skip them again: tokenloom restore … --sample %d --skip-samples %d",
                self._coordinator.name, present.generation, present.skipped, present.start_index, brought.sample_index,
                brought.sample_index, present.start_index - brought.sample_index,
            )  # fmt: skip

    def _adopt(self, point: ResumePoint, stored: StoredRun) -> str:
        """The run's uid: a trainer's state brings its own to a ledger that never opened the run."""
        if point.run_uid is None or point.run_uid == stored.uid:
            return stored.uid
        coordinator = self._coordinator
        coordinator.ledger.adopt(stored.uid, coordinator.stream, coordinator.epoch, point.run_uid)
        _log.info("%s: an empty ledger goes on with the trainer's run_uid %s", coordinator.name, point.run_uid)
        return point.run_uid

    def _stored(self) -> StoredRun:
        coordinator = self._coordinator
        stored = coordinator.ledger.read_run(coordinator.name, coordinator.stream)
        if stored is None:
            raise LedgerError(
                f"run {coordinator.name!r} is gone from {coordinator.ledger.description}; restart the server"
            )
        return stored

    def _remember(self, call: JoinCall, error: TokenloomError) -> None:
        try:
            asked = self._ask_of(call)
        except TokenloomError:
            # Rank 0's state cannot be read; the other ranks' own Joins meet the same.
            return
        with self._coordinator.lock:
            self._refused[call.attempt, asked] = error
            while len(self._refused) > _REMEMBERED_REFUSALS:
                self._refused.popitem(last=False)
            self._coordinator.changed.notify_all()

    def _log_resume(self, opening: Opening, ramp: Ramp, start: State, notes: Sequence[str]) -> None:
        coordinator = self._coordinator
        _log.info(
            "%s: generation %d (attempt %s): %d ranks × %d samples from sample %d, digest %s",
            coordinator.name, opening.generation, opening.attempt, opening.world_size, opening.batch_size,
            start.sample_index, digest_hex(start.digest),
        )  # fmt: skip
        for plan in ramp.plans[1:]:
            _log.info("%s: %d samples per rank from sample %d on", coordinator.name, plan.batch_size, plan.start_index)
        if opening.skipped:
            _log.info(
                "%s: samples %d to %d are skipped", coordinator.name, opening.start_index - opening.skipped,
                opening.start_index - 1,
            )  # fmt: skip
        for revision in coordinator.timeline.revisions:
            if revision.sample_index > start.sample_index:
                _log.info(
                    "%s: revision %d applies at sample %d (%s)",
                    coordinator.name, revision.number, revision.sample_index, revision.reason,
                )  # fmt: skip
        for note in notes:
            _log.info(note)
        if notes:
            return
        order = coordinator.timeline.at(start.sample_index)
        for config, source, shards in zip(order.config.sources, start.sources, order.shard_paths, strict=True):
            cursor = source.cursor
            place = f"window={cursor.shard}" if config.shuffle == "rows" else f"shard={shards[cursor.shard]}"
            _log.info("resume: spec=%s sample_row=%d %s offset=%d", config.source, source.rows, place, cursor.row)


def _check(call: JoinCall, sample_bytes: int, window_steps: int | None = None) -> None:
    """``window_steps``: where the mixture file says it."""
    if not 1 <= call.world_size <= MAX_WORLD_SIZE:
        raise JoinRefused(
            f"world size is {call.world_size}; expected 1 to {MAX_WORLD_SIZE}: each rank's stream takes a thread, so "
            "only the processes of the data-parallel group join"
        )
    if call.rank >= call.world_size:
        raise JoinRefused(f"rank {call.rank} is not below the world size {call.world_size}")
    if call.batch_sizes and call.batch_size:
        raise JoinRefused(f"batch size is {call.batch_size} and also a schedule, {call.schedule}: give one of them")
    schedule = call.schedule
    schedule.check()
    step_bytes = call.world_size * schedule.greatest * sample_bytes
    if step_bytes > MAX_STEP_BYTES:
        raise JoinRefused(
            f"a step of {call.world_size} ranks × {schedule.greatest} samples × {sample_bytes} bytes has {step_bytes} "
            f"bytes; expected at most {MAX_STEP_BYTES}, since the server holds at least two steps: take a smaller "
            "batch size and accumulate gradients"
        )
    if schedule.accumulate * step_bytes > MAX_ACCUMULATED_BYTES:
        raise JoinRefused(
            f"accumulate is {schedule.accumulate}, and so many steps of {step_bytes} bytes have "
            f"{schedule.accumulate * step_bytes}; expected at most {MAX_ACCUMULATED_BYTES}, since the server holds two "
            "optimiser steps: accumulate fewer steps"
        )
    if schedule.accumulate > 1 and window_steps is not None and window_steps < 2 * schedule.accumulate:
        raise JoinRefused(
            f"accumulate is {schedule.accumulate}, but window_steps in the mixture file is {window_steps}; expected at "
            f"least {2 * schedule.accumulate}, since a rank waits for all steps of an optimiser step: raise "
            "window_steps, or leave it out, and restart the server"
        )
    for what, value in (("attempt", call.attempt), ("nonce", call.nonce)):
        if not 1 <= len(value) <= 256:
            raise JoinRefused(f"{what} has {len(value)} characters; expected 1 to 256")


def _same_place(a: ResumePoint, b: ResumePoint) -> bool:
    """An older payload may know no digest; then its sample index is all that it says."""
    return a.sample_index == b.sample_index and (None in (a.digest, b.digest) or a.digest == b.digest)


def _position(sample_index: int, digest: str | None) -> str:
    return f"sample {sample_index} ({f'digest {digest}' if digest is not None else 'an older checkpoint'})"


def _describe(asked: tuple[str, str]) -> str:
    kind, value = asked
    if kind == "state":
        return f"a loaded state at {value}"
    return f"resume={value!r}" if value else "no state"
