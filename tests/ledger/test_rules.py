"""The rules of the ledger, each by an example, on a ledger that has nothing but them.

Other ledgers are held against these by ``test_machine.py``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from support.ledger_data import commit_at, opening_of, revision_of
from support.ledger_server import NAME, STREAM, UID, Server, lead
from support.ledger_stores import LedgerStore, MemoryStore
from tokenloom_server.core.state import MAX_COUNTER
from tokenloom_server.errors import (
    AttemptUsed,
    Fenced,
    LedgerError,
    LedgerRolledBack,
    NotFound,
    NotLeader,
    OrderMismatch,
)
from tokenloom_server.ledger.base import Ledger
from tokenloom_server.ledger.commands import Acquire, Adopt, Commit, Pin, Renew
from tokenloom_server.ledger.records import Lease


@pytest.fixture
def store() -> LedgerStore:
    return MemoryStore()


def test_an_epoch_that_was_never_given_is_refused(server: Server) -> None:
    ahead = replace(server, epoch=server.epoch + 1)
    for write in (partial(ahead.commit, 1), partial(ahead.revise, 1, 0), partial(ahead.drop, 1)):
        with pytest.raises(LedgerRolledBack, match="epoch 1, but had given out 2"):
            write()
    assert server.revisions == []


def test_an_epoch_that_was_given_out_twice_does_not_renew_the_other_holders_lease(
    ledger: Ledger,
) -> None:
    ledger.create_run(NAME, STREAM, UID, "{}")
    epoch = ledger.execute(Acquire(UID, STREAM, "two", 1000.0))
    before = ledger.read_run(NAME, STREAM)
    with pytest.raises(
        NotLeader, match=f"two has the lease of run '{NAME}', at this server's own epoch {epoch}"
    ):
        ledger.execute(Renew(UID, STREAM, epoch, "one", 5.0, 7.25, 0, 0))
    assert ledger.read_run(NAME, STREAM) == before
    with pytest.raises(LedgerRolledBack):  # what was lost is told first
        ledger.execute(Renew(UID, STREAM, epoch, "one", 5.0, 7.25, 1, 0))


def test_a_lease_of_a_clock_that_has_gone_back_since_keeps_nobody_waiting_for_hours() -> None:
    lease = Lease(holder="one", acquired_at=7200.0, lapses_at=7215.0, lasts_s=15.0, heard_at=None)
    assert [lease.left_s(now) for now in (7201.0, 7214.5, 7216.0, 7199.5, 100.0)] == [
        14.0,
        0.5,
        0.0,
        15.5,
        0.0,
    ]


def test_an_epoch_can_be_asked_to_be_beyond_those_that_a_rolled_back_ledger_forgot(
    ledger: Ledger,
) -> None:
    ledger.create_run(NAME, STREAM, UID, "{}")
    assert ledger.execute(Acquire(UID, STREAM, "one", 0.0, beyond_epoch=41)) == 42
    assert ledger.execute(Acquire(UID, STREAM, "one", 0.0, beyond_epoch=7)) == 43


def test_a_ledger_that_is_behind_what_its_server_knows_is_refused_before_anything_changes(
    server: Server,
) -> None:
    server.commit(8)
    with pytest.raises(
        LedgerRolledBack, match=r"generation 1, sample index 8, but .*generation 1, sample index 12"
    ):
        server.do(Commit, 1, commit_at(16), False, 12)
    for generation, index in ((1, 9), (2, 0)):
        with pytest.raises(LedgerRolledBack):
            server.do(Renew, "one", 5.0, None, generation, index)
    with pytest.raises(LedgerRolledBack, match="at generation 1, but the call's is 2"):
        server.commit(16, 2)
    assert server.committed == commit_at(8)
    server.open(2, 0)
    server.do(Renew, "one", 5.0, None, 1, 8)  # an older generation's: no rollback


def test_an_attempt_opens_once_and_the_refusal_names_its_generation(server: Server) -> None:
    server.open(2, 0, attempt="launch-2")
    for generation, start, attempt, opened in (
        (2, 0, "attempt-1", 1),
        (3, 0, "attempt-1", 1),
        (3, 0, "launch-2", 2),
        (2, 4, "launch-2", 2),  # another start: not a repetition
    ):
        with pytest.raises(AttemptUsed, match=f"'{attempt}' opened generation {opened}"):
            server.open(generation, start, attempt=attempt)
    assert server.run.opening == opening_of(2, commit_at(0), "launch-2")


def test_repeating_an_opening_after_an_unknown_outcome_changes_nothing(server: Server) -> None:
    server.open(1, 0)
    server.open(1, 0, opened_at=1800000000.0)
    server.commit(8)
    server.open(1, 0)
    assert server.committed == commit_at(8)
    assert server.ledger.openings(UID, STREAM) == [opening_of(1, commit_at(0))]


def test_an_opening_is_no_repetition_for_the_next_server(store: LedgerStore) -> None:
    lead(store.open()).open(1, 0)
    with pytest.raises(AttemptUsed):
        lead(store.open()).open(1, 0)


@pytest.mark.parametrize("generation", [3, 2, 1])
def test_a_generation_that_is_not_above_the_current_one_is_refused(
    server: Server, generation: int
) -> None:
    server.open(3, 4)
    with pytest.raises(
        LedgerError, match=f"generation 3, the opening has {generation}; expected 4 or more"
    ):
        server.open(generation, 0, attempt="fresh")
    assert server.committed == commit_at(4)


def test_a_generation_may_leave_numbers_out(server: Server) -> None:
    server.open(7, 4)
    assert server.commit(5, 7) == 5


def test_a_slot_belongs_to_one_client_process_which_may_claim_it_again(server: Server) -> None:
    server.claim(0, "first")
    server.claim(0, "first")
    server.claim(1, "other")
    with pytest.raises(AttemptUsed, match=r"rank 0 of generation 1.*new attempt id"):
        server.claim(0, "second")
    with pytest.raises(Fenced):
        server.claim(0, "first", generation=0)
    with pytest.raises(LedgerRolledBack):
        server.claim(0, "first", generation=2)


def test_a_new_generation_forgets_the_slots_of_the_one_before(server: Server) -> None:
    server.claim(0, "first")
    server.open(2, 0)
    server.claim(0, "second", generation=2)
    with pytest.raises(Fenced, match=r"at generation 2, the call belongs to generation 1"):
        server.claim(0, "first")


def test_a_commit_at_or_below_the_committed_index_changes_nothing(server: Server) -> None:
    server.commit(8)
    assert server.commit(8) == 8
    assert server.commit(4) == 8
    assert server.commit(4, order="1") == 8
    assert server.commit(0, journal=True) == 8
    assert server.committed == commit_at(8)
    assert server.ledger.journal_size(UID, STREAM)[0] == 1


def test_two_digests_for_one_sample_index_stop_everything(server: Server) -> None:
    server.commit(8)
    with pytest.raises(
        OrderMismatch, match=rf"index 8 .*{commit_at(8).digest}.*{commit_at(8, 'f').digest}"
    ):
        server.commit(8, order="f")
    assert server.committed == commit_at(8)


@pytest.mark.parametrize("generation", [0, 1])
def test_a_commit_of_another_generation_is_fenced(server: Server, generation: int) -> None:
    server.open(2, 0)
    with pytest.raises(
        Fenced, match=f"at generation 2, the call belongs to generation {generation}"
    ):
        server.commit(4, generation)
    assert server.committed == commit_at(0)


@pytest.mark.parametrize("generation", [0, 1])
def test_nothing_is_committed_before_the_first_generation(ledger: Ledger, generation: int) -> None:
    server = lead(ledger)
    with pytest.raises(
        LedgerRolledBack if generation else Fenced, match=r"no generation of it yet|at generation 0"
    ):
        server.commit(4, generation)
    with pytest.raises((Fenced, LedgerRolledBack)):
        server.claim(0, "n", generation)


def test_repeating_a_revision_after_an_unknown_outcome_changes_nothing(server: Server) -> None:
    for number, index in ((1, 4), (1, 4), (2, 8), (2, 8), (1, 4)):
        server.revise(number, index)
    assert server.revisions == [revision_of(1, 4), revision_of(2, 8)]


@pytest.mark.parametrize("number", [0, 1, 2, 4, MAX_COUNTER])
def test_a_revision_that_is_not_the_next_one_is_refused(server: Server, number: int) -> None:
    with pytest.raises(LedgerError, match="has no revision yet, the call's is 2; expected 1"):
        server.revise(2, 8)
    server.revise(1, 8)
    server.revise(2, 8)
    with pytest.raises(
        LedgerError, match=f"newest revision is 2, the call's is {number}; expected 3"
    ):
        server.revise(number, 8, reason="another")
    assert server.revisions == [revision_of(1, 8), revision_of(2, 8)]


def test_a_revision_before_the_newest_one_is_refused(server: Server) -> None:
    server.revise(1, MAX_COUNTER)
    with pytest.raises(
        LedgerError,
        match=f"revision 1 begins at sample index {MAX_COUNTER}, the next one would at {MAX_COUNTER - 1}",
    ):
        server.revise(2, MAX_COUNTER - 1)
    for number, index in ((2, MAX_COUNTER + 1), (2, -1), (MAX_COUNTER + 1, MAX_COUNTER)):
        with pytest.raises(LedgerError, match="expected 0 to 9007199254740991"):
            server.revise(number, index)
    server.revise(2, MAX_COUNTER)
    assert server.revisions == [revision_of(1, MAX_COUNTER), revision_of(2, MAX_COUNTER)]


def test_dropping_a_revision_drops_those_behind_it(server: Server) -> None:
    for number in range(1, 6):
        server.revise(number, 10 * number)
    server.drop(6)
    server.drop(MAX_COUNTER)
    assert len(server.revisions) == 5
    for number in (4, 4, 5):
        server.drop(number)
        assert server.revisions == [revision_of(1, 10), revision_of(2, 20), revision_of(3, 30)]
    server.revise(4, 30)
    server.drop(2)
    assert server.revisions == [revision_of(1, 10)]
    server.drop(1)
    server.drop(1)
    assert server.revisions == []
    server.revise(1, 0, reason="once more")
    assert server.revisions == [revision_of(1, 0, "once more")]


def test_a_run_with_a_generation_keeps_its_uid(server: Server) -> None:
    with pytest.raises(LedgerError, match=r"opened generation 1, so it cannot take the uid uid-2"):
        server.do(Adopt, "uid-2")
    assert server.run.uid == UID
    with pytest.raises(NotFound):
        server.ledger.execute(Acquire("uid-2", STREAM, "a", 0.0))


def test_a_pin_is_set_replaced_removed_and_ended_by_an_opening(server: Server) -> None:
    for number, pin in enumerate(('{"at":1}', '{"at":2}', None, '{"at":3}'), 1):
        server.do(Pin, pin, number)
        assert server.run.pin == pin
    server.commit(4)
    assert server.run.pin == '{"at":3}'
    server.open(2, 0)
    assert server.run.pin is None


def test_a_pin_that_comes_late_is_refused(server: Server) -> None:
    server.do(Pin, '{"at":1}', 1)
    server.do(Pin, None, 2)
    with pytest.raises(LedgerError, match=r"change 1 of the pinned .* came late: change 2 of it"):
        server.do(Pin, '{"at":1}', 1)
    server.do(Pin, '{"at":3}', 3)
    server.do(Pin, '{"at":3}', 3)
    server.open(2, 0)
    with pytest.raises(LedgerError, match="an opening, came first"):
        server.do(Pin, '{"at":3}', 3)
    assert server.run.pin is None
    server.do(Pin, '{"at":4}', 4)
    assert server.run.pin == '{"at":4}'
