"""Revisions while ranks train."""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from support.corpora import CODE, DOCS, PROSE, flat
from support.served import Place, Sizes, Trainer, part, sequence, until_led
from tokenloom_server.config.mixture_change import MixtureChange
from tokenloom_server.errors import (
    BeyondHorizon,
    ConfigError,
    Fenced,
    LedgerError,
    LedgerRolledBack,
    LedgerUnavailable,
    NotFound,
    NotLeader,
    SnapshotInvalid,
)
from tokenloom_server.ledger.commands import Command, Revise
from tokenloom_server.ledger.records import StoredRevision
from tokenloom_server.run.losses import Report
from tokenloom_server.run.timeouts import Timeouts


@pytest.fixture(autouse=True)
def short_groups(small_groups: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """State boundaries every two steps, so that revisions hold soon."""
    monkeypatch.setattr("tokenloom_server.run.sizing.MESSAGE_STEPS", 2)


def heavier(weight: float = 20, **fields: Any) -> MixtureChange:
    return MixtureChange.model_validate({"reason": "a test", "set": [{"child": "docs", "weight": weight}], **fields})


@pytest.mark.parametrize("batch_size", [2, ((0, 2), (160, 3), (256, 1))])
@pytest.mark.parametrize("later", [0, 3])
def test_ranks_go_on_to_a_revision_that_is_being_written_and_no_further(
    made: Callable[..., Place], later: int, batch_size: Sizes
) -> None:
    place = made(window_micro_steps=4)
    served = place.serve()
    trainer = Trainer(served, batch_size=batch_size)
    step = 2 * (batch_size if isinstance(batch_size, int) else 3)
    trainer.train(3)

    def meanwhile(revision: StoredRevision) -> None:
        # Commits go on, and with them the window: nothing but the revision stops production now.
        while trainer.index + 2 * step <= revision.sample_index:
            trainer.train(1)

    place.ledger.meanwhile = meanwhile  # type: ignore[method-assign]
    trainer.settle()
    active, deadline = served.coordinator._active, time.monotonic() + 120
    assert active is not None
    while active.generation.steps_wanted():  # what it may produce once more is committed moves the index
        assert time.monotonic() < deadline
        time.sleep(0.005)
    index = served.coordinator.view().first_revisable(None) + later
    assert served.revision_handler.revise(heavier(sample_index=index)).sample_index == index
    trainer.take(20)
    samples = sequence(served)
    assert dict(sorted(trainer.taken().items())) == part(samples, 0, trainer.index)
    plain = served.coordinator.timeline.with_revisions(())
    assert served.coordinator.timeline.at(index).config != plain.at(index).config
    # A restore anywhere, and another server, find the same.
    trainer.settle()
    again = Trainer(served, 3, 1, state=trainer.state(), takeover=True)
    assert again.take(2) == part(samples, trainer.index, again.index)


def test_a_revision_of_an_epoch_that_is_over_is_not_written(made: Callable[..., Place]) -> None:
    place = made(window_micro_steps=4)
    served = place.serve()
    coordinator = served.coordinator
    # Another server took the lead and gave it back while the revision was on its way.
    place.ledger.meanwhile = lambda revision: served.leadership._acquire()  # type: ignore[method-assign]
    with pytest.raises(NotLeader):
        served.revision_handler.revise(heavier(sample_index=0))
    assert not coordinator.timeline.revisions
    assert not place.ledger.revisions(coordinator.uid, "train")
    assert coordinator._revising_at is None


def test_a_revision_may_be_taken_back_until_production_reaches_it(made: Callable[..., Place]) -> None:
    served = made(window_micro_steps=4).serve()
    trainer, handler = Trainer(served), served.revision_handler
    trainer.train(1)
    least = served.coordinator.view().first_revisable(None)
    with pytest.raises(BeyondHorizon, match=f"a revision of run 'test' can hold from sample {least} on .*tokens"):
        handler.revise(heavier(sample_index=least - 1))
    with pytest.raises(ConfigError, match="name one of them, or neither"):
        handler.revise(heavier(sample_index=least, total_tokens=8 * least))
    index = handler.revise(heavier()).sample_index
    assert index == least
    for weight, later in ((3, 20), (4, 41)):
        handler.revise(heavier(weight, sample_index=index + later))
    with pytest.raises(NotFound, match="has 3 revisions, and none of number 4"):
        handler.drop(4)
    assert [revision.number for revision in handler.drop(2)] == [2, 3]
    trainer.train_to(index + 8)
    with pytest.raises(BeyondHorizon, match=rf"revision 1 holds from sample {index} on, and samples before \d+ may"):
        handler.drop(1)
    trainer.train(1000)
    assert [revision.sample_index for revision in served.coordinator.timeline.revisions] == [index]
    assert trainer.taken() == part(sequence(served), 0, trainer.index)


def test_a_plan_under_a_change_is_the_one_that_the_run_has_once_it_is_made(made: Callable[..., Place]) -> None:
    place = made(window_micro_steps=4)
    served = place.serve()
    Trainer(served).train(3)
    before, timeline = served.plan(None), served.coordinator.timeline
    revision, plan = served.plan_under(heavier(), None)
    assert (served.coordinator.timeline, served.plan(None)) == (timeline, before)
    assert not place.ledger.revisions(served.coordinator.uid, "train")
    assert (revision.number, revision.changes) == (1, ["docs: weight 1 → 20"])
    assert plan.segments != before.segments
    with pytest.raises(ConfigError, match="the mixture has no 'nothing'; it has"):
        served.plan_under(
            MixtureChange.model_validate({"reason": "x", "set": [{"child": "nothing", "weight": 1}]}), None
        )
    written = served.mixture.revise(heavier(sample_index=revision.sample_index))
    assert written.changes == revision.changes
    assert served.plan(None) == plan


def test_changes_at_once_build_on_each_other(made: Callable[..., Place]) -> None:
    place = made(window_micro_steps=4)
    served = place.serve()
    trainer = Trainer(served)
    trainer.train(1)
    place.ledger.meanwhile = lambda revision: time.sleep(0.01)  # type: ignore[method-assign]
    with ThreadPoolExecutor(5) as pool:
        revisions = [*pool.map(lambda weight: served.revision_handler.revise(heavier(weight)), range(2, 7))]
    assert sorted(revision.number for revision in revisions) == [1, 2, 3, 4, 5]
    timeline = served.coordinator.timeline
    assert sorted(revisions, key=lambda revision: revision.number) == [*timeline.revisions]
    assert [*place.ledger.revisions(served.coordinator.uid, "train")] == [*timeline.revisions]
    trainer.train(1000)
    assert trainer.taken() == part(sequence(served), 0, trainer.index)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_state_names_the_revisions_that_were_accepted_before_its_step_was_produced(
    made: Callable[..., Place], restarted: bool
) -> None:
    place = made(window_micro_steps=6)
    served = place.serve()
    trainer = Trainer(served)
    trainer.train(1)
    trainer.ranks[0].take(4)
    known_from = served.coordinator.view().generation.first_unproduced
    index = served.revision_handler.revise(heavier(sample_index=known_from + 24)).sample_index
    if restarted:  # and what rank 1 did not get yet is produced again, by a server that knows the revision
        trainer.connect(place.restart())
    trainer.ranks[1].take(4)
    assert "revisions" not in json.loads(trainer.state())["resume_state"]  # the same of both ranks
    trainer.train_to(known_from + 4)
    assert [one["sample_index"] for one in json.loads(trainer.state())["resume_state"]["revisions"]] == [index]
    written = json.loads(place.committed().state)
    assert [one["sample_index"] for one in written["revisions"]] == [index]
    again = Trainer(trainer.ranks[0].served, resume="fresh", takeover=True)
    again.take(1)
    assert json.loads(again.state())["resume_state"]["revisions"][0]["sample_index"] == index


@pytest.mark.parametrize("restarted", [False, True])
def test_a_state_names_a_revision_until_another_one_at_its_sample_is_known(
    made: Callable[..., Place], restarted: bool
) -> None:
    # 14.16: what was produced again after a restart named neither of the two, and ranks wrote different states.
    place = made(window_micro_steps=6)
    served = place.serve()
    first = served.revision_handler.revise(heavier(sample_index=200))
    trainer = Trainer(served)
    trainer.train(1)
    trainer.ranks[0].take(4)
    known_from = served.coordinator.view().generation.first_unproduced
    second = served.revision_handler.revise(heavier(3, sample_index=200))
    if restarted:
        trainer.connect(place.restart())
    trainer.ranks[1].take(4)

    def named() -> list[Any]:
        return [one["content"] for one in json.loads(trainer.state())["resume_state"]["revisions"]]

    assert named() == [json.loads(first.content)]
    old = trainer.state()
    trainer.train_to(known_from + 4)
    assert named() == [json.loads(second.content)]
    served = trainer.ranks[0].served
    again = Trainer(served, state=old, takeover=True)
    assert len(served.coordinator.timeline.revisions) == 2
    again.train(1000)
    assert again.taken() == part(sequence(served), 20, again.index)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_revision_of_a_run_that_stands_still_holds_from_where_it_stands(
    made: Callable[..., Place], restarted: bool
) -> None:
    place = made(window_micro_steps=40)
    place.timeouts = Timeouts(liveness_s=60.0)
    served = place.serve()
    trainer = Trainer(served)
    trainer.train(5)
    trainer.leave()
    if restarted:
        served = place.restart()
    coordinator = served.coordinator
    assert coordinator.view().generation.stands_still
    assert served.mixture.info().first_revisable == trainer.index
    change = heavier(add=[{"child": {"source": "txt:data/prose/1.txt:text", "weight": 9}}])
    assert served.revision_handler.revise(change).sample_index == trainer.index == place.committed().sample_index
    assert place.stored().closed_generation == 1
    for restarts in range(2):
        served = place.restart() if restarts else served
        with pytest.raises(Fenced, match=r"generation 1 of run 'test' .* is over: a revision closed it"):
            trainer.connect(served)
        served.stats.read()
        assert served.past_states.snapshot(None)[1] == trainer.index
        assert served.coordinator.view().waiting.waiting_for == "a trainer"
    # Another change, and one that is taken back, need no further generation.
    served.revision_handler.revise(heavier(3))
    assert [revision.number for revision in served.revision_handler.drop(2)] == [2]
    asks: list[dict[str, Any]] = [{"resume": "latest"}, {"state": trainer.state(), "takeover": True}]
    for ask in asks:
        again = Trainer(served, 2, 3, **ask)
        assert again.take(5) == part(sequence(served), trainer.index, again.index)


def test_a_run_stands_still_only_where_it_was_listened_to(made: Callable[..., Place]) -> None:
    """Ranks that were cut off from a server that ended may come back to the next one."""
    place = made(window_micro_steps=40)
    place.timeouts = Timeouts(liveness_s=1.0)
    served = place.serve()
    trainer = Trainer(served)
    trainer.train(5)
    trainer.leave(goodbye=False)
    assert not served.coordinator.view().generation.stands_still
    place.stop()
    time.sleep(1.1)
    served = place.serve()
    generation = served.coordinator.view().generation
    assert not generation.stands_still
    assert not generation.all_attached
    # Until each has come, they may hold all that the window allows.
    assert generation.first_unproduced > generation.horizon_index
    rank = trainer.ranks[0]
    rank.connect(served)
    assert served.coordinator.view().generation.first_unproduced > generation.horizon_index
    trainer.ranks[1].connect(served)
    streams = served.coordinator.view().generation
    assert max(trainer.index, streams.produced_index) < streams.first_unproduced < generation.horizon_index
    trainer.leave(goodbye=False)
    time.sleep(1.1)
    assert served.revision_handler.revise(heavier()).sample_index == trainer.index


def test_a_launch_does_not_stand_still_because_the_one_before_it_did(
    made: Callable[..., Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = made(window_micro_steps=40)
    place.timeouts = Timeouts(liveness_s=60.0)
    served = place.serve()
    trainer = Trainer(served)
    trainer.train(5)
    trainer.leave()
    served.leadership.step()  # notes that nobody trains
    trainer = Trainer(served, state=trainer.state())
    trainer.train(3)
    monkeypatch.setattr(served.leadership, "let_go", lambda: None)  # killed, before it noted anything else
    served = place.restart()
    generation = served.coordinator.view().generation
    assert (generation.stands_still, generation.ranks[0].last_heard) == (False, None)
    served.revision_handler.revise(heavier())
    trainer.connect(served)
    trainer.train(1000)
    assert trainer.taken() == part(sequence(served), 20, trainer.index)


def test_a_revision_that_has_to_wait_says_in_the_log_why_it_was_not_made(
    made: Callable[..., Place], caplog: pytest.LogCaptureFixture
) -> None:
    place = made(window_micro_steps=40)
    Trainer(place.serve()).train(2)
    place.timeouts = Timeouts(liveness_s=0.2)
    place.stop()
    served = place.serve()
    served.revision_handler.revise_soon(heavier(0.5, sample_index=3))
    deadline = time.monotonic() + 120
    while "was not made" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "the revision of the mixture file (a test) was not made: BeyondHorizon: sample 3 may" in caplog.text


def test_a_revision_of_a_run_that_stands_still_comes_after_all_that_is_known_to_be_kept(
    made: Callable[..., Place],
) -> None:
    place = made(window_micro_steps=40)
    served = place.serve()
    trainer = Trainer(served)
    trainer.train(5)
    trainer.ranks[0].take(2)  # reported, and not committed, for rank 1 is not there yet
    beyond = trainer.ranks[0].consumed
    for rank in trainer.ranks:  # used, and never reported
        while rank.history.last.sample_index < beyond + 8:
            assert rank.buffer or rank.receive()
            rank.history.append(rank.buffer.popleft().point)
    trainer.leave()
    assert served.mixture.info().first_revisable == beyond
    with pytest.raises(BeyondHorizon, match=f"a revision of run 'test' can hold from sample {beyond} on"):
        served.revision_handler.revise(heavier(sample_index=beyond - 1))
    _, kept = served.snapshots.take(beyond + 4, save=True)
    assert served.mixture.info().first_revisable == beyond + 5
    served.start_points.restore(sample_index=beyond + 6)
    for _ in range(2):  # also where one was taken back, in the generation that it closed
        assert served.revision_handler.revise(heavier()).sample_index == beyond + 7
        served.revision_handler.drop(1)
    served.revision_handler.revise(heavier())
    with pytest.raises(
        SnapshotInvalid, match=f"made without revision 1, which holds from sample {beyond + 7} on, from other"
    ):
        served.past_states.forward(served.past_states.parse(trainer.state(beyond + 8)))
    served.start_points.restore(snapshot_id=kept)
    assert Trainer(served).take(4) == part(sequence(served), beyond + 4, beyond + 4 + 16)


def test_a_revision_of_a_run_that_trains_comes_after_what_is_pinned(made: Callable[..., Place]) -> None:
    """Also where that lies beyond the launch that trains now, on the one before it."""
    served = made(window_micro_steps=4).serve()
    first = Trainer(served)
    first.train(20)
    pinned = first.index
    second = Trainer(served, resume="fresh", takeover=True)
    second.train(2)
    served.start_points.restore(text=first.state().decode())
    assert served.coordinator.view().generation.first_unproduced < pinned
    assert served.mixture.info().first_revisable == pinned + 1
    assert served.revision_handler.revise(heavier()).sample_index == pinned + 1
    assert Trainer(served, takeover=True).take(4) == part(sequence(served), pinned, pinned + 16)


def test_no_rank_comes_back_while_a_revision_closes_its_generation_but_after_it_was_refused(
    made: Callable[..., Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = made(window_micro_steps=40)
    served = place.serve()
    trainer = Trainer(served)
    trainer.train(5)
    trainer.leave()

    def refuse(revision: StoredRevision) -> None:
        # 14.16: not for good yet, so it asks again.
        with pytest.raises(NotLeader, match="being revised, which may close generation 1"):
            trainer.connect(served)
        raise LedgerError("refused on purpose")

    monkeypatch.setattr(place.ledger, "meanwhile", refuse)
    with pytest.raises(LedgerError, match="refused on purpose"):
        served.revision_handler.revise(heavier())
    trainer.connect(served)
    trainer.train(1000)
    assert trainer.taken() == part(sequence(served), 0, trainer.index)


def test_time_in_which_the_server_was_paused_is_no_silence_of_its_ranks(made: Callable[..., Place]) -> None:
    # 14.16: a revision closed the generation of ranks that came back at once.
    place = made(window_micro_steps=40)
    place.timeouts = Timeouts(liveness_s=20.0, lease_s=1000.0)
    served = place.serve()
    trainer = Trainer(served)
    trainer.train(5)
    trainer.leave(goodbye=False)
    coordinator, clock, slept_s = served.coordinator, served.coordinator.clock, 60.0
    coordinator.clock = lambda: clock() + slept_s
    assert not coordinator.view().generation.stands_still
    for _ in range(4):
        assert not coordinator.view().generation.stands_still
        slept_s += place.timeouts.tick_s
    assert coordinator.view().generation.stands_still
    trainer.connect(served)
    trainer.train(1000)
    assert trainer.taken() == part(sequence(served), 0, trainer.index)


def lose_revisions(place: Place) -> None:
    """The ledger comes back as it was before the first revision, while its server goes on."""
    with closing(sqlite3.connect(place.ledger_path)) as connection:
        connection.executescript(
            "DELETE FROM revisions; UPDATE runs SET revision_changes = 0; UPDATE leases SET lapses_at = 0"
        )


def test_a_ledger_that_lost_a_revision_opens_nothing(made: Callable[..., Place]) -> None:
    place = made(window_micro_steps=4)
    served = place.serve()
    served.revision_handler.revise(heavier())
    lose_revisions(place)
    with pytest.raises(LedgerRolledBack, match=r"has 0 changes of its revisions .* but had acknowledged 1"):
        Trainer(served)
    served.leadership.step()  # finds the same, and takes the lease anew
    trainer = until_led(lambda: Trainer(served))
    trainer.train(1000)
    assert not served.coordinator.timeline.revisions
    assert trainer.taken() == part(sequence(served), 0, trainer.index)


def test_a_ledger_that_lost_a_revision_while_ranks_train_stops_them(made: Callable[..., Place]) -> None:
    place = made(window_micro_steps=4)
    served = place.serve()
    trainer = Trainer(served)
    trainer.train(1)
    served.revision_handler.revise(heavier())
    lose_revisions(place)
    with pytest.raises(LedgerRolledBack, match="has 0 changes of its revisions"):
        until_led(lambda: trainer.take(1000))
    # Generation and commits are all there, but what the ranks have was made under the revision, perhaps.
    with pytest.raises(LedgerRolledBack, match="has 0 changes of its revisions"):
        until_led(lambda: trainer.connect(served))


def test_a_ledger_that_lost_a_revision_while_a_write_was_on_its_way_stops_the_ranks(
    made: Callable[..., Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = made(window_micro_steps=4)
    served = place.serve()
    trainer = Trainer(served)
    trainer.train(1)
    early = trainer.state()
    served.revision_handler.revise(heavier())

    def fail_over(revision: StoredRevision) -> None:
        lose_revisions(place)
        raise LedgerUnavailable("the store failed over")

    monkeypatch.setattr(place.ledger, "meanwhile", fail_over)
    with pytest.raises(LedgerUnavailable, match="the store failed over"):
        served.revision_handler.revise(heavier(3))
    for _ in range(2):  # the lease is taken anew, before anything names what the server knows
        with pytest.raises(LedgerRolledBack, match=r"has 0 changes of its revisions .* but had acknowledged 1"):
            until_led(lambda: trainer.connect(served))
        served.leadership._acquire()
    trainer = Trainer(served, state=early)
    trainer.train(1000)
    assert served.coordinator.view().error is None
    assert trainer.taken() == part(sequence(served), 4, trainer.index)


def test_a_ledger_that_lost_a_revision_takes_it_from_the_trainers_state(made: Callable[..., Place]) -> None:
    place = made(window_micro_steps=4)
    trainer = Trainer(place.serve())
    trainer.train(1)
    place.stop()
    older = place.ledger_path.with_name("backup.db")
    older.write_bytes(place.ledger_path.read_bytes())
    served = trainer.connect(place.serve())
    index = served.revision_handler.revise(heavier()).sample_index
    trainer.train_to(index + 8)
    samples = sequence(served)
    place.stop()
    served = place.serve(older)
    again = Trainer(served, 3, 2, state=trainer.state())
    assert again.take(5) == part(samples, trainer.index, again.index)
    assert [(each.sample_index, each.reason) for each in served.coordinator.timeline.revisions] == [
        (index, "brought by a trainer's state")
    ]


def test_a_restore_to_before_a_revision_applies_it_again_at_its_index_and_says_so(
    made: Callable[..., Place], caplog: pytest.LogCaptureFixture
) -> None:
    served = made(window_micro_steps=4).serve()
    trainer = Trainer(served)
    trainer.train(1)
    early = trainer.state()
    index = served.revision_handler.revise(heavier()).sample_index
    trainer.train_to(index + 8)
    # Another world and batch: the revision lies within a step of theirs.
    with caplog.at_level(logging.INFO):
        again = Trainer(served, 3, 5, state=early)
    assert again.take(6) == part(sequence(served), 4, again.index)
    assert f"revision 1 applies at sample {index} (a test)" in caplog.text


def test_losses_of_a_source_that_a_revision_brings_have_its_name(made: Callable[..., Place]) -> None:
    served = made(window_micro_steps=4, **flat([CODE, PROSE])).serve()
    trainer, uid = Trainer(served), served.coordinator.uid
    trainer.train(1)

    def report(index: int, sources: dict[int, tuple[float, int]]) -> None:
        told = Report(sample_index=index, total_tokens=8 * index, step=index, sources=sources)
        served.losses.add(uid, 1, trainer.attempt, told)

    report(4, {0: (2.0, 10)})
    add = {"reason": "more", "add": [{"child": {"source": DOCS, "alias": "late"}}]}
    index = served.revision_handler.revise(MixtureChange.model_validate(add)).sample_index
    trainer.train_to(index + 8)
    report(index + 8, {0: (1.0, 10), 2: (3.0, 5)})
    assert [(each.alias, each.losses) for each in served.losses.read().sources] == [
        (CODE, [2.0, 1.0]),
        ("late", [None, 3.0]),
    ]


def test_a_closing_revision_of_unknown_outcome_is_what_the_ledger_has(
    made: Callable[..., Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = made(window_micro_steps=40)
    served = place.serve()
    trainer = Trainer(served)
    trainer.train(5)
    trainer.leave()
    execute = place.ledger.execute

    def lose_answer(command: Command) -> int:
        answer = execute(command)
        if isinstance(command, Revise):
            raise LedgerUnavailable("the answer was lost on purpose")
        return answer

    monkeypatch.setattr(place.ledger, "execute", lose_answer)
    with pytest.raises(LedgerUnavailable):
        served.revision_handler.revise(heavier())
    with pytest.raises(Fenced, match="a revision closed it"):
        until_led(lambda: trainer.connect(served))
    assert [revision.sample_index for revision in served.coordinator.timeline.revisions] == [trainer.index]
