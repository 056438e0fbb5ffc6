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
from support.served import revise as revised
from support.waiting import wait_for
from tokenloom_server.api.served_run import ServedRun
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


@pytest.fixture
def place(made: Callable[..., Place]) -> Place:
    return made(window_micro_steps=4)


@pytest.fixture
def wide(made: Callable[..., Place]) -> Place:
    """Where much may be produced ahead, and ranks that are away are waited for."""
    place = made(window_micro_steps=40)
    place.timeouts = Timeouts(liveness_s=60.0)
    return place


def heavier(weight: float = 20, **fields: Any) -> MixtureChange:
    return MixtureChange.model_validate(
        {"reason": "a test", "set": [{"child": "docs", "weight": weight}], **fields}
    )


def revise(served: ServedRun, weight: float = 20, **fields: Any) -> StoredRevision:
    return served.revision_handler.revise(heavier(weight, **fields))


def takes_the_rest(trainer: Trainer, begin: int = 0) -> None:
    """To the end of the data a trainer gets what the run's order is by now."""
    trainer.train(1000)
    assert trainer.taken() == part(sequence(trainer.ranks[0].served), begin, trainer.index)


def named(state: bytes) -> list[Any]:
    """The changes of the mixture that a state knows of."""
    return [one["content"] for one in json.loads(state)["resume_state"].get("revisions", [])]


@pytest.mark.parametrize(("later", "batch_size"), [(3, 2), (0, ((0, 2), (160, 3), (256, 1)))])
def test_ranks_go_on_to_a_revision_that_is_being_written_and_no_further(
    place: Place, served: ServedRun, later: int, batch_size: Sizes
) -> None:
    trainer = Trainer(served, batch_size=batch_size)
    step = 2 * (batch_size if isinstance(batch_size, int) else 3)
    trainer.train(3)

    def meanwhile(revision: StoredRevision) -> None:
        # Commits go on, and with them the window: nothing but the revision stops production now.
        while trainer.index + 2 * step <= revision.sample_index:
            trainer.train(1)

    place.ledger.meanwhile = meanwhile  # type: ignore[method-assign]
    active = served.coordinator._present.active
    assert active is not None
    # What it may produce once more is committed moves the index.
    wait_for(lambda: not active.generation.steps_wanted(), "all that may be produced")
    index = served.coordinator.view().first_revisable(None) + later
    assert revise(served, sample_index=index).sample_index == index
    trainer.take(20)
    samples = sequence(served)
    assert dict(sorted(trainer.taken().items())) == part(samples, 0, trainer.index)
    plain = served.coordinator.timeline.with_revisions(())
    assert served.coordinator.timeline.at(index).config != plain.at(index).config
    # A restore anywhere, and another server, find the same.
    trainer.settle()
    again = Trainer(served, 3, 1, state=trainer.state(), takeover=True)
    assert again.take(2) == part(samples, trainer.index, again.index)


def test_a_revision_of_an_epoch_that_is_over_is_not_written(
    place: Place, served: ServedRun
) -> None:
    coordinator = served.coordinator
    # Another server took the lead and gave it back while the revision was on its way.
    place.ledger.meanwhile = lambda revision: served.leadership._acquire()  # type: ignore[method-assign]
    with pytest.raises(NotLeader):
        revise(served, sample_index=0)
    assert not coordinator.timeline.revisions
    assert not place.ledger.revisions(coordinator.uid, "train")
    assert coordinator._present.held_at is None


def test_a_revision_may_be_taken_back_until_production_reaches_it(
    served: ServedRun, trainer: Trainer
) -> None:
    handler = served.revision_handler
    trainer.train(1)
    least = served.coordinator.view().first_revisable(None)
    with pytest.raises(
        BeyondHorizon, match=f"a revision of run 'test' can hold from sample {least} on .*tokens"
    ):
        revise(served, sample_index=least - 1)
    with pytest.raises(ConfigError, match="name one of them, or neither"):
        revise(served, sample_index=least, total_tokens=8 * least)
    index = revise(served).sample_index
    assert index == least
    for weight, later in ((3, 20), (4, 41)):
        revise(served, weight, sample_index=index + later)
    with pytest.raises(NotFound, match="has 3 revisions, and none of number 4"):
        handler.drop(4)
    assert [revision.number for revision in handler.drop(2)] == [2, 3]
    trainer.train_to(index + 8)
    with pytest.raises(
        BeyondHorizon, match=rf"revision 1 holds from sample {index} on, and samples before \d+ may"
    ):
        handler.drop(1)
    takes_the_rest(trainer)
    assert [revision.sample_index for revision in served.coordinator.timeline.revisions] == [index]


