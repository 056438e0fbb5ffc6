"""The present generation of a run, with what belongs to it alone. Pure: the coordinator passes the time in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tokenloom_server.config.run import RunConfig
from tokenloom_server.core.state import State, digest_hex
from tokenloom_server.ledger.base import Commit, Opening, StoredRun, date_of
from tokenloom_server.order.pipeline import StepGroup
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.run.generation import Generation
from tokenloom_server.run.sizing import steps_of, window_steps


class LedgerLoss(NamedTuple):
    """What the ledger no longer has: a commit of this generation beyond, or at, this sample index."""

    generation: int
    sample_index: float
    #: Unix time.
    noticed_at: float

    def made_right(self, stored: StoredRun) -> bool:
        """Whether the ledger has it again, or a generation that was opened since."""
        if stored.opening is None or stored.committed is None:
            return False
        back = (stored.opening.generation, stored.committed.sample_index) >= (self.generation, self.sample_index)
        return back or stored.opening.opened_at > self.noticed_at


class HeldState(NamedTuple):
    """What is at hand of a sample index of the present generation."""

    generation: int
    sample_index: int
    #: What the ledger has.
    commit: Commit
    #: Up to this sample index production may go, and by so many steps after the committed one.
    horizon_index: int
    window_steps: int
    #: The group of the boundary before the index, digest and total tokens at it; None where it is not in memory.
    point: tuple[StepGroup, str, int] | None


@dataclass(slots=True)
class ActiveGeneration:
    """Changed by the run's coordinator alone, under its lock; others hold it to name the generation."""

    generation: Generation
    #: The state at which production begins.
    base: State
    #: The committed digest that production has to meet again after a restart; None once met.
    expected_digest: str | None
    #: The server epoch at which it was opened or taken up.
    epoch: int
    #: Unix time, for people.
    opened_at: float
    #: Rank 0's process, as far as known: one may begin anew without waiting for itself.
    process: str

    @classmethod
    def of(
        cls,
        opening: Opening,
        base: State,
        committed: Commit,
        config: RunConfig,
        timeline: Timeline,
        message_steps: Callable[[int], int],
        *,
        resumed: bool,
        epoch: int,
        process: str,
    ) -> ActiveGeneration:
        """``message_steps``: steps of a full message, by the batch size. ``resumed``: after a restart of the server,
        where production has to meet the committed digest again."""
        ramp = steps_of(opening)
        steps, rest = ramp.steps_until(committed.sample_index)
        generation = Generation(
            opening.generation,
            opening.attempt,
            ramp,
            # A client may hold all steps of an optimiser step, and has more to go on with.
            [
                max(config.window_steps or window_steps(timeline.sample_bytes, plan), 2 * ramp.accumulate)
                for plan in ramp.plans
            ],
            [message_steps(plan.batch_size) for plan in ramp.plans],
            pads_last_step=config.last_step == "pad",
            committed=steps + bool(rest),
        )
        expected_digest = committed.digest if resumed else None
        return cls(generation, base, expected_digest, epoch, opening.opened_at, process)

    def trained_on(self, now: float, liveness_s: float) -> str | None:
        """Who trains on it, if each rank was heard within ``liveness_s``; None where nobody does."""
        generation = self.generation
        heard = generation.slots.heard_at()
        if heard is None or generation.over or now - heard >= liveness_s:
            return None
        process = f", rank 0 in process {self.process}" if self.process else ""
        return (
            f"generation {generation.number} (attempt {generation.attempt!r}, {len(generation.slots)} ranks"
            f"{process}) trains on it since {date_of(self.opened_at)}, and each rank of it was heard "
            f"{now - heard:.1f} s ago or later"
        )

    def steps_wanted(self, revising_at: int | None) -> int:
        """How many steps to produce now, none of them under a revision that is being written; 0 to wait."""
        generation = self.generation
        steps = generation.steps_wanted()
        if steps and revising_at is not None:
            # Nothing at the index itself, and no group that it lies in, may be there before the revision is.
            begin = generation.ramp.boundary(revising_at + 1)
            limit = begin - (begin == revising_at)
            return min(steps, max(0, generation.ramp.steps_until(limit)[0] - generation.produced))
        return steps

    def first_unproduced(self) -> int:
        """The first state boundary after all that may have been produced."""
        generation = self.generation
        # After a restart ranks may hold more than is produced again, and more than this server's own window allows.
        sent = max(slot.sent for slot in generation.slots)
        return generation.ramp.boundary_behind(generation.index_of(max(generation.produced, sent, generation.horizon)))

    def check_order(self, ended: bool) -> None:
        """Raises ``OrderMismatch`` where what is produced is not what was committed, or what a rank has."""
        generation = self.generation
        if self.expected_digest is not None and (generation.produced >= generation.committed or ended):
            generation.check_digest(self.expected_digest)
            self.expected_digest = None
        if generation.claims:
            generation.check_claims()

    def waiting_for(self) -> str:
        """Which ranks production waits for; empty where it waits for none."""
        generation = self.generation
        if generation.end is not None or generation.steps_wanted():
            return ""
        absent = [slot.rank for slot in generation.slots if not slot.connected]
        if absent:
            named = ", ".join(map(str, absent[:8])) + (", …" if len(absent) > 8 else "")
            return f"rank {named} to connect"
        slot = next(generation.slots.laggards())
        return f"rank {slot.rank} to go on from sample {generation.index_of(slot.consumed)}"

    def held_state(self, sample_index: int | None, committed: Commit) -> HeldState:
        """At a sample index; None for the committed one."""
        generation = self.generation
        index = committed.sample_index if sample_index is None else sample_index
        horizon_index = generation.ramp.index_of(generation.horizon)
        held = self._point_at(index)
        return HeldState(generation.number, index, committed, horizon_index, generation.window_steps, held)

    def _point_at(self, index: int) -> tuple[StepGroup, str, int] | None:
        """(group of the boundary before it, digest, total tokens) at a sample index; None where that is not held."""
        generation = self.generation
        boundary = generation.ramp.boundary(index)
        for group in generation.groups:
            if group.begin != boundary:
                continue
            if index == group.begin:
                return group, digest_hex(group.base.digest), group.base.total_tokens
            # Only steps that were published: the producer may be filling the group right now.
            for mark in group.marks[: generation.produced - group.first_step]:
                if mark.sample_index == index:
                    return group, digest_hex(mark.digest), mark.total_tokens
        return None
