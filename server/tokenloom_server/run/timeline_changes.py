"""Changes of a run's timeline while it trains: production held, the write, and the new timeline in force.

Commands of ``revise`` and ``fork``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tokenloom_server.errors import LedgerUnavailable
from tokenloom_server.ledger.records import StoredRun
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.run.context import RunContext
from tokenloom_server.run.head import Head
from tokenloom_server.run.lease import Lease
from tokenloom_server.run.present_generation import PresentGeneration
from tokenloom_server.run.views import RunView


@dataclass(eq=False)
class TimelineChanges:
    """Those of one run; the caller holds ``one_change``. Thread-safe."""

    _context: RunContext
    _head: Head
    _present: PresentGeneration
    _lease: Lease
    #: The run at the moment, for who holds the lock.
    _view: Callable[[], RunView]

    @contextmanager
    def held(self, choose: Callable[[RunView], int]) -> Iterator[tuple[RunView, int]]:
        """Makes production wait before the first sample index that is certainly not produced, or that ``choose`` gives,
        until a new timeline is in force or an error ends the context: what is produced then knows of it. Raises
        ``NotLeader``, and what ``choose`` does."""
        with self._context.lock:
            self._lease.require()
            view = self._view()
            index, was_closed = choose(view), view.generation.closed
            # No rank comes back while a revision is written that closes the generation.
            self._present.hold(
                min(index, view.generation.first_unproduced),
                was_closed or bool(view.closed_by(index)),
            )
        try:
            yield view, index
        except BaseException:
            with self._context.lock:
                if self._lease.state.epoch == view.lease.epoch:
                    self._present.hold(None, was_closed)
                    self._context.wakes.everyone()
            raise

    def write(
        self,
        epoch: int,
        timeline: Timeline,
        write: Callable[[int], int],
        closed: StoredRun | None = None,
    ) -> None:
        """Writes a change of the timeline, and puts it in force once the ledger has it. ``write`` gets how many changes
        of the revisions are acknowledged, and returns how many there are after it; ``closed``: what the ledger has
        after it, where it closes the generation. Raises what ``write`` does."""
        known = self._head.revision_changes
        try:
            changes = write(known)
        except LedgerUnavailable as error:
            with self._context.lock:
                if self._lease.state.epoch == epoch:
                    self._lease.await_ledger("a revision was written", error)
            raise
        self._context.measures.revisions.add(changes - known)
        self.adopt(epoch, timeline, changes, closed)

    def adopt(
        self,
        epoch: int,
        timeline: Timeline,
        changes: int | None = None,
        closed: StoredRun | None = None,
    ) -> None:
        """Puts a timeline in force, and lets production go on under it. Changes nothing where the run was taken up
        since at a newer epoch, with what the ledger has."""
        head, present = self._head, self._present
        with self._context.lock:
            if self._lease.state.epoch == epoch:
                present.hold(None)
                begun = present.active is not None
                head.revise(
                    timeline, head.revision_changes if changes is None else changes, begun=begun
                )
                if begun and closed is not None:
                    present.take_up(closed, epoch)
                self._context.wakes.everyone()
