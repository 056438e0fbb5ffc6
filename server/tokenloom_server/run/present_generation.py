"""The present generation of a run: what stops it, what holds it up, and whom that wakes.

Knows no lock: whoever calls it holds the run's.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import NamedTuple

from tokenloom_server.core.state import State
from tokenloom_server.errors import LedgerError, LedgerRolledBack, ServerStopping, TokenloomError
from tokenloom_server.ledger.records import CommittedState, Opening, StoredRun
from tokenloom_server.run import sizing
from tokenloom_server.run.active_generation import ActiveGeneration
from tokenloom_server.run.context import RunContext
from tokenloom_server.run.generation import Generation
from tokenloom_server.run.head import Head

_log = logging.getLogger(__name__)


class LedgerLoss(NamedTuple):
    """What the ledger no longer has: a commit of this generation beyond, or at, this sample index, or so many changes
    of the revisions."""

    generation: int = 0
    sample_index: float = 0
    revision_changes: int = 0
    #: Unix time.
    noticed_at: float = 0

    def made_right(self, stored: StoredRun) -> bool:
        """Whether the ledger has it again, or a generation that was opened since."""
        if stored.opening is None or stored.committed is None:
            return False
        back = (stored.opening.generation, stored.committed.sample_index) >= (
            self.generation,
            self.sample_index,
        )
        back = back and stored.revision_changes >= self.revision_changes
        return back or stored.opening.opened_at > self.noticed_at


@dataclass(eq=False)
class PresentGeneration:
    """See the module."""

    _context: RunContext
    _head: Head
    active: ActiveGeneration | None = None
    #: What stopped it for all ranks; it outlives the generation where the ledger lost data.
    error: TokenloomError | None = None
    #: Production waits before this sample index: a revision from there on is being written.
    held_at: int | None = None
    #: What streams hear once the server is stopping; None while it is not.
    ending: TokenloomError | None = None
    _loss: LedgerLoss = field(default_factory=LedgerLoss)
    #: Whether the committer sleeps until a commit is due.
    _committer_idle: bool = False
    #: When this server, or its leading, began: until the first batch went out.
    _up_since: float | None = None

    # --- one begins, and ends ----------------------------------------------------------------------

    def is_open(self, attempt: str) -> bool:
        """Whether it is the one that an attempt opened."""
        return self.active is not None and self.active.generation.attempt == attempt

    def begin(
        self,
        opening: Opening,
        base: State,
        commit: CommittedState,
        committed_at: float | None,
        epoch: int,
        *,
        resumed: bool = False,
    ) -> ActiveGeneration:
        """An opening's is the present one from now on. ``resumed``: after a restart of the server, where production has
        to meet the committed digest again."""
        context, timeline, now = self._context, self._head.timeline, self._context.clock()
        batch_plans, config, size = (
            sizing.batch_plans_of(opening),
            context.order.config,
            timeline.sample_bytes,
        )
        window, accumulate = config.window_micro_steps, batch_plans.accumulate
        steps, rest = batch_plans.steps_until(commit.sample_index)
        generation = Generation(
            opening.generation,
            opening.attempt,
            batch_plans,
            # A client may hold all micro-steps of an optimiser step, and has more to go on with.
            [
                max(window or sizing.window_micro_steps(size, plan), 2 * accumulate)
                for plan in batch_plans.plans
            ],
            [
                min(context.message_steps(size, plan.batch_size), plan.group_micro_steps)
                for plan in batch_plans.plans
            ],
            pads_last_micro_step=config.last_micro_step == "pad",
            committed=steps + bool(rest),
        )
        digest = commit.digest if resumed else None
        active = ActiveGeneration(
            generation, base, digest, epoch, opening.opened_at, opening.process, now, resumed
        )
        self._context.wakes.everyone()
        self.active = active
        self._context.wakes.set_ranks(len(generation.slots))
        self._head.begin(commit, base, committed_at, now)
        self.error = None
        self._context.wakes.everyone()
        return active

    def take_up(self, stored: StoredRun, epoch: int) -> None:
        """The one that the ledger has goes on."""
        if stored.opening is None or stored.committed is None:
            return
        context, base = self._context, self._head.timeline.decode(stored.committed.state)
        active = self.begin(
            stored.opening, base, stored.committed, stored.committed_at, epoch, resumed=True
        )
        active.close(stored.closed_generation >= stored.opening.generation)
        if stored.lease is not None and (heard_at := stored.lease.heard_at) is not None:
            silent_s = max(0.0, context.lease_clock() - heard_at)
            active.generation.slots.all_heard(context.clock() - silent_s if heard_at else None)

    def drop(self) -> None:
        """There is none: this server does not lead."""
        self._context.wakes.everyone()
        self.active = None
        self._context.wakes.set_ranks(0)

    def lead(
        self, stored: StoredRun, epoch: int, error: TokenloomError | None, since: float
    ) -> None:
        """This server leads, since when batches may go out; the log says when the first did. ``error``: what stops all
        ranks still."""
        self.held_at = None
        self.drop()
        self.take_up(stored, epoch)
        self.error = error
        self._up_since = since if self._up_since is None else min(since, self._up_since)
        self._context.wakes.everyone()

    def end(self, why: TokenloomError | None) -> None:
        """The server is stopping; ``why``: this run alone ends."""
        self.ending = (
            why
            or self.ending
            or ServerStopping("the server is stopping; it goes on where it was when it is back")
        )
        self._context.wakes.everyone()

    def note_batch(self) -> None:
        """A batch goes out."""
        if self._up_since is not None:
            waited_s, self._up_since = self._context.clock() - self._up_since, None
            _log.info(
                "%s: first batch %.2f s after the server was up, the wait for trainers included",
                self._context.name, waited_s,
            )  # fmt: skip

    def hold(self, sample_index: int | None, closed: bool | None = None) -> None:
        """Production waits before a sample index, for a revision; None: no more. ``closed``: whether that closes the
        generation; None: it is as it was."""
        self.held_at = sample_index
        if self.active is not None and closed is not None:
            self.active.close(closed)

    # --- what stops it -----------------------------------------------------------------------------

    def stop(self, error: TokenloomError, level: int = logging.ERROR) -> None:
        """All ranks get the error, once they have consumed what is produced."""
        _log.log(level, "%s: stopped: %s: %s", self._context.name, error.name, error)
        error.of_launch = True
        self.error = error
        self._context.wakes.everyone()

    def alarm(self, error: TokenloomError) -> None:
        """A rank, or production, has something else than the ledger or this server."""
        if isinstance(error, LedgerRolledBack):
            self.lose(error, math.inf)  # a rank knows more than this server does
        self.stop(error)

    def lose(self, error: LedgerRolledBack, known_index: float) -> None:
        """The ledger lost commits; ``known_index``: up to there it had the run, as far as is known."""
        self.error = error
        generation = (
            self.active.generation.number if self.active is not None else self._loss.generation
        )
        self._loss = LedgerLoss(
            generation, known_index, self._head.revision_changes, self._context.wall_clock()
        )

    def loss_under(self, is_next_epoch: bool, stored: StoredRun) -> TokenloomError | None:
        """What the ledger lost, if it did: that stops all ranks, also under a new lease, until a launch from a
        trainer's state has made it right again; that launch may have joined another server."""
        context, changes = self._context, self._head.revision_changes
        if isinstance(self.error, LedgerRolledBack):
            return None if self._loss.made_right(stored) else self.error
        # Where another server led meanwhile, that one knew what the ledger had, and has seen to it.
        if not is_next_epoch or stored.revision_changes >= changes:
            return None
        # While nobody knew whether a write was done: no renewal has found it out.
        error = LedgerRolledBack(
            f"run {context.name!r}: {context.ledger.description} has {stored.revision_changes} changes of its "
            f"revisions (made or dropped), but had acknowledged {changes}. {LedgerRolledBack.remedy}"
        )
        self.lose(error, self._head.committed_through)
        self.stop(error)
        return error

    # --- what is due -------------------------------------------------------------------------------

    def steps_wanted(self) -> int:
        """How many micro-steps to produce now; 0 to wait."""
        if self.active is None or self.error is not None:
            return 0
        return self.active.steps_wanted(self.held_at)

    def commit_due(self) -> int:
        """How many micro-steps to commit; 0 for nothing new."""
        # What the ranks acknowledge after a bad row is still committed; after a ledger's refusal nothing is.
        if (
            self.active is None
            or isinstance(self.error, LedgerError)
            or self.active.expected_digest is not None
        ):
            return 0
        return self.active.generation.commit_due() or 0

    def commit_rest_s(self, not_before_s: float, may_hurry: bool) -> float | None:
        """How long the committer rests, seconds: 0 where a commit is due, None until it is woken."""
        self._committer_idle = not self.commit_due() and self.ending is None
        if self._committer_idle:
            return None
        if self.ending is not None or (may_hurry and self._is_backlog()):
            return 0.0
        return max(0.0, not_before_s - self._context.clock())

    def _is_backlog(self) -> bool:
        """Whether the micro-steps to commit are so many that the window may fill up meanwhile."""
        due = self.commit_due()
        if not due or self.active is None:
            return False
        generation = self.active.generation
        return 4 * (due - generation.committed) >= generation.window_micro_steps

    # --- who is woken: only where it would act, for waking costs more than what most events bring ------------------

    def wake_rank(self, rank: int) -> None:
        if self.active is not None and (
            self.active.generation.has_for(rank) or self.error is not None
        ):
            self._context.wakes.ranks[rank].notify_all()

    def wake_producer(self) -> None:
        if self.steps_wanted():
            self._context.wakes.producer.notify()

    def wake_committer(self) -> None:
        if (self._committer_idle and self.commit_due()) or self._is_backlog():
            self._context.wakes.committer.notify()