def test_a_plan_under_a_change_is_the_one_that_the_run_has_once_it_is_made(
    place: Place, served: ServedRun, trainer: Trainer
) -> None:
    trainer.train(3)
    before, timeline = served.plan(None), served.coordinator.timeline
    revision, plan = served.plan_under(heavier(), None)
    assert (served.coordinator.timeline, served.plan(None)) == (timeline, before)
    assert not place.ledger.revisions(served.coordinator.uid, "train")
    assert (revision.number, revision.changes) == (1, ["docs: weight 1 → 20"])
    assert plan.segments != before.segments
    written = served.mixture.revise(heavier(sample_index=revision.sample_index))
    assert written.changes == revision.changes
    assert served.plan(None) == plan


def test_changes_at_once_build_on_each_other(
    place: Place, served: ServedRun, trainer: Trainer
) -> None:
    trainer.train(1)
    place.ledger.meanwhile = lambda revision: time.sleep(0.01)  # type: ignore[method-assign]
    with ThreadPoolExecutor(5) as pool:
        revisions = [*pool.map(lambda weight: revise(served, weight), range(2, 7))]
    assert sorted(revision.number for revision in revisions) == [1, 2, 3, 4, 5]
    timeline = served.coordinator.timeline
    assert sorted(revisions, key=lambda revision: revision.number) == [*timeline.revisions]
    assert [*place.ledger.revisions(served.coordinator.uid, "train")] == [*timeline.revisions]
    takes_the_rest(trainer)


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("is_second", [False, True])
def test_a_state_names_the_revisions_that_were_accepted_before_its_step_was_produced(
    place: Place, served: ServedRun, trainer: Trainer, is_second: bool, restarted: bool
) -> None:
    # 14.16: of two at one sample, what was produced again after a restart named neither.
    before = [json.loads(revise(served, 3, sample_index=120).content)] if is_second else []
    trainer.train(1)
    trainer.ranks[0].take(3)
    # A state at the first sample that is not produced yet would name the revision.
    view = served.coordinator.view
    wait_for(lambda: view().generation.first_unproduced > 16, "samples beyond the four micro-steps")
    content = json.loads(revise(served, sample_index=120).content)
    known_from = (
        served.coordinator.view().generation.first_unproduced
    )  # it may have been less a moment before
    if (
        restarted
    ):  # and what rank 1 did not get yet is produced again, by a server that knows the revision
        trainer.connect(place.restart())
    trainer.ranks[1].take(3)
    old = trainer.state()  # the same of both ranks
    assert named(old) == [
        one for one in before if one["known_from"] <= 16
    ]  # more may have been produced before it
    trainer.train_to(known_from + 4)
    assert named(trainer.state()) == [content]
    assert [one["content"] for one in json.loads(place.committed().state)["revisions"]] == [content]
    takes_the_rest(Trainer(trainer.ranks[0].served, state=old, takeover=True), 16)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_revision_of_a_run_that_stands_still_holds_from_where_it_stands(
    wide: Place, restarted: bool
) -> None:
    served = wide.serve()
    trainer = Trainer(served)
    trainer.train(5)
    trainer.leave()
    if restarted:
        served = wide.restart()
    assert served.coordinator.view().generation.stands_still
    assert served.mixture.info().first_revisable == trainer.index
    added = [{"child": {"source": "txt:data/prose/1.txt:text", "weight": 9}}]
    assert revise(served, add=added).sample_index == trainer.index == wide.committed().sample_index
    assert wide.stored().closed_generation == 1
    for restarts in range(2):
        served = wide.restart() if restarts else served
        with pytest.raises(
            Fenced, match=r"generation 1 of run 'test' .* is over: a revision closed it"
        ):
            trainer.connect(served)
        served.stats.read()
        assert served.snapshots.at(None)[1] == trainer.index
        assert served.coordinator.view().waiting.waiting_for == "a trainer"
    # Another change, and one that is taken back, need no further generation.
    revise(served, 3)
    assert [revision.number for revision in served.revision_handler.drop(2)] == [2]
    asks: list[dict[str, Any]] = [
        {"resume": "latest"},
        {"state": trainer.state(), "takeover": True},
    ]
    for ask in asks:
        again = Trainer(served, 2, 3, **ask)
        assert again.take(5) == part(sequence(served), trainer.index, again.index)


