"""Attempts whose rank 0 was refused, so that the ranks that wait for it hear why."""

from __future__ import annotations

from collections import OrderedDict

from tokenloom_server.errors import TokenloomError
from tokenloom_server.run.resume_choice import ResumeChoice

#: Older ones are forgotten.
_REMEMBERED = 64


class RefusedAttempts:
    """By attempt and by what rank 0 asked for: the same id may be tried again with another resume point."""

    def __init__(self) -> None:
        self._errors: OrderedDict[tuple[str, ResumeChoice], TokenloomError] = OrderedDict()

    def add(self, attempt: str, choice: ResumeChoice, error: TokenloomError) -> None:
        self._errors[attempt, choice] = error
        while len(self._errors) > _REMEMBERED:
            self._errors.popitem(last=False)

    def get(self, attempt: str, choice: ResumeChoice) -> TokenloomError | None:
        return self._errors.get((attempt, choice))

    def clear(self) -> None:
        """A generation was opened: nobody who joins from now on is to hear of what was before."""
        self._errors.clear()
