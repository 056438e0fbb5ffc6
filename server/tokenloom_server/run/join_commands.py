"""Commands of Joins: which ranks of an attempt were refused, and what the others wait for."""

from __future__ import annotations

from tokenloom_server.errors import ServerStopping, TokenloomError
from tokenloom_server.run.join_call import ResumeChoice
from tokenloom_server.run.stream_commands import StreamCommands

#: Refused attempts that are remembered, so that waiting ranks hear why.
_REMEMBERED_REFUSALS = 64


class JoinCommands(StreamCommands):
    """A part of ``RunCoordinator``."""

    def refuse_attempt(self, attempt: str, choice: ResumeChoice, error: TokenloomError) -> None:
        """Rank 0 of an attempt was refused: the other ranks hear the same."""
        error.of_launch = True
        with self._lock:
            self._refused[attempt, choice] = error
            while len(self._refused) > _REMEMBERED_REFUSALS:
                self._refused.pop(next(iter(self._refused)))
            self._wakes.changed.notify_all()

    def has_opened(self, attempt: str, choice: ResumeChoice) -> bool:
        """Whether rank 0 of an attempt opened the present generation. Raises ``ServerStopping``, and what rank 0 was
        refused with."""
        with self._lock:
            if self.stopping:
                raise ServerStopping("the server is stopping; join again when it is back")
            refusal = self._refused.get((attempt, choice))
            if not self._is_open(attempt) and refusal is not None:
                raise refusal
            return self._is_open(attempt)

    def await_rank_0(self, attempt: str, choice: ResumeChoice, timeout_s: float) -> None:
        """Waits, bounded, until rank 0 opened the attempt, was refused, or cannot."""

        def is_decided() -> bool:
            is_refused = (attempt, choice) in self._refused
            return self.stopping or not self.leads() or self._is_open(attempt) or is_refused

        with self._lock:
            self._wakes.changed.wait_for(is_decided, timeout_s)

    def _is_open(self, attempt: str) -> bool:
        return self._active is not None and self._active.generation.attempt == attempt
