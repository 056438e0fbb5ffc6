"""What others see of a live run: immutable, each made under the run's lock, so true of one moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokenloom_server.core.state import State
from tokenloom_server.errors import TokenloomError
from tokenloom_server.ledger.records import CommittedState
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.run.active_generation import GenerationView
from tokenloom_server.run.generation import Waiting
from tokenloom_server.run.head import RecentCommit
from tokenloom_server.run.lease import LeaseState
from tokenloom_server.run.pins import PinnedPoint

#: Rates and window shares look back this far, seconds.
LOOK_BACK_S = 30.0


class RunView(NamedTuple):
    """A run at one moment."""

    timeline: Timeline
    lease: LeaseState
    leads: bool
    #: The newest commit; before the first generation one of zero samples.
    commit: CommittedState
    #: The state at its sample index; right after a restart that at the state boundary before it.
    state: State
    #: Unix time by the clock of leases; None before the first commit.
    committed_at: float | None
    #: Commits over the last minute or so; and the time now.
    recent: Sequence[RecentCommit]
    now: float
    #: What stopped the run for all ranks, and why commits wait.
    error: TokenloomError | None
    ledger_error: str | None
    #: What production or delivery waits for.
    waiting: Waiting
    #: Whether a launch is being opened.
    opening: bool
    #: Where the next launch begins, if that is pinned.
    pin: PinnedPoint | None
    #: The present one; without a number where there is none.
    generation: GenerationView

    @property
    def earlier_commit(self) -> RecentCommit:
        """The commit at which the window of rates begins: the newest one of then, or the first that is known."""
        begin, known = self.now - LOOK_BACK_S, RecentCommit(self.now, self.commit.total_tokens, ())
        earlier = [commit for commit in self.recent if commit.time <= begin][-1:] or self.recent[:1]
        return earlier[0]._replace(time=max(begin, earlier[0].time)) if earlier else known

    @property
    def tokens_per_s(self) -> float:
        """How many tokens were committed in each second lately; 0 where none were."""
        earlier = self.earlier_commit
        since_s = self.now - earlier.time
        return (self.commit.total_tokens - earlier.total_tokens) / since_s if since_s > 0 else 0.0

    def seconds_until(self, sample_index: int) -> float | None:
        """When a sample index is committed at this rate, seconds from now; None where nothing is committed lately."""
        left, rate = (
            self.timeline.tokens_at(sample_index) - self.commit.total_tokens,
            self.tokens_per_s,
        )
        return round(max(0, left) / rate, 1) if rate > 0 else None

    def first_revisable(self, kept: int | None) -> int:
        """The first sample index from which on a revision may hold, after the newest one and after what is pinned,
        whose state does not name it: what is not produced. Where a run stands still, where its commits, its ranks'
        reports and ``kept`` end (None: unknown)."""
        generation, first = self.generation, self.generation.first_unproduced
        if generation.stands_still and kept is not None:
            first = max(
                kept, self.commit.sample_index, *(rank.position for rank in generation.ranks)
            )
        if self.pin is not None:
            first = max(first, self.pin.sample_index + 1)
        first += -first % self.timeline.at(first).config.pick_samples
        return max(first, self.timeline.last_revised)

    def closed_by(self, sample_index: int) -> int:
        """The generation that a revision at a sample index closes, since samples after it may be produced; 0: none."""
        generation = self.generation
        closes = (
            generation.stands_still
            and not generation.closed
            and sample_index < generation.first_unproduced
        )
        return generation.number if closes else 0
