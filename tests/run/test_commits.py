"""What is committed, and who may commit: counters, fences, and ledgers that say something else."""

from __future__ import annotations

import contextlib
import functools
import json
import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.served import PATIENCE_S, Place, Trainer, never, part, recount, sequence
from tokenloom_proto.seal import seal
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.core.state import State
from tokenloom_server.errors import (
    AttemptUsed,
    Fenced,
    LedgerRolledBack,
    LedgerUnavailable,
    NotLeader,
    OrderMismatch,
    TokenloomError,
)
from tokenloom_server.ledger import commands
from tokenloom_server.ledger.commands import Commit
from tokenloom_server.ledger.records import StoredRun
from tokenloom_server.run.head import commit_of


def test_committed_counters_are_a_recount_of_what_the_ranks_took(
    place: Place, served: ServedRun, trainer: Trainer
) -> None:
    for _ in range(6):
        trainer.train(5)
        assert place.counters() == recount(served, trainer.taken())
    # After a rewind they are those of the new lineage alone.
    kept = part(sequence(served), 0, 8)
    again = Trainer(served, state=trainer.state(8))
    assert place.counters() == recount(served, kept)
    again.train(3)
    assert place.counters() == recount(served, kept | again.taken())


def test_a_new_attempt_that_takes_over_a_streaming_run_is_committed_like_the_first(
    served: ServedRun,
) -> None:
    for _ in range(5):
        # The committer is between two commits of the old generation when the new one comes.
        Trainer(served, resume="fresh").take(3)
        Trainer(served, resume="fresh").train(4)
        assert served.coordinator.committed_through == 16
        assert served.coordinator.not_ready() is None


# --- fences ------------------------------------------------------------------------------------------


def test_a_fenced_generation_gets_nothing_and_moves_nothing(
    place: Place, served: ServedRun, trainer: Trainer
) -> None:
    trainer.take(2)
    state, rank, coordinator = trainer.state(), trainer.ranks[0], served.coordinator
    rank.receive()
    new = Trainer(served, state=state)
    before = place.written()
    with pytest.raises(Fenced, match="generation 1 of run 'test' is over: generation 2"):
        coordinator.sessions.next_for(rank.session, 1.0, never)
    with pytest.raises(Fenced):
        coordinator.sessions.progress(rank.session, rank.received, 9)
    with pytest.raises(Fenced):
        rank.connect(served)
    with pytest.raises(Fenced):
        commit = replace(place.committed(), sample_index=99)
        place.ledger.execute(
            Commit(coordinator.uid, "train", coordinator.lease.epoch, 1, commit, False)
        )
    assert place.written() == before
    coordinator.sessions.detach(rank.session)
    new.take(1)


def test_a_rank_that_waits_hears_of_the_new_generation_at_once(
    served: ServedRun, trainer: Trainer, in_thread: Any
) -> None:
    trainer.ranks[0].take(6)
    outcome = in_thread(
        lambda: served.coordinator.sessions.next_for(trainer.ranks[0].session, PATIENCE_S, never)
    )
    Trainer(served, resume="fresh")
    assert isinstance(outcome(2.0), Fenced)


def test_a_rank_of_another_attempt_is_fenced_even_where_a_lost_ledger_gave_its_number_again(
    served: ServedRun, trainer: Trainer
) -> None:
    coordinator, rank = served.coordinator, trainer.ranks[0]
    number, nonce = rank.joined.opening.generation, rank.call.nonce
    with pytest.raises(Fenced, match=r"attempt 'zombie'.*attempt 'attempt-"):
        coordinator.sessions.attach(coordinator.uid, number, 0, nonce, 0, 0, attempt="zombie")
    with pytest.raises(LedgerRolledBack, match=r"generation 2 .*ledger is at generation 1"):
        coordinator.sessions.attach(coordinator.uid, number + 1, 0, nonce, 0, 0)
    trainer.train(2)


def test_one_rank_with_another_digest_stops_all_of_them(
    served: ServedRun, trainer: Trainer
) -> None:
    trainer.take(2)
    rank = trainer.ranks[1]
    with pytest.raises(OrderMismatch, match="rank 1 has digest ffff"):
        served.coordinator.sessions.attach(
            rank.joined.uid, 1, 1, rank.call.nonce, rank.consumed, 0, "f" * 32
        )
    with pytest.raises(OrderMismatch, match="the ranks no longer see one order"):
        trainer.take(9)


