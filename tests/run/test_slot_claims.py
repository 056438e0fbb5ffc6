"""The claims of a launch's ranks: each durable before it is answered, and together where they come together."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.ledger_server import STREAM, UID, Server, lead
from tokenloom_server.errors import AttemptUsed, LedgerUnavailable, TokenloomError
from tokenloom_server.ledger.commands import ClaimSlot, Command
from tokenloom_server.ledger.sqlite import SqliteLedger
from tokenloom_server.run.slot_claims import SlotClaims

RANKS = 40


class CountingLedger(SqliteLedger):
    """Counts its writes of several commands, and waits with the first for what comes meanwhile."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.sizes: list[int] = []
        self.claims: SlotClaims | None = None
        self.away = False

    def execute_all(self, some: Sequence[Command]) -> list[int | TokenloomError]:
        self.sizes.append(len(some))
        while (
            len(self.sizes) == 1
            and self.claims is not None
            and len(self.claims._waiting) < RANKS - 1
        ):
            pass
        if self.away:
            raise LedgerUnavailable("away")
        return super().execute_all(some)


@pytest.fixture
def server(tmp_path: Path) -> Server:
    made = lead(CountingLedger(tmp_path / "ledger.db"))
    made.open(1, 0)
    return made


def claim_all(server: Server, claims: SlotClaims, nonce: str) -> list[TokenloomError | None]:
    """What becomes of the claims of all ranks, made at once, by rank."""

    def claim(rank: int) -> TokenloomError | None:
        try:
            claims.write(ClaimSlot(UID, STREAM, server.epoch, 1, rank, nonce))
        except TokenloomError as error:
            return error
        return None

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(claim, range(RANKS)))


def test_claims_that_come_while_one_is_written_are_one_write(server: Server) -> None:
    ledger = server.ledger
    assert isinstance(ledger, CountingLedger)
    ledger.claims = claims = SlotClaims(ledger)
    server.claim(5, "another")
    answers = claim_all(server, claims, "nonce")
    assert ledger.sizes == [1, RANKS - 1]
    assert [rank for rank, answer in enumerate(answers) if answer is not None] == [5]
    assert isinstance(answers[5], AttemptUsed)
    for rank in {*range(RANKS)} - {5}:
        with pytest.raises(AttemptUsed):
            server.claim(rank, "other")


def test_where_the_ledger_is_away_every_claim_hears_so_and_may_come_again(server: Server) -> None:
    ledger = server.ledger
    assert isinstance(ledger, CountingLedger)
    ledger.away, claims = True, SlotClaims(ledger)
    assert {type(answer) for answer in claim_all(server, claims, "nonce")} == {LedgerUnavailable}
    ledger.away = False
    assert claim_all(server, claims, "nonce") == [None] * RANKS


class _BrokenOnce(SqliteLedger):
    """Fails once, with two claims in hand."""

    claims: SlotClaims | None = None
    broken = False

    def execute_all(self, some: Sequence[Command]) -> list[int | TokenloomError]:
        if self.claims is not None and not self.broken:
            while len(some) == 1 and not self.claims._waiting:
                pass
            if len(some) == 1:
                return super().execute_all(some)
            self.broken = True
            raise OSError("on purpose")
        return super().execute_all(some)


def test_a_claim_that_a_fault_left_unanswered_is_not_taken_for_written(tmp_path: Path) -> None:
    ledger = _BrokenOnce(tmp_path / "ledger.db")
    server = lead(ledger)
    server.open(1, 0)
    ledger.claims = claims = SlotClaims(ledger)

    def claim(rank: int) -> BaseException | None:
        try:
            claims.write(ClaimSlot(UID, STREAM, server.epoch, 1, rank, "nonce"))
        except (TokenloomError, OSError) as error:
            return error
        return None

    with ThreadPoolExecutor(RANKS) as pool:
        answers = list(pool.map(claim, range(RANKS)))
    taken = set()
    for rank in range(RANKS):
        try:
            server.claim(rank, "other")
        except AttemptUsed:
            taken.add(rank)
    assert ledger.broken
    assert taken == {rank for rank, answer in enumerate(answers) if answer is None}