def test_a_run_stands_still_only_where_it_was_listened_to(wide: Place) -> None:
    """Ranks that were cut off from a server that ended may come back to the next one."""
    wide.timeouts = Timeouts(liveness_s=1.0)
    trainer = Trainer(wide.serve())
    trainer.train(5)
    trainer.leave(goodbye=False)
    assert not trainer.ranks[0].served.coordinator.view().generation.stands_still
    wide.stop()
    time.sleep(1.1)
    served = wide.serve()
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
    assert (
        max(trainer.index, streams.produced_index)
        < streams.first_unproduced
        < generation.horizon_index
    )
    trainer.leave(goodbye=False)
    time.sleep(1.1)
    assert revise(served).sample_index == trainer.index


def test_a_launch_does_not_stand_still_because_the_one_before_it_did(
    wide: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = wide.serve()
    trainer = Trainer(served)
    trainer.train(5)
    trainer.leave()
    served.leadership.step()  # notes that nobody trains
    trainer = Trainer(served, state=trainer.state())
    trainer.train(3)
    monkeypatch.setattr(
        served.leadership, "let_go", lambda: None
    )  # killed, before it noted anything else
    served = wide.restart()
    generation = served.coordinator.view().generation
    assert (generation.stands_still, generation.ranks[0].last_heard) == (False, None)
    revise(served)
    trainer.connect(served)
    takes_the_rest(trainer, 20)


def test_a_revision_that_has_to_wait_says_in_the_log_why_it_was_not_made(
    wide: Place, caplog: pytest.LogCaptureFixture
) -> None:
    Trainer(wide.serve()).train(2)
    wide.timeouts = Timeouts(liveness_s=2.0)  # it is asked sooner than that after its start
    wide.restart().revision_handler.revise_soon(heavier(0.5, sample_index=3))
    wait_for(lambda: "was not made" in caplog.text, "the revision's end")
    assert (
        "the revision of the mixture file (a test) was not made: BeyondHorizon: sample 3 may"
        in caplog.text
    )


def test_a_revision_of_a_run_that_stands_still_comes_after_all_that_is_known_to_be_kept(
    made: Callable[..., Place],
) -> None:
    served = made(window_micro_steps=40).serve()
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
    with pytest.raises(
        BeyondHorizon, match=f"a revision of run 'test' can hold from sample {beyond} on"
    ):
        revise(served, sample_index=beyond - 1)
    _, kept = served.snapshots.take(beyond + 4, save=True)
    assert served.mixture.info().first_revisable == beyond + 5
    served.restores.restore(sample_index=beyond + 6)
    for _ in range(2):  # also where one was taken back, in the generation that it closed
        assert revise(served).sample_index == beyond + 7
        served.revision_handler.drop(1)
    revise(served)
    with pytest.raises(
        SnapshotInvalid,
        match=f"made without revision 1, which holds from sample {beyond + 7} on, from other",
    ):
        served.resume_points.forward(served.resume_points.parse(trainer.state(beyond + 8)))
    served.restores.restore(snapshot_id=kept)
    assert Trainer(served).take(4) == part(sequence(served), beyond + 4, beyond + 4 + 16)


def test_a_revision_of_a_run_that_trains_comes_after_what_is_pinned(
    served: ServedRun, trainer: Trainer
) -> None:
    """Also where that lies beyond the launch that trains now, on the one before it."""
    trainer.train(20)
    pinned = trainer.index
    Trainer(served, resume="fresh", takeover=True).train(2)
    served.restores.restore(text=trainer.state().decode())
    assert served.coordinator.view().generation.first_unproduced < pinned
    assert served.mixture.info().first_revisable == pinned + 1
    assert revise(served).sample_index == pinned + 1
    assert Trainer(served, takeover=True).take(4) == part(sequence(served), pinned, pinned + 16)


def test_no_rank_comes_back_while_a_revision_closes_its_generation_but_after_it_was_refused(
    wide: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = wide.serve()
    trainer = Trainer(served)
    trainer.train(5)
    trainer.leave()

    def refuse(revision: StoredRevision) -> None:
        # 14.16: not for good yet, so it asks again.
        with pytest.raises(NotLeader, match="being revised, which may close generation 1"):
            trainer.connect(served)
        raise LedgerError("refused on purpose")

    monkeypatch.setattr(wide.ledger, "meanwhile", refuse)
    with pytest.raises(LedgerError, match="refused on purpose"):
        revise(served)
    trainer.connect(served)
    takes_the_rest(trainer)


def test_time_in_which_the_server_was_paused_is_no_silence_of_its_ranks(wide: Place) -> None:
    # 14.16: a revision closed the generation of ranks that came back at once.
    wide.timeouts = Timeouts(liveness_s=20.0, lease_s=1000.0)
    served = wide.serve()
    trainer = Trainer(served)
    trainer.train(5)
    trainer.leave(goodbye=False)
    coordinator, clock, slept_s = served.coordinator, served.coordinator.clock, 60.0
    coordinator._context.clock = lambda: clock() + slept_s
    assert not coordinator.view().generation.stands_still
    for _ in range(4):
        assert not coordinator.view().generation.stands_still
        slept_s += wide.timeouts.tick_s
    assert coordinator.view().generation.stands_still
    trainer.connect(served)
    takes_the_rest(trainer)


@pytest.mark.parametrize("writes", [False, True])
def test_a_ledger_that_lost_a_revision_while_ranks_train_stops_them(
    place: Place, served: ServedRun, trainer: Trainer, monkeypatch: pytest.MonkeyPatch, writes: bool
) -> None:
    trainer.train(1)
    early = trainer.state()
    revise(served)

    def fail_over(revision: StoredRevision | None = None) -> None:
        """The ledger comes back as it was before the first revision, while its server goes on."""
        with closing(sqlite3.connect(place.ledger_path)) as connection:
            connection.executescript(
                "DELETE FROM revisions; UPDATE runs SET revision_changes = 0; UPDATE leases SET lapses_at = 0"
            )
        if revision is not None:
            raise LedgerUnavailable("the store failed over")

    if writes:
        monkeypatch.setattr(place.ledger, "meanwhile", fail_over)
        with pytest.raises(LedgerUnavailable, match="the store failed over"):
            revise(served, 3)
    else:
        fail_over()
        with pytest.raises(LedgerRolledBack, match="has 0 changes of its revisions"):
            until_led(lambda: trainer.take(1000))
    # Generation and commits are all there, but what the ranks have was made under the revision, perhaps.
    for _ in range(2):  # the lease is taken anew, before anything names what the server knows
        with pytest.raises(
            LedgerRolledBack, match=r"has 0 changes of its revisions .* but had acknowledged 1"
        ):
            until_led(lambda: trainer.connect(served))
        served.leadership._acquire()
    takes_the_rest(Trainer(served, state=early), 4)
    assert served.coordinator.view().error is None
    assert not served.coordinator.timeline.revisions


def test_a_ledger_that_lost_a_revision_takes_it_from_the_trainers_state(
    place: Place, trainer: Trainer
) -> None:
    trainer.train(1)
    place.stop()
    older = place.ledger_path.with_name("backup.db")
    older.write_bytes(place.ledger_path.read_bytes())
    served = trainer.connect(place.serve())
    index = revise(served).sample_index
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
    served: ServedRun, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer.train(1)
    early = trainer.state()
    index = revise(served).sample_index
    trainer.train_to(index + 8)
    # Another world and batch: the revision lies within a step of theirs.
    with caplog.at_level(logging.INFO):
        again = Trainer(served, 3, 5, state=early)
    assert again.take(6) == part(sequence(served), 4, again.index)
    assert f"revision 1 applies at sample {index} (a test)" in caplog.text


def test_losses_of_a_source_that_a_revision_brings_have_its_name(
    made: Callable[..., Place],
) -> None:
    served = made(window_micro_steps=4, **flat([CODE, PROSE])).serve()
    trainer = Trainer(served)

    def report(sources: dict[int, tuple[float, int]]) -> None:
        told = Report(
            sample_index=trainer.index,
            total_tokens=8 * trainer.index,
            step=trainer.index,
            sources=sources,
        )
        served.losses.add(served.coordinator.uid, 1, trainer.attempt, told)

    trainer.train(1)
    report({0: (2.0, 10)})
    trainer.train_to(
        revised(served, add=[{"child": {"source": DOCS, "alias": "late"}}]).sample_index + 8
    )
    report({0: (1.0, 10), 2: (3.0, 5)})
    assert [(each.alias, each.losses) for each in served.losses.read().sources] == [
        (CODE, [2.0, 1.0]),
        ("late", [None, 3.0]),
    ]


def test_a_closing_revision_of_unknown_outcome_is_what_the_ledger_has(
    wide: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = wide.serve()
    trainer = Trainer(served)
    trainer.train(5)
    trainer.leave()
    execute = wide.ledger.execute

    def lose_answer(command: Command) -> int:
        answer = execute(command)
        if isinstance(command, Revise):
            raise LedgerUnavailable("the answer was lost on purpose")
        return answer

    monkeypatch.setattr(wide.ledger, "execute", lose_answer)
    with pytest.raises(LedgerUnavailable):
        revise(served)
    with pytest.raises(Fenced, match="a revision closed it"):
        until_led(lambda: trainer.connect(served))
    assert [revision.sample_index for revision in served.coordinator.timeline.revisions] == [
        trainer.index
    ]
