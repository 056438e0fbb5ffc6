"""A ledger that is away, or does not say whether it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.served import Place, Rank, Trainer, call_of, never, recount, until_led
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.errors import Fenced, LedgerUnavailable, NotLeader, RankStalled
from tokenloom_server.ledger.sqlite import SqliteLedger
from tokenloom_server.run.generation import Waiting


def test_while_the_ledger_is_away_production_stops_at_the_horizon_and_nothing_is_lost(
    place: Place, served: ServedRun, trainer: Trainer
) -> None:
    place.ledger.away = True
    trainer.take(6)
    message = served.coordinator.sessions.next_for(trainer.ranks[0].session, 0.2, never)
    assert message == Waiting("the ledger: away on purpose", "ledger")
    assert place.runs.not_ready() == "run test: the ledger is away: away on purpose"
    place.ledger.away = False
    trainer.train(6)
    assert place.runs.not_ready() is None
    assert place.counters() == recount(served, trainer.taken())


def test_a_server_that_leads_no_longer_waits_for_no_ledger_and_says_where_it_cannot_ask_who_leads(
    place: Place, served: ServedRun, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object) -> None:
        raise LedgerUnavailable("cut off on purpose")

    place.ledger.away = True
    trainer.take(6)
    served.coordinator.sessions.next_for(trainer.ranks[0].session, 0.2, never)
    assert not served.stats.read().ledger.available
    monkeypatch.setattr(place.ledger, "read_run", unreachable)
    served.coordinator.leadership.lose(NotLeader("another leads"))
    assert served.stats.read().ledger.available
    served.leadership.step()
    assert served.coordinator.not_ready() == "stands by: cut off on purpose"


def test_an_opening_that_arrives_when_it_was_given_up_opens_nothing(
    place: Place, served: ServedRun, trainer: Trainer
) -> None:
    trainer.train(2)
    place.ledger.keep_opening = True
    with pytest.raises(LedgerUnavailable):
        served.join_handler.join(call_of(0, attempt="late", resume="latest", takeover=True))
    until_led(served.coordinator.require_lead)
    assert place.ledger.kept is not None
    with pytest.raises(NotLeader):
        SqliteLedger.execute(place.ledger, place.ledger.kept)
    trainer.connect(served)
    trainer.take(2)


def test_an_opening_whose_answer_was_lost_is_found_again_and_nothing_is_sent_to_the_launch_before(
    place: Place, served: ServedRun, trainer: Trainer
) -> None:
    trainer.train(2)
    place.ledger.lose_answer = True
    calls = [call_of(rank, attempt="lost", state=trainer.state()) for rank in range(2)]
    with pytest.raises(LedgerUnavailable):
        served.join_handler.join(calls[0])
    # Its generation is over in the ledger, and this server cannot know.
    with pytest.raises((NotLeader, Fenced)):
        trainer.take(9)
    ranks = [until_led(lambda call=call: Rank(served, call)) for call in calls]  # type: ignore[misc]
    assert {rank.joined.opening.generation for rank in ranks} == {2}
    assert [rank.take(3) for rank in ranks] == [3, 3]
    with pytest.raises(Fenced):
        trainer.ranks[0].connect(served)


def test_an_opening_that_never_reached_the_ledger_leaves_the_launch_before_as_it_was(
    place: Place, served: ServedRun, trainer: Trainer
) -> None:
    trainer.train(2)
    place.ledger.lose_request = True
    with pytest.raises(LedgerUnavailable):
        served.join_handler.join(call_of(0, attempt="lost", state=trainer.state()))
    for rank in trainer.ranks:
        until_led(lambda rank=rank: rank.connect(served))  # type: ignore[misc]
    trainer.train(5)
    assert served.coordinator.view().generation.number == 1
    assert place.counters() == recount(served, trainer.taken())


def test_an_opening_whose_answer_was_lost_inherits_nothing_of_what_stopped_the_one_before(
    place: Place, served: ServedRun, trainer: Trainer
) -> None:
    trainer.take(2)
    served.coordinator.producer.fail(
        trainer.ranks[0].session.active, RankStalled("of the generation before")
    )
    place.ledger.lose_answer = True
    call = call_of(0, 1, attempt="lost", resume="latest", process="notebook")
    with pytest.raises(LedgerUnavailable):
        served.join_handler.join(call)
    rank = until_led(lambda: Rank(served, call))
    assert rank.take(3) == 3
    assert rank.session.active.process == "notebook"


def test_an_adoption_whose_answer_was_lost_is_found_again(
    place: Place, trainer: Trainer, tmp_path: Path
) -> None:
    trainer.take(2)
    state = trainer.state()
    place.stop()
    served = place.serve(tmp_path / "elsewhere.db")
    place.ledger.lose_answer = True
    calls = [call_of(rank, attempt="moved", state=state) for rank in range(2)]
    with pytest.raises(LedgerUnavailable):
        served.join_handler.join(calls[0])
    rank = until_led(lambda: Rank(served, calls[0]))
    Rank(served, calls[1])
    assert rank.take(3) == 3
    assert served.coordinator.uid == json.loads(state)["run_uid"]
