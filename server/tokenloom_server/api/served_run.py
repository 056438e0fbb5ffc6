"""One run of a server: its coordinator, and the owner of everything that is asked of the run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from tokenloom_server.api.mixture_origin import MixtureOrigin
from tokenloom_server.config.run import RunConfig
from tokenloom_server.core.state import MAX_COUNTER
from tokenloom_server.planning.forecast import Planner
from tokenloom_server.planning.plan import RunPlan
from tokenloom_server.replay.evaluation import Evaluations
from tokenloom_server.replay.peek import Peeks
from tokenloom_server.reports.stats import RevisionInfo
from tokenloom_server.run.coordinator import RunCoordinator
from tokenloom_server.run.evaluation_streams import EvaluationStreams
from tokenloom_server.run.fork import ForkHandler
from tokenloom_server.run.history import HistoryReader
from tokenloom_server.run.join import JoinHandler
from tokenloom_server.run.losses import Losses
from tokenloom_server.run.past import Past
from tokenloom_server.run.recorder import Recorder
from tokenloom_server.run.restore import Restores
from tokenloom_server.run.resume_points import ResumePoints
from tokenloom_server.run.revise import Mixture, RevisionHandler, revision_info
from tokenloom_server.run.snapshots import Snapshots
from tokenloom_server.run.stats import StatsReader

if TYPE_CHECKING:
    from tokenloom_server.config.mixture_change import MixtureChange

_T = TypeVar("_T")


class Companions:
    """The companions of one owner. Thread-safe."""

    def __init__(self, owner: object) -> None:
        self._owner = owner
        self._lock = threading.Lock()
        self._made: dict[Callable[..., Any], Any] = {}

    def __call__(self, kind: Callable[[Any], _T]) -> _T:
        """The one of a class, made with the owner as its argument when it is first asked for."""
        with self._lock:
            if kind not in self._made:
                self._made[kind] = kind(self._owner)
            made: _T = self._made[kind]
            return made


class ServedRun:
    """One run, and the owner of everything that is asked of it."""

    def __init__(
        self,
        coordinator: RunCoordinator,
        streams: EvaluationStreams,
        other: Callable[[str], ResumePoints | None],
        origin: MixtureOrigin,
        config: RunConfig,
    ) -> None:
        """``other`` finds another run of the server, for forks. ``config`` is what stood at ``origin`` when the run was
        brought up or reloaded."""
        self.coordinator = coordinator
        self.name = coordinator.name
        self.origin, self.config = origin, config
        #: Are called where the run is removed, or taken up anew, and its streams have had time to end: what cancels
        #: a call whose client reads nothing, and what ends threads.
        self.closers: set[Callable[[], object]] = set()
        self.measures = coordinator.measures
        self.leadership = coordinator.leadership
        self.past = Past(coordinator)
        self.snapshots = Snapshots(self.past)
        self.resume_points = ResumePoints(self.past, self.snapshots)
        self.revision_handler = RevisionHandler(coordinator)
        forks = ForkHandler(coordinator, self.resume_points, other)
        self.restores = Restores(self.resume_points, forks)
        self.join_handler = JoinHandler(
            coordinator, self.resume_points, self.revision_handler, forks
        )
        self.losses = Losses(coordinator)
        self.stats = StatsReader(self.past, self.losses)
        self.recorder = Recorder(
            coordinator, self.stats, self.losses, coordinator.leadership.holder
        )
        self.history = HistoryReader(coordinator)
        self.peeks = Peeks(self.resume_points)
        self.evaluations = Evaluations(coordinator, streams)
        self.mixture = Mixture(coordinator, self.revision_handler)
        #: What tools keep for this run.
        self.companion = Companions(self)
        self._planner = Planner()

    def plan(self, until_tokens: int | None) -> RunPlan:
        """What the run will be from where it is committed, up to a total of tokens or, for None, to its end."""
        view = self.coordinator.view()
        return self._planner.plan(view.timeline, view.state, until_tokens)

    def plan_under(
        self, change: MixtureChange, until_tokens: int | None
    ) -> tuple[RevisionInfo, RunPlan]:
        """The revision that a change would be now, and what the run would be under it; nothing is changed. Raises what
        ``RevisionHandler.revise`` does."""
        view, timeline = self.revision_handler.tried(change)
        revision = revision_info(timeline, timeline.revisions[-1], view.commit.sample_index)
        return revision, self._planner.plan(timeline, view.state, until_tokens)

    def plan_from_start(self, until_tokens: int | None) -> RunPlan:
        """The plan from the run's beginning, endless or not: what a trainer's budget is made of. As it does not look at
        how far the run is, it is the same for all ranks, and for those of a later launch."""
        timeline = self.coordinator.timeline
        return self._planner.plan(timeline, timeline.initial(), until_tokens or MAX_COUNTER)
