"""Commands of who opens generations (``join``) and changes the timeline (``revise``, ``fork``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from tokenloom_server.core.state import State
from tokenloom_server.errors import LedgerUnavailable, NotLeader, ServerStopping, TokenloomError
from tokenloom_server.ledger.base import Commit, Opening
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.run.resume_choice import ResumeChoice
from tokenloom_server.run.run_state import RunState
from tokenloom_server.run.views import RevisionWindow


class ChangeCommands(RunState):
    """A part of ``RunCoordinator``."""

    def one_change(self) -> AbstractContextManager[object]:
        """Openings, revisions and forks: one at a time, since each builds on what the one before made."""
        return self._one_change

    def is_changing(self) -> bool:
        """Whether one is under way."""
        return self._one_change.locked()

    # --- openings ----------------------------------------------------------------------------------

    def busy(self, process: str) -> str | None:
        """Who trains on the run, if every rank of it was heard within ``liveness_s`` and rank 0 is of another process;
        None where nobody does."""
        with self._lock:
            active = self._active
            if active is None or self._error is not None or (process and active.process == process):
                return None
            return active.trained_on(self.clock(), self.timeouts.liveness_s)

    def open_generation(self, uid: str, opening: Opening, start: State, committed: Commit, process: str) -> None:
        """Writes an opening, and makes its generation the present one. Raises the ledger's errors."""
        with self._lock:
            try:
                self.ledger.open(uid, self.stream, self._lease.epoch, opening, committed)
            except LedgerUnavailable as error:
                self._await_ledger("a generation was opened", error)
                raise
            self._uid = uid
            self._refused.clear()
            self._committed_state, self._committed_at = start, opening.opened_at
            self._install(opening, start, committed, resumed=False, process=process)

    def reopen(self, opening: Opening, process: str) -> None:
        """Rank 0 asks again for what it opened. Raises ``NotLeader`` where that is being taken up anew."""
        with self._lock:
            active = self._active
            if active is None or active.generation.number != opening.generation:
                raise NotLeader(f"run {self.name!r} is being taken up anew; join again")
            # The ledger does not know which process that is.
            active.process = process
            self._refused.clear()

    def refuse_attempt(self, attempt: str, choice: ResumeChoice, error: TokenloomError) -> None:
        """Rank 0 of an attempt was refused: the other ranks hear the same."""
        with self._lock:
            self._refused.add(attempt, choice, error)
            self._wakes.changed.notify_all()

    def has_opened(self, attempt: str, choice: ResumeChoice) -> bool:
        """Whether rank 0 of an attempt opened the present generation. Raises ``ServerStopping``, and what rank 0 was
        refused with."""
        with self._lock:
            if self._stopping:
                raise ServerStopping("the server is stopping; join again when it is back")
            refusal = self._refused.get(attempt, choice)
            if not self._is_open(attempt) and refusal is not None:
                raise refusal
            return self._is_open(attempt)

    def is_decided(self, attempt: str, choice: ResumeChoice) -> bool:
        """Whether a rank that waits for rank 0 has to look again: it opened the attempt, was refused, or cannot."""
        with self._lock:
            return self._is_decided(attempt, choice)

    def await_rank_0(self, attempt: str, choice: ResumeChoice, timeout_s: float) -> None:
        """Waits, bounded, until ``is_decided``."""
        with self._lock:
            self._wakes.changed.wait_for(lambda: self._is_decided(attempt, choice), timeout_s)

    def _is_decided(self, attempt: str, choice: ResumeChoice) -> bool:
        is_refused = self._refused.get(attempt, choice) is not None
        return self._stopping or not self.leads() or self._is_open(attempt) or is_refused

    def _is_open(self, attempt: str) -> bool:
        return self._active is not None and self._active.generation.attempt == attempt

    def claim_slot(self, generation: int, rank: int, nonce: str) -> None:
        """A rank joined: its slot is this process's. Raises ``AttemptUsed`` and the ledger's errors."""
        self.ledger.claim_slot(self._uid, self.stream, self._lease.epoch, generation, rank, nonce)
        with self._lock:
            if self._active is not None and self._active.generation.number == generation:
                slot = self._active.generation.slots[rank]
                slot.last_heard, slot.left = self.clock(), False

    # --- the timeline ------------------------------------------------------------------------------

    @contextmanager
    def production_held(
        self, choose: Callable[[RevisionWindow], int], *, dry_run: bool = False
    ) -> Iterator[tuple[RevisionWindow, int]]:
        """Makes production wait before the sample index that ``choose`` gives, until ``change_timeline`` or until an
        error ends the context; ``dry_run``: only chooses. Raises ``NotLeader``, and what ``choose`` does."""
        with self._lock:
            self.require_lead()
            window = self._revision_window()
            index = choose(window)
            if not dry_run:
                self._revising_at = index
        try:
            yield window, index
        except BaseException:
            self.put_in_force(window.epoch)
            raise

    def change_timeline(self, epoch: int, timeline: Timeline, write: Callable[[], object]) -> None:
        """Writes a change of the timeline, and puts it in force once the ledger has it. Raises what ``write`` does."""
        try:
            write()
        except LedgerUnavailable as error:
            with self._lock:
                if self._lease.epoch == epoch:
                    self._await_ledger("a revision was written", error)
            raise
        self.put_in_force(epoch, timeline)

    def put_in_force(self, epoch: int, timeline: Timeline | None = None) -> None:
        """What the ledger has is in force, and production goes on; None: nothing was changed."""
        with self._lock:
            if self._lease.epoch != epoch:
                return  # the run was taken up anew since, with what the ledger has
            self._revising_at = None
            if timeline is not None:
                self._timeline = timeline
                if self._active is None:
                    self._committed_state = timeline.initial()
            self._wakes.everyone()
