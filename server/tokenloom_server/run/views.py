"""What others see of a live run: immutable, each made under the run's lock, so true of one moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokenloom_server.core.state import State
from tokenloom_server.errors import TokenloomError
from tokenloom_server.ledger.records import CommittedState
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.run.active_generation import GenerationView
from tokenloom_server.run.attempts import Attempts
from tokenloom_server.run.commits import commit_of
from tokenloom_server.run.context import RunContext
from tokenloom_server.run.delivery import Waiting
from tokenloom_server.run.head import Head, RecentCommit
from tokenloom_server.run.lease import Lease, LeaseState
from tokenloom_server.run.pins import PinnedPoint, Pins
from tokenloom_server.run.present_generation import PresentGeneration
from tokenloom_server.run.silent_ranks import SilentRanks

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
        left, rate = self.timeline.tokens_at(sample_index) - self.commit.total_tokens, self.tokens_per_s
        return round(max(0, left) / rate, 1) if rate > 0 else None

    def first_revisable(self, kept: int | None) -> int:
        """The first sample index from which on a revision may hold, after the newest one and after what is pinned,
        whose state does not name it: what is not produced. Where a run stands still, where its commits, its ranks'
        reports and ``kept`` end (None: unknown)."""
        generation, first = self.generation, self.generation.first_unproduced
        if generation.stands_still and kept is not None:
            first = max(kept, self.commit.sample_index, *(rank.position for rank in generation.ranks))
        if self.pin is not None:
            first = max(first, self.pin.sample_index + 1)
        first += -first % self.timeline.at(first).config.pick_samples
        return max(first, self.timeline.last_revised)

    def closed_by(self, sample_index: int) -> int:
        """The generation that a revision at a sample index closes, since samples after it may be produced; 0: none."""
        generation = self.generation
        closes = generation.stands_still and not generation.closed and sample_index < generation.first_unproduced
        return generation.number if closes else 0


@dataclass(eq=False)
class Overview:
    """Looks at the parts of one run together. Knows no lock: who calls it holds the run's."""

    _context: RunContext
    _head: Head
    _present: PresentGeneration
    _lease: Lease
    _attempts: Attempts
    _pins: Pins
    _silent_ranks: SilentRanks
    #: What stands still without an error of its own.
    _failing_thread: Callable[[], TokenloomError | None]

    def view(self) -> RunView:
        head, lease, active, now = (
            self._head,
            self._lease.state,
            self._present.active,
            self._silent_ranks.note_running(),
        )
        liveness_s = self._context.timeouts.liveness_s
        return RunView(
            timeline=head.timeline,
            lease=lease,
            leads=self._lease.leads(),
            commit=head.commit or commit_of(head.timeline, head.timeline.initial(), ""),
            state=head.state,
            committed_at=head.committed_at,
            recent=tuple(head.recent),
            now=now,
            error=self._present.error or self._failing_thread(),
            ledger_error=head.ledger_error if lease.held or lease.awaits_ledger else None,
            waiting=self.waiting(),
            opening=self._attempts.is_opening,
            pin=self._pins.pin,
            generation=active.view(now, liveness_s) if active is not None else GenerationView(),
        )

    def waiting(self) -> Waiting:
        """What production or delivery waits for."""
        active, io_stats = self._present.active, self._context.order.resources.io_stats
        if not self._lease.leads():
            return Waiting(f"the lease: {self._lease.state.stands_by_for}", "lease")
        if active is None:
            return Waiting("the launch that is being opened" if self._attempts.is_opening else "a trainer", "ranks")
        if self._head.ledger_error is not None:
            return Waiting(f"the ledger: {self._head.ledger_error}", "ledger")
        if ranks := active.waiting_for():
            return Waiting(ranks, "ranks")
        if self._present.error is not None or not active.generation.steps_wanted():
            return Waiting()
        if wait := io_stats.longest_wait():
            return Waiting(wait.text(), wait.reason)
        return Waiting("samples to be read and tokenised", "rows") if active.starves() else Waiting()
