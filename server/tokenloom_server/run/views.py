"""What others see of a live run: immutable, each made under the coordinator's lock, so true of one moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokenloom_server.core.state import State
from tokenloom_server.errors import TokenloomError
from tokenloom_server.ledger.records import CommittedState
from tokenloom_server.order.steps import BatchPlan, StepGroup
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.run.active_generation import ActiveGeneration, GenerationView
from tokenloom_server.run.lease_state import LeaseState


class Session(NamedTuple):
    """A rank's stream: the generation that it is of, and which of the rank's streams it is."""

    active: ActiveGeneration
    rank: int
    number: int


class ProductionTask(NamedTuple):
    """Micro-steps that the producer has to make now, all of one group."""

    active: ActiveGeneration
    timeline: Timeline
    plan: BatchPlan
    steps: int
    #: Micro-steps of the group that are published already; 0 where it begins.
    published: int


class CommitTask(NamedTuple):
    """What the committer has to write now: the state after the generation's first ``steps`` micro-steps, the last of
    which is in ``group``."""

    active: ActiveGeneration
    timeline: Timeline
    uid: str
    group: StepGroup
    steps: int
    #: The sample index that this server knows to be committed.
    known_index: int


class RunView(NamedTuple):
    """A run at one moment."""

    timeline: Timeline
    lease: LeaseState
    leads: bool
    #: The newest commit; before the first generation one of zero samples.
    commit: CommittedState
    #: The state at its sample index; right after a restart that at the state boundary before it.
    state: State
    #: Unix time; None before the first commit.
    committed_at: float | None
    #: (time, commit) over the last minute or so; and the time now.
    recent: Sequence[tuple[float, CommittedState]]
    now: float
    #: What stopped the run for all ranks, and why commits wait.
    error: TokenloomError | None
    ledger_error: str | None
    #: What production or delivery waits for, for people; empty where it waits for nothing.
    waiting_for: str
    #: The present one; without a number where there is none.
    generation: GenerationView

    @property
    def first_revisable(self) -> int:
        """The first sample index from which on a revision may hold: what is not produced, after the newest revision."""
        return max(self.timeline.last_revised, self.generation.first_unproduced)
