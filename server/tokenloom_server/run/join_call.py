"""One rank's Join: what it asks for, and what no run can serve."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from tokenloom_proto.batch_schedule import BatchSchedule

from tokenloom_server.core.control_characters import refuse_control_characters
from tokenloom_server.errors import JoinRefused, SnapshotInvalid

#: Each rank's Join has a thread; gRPC has room for so many, and their Joins (``api.grpc.server.MAX_CALLS``).
MAX_WORLD_SIZE = 4096
#: The largest micro-step that the server makes room for, bytes.
MAX_STEP_BYTES = 2**30
#: The largest optimiser step that it makes room for, bytes.
MAX_ACCUMULATED_BYTES = 2**33
#: The longest attempt and nonce, characters.
MAX_NAME = 256


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
    #: Pairs (total tokens, batch size) instead of ``batch_size``; see ``batch_schedule.BatchSchedule``.
    batch_sizes: tuple[tuple[int, int], ...] = ()
    #: Micro-steps of an optimiser step.
    accumulate: int = 1
    #: ``state`` is another run's: this one, which has not begun, begins there.
    fork: bool = False
    #: The client's, as ``tokenloom_proto.versions`` knows it; empty where it does not say.
    release: str = ""

    @property
    def schedule(self) -> BatchSchedule:
        return BatchSchedule(self.batch_sizes or ((0, self.batch_size),), self.accumulate)


class ResumeChoice(NamedTuple):
    """``position`` of the state that was loaded, or else what ``resume`` says, empty where neither is given."""

    position: str | None
    resume: str

    @classmethod
    def of_state(cls, sample_index: int, digest: str | None) -> ResumeChoice:
        """A state that was loaded; without a digest where an older checkpoint has none."""
        return cls(position_of(sample_index, digest), "")

    def __str__(self) -> str:
        if self.position is not None:
            return f"a loaded state at {self.position}"
        return f"resume={self.resume!r}" if self.resume else "no state"


@dataclass(frozen=True, slots=True)
class RankRefusal:
    """One rank of an attempt was refused before the attempt was opened."""

    error: JoinRefused | SnapshotInvalid
    #: Ranks that know of it; one that comes again tries anew under the same id.
    heard_by: set[int]


def position_of(sample_index: int, digest: str | None) -> str:
    """A place in the order, for people; two are equal where their texts are."""
    return f"sample {sample_index} ({f'digest {digest}' if digest is not None else 'an older checkpoint'})"


def with_global_batch_size(call: JoinCall, run: str, size: int | None) -> JoinCall:
    """With the batch size that follows from a run's ``global_batch_size`` (``size``; None: it has none) and the number
    of ranks. Raises ``JoinRefused``."""
    world = call.world_size
    if size is None or world < 1:
        return call
    each = f"run {run!r} gives global batches of {size} samples"
    if size % world:
        raise JoinRefused(
            f"{each}, each from one bucket, and {size} cannot be divided among {world} ranks: launch a number of ranks "
            f"that divides {size}, or begin a new run with another global_batch_size (which is another order)"
        )
    if call.batch_sizes:
        raise JoinRefused(
            f"batch size is {call.schedule}, but {each}, which are a part of its order, so the size cannot follow a "
            "schedule: leave batch_size out"
        )
    if call.batch_size not in (0, size // world):
        raise JoinRefused(
            f"batch size is {call.batch_size}, but {each}, which are {size // world} for each of {world} ranks: leave "
            "batch_size out"
        )
    return replace(call, batch_size=size // world)


def check(call: JoinCall, sample_bytes: int, window_micro_steps: int | None = None) -> None:
    """Raises ``JoinRefused`` for what no run can serve. ``window_micro_steps``: where the mixture file says it."""
    if not 1 <= call.world_size <= MAX_WORLD_SIZE:
        raise JoinRefused(
            f"world size is {call.world_size}; expected 1 to {MAX_WORLD_SIZE}: each rank's stream takes a thread, so "
            "only the processes of the data-parallel group join"
        )
    if call.rank >= call.world_size:
        raise JoinRefused(f"rank {call.rank} is not below the world size {call.world_size}")
    if call.batch_sizes and call.batch_size:
        raise JoinRefused(
            f"batch size is {call.batch_size} and also a schedule, {call.schedule}: give one of them"
        )
    if not (call.batch_size or call.batch_sizes):
        raise JoinRefused(
            "batch_size is missing: give the samples of a rank and micro-step, as in RemoteDataset(url, batch_size=8); "
            "only a run of buckets has its own"
        )
    schedule = call.schedule
    try:
        schedule.check()
    except ValueError as error:
        raise JoinRefused(str(error)) from None
    step_bytes = call.world_size * schedule.greatest * sample_bytes
    if step_bytes > MAX_STEP_BYTES:
        raise JoinRefused(
            f"a micro-step of {call.world_size} ranks × {schedule.greatest} samples × {sample_bytes} bytes has "
            f"{step_bytes} bytes; expected at most {MAX_STEP_BYTES}, since the server holds at least two steps: take a "
            "smaller batch size and accumulate gradients"
        )
    if schedule.accumulate * step_bytes > MAX_ACCUMULATED_BYTES:
        raise JoinRefused(
            f"accumulate is {schedule.accumulate}, and so many micro-steps of {step_bytes} bytes have "
            f"{schedule.accumulate * step_bytes}; expected at most {MAX_ACCUMULATED_BYTES}, since the server holds two "
            "optimiser steps: accumulate fewer micro-steps"
        )
    if (
        schedule.accumulate > 1
        and window_micro_steps is not None
        and window_micro_steps < 2 * schedule.accumulate
    ):
        raise JoinRefused(
            f"accumulate is {schedule.accumulate}, but window_micro_steps in the mixture file is {window_micro_steps}; "
            f"expected at least {2 * schedule.accumulate}, since a rank waits for all micro-steps of an optimiser "
            "step: raise window_micro_steps, or leave it out, and restart the server"
        )
    for field, value in (("attempt", call.attempt), ("nonce", call.nonce)):
        if not 1 <= len(value) <= MAX_NAME:
            raise JoinRefused(f"{field} has {len(value)} characters; expected 1 to {MAX_NAME}")
    refuse_control_characters(call.attempt, "attempt: ", JoinRefused)
