"""What the silence of a rank leads to, and what else a rank waits for too long.

Silent for ``liveness_s`` it trains no more (``ActiveGeneration.stands_still``); after ``RANK_WARNING_S`` the log names
it, where others wait for it; after ``rank_timeout_s`` the launch ends. Knows no lock: who calls it holds the run's.
"""

from __future__ import annotations

import logging
import math

from tokenloom_server.errors import RankStalled, StorageError
from tokenloom_server.run.active_generation import ActiveGeneration
from tokenloom_server.run.context import RunContext
from tokenloom_server.run.present_generation import PresentGeneration

_log = logging.getLogger(__name__)

#: After so long a wait for another rank the log names it, and again after each further, seconds.
RANK_WARNING_S = 30.0


class SilentRanks:
    """Those of the present generation."""

    def __init__(self, context: RunContext, present: PresentGeneration) -> None:
        self._context, self._present = context, present
        # When the server ran last, as far as is noted: time in which it was paused is no silence of its ranks.
        self._ran_at = context.clock()
        self._warn_at = -math.inf

    def note_running(self) -> float:
        """Where the server did not run for a while, its ranks' silence begins anew; returns the time."""
        now, active = self._context.clock(), self._present.active
        if active is not None and now - self._ran_at > 2 * self._context.timeouts.tick_s:
            active.listen(now)
        self._ran_at = now
        return now

    def watch(self, active: ActiveGeneration, rank: int, number: int) -> None:
        """Stops the run where a stream waits too long, for other ranks or for storage."""
        self._watch_ranks(active, rank, number)
        # Storage that cannot be asked a second time: a mount that hangs never gives up by itself.
        io_stats = self._context.order.resources.io_stats
        overdue = active.generation.steps_wanted() and io_stats.overdue()
        if self._present.error is None and overdue:
            self._present.stop(StorageError(overdue))

    def _watch_ranks(self, active: ActiveGeneration, rank: int, number: int) -> None:
        """Names the ranks that hold the others back: in the log, and after ``rank_timeout_s`` as an error for all."""
        now, generation = self._context.clock(), active.generation
        timeout_s, waited_s = (
            self._context.timeouts.rank_timeout_s,
            generation.stalled(rank, number, now),
        )
        if waited_s < min(RANK_WARNING_S, timeout_s) or self._present.error is not None:
            return
        named = generation.describe_laggards(now)
        if waited_s >= timeout_s:
            error = RankStalled(
                f"the other ranks waited {waited_s:.0f} s for {named}; look at its log and its machine, and restart "
                "the training job from its last checkpoint (--rank-timeout sets how long they wait)"
            )
            self._present.stop(error)
        elif now >= self._warn_at:
            self._warn_at = now + RANK_WARNING_S
            _log.warning("%s: ranks have waited %.0f s for %s", self._context.name, waited_s, named)
