"""One run of a server: its coordinator, and the owner of everything that is asked of the run."""

from __future__ import annotations

from collections.abc import Callable

from tokenloom_server.core.state import MAX_COUNTER
from tokenloom_server.planning.plan import RunPlan
from tokenloom_server.planning.planner import Planner
from tokenloom_server.replay.evaluation import Evaluations
from tokenloom_server.replay.mixture import Mixture
from tokenloom_server.replay.past import Past
from tokenloom_server.replay.peek import Peeks
from tokenloom_server.replay.receipts import Receipts
from tokenloom_server.replay.saved_snapshots import SavedSnapshots
from tokenloom_server.replay.start_points import StartPoints
from tokenloom_server.replay.trace import Traces
from tokenloom_server.run.coordinator import RunCoordinator
from tokenloom_server.run.fork import ForkHandler
from tokenloom_server.run.history import History
from tokenloom_server.run.join import JoinHandler
from tokenloom_server.run.leadership import Leadership
from tokenloom_server.run.losses import Losses
from tokenloom_server.run.revise import RevisionHandler
from tokenloom_server.run.stats import StatsReader
from tokenloom_server.run.streams import Streams


class ServedRun:
    """One run, and the owner of everything that is asked of it."""

    def __init__(
        self,
        coordinator: RunCoordinator,
        leadership: Leadership,
        streams: Streams,
        other: Callable[[str], History | None] = lambda run: None,
    ) -> None:
        """``other`` finds another run of the server, for forks."""
        self.coordinator = coordinator
        self.leadership = leadership
        self.history = History(coordinator)
        self.revision_handler = RevisionHandler(coordinator)
        self.fork_handler = ForkHandler(coordinator, self.history, other)
        self.join_handler = JoinHandler(coordinator, self.history, self.revision_handler, self.fork_handler)
        self.losses = Losses(coordinator)
        self.stats = StatsReader(coordinator, self.losses)
        self.past = Past(coordinator, self.history)
        self.peeks = Peeks(coordinator, self.history, self.past)
        self.evaluations = Evaluations(coordinator, streams)
        self.snapshots = SavedSnapshots(coordinator, self.history)
        self.start_points = StartPoints(coordinator, self.history, self.past, self.fork_handler)
        self.mixture = Mixture(coordinator, self.revision_handler)
        self.receipts = Receipts(coordinator, self.history, self.past, self.stats)
        self.traces = Traces(coordinator, self.history, self.past, self.evaluations)
        self._planner = Planner()

    def plan(self, until_tokens: int | None) -> RunPlan:
        """What the run will be from where it is committed, up to a total of tokens or, for None, to its end."""
        view = self.coordinator.view()
        return self._planner.plan(view.timeline, view.state, until_tokens)

    def plan_from_start(self, until_tokens: int | None) -> RunPlan:
        """The plan from the run's beginning, endless or not: what a trainer's budget is made of. As it does not look at
        how far the run is, it is the same for all ranks, and for those of a later launch."""
        timeline = self.coordinator.timeline
        return self._planner.plan(timeline, timeline.initial(), until_tokens or MAX_COUNTER)
