"""Worlds with a guard of the product taken out. The simulation is worth what it finds in these."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from tokenloom_server.errors import NotFound
from tokenloom_server.ledger import rules
from tokenloom_server.ledger.records import StoredRun
from tokenloom_server.order.foreign_payload import Payload
from tokenloom_server.order.pipeline import Pipeline
from tokenloom_server.order.timeline import Timeline, _Recorded
from tokenloom_server.run.active_generation import ActiveGeneration
from tokenloom_server.run.generation import Generation
from tokenloom_server.run.leadership import Leadership
from tokenloom_server.run.lease import Lease, LeaseState
from tokenloom_server.run.pins import PinnedPoint
from tokenloom_server.run.resume_points import ResumePoints
from tokenloom_server.run.sessions import Sessions
from tokenloom_server.run.slot_claims import SlotClaims
from tokenloom_server.run.slots import Slot
from tokenloom_server.run.views import RunView
from tokenloom_server.sources.base import Rows
from tokenloom_server.workers.cluster.readers.rows import Request
from tokenloom_server.workers.cluster.readers.source import RowsOfReaders

from tests.simulation.corpus import skips_of

#: Takes the guard out.
Mutant = Callable[[pytest.MonkeyPatch], None]


def ledger_without_fence(patch: pytest.MonkeyPatch) -> None:
    """The ledger takes writes of a generation that is over."""
    patch.setattr(rules, "_refuse_generation", lambda head, command: None)


def server_without_fence(patch: pytest.MonkeyPatch) -> None:
    """The server serves every generation as if it were the present one."""

    def any_generation(
        self: Sessions, uid: str, generation: int, attempt: str, committed_through: int
    ) -> ActiveGeneration:
        if self._present.active is None:
            raise NotFound("join first")
        return self._present.active

    patch.setattr(Sessions, "_active_for", any_generation)
    patch.setattr(Sessions, "_current", lambda self, session: any_generation(self, "", 0, "", 0))


def ledger_without_deduplication(patch: pytest.MonkeyPatch) -> None:
    """A commit that comes twice, or late, moves the counters back."""
    patch.setattr(rules, "_is_committed", lambda head, sample_index: False)


def ledger_that_ignores_the_epoch(patch: pytest.MonkeyPatch) -> None:
    """A server that was superseded goes on writing."""
    patch.setattr(rules, "_refuse_epoch", lambda head, command: None)


def boundary_one_step_early(patch: pytest.MonkeyPatch) -> None:
    """After a restart, production begins one step away from the boundary."""
    right = Generation.first_needed.fget
    assert right is not None
    patch.setattr(Generation, "first_needed", property(lambda self: max(0, right(self) - 1)))


def commit_one_step_ahead(patch: pytest.MonkeyPatch) -> None:
    """What one rank has consumed is committed as if all had."""

    def commit_due(self: Generation) -> int | None:
        steps = min(max(slot.consumed for slot in self.slots), self.produced)
        return steps if steps > self.committed else None

    patch.setattr(Generation, "commit_due", commit_due)


def opening_of_unknown_outcome_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Where the ledger did not say whether a generation was opened, the one before goes on."""
    patch.setattr(Lease, "await_ledger", lambda self, possibly, error: None)


def lease_ignored(patch: pytest.MonkeyPatch) -> None:
    """A server that could not renew its lease goes on sending."""
    patch.setattr(LeaseState, "leads", lambda self, now: self.held)


def credits_ignored(patch: pytest.MonkeyPatch) -> None:
    """A rank is sent more than it has room for."""
    sendable = Generation._sendable

    def generous(self: Generation, slot: Slot, flush: bool = False) -> int:
        given, slot.credit_micro_steps = slot.credit_micro_steps, slot.credit_micro_steps + 1
        try:
            return sendable(self, slot, flush)
        finally:
            slot.credit_micro_steps = given

    patch.setattr(Generation, "_sendable", generous)


def revisions_below_the_horizon(patch: pytest.MonkeyPatch) -> None:
    """A revision may hold from a sample on that was produced already."""

    patch.setattr(RunView, "first_revisable", lambda self, kept: self.commit.sample_index + 1)


def revisions_not_read_when_leading(patch: pytest.MonkeyPatch) -> None:
    """A server that takes a run up goes on with the revisions that it knows."""
    right = Leadership.lead

    def lead(
        self: Leadership, epoch: int, stored: StoredRun, timeline: Timeline, *lease: Any
    ) -> None:
        right(self, epoch, stored, self._head.timeline, *lease)

    patch.setattr(Leadership, "lead", lead)