# --- two servers, and epochs -------------------------------------------------------------------------


def test_a_server_whose_client_met_a_newer_one_sends_nothing_more(
    place: Place, served: ServedRun, trainer: Trainer
) -> None:
    trainer.take(1)
    rank = trainer.ranks[0]
    place.serve()
    with pytest.raises(NotLeader, match="served at server epoch 2 already, and this is 1"):
        served.coordinator.sessions.attach(
            rank.joined.uid, 1, 0, rank.call.nonce, rank.consumed, 0, "", 2
        )
    with pytest.raises(NotLeader):
        trainer.take(9)


def test_a_client_that_met_an_epoch_which_the_ledger_forgot_hears_of_lost_data_and_disturbs_nobody(
    place: Place, served: ServedRun, trainer: Trainer
) -> None:
    # A Redis that came back empty while its server was killed, too, counts its servers from 1 again.
    trainer.take(1)
    with pytest.raises(
        LedgerRolledBack, match=r"server epoch 2, but the ledger .* none beyond 1: it lost data"
    ):
        served.coordinator.sessions.attach("of before", 1, 0, "zombie", 0, 0, "", 2)
    trainer.train(9)
    assert place.committed().sample_index == trainer.index


def test_a_client_that_met_a_newer_server_gets_nothing_while_the_ledger_cannot_say_whether_there_is_one(
    place: Place, served: ServedRun, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(*_: object) -> StoredRun:
        raise LedgerUnavailable("away on purpose")

    trainer.take(1)
    rank = trainer.ranks[0]
    monkeypatch.setattr(place.ledger, "read_run", unavailable)
    with pytest.raises(LedgerUnavailable):
        served.coordinator.sessions.attach(
            rank.joined.uid, 1, 0, rank.call.nonce, rank.consumed, 0, "", 2
        )
    with pytest.raises(NotLeader, match="served at server epoch 2 already, and this is 1"):
        served.coordinator.require_lead()


def test_a_stream_that_a_newer_one_of_its_process_overtook_does_not_take_its_place(
    served: ServedRun, trainer: Trainer
) -> None:
    # 14.16: it displaced the one that the rank reports on, so what was used last was never committed.
    trainer.train(1)
    rank, coordinator = trainer.ranks[0], served.coordinator
    # The first message may have had more micro-steps than the one that was trained on.
    attach = functools.partial(
        coordinator.sessions.attach, rank.joined.uid, 1, 0, rank.call.nonce, rank.received, 0
    )
    rank.session = attach(stream_number=2)
    with pytest.raises(Fenced, match="a newer stream of rank 0"):
        attach(stream_number=1)
    with pytest.raises(AttemptUsed):  # of another process's number nothing is known
        coordinator.sessions.attach(
            rank.joined.uid, 1, 0, "another", rank.received, 0, stream_number=9
        )
    coordinator.sessions.progress(rank.session, rank.consumed, 1000)
    rank.session = attach(stream_number=3)
    coordinator.sessions.progress(rank.session, rank.consumed, 1000)
    trainer.train(5)


def test_of_two_servers_the_older_fails_closed_at_its_next_commit(
    place: Place, served: ServedRun, trainer: Trainer
) -> None:
    trainer.train(1)
    newer = place.serve()
    # It would show at once in what the ranks are sent: no more than the window.
    with pytest.raises(NotLeader):
        for _ in range(20):
            trainer.train(1)
    with pytest.raises(NotLeader):
        Trainer(served, resume="latest")
    assert place.committed().sample_index == 4
    trainer.connect(newer)
    for rank in trainer.ranks:  # one had taken a step when the older server ended
        rank.take((max(rank.consumed for rank in trainer.ranks) - rank.consumed) // 4)
    trainer.train(2)
    assert place.counters() == recount(newer, trainer.taken())


def test_a_server_whose_epoch_the_ledger_gave_out_twice_leads_no_longer(
    place: Place, served: ServedRun
) -> None:
    assert served.coordinator.leads()
    with contextlib.closing(sqlite3.connect(place.ledger_path)) as file, file:
        file.execute("UPDATE leases SET holder = 'another'")
    served.leadership.step()
    assert not served.coordinator.leads()
    assert (
        "another has the lease of run 'test', at this server's own epoch"
        in served.coordinator.lease.stands_by_for
    )


# --- a ledger that says something else ---------------------------------------------------------------


def commit_another_order(served: ServedRun, place: Place, index: int) -> None:
    """Somebody else's commit at a sample index, with another digest."""
    coordinator, points = served.coordinator, served.resume_points
    point = points.parse(seal(json.loads(served.snapshots.at(index)[0])))
    state: State = points.forward(point)
    resume_state = coordinator.timeline.encode(point.base or coordinator.timeline.initial())
    commit = replace(commit_of(coordinator.timeline, state, resume_state), digest="f" * 32)
    place.ledger.execute(
        Commit(coordinator.uid, "train", coordinator.lease.epoch, 1, commit, False)
    )


def test_a_commit_that_contradicts_the_ledger_stops_everything(
    place: Place, served: ServedRun, trainer: Trainer
) -> None:
    commit_another_order(served, place, 4)  # at the index where this server commits next
    with pytest.raises(OrderMismatch):
        for _ in range(20):
            trainer.train(1)
    assert isinstance(served.coordinator.view().error, OrderMismatch)
    assert (place.committed().sample_index, place.committed().digest) == (4, "f" * 32)


def test_a_restarted_server_that_produces_another_order_delivers_nothing(
    place: Place, served: ServedRun, trainer: Trainer
) -> None:
    commit_another_order(served, place, 12)
    again, rank = place.restart(), trainer.ranks[0]
    rank.received = rank.consumed = 12
    rank.connect(again)
    with pytest.raises(OrderMismatch, match="sample 12 was committed with digest ffff"):
        again.coordinator.sessions.next_for(rank.session, PATIENCE_S, never)


def test_a_rank_that_comes_while_the_lease_is_lost_asks_again(
    place: Place, trainer: Trainer
) -> None:
    trainer.train(1)
    served = place.restart()
    claim = place.ledger.execute_all

    def lose_lease(some: Sequence[commands.Command]) -> list[int | TokenloomError]:
        served.coordinator.leadership.lose(NotLeader("the lease was lost on purpose"))
        return claim(some)

    place.ledger.execute_all = lose_lease  # type: ignore[method-assign]
    with pytest.raises(
        NotLeader, match="does not lead run 'test': it stands by: the lease was lost on purpose"
    ):
        trainer.ranks[0].connect(served)


def test_a_ledger_that_lost_commits_is_refused(place: Place, trainer: Trainer) -> None:
    trainer.train(1)
    older = place.ledger_path.with_name("backup.db")
    place.stop()
    older.write_bytes(place.ledger_path.read_bytes())
    trainer.connect(place.serve())
    trainer.train(4)
    trainer.ranks[0].committed_seen = 20
    place.stop()
    served = place.serve(older)
    with pytest.raises(
        LedgerRolledBack, match="rank 0 saw a commit at sample 20, but the ledger is at 4"
    ):
        trainer.ranks[0].connect(served)


@pytest.mark.parametrize(
    ("generation", "index", "lost"), [(1, 4, True), (1, 8, False), (2, 4, False), (0, 0, True)]
)
def test_a_loss_is_reported_until_the_ledger_has_caught_up_perhaps_by_another_server(
    place: Place, served: ServedRun, trainer: Trainer, generation: int, index: int, lost: bool
) -> None:
    trainer.train(2)
    stored, coordinator = place.stored(), served.coordinator
    coordinator.leadership.lose(LedgerRolledBack("it lost data on purpose"))
    assert stored.opening is not None
    stored = replace(
        stored,
        opening=replace(stored.opening, generation=generation) if generation else None,
        committed=replace(place.committed(), sample_index=index) if generation else None,
    )
    now = coordinator.clock()
    coordinator.leadership.lead(
        coordinator.lease.epoch, stored, coordinator.timeline, now, now + 15
    )
    assert isinstance(coordinator.view().error, LedgerRolledBack) == lost


def test_a_ledger_that_begins_anew_has_no_rate_of_before(
    place: Place, served: ServedRun, trainer: Trainer
) -> None:
    trainer.train(2)
    Trainer(served, state=trainer.state())  # a launch at sample 8, so rates begin with its tokens
    coordinator, stored = served.coordinator, replace(place.stored(), opening=None, committed=None)
    now = coordinator.clock()
    coordinator.leadership.lead(
        coordinator.lease.epoch, stored, coordinator.timeline, now, now + 15
    )
    assert coordinator.view().tokens_per_s == 0.0
