"""The ranks' claims of their slots, written to the ledger together."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from tokenloom_server.errors import LedgerUnavailable, TokenloomError
from tokenloom_server.ledger.base import Ledger
from tokenloom_server.ledger.commands import ClaimSlot


@dataclass(slots=True, eq=False)
class _Claim:
    command: ClaimSlot
    #: What the ledger made of it; None until it has answered.
    answer: int | TokenloomError | None = None


class SlotClaims:
    """A launch of thousands of ranks claims as many slots at once, and a durable write takes milliseconds. So claims
    that come while one write is under way wait, and go together in the next (group commit). Thread-safe."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._waiting: deque[_Claim] = deque()
        # Who has it writes all that waits. (One thread may be within it twice where threads are simulated.)
        self._writing = threading.RLock()

    def write(self, command: ClaimSlot) -> None:
        """Returns once the claim is durable. Raises what ``Ledger.execute`` raises of it."""
        claim = _Claim(command)
        self._waiting.append(claim)
        with self._writing:
            if claim.answer is None:
                self._write_all()
        if isinstance(claim.answer, TokenloomError):
            raise claim.answer

    def _write_all(self) -> None:
        claims = [self._waiting.popleft() for _ in range(len(self._waiting))]
        # What a fault of the program leaves unanswered was perhaps not written.
        unknown = LedgerUnavailable("claiming a slot failed; see the server's log")
        answers: list[int | TokenloomError] = [unknown] * len(claims)
        try:
            answers = self._ledger.execute_all([claim.command for claim in claims])
        except TokenloomError as error:
            answers = [error] * len(claims)
        finally:
            for claim, answer in zip(claims, answers, strict=True):
                claim.answer = answer