def revisions_not_told_to_the_producer(patch: pytest.MonkeyPatch) -> None:
    """A pipeline that is at work hears of no revision."""
    patch.setattr(Pipeline, "replace_switches", lambda self, switches: None)


def revisions_named_as_soon_as_they_are_known(patch: pytest.MonkeyPatch) -> None:
    """A state names the revisions that its server knows when it is written, and not those of when it was produced."""
    patch.setattr(_Recorded, "is_named", lambda self, sample_index, generation: True)


def clock_of_an_older_checkpoint_ignored(patch: pytest.MonkeyPatch) -> None:
    """A run that goes on from an older data loader's checkpoint counts its tokens from its own samples."""
    patch.setattr(Payload, "clock", lambda self: (None, ""))


def clock_forgotten_when_leading(patch: pytest.MonkeyPatch) -> None:
    """A server that takes a run up lays its phases by the samples, whatever clock the states have."""
    patch.setattr(Timeline, "of_state", lambda self, resume_state: self.with_clock(0))


def skips_forgotten_when_leading(patch: pytest.MonkeyPatch) -> None:
    """A server that takes a run up goes on without what a restore passed over."""
    right = Leadership.lead

    def lead(
        self: Leadership, epoch: int, stored: StoredRun, timeline: Timeline, *lease: Any
    ) -> None:
        changes = [revision for revision in timeline.revisions if skips_of(revision) is None]
        right(self, epoch, stored, timeline.with_revisions(changes), *lease)

    patch.setattr(Leadership, "lead", lead)


def skips_for_one_launch_alone(patch: pytest.MonkeyPatch) -> None:
    """An opening that takes a pin writes only where it begins, and not what is passed over from there on."""
    right = ResumePoints.pinned

    def pinned(self: ResumePoints, pin: PinnedPoint | None, made_at: float = 0.0) -> Timeline:
        return right(self, pin, made_at) if not made_at else right(self, None, made_at)

    patch.setattr(ResumePoints, "pinned", pinned)


def states_of_before_a_skip_taken(patch: pytest.MonkeyPatch) -> None:
    """A state that did not pass over what the run does is gone on from as if it had, and its digest is believed."""
    patch.setattr(Timeline, "check_skips", lambda self, state, index: None)


def claims_answered_unwritten(patch: pytest.MonkeyPatch) -> None:
    """A rank's slot is its own for as long as the server lives that said so."""
    patch.setattr(SlotClaims, "write", lambda self, command: None)


def answers_of_readers_as_they_come(patch: pytest.MonkeyPatch) -> None:
    """The rows of the answer that is there first are taken for those that were asked for first."""
    right = RowsOfReaders._next

    def first_to_come(self: RowsOfReaders, shard: int, row: int) -> Rows | None:
        self._tickets = deque(sorted(self._tickets, key=lambda ticket: not ticket.is_answered()))
        rows = right(self, shard, row)
        if rows is None and self._pieces:
            return self._pieces.popleft()[1]
        return rows

    patch.setattr(RowsOfReaders, "_next", first_to_come)


def rows_of_readers_again_after_a_cut(patch: pytest.MonkeyPatch) -> None:
    """What is left of a request after an answer that was cut begins with the row that the answer ended with."""
    right = Request.after

    def after(self: Request, rows: int) -> Request | None:
        return right(self, max(0, rows - 1))

    patch.setattr(Request, "after", after)


MUTANTS: dict[str, Mutant] = {
    mutant.__name__: mutant
    for mutant in (
        ledger_without_fence,
        server_without_fence,
        ledger_without_deduplication,
        ledger_that_ignores_the_epoch,
        boundary_one_step_early,
        commit_one_step_ahead,
        opening_of_unknown_outcome_forgotten,
        lease_ignored,
        credits_ignored,
        revisions_below_the_horizon,
        revisions_not_read_when_leading,
        revisions_not_told_to_the_producer,
        revisions_named_as_soon_as_they_are_known,
        clock_of_an_older_checkpoint_ignored,
        clock_forgotten_when_leading,
        skips_forgotten_when_leading,
        skips_for_one_launch_alone,
        states_of_before_a_skip_taken,
        claims_answered_unwritten,
        answers_of_readers_as_they_come,
        rows_of_readers_again_after_a_cut,
    )
}
