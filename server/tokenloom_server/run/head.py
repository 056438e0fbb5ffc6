"""The head of a run: what the ledger has of it, as far as this server knows."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from tokenloom_server.core.state import State, digest_hex
from tokenloom_server.ledger.records import CommittedState, Counters, StoredRun
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.timeline import Timeline

#: Commits before the newest are remembered this far apart, seconds, for rates and window shares.
RECENT_EVERY_S = 0.25


class RecentCommit(NamedTuple):
    """A commit of the last minute or so: when it was made, and what was ``consumed`` up to it."""

    time: float
    total_tokens: int
    consumed: tuple[int, ...]


class Head:
    """Its fields are values that never change, each replaced by another one. Changed under the run's lock."""

    def __init__(self, order: PipelineFactory, uid: str) -> None:
        #: The order under its phases and revisions.
        self.timeline = Timeline(order)
        self.uid = uid
        #: How many changes of the revisions the ledger has acknowledged to this server: every write says so.
        self.revision_changes = 0
        self.commit: CommittedState | None = None
        #: At the committed index (after a restart: at the boundary before it), for the stats.
        self.state: State = self.timeline.initial()
        self.committed_at: float | None = None
        #: Why commits wait.
        self.ledger_error: str | None = None
        #: For rates and window shares.
        self.recent: deque[RecentCommit] = deque(maxlen=512)

    @property
    def committed_through(self) -> int:
        """The sample index up to which the ledger has the run."""
        commit = self.commit
        return commit.sample_index if commit is not None else 0

    def adopt(self, uid: str) -> None:
        """An opening was written under this uid."""
        self.uid = uid

    def read(self, stored: StoredRun, timeline: Timeline) -> None:
        """This server takes the run up, with a timeline of what the ledger has."""
        self.uid = stored.uid
        self.commit = self.committed_at = self.ledger_error = None
        self.recent.clear()
        self.revise(timeline, stored.revision_changes, begun=False)

    def revise(self, timeline: Timeline, revision_changes: int, *, begun: bool) -> None:
        """Another timeline is in force; ``begun``: where a generation goes on under it."""
        self.timeline, self.revision_changes = timeline, revision_changes
        if not begun:
            self.state = timeline.initial()

    def miss_ledger(self, error: str | None) -> None:
        """Commits wait for the ledger, which says so; None: it is back."""
        self.ledger_error = error

    def begin(
        self, commit: CommittedState, state: State, committed_at: float | None, now: float
    ) -> None:
        """A generation begins at a commit, or goes on from it."""
        self.recent.clear()
        self.advance(self.timeline, commit, state, committed_at, now)

    def advance(
        self,
        timeline: Timeline,
        commit: CommittedState,
        state: State,
        committed_at: float | None,
        now: float,
    ) -> None:
        """The ledger has a commit; ``now`` is by the run's own clock."""
        self.commit, self.state, self.committed_at = commit, state, committed_at
        if len(self.recent) > 1 and now - self.recent[-2].time < RECENT_EVERY_S:
            self.recent.pop()
        consumed = timeline.at(state.sample_index).config.consumed(state)
        self.recent.append(RecentCommit(now, commit.total_tokens, consumed))


def commit_of(timeline: Timeline, state: State, resume_state: str) -> CommittedState:
    """The ledger's view of a state; ``resume_state`` is at the boundary to go forward from. The counters are of what
    was consumed: what a restore jumped over is not in them, but in ``total_tokens``, the order's position."""
    return CommittedState(
        sample_index=state.sample_index,
        total_tokens=state.total_tokens,
        digest=digest_hex(state.digest),
        state=resume_state,
        counters={
            spec: Counters(
                samples=source.samples - source.skipped_samples,
                rows=source.rows - source.skipped_rows,
                tokens=source.tokens - source.skipped_tokens,
            )
            for spec, source in zip(
                timeline.at(state.sample_index).record.specs, state.sources, strict=True
            )
        },
    )
