"""A snapshot of any sample index that the run ever held."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable

import pytest
from support.served import SCHEDULE, Place, Sizes, Trainer
from support.waiting import wait_for
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.core.state import State
from tokenloom_server.errors import BeyondHorizon, LedgerRolledBack, OrderMismatch
from tokenloom_server.order.pipeline import Pipeline


@pytest.mark.parametrize(("batch_size", "last_micro_step"), [(SCHEDULE, "drop"), (2, "pad")])
def test_a_snapshot_at_every_index_is_what_a_client_writes_there_before_and_after_a_restart(
    made: Callable[..., Place], last_micro_step: str, batch_size: Sizes
) -> None:
    place = made(last_micro_step=last_micro_step)
    served = place.serve()
    trainer = Trainer(served, world_size=3, batch_size=batch_size)
    written = {0: trainer.state()}
    fresh: dict[int, str] = {}
    while trainer.take(1):
        written[trainer.index] = trainer.state()
        trainer.settle()  # the horizon is that of what is committed
        # In memory: what was produced and not yet dropped.
        for index in range(trainer.index, trainer.index + 7, 3):
            if index <= 174 - (last_micro_step == "drop" and batch_size is SCHEDULE):
                fresh.setdefault(index, served.snapshots.at(index)[0])
    trainer.settle()
    assert list(written)[-1] == (175 if last_micro_step == "pad" else 174)
    for index, text in written.items():
        assert served.snapshots.at(index) == (text.decode(), index)
        assert fresh.get(index, text.decode()) == text.decode()
    assert served.snapshots.at(None)[0] == trainer.state().decode()
    # Indices within a step, too: no client stands there, but a restore may.
    every = [served.snapshots.at(index)[0] for index in range(0, 175, 7)]
    again = place.restart()
    for index, text in list(written.items())[::3]:
        assert again.snapshots.at(index) == (text.decode(), index)
    assert [again.snapshots.at(index)[0] for index in range(0, 175, 7)] == every


def test_a_past_index_of_a_generation_that_the_ledger_lost_is_told_as_its_loss(
    place: Place, trainer: Trainer
) -> None:
    # 14.16: it was said to lie before the first state of the run.
    trainer.train(20)
    with contextlib.closing(sqlite3.connect(place.ledger_path)) as connection, connection:
        connection.execute("DELETE FROM openings")
    with pytest.raises(
        LedgerRolledBack, match=r"is at generation 1, but .* has no opening of it: it lost data"
    ):
        trainer.ranks[0].served.snapshots.at(8)


def test_a_past_index_is_reached_from_the_nearest_journalled_state(
    place: Place, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(36):
        trainer.train(1)
    served = place.restart()
    begun: list[int] = []
    make = served.coordinator.timeline.pipeline

    def pipeline(state: State, *, ahead: bool = False) -> Pipeline:
        begun.append(state.sample_index)
        return make(state, ahead=ahead)

    monkeypatch.setattr(served.coordinator.timeline, "pipeline", pipeline)
    served.snapshots.at(100)
    # Groups have 16 samples: the boundary is 96, and every boundary is journalled while there is room.
    assert min(begun) >= 80


def test_the_journal_is_bounded_and_loses_no_index(
    place: Place, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom_server.run.committer.JOURNAL_BYTES", 4000)
    for _ in range(42):
        trainer.train(1)
    entries, size = place.ledger.journal_size(place.stored().uid, "train")
    assert 1 < entries < 8
    assert size < 6000
    assert place.restart().snapshots.at(100)[0] == trainer.state(100).decode()


@pytest.mark.parametrize("produced", [False, True], ids=["at once", "after production stopped"])
def test_a_commit_that_going_forward_does_not_meet_is_not_sealed(
    place: Place, trainer: Trainer, produced: bool
) -> None:
    trainer.train(5)
    digest = json.loads(trainer.state())["digest"]
    place.stop()
    # As other software would have committed it.
    with sqlite3.connect(place.ledger_path) as connection:
        connection.execute("UPDATE committed SET digest = ?", ("0" * 32,))
    connection.close()
    served = place.serve()
    if produced:
        wait_for(lambda: served.coordinator.view().error, "the order to be found out")
    with pytest.raises(
        OrderMismatch,
        match=rf"sample 20 is committed with digest {'0' * 32}, but .* gives {digest}",
    ):
        served.snapshots.at(None)


def test_a_snapshot_beyond_the_horizon_is_refused_with_the_limits(served: ServedRun) -> None:
    assert json.loads(served.snapshots.at(None)[0])["sample_index"] == 0
    with pytest.raises(
        BeyondHorizon, match="sample 1 is beyond the horizon 0: no trainer has joined"
    ):
        served.snapshots.at(1)
    Trainer(served).train(2)
    # Two steps of four are committed, and six more may be produced.
    served.snapshots.at(32)
    with pytest.raises(BeyondHorizon, match="sample 33 is beyond the horizon 32: 8 is committed"):
        served.snapshots.at(33)
    with pytest.raises(BeyondHorizon):
        served.snapshots.at(-1)


def test_a_rewound_run_has_one_answer_for_each_index(
    place: Place, served: ServedRun, trainer: Trainer
) -> None:
    trainer.train(9)
    state, early = trainer.state(16), trainer.state(8).decode()
    second = Trainer(served, world_size=1, batch_size=3, state=state)
    second.train(3)
    # Before the rewind the first generation's, from it on the second's.
    for restarted in (False, True):
        served = place.restart() if restarted else served
        assert served.snapshots.at(8)[0] == early
        assert served.snapshots.at(22)[0] == second.state(22).decode()
        for index, generation in ((16, 2), (15, 1), (36, 2)):
            assert json.loads(served.snapshots.at(index)[0])["generation"] == generation
