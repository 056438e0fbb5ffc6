"""What others see of a live run: immutable, each made under the coordinator's lock, so true of one moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokenloom_server.core.state import State
from tokenloom_server.errors import TokenloomError
from tokenloom_server.ledger.base import Commit
from tokenloom_server.order.pipeline import BatchPlan, StepGroup
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.run.active_generation import ActiveGeneration
from tokenloom_server.run.delivery import EndOfData


class Session(NamedTuple):
    """A rank's stream: the generation that it is of, and which of the rank's streams it is."""

    active: ActiveGeneration
    rank: int
    number: int


class ProductionTask(NamedTuple):
    """Steps that the producer has to make now, all of one group."""

    active: ActiveGeneration
    timeline: Timeline
    plan: BatchPlan
    steps: int
    #: Steps of the group that are published already; 0 where it begins.
    published: int


class CommitTask(NamedTuple):
    """What the committer has to write now: the state after the generation's first ``steps`` steps, the last of which is
    in ``group``."""

    active: ActiveGeneration
    timeline: Timeline
    uid: str
    group: StepGroup
    steps: int
    #: The sample index that this server knows to be committed.
    known_index: int


class Heard(NamedTuple):
    """What a renewal of the lease says of the present generation; 0 where there is none."""

    generation: int
    committed_index: int
    #: Unix time at which all of its ranks had been heard; None where one was not.
    at: float | None


class RevisionWindow(NamedTuple):
    """From where on a revision may hold."""

    timeline: Timeline
    epoch: int
    #: The number of the present generation; 0 for none.
    generation: int
    committed_index: int
    #: The first state boundary after all that may have been produced.
    first_unproduced: int
    #: That, and not before the newest revision.
    first_revisable: int
    #: Where production ended.
    end: EndOfData | None


class Position(NamedTuple):
    """How far a run is."""

    timeline: Timeline
    #: Of nothing before the first generation.
    commit: Commit
    #: The state there; after a restart that at the boundary before it.
    state: State
    #: Unix time; None before the first commit.
    committed_at: float | None
    #: The number of the present generation; 0 for none.
    generation: int
    #: The sample indices at which it began, and up to which it is produced; 0 for none.
    start_index: int
    produced_index: int
    #: Why the data ended, as soon as that is produced; and whether all until there is committed.
    ended: str | None
    over: bool


class RankView(NamedTuple):
    """A rank of the present generation."""

    rank: int
    connected: bool
    #: Sample index up to which it has consumed.
    position: int
    #: Seconds since its last message; None where it was never heard.
    last_heard_s: float | None


class RunView(NamedTuple):
    """All that a run's stats are made of."""

    position: Position
    leads: bool
    epoch: int
    error: TokenloomError | None
    ledger_error: str | None
    #: Empty where nothing is waited for.
    waiting_for: str
    now: float
    #: (time, commit) over the last minute or so.
    recent: Sequence[tuple[float, Commit]]
    #: Of the present generation; 0 and none where there is none. ``batch_size`` is that of the next step to commit.
    world_size: int
    batch_size: int
    #: Steps that are produced and not committed, and how many may be.
    held_steps: int
    window_steps: int
    ranks: Sequence[RankView]
