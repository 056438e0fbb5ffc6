"""Servers that come and go while ranks train, and how a run ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support.corpora import mixture
from support.served import (
    PATIENCE_S,
    RUN,
    SCHEDULE,
    FaultyLedger,
    Place,
    Trainer,
    call_of,
    part,
    recount,
    sequence,
)
from support.waiting import wait_for
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.api.service import Runs
from tokenloom_server.errors import LedgerUnavailable, RunBusy, SourceError
from tokenloom_server.ledger import commands
from tokenloom_server.ledger.sqlite import SqliteLedger
from tokenloom_server.order.pipeline import Pipeline
from tokenloom_server.order.steps import StepGroup
from tokenloom_server.run.generation import EndOfData
from tokenloom_server.run.sizing import batch_plans_of
from tokenloom_server.run.timeouts import Timeouts


def test_ranks_go_on_over_restarts_with_what_they_hold(
    place: Place, served: ServedRun, trainer: Trainer
) -> None:
    samples = sequence(served)
    for round_ in range(6):
        trainer.take(3 + round_)
        # One rank holds more than it consumed, the other less.
        if not trainer.ranks[0].buffer:
            trainer.ranks[0].receive()
        if round_ % 2:
            trainer.settle()
        served = trainer.connect(place.restart())
    trainer.train(1000)
    assert trainer.taken() == part(samples, 0, 172)
    assert place.counters() == recount(served, trainer.taken())


def test_a_server_that_is_restarted_at_every_step_of_a_schedule_goes_on_with_the_size_that_comes_next(
    made: Callable[..., Place],
) -> None:
    place = made(window_micro_steps=8)
    served = place.serve()
    samples = sequence(served)
    trainer = Trainer(served, batch_size=SCHEDULE, accumulate=3)
    ends = []
    while trainer.take(1):
        ends.append(trainer.index)
        if len(ends) % 2:
            trainer.settle()
        assert served.snapshots.at(trainer.index)[0].encode() == trainer.state()
        served = trainer.connect(place.restart())
    # Nine steps of 2 × 2, then nine of 2 × 5, of which the last begins before sample 100, then those of 2 × 1.
    assert ends == [*range(4, 37, 4), *range(46, 127, 10), *range(128, 175, 2)]
    assert trainer.taken() == part(samples, 0, 174)
    opening = place.stored().opening
    assert opening is not None
    assert (opening.batch_size, batch_plans_of(opening).accumulate) == (2, 3)


@pytest.mark.parametrize(("last_micro_step", "end", "dropped"), [("drop", 168, 7), ("pad", 175, 0)])
def test_all_ranks_end_at_the_same_step_with_the_reason_also_after_a_restart(
    made: Callable[..., Place], last_micro_step: str, end: int, dropped: int
) -> None:
    place = made(last_micro_step=last_micro_step, window_micro_steps=4)
    served = place.serve()
    trainer = Trainer(served, world_size=4, batch_size=2)
    trainer.take(1000)
    expected = EndOfData(end, "every source is exhausted", dropped)
    assert [rank.end for rank in trainer.ranks] == [expected] * 4
    assert trainer.index == end
    stats = served.stats.read()
    assert (
        stats.ended is None or stats.sample_index == end
    )  # until then it stopped, for all that the ledger knows
    state = trainer.state()
    for settled in (False, True):
        if settled:
            trainer.settle()
        served = trainer.connect(place.restart())
        for rank in trainer.ranks:
            assert not rank.receive()
            assert rank.end == expected
    trainer.settle()
    assert place.committed().sample_index == end
    assert served.stats.read().ended == expected.reason
    assert served.snapshots.at(end)[0].encode() == state
    over = Trainer(served, world_size=1, batch_size=1, state=state)
    assert list(over.take(100)) == list(range(end, 175))


def test_a_server_that_comes_after_one_that_died_knows_when_ranks_were_last_heard(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch that lives keeps others out of its run also while no server has heard it yet; one that left does not."""
    monkeypatch.setattr("tokenloom_server.run.leadership.RENEWALS", 10_000)
    place.timeouts = Timeouts(liveness_s=1000.0)
    trainer = Trainer(place.serve())
    trainer.take(3)

    def noted() -> float | None:
        lease = place.stored().lease
        return None if lease is None else lease.heard_at

    wait_for(lambda: noted() is not None, "a renewal that says when the ranks were heard")
    served = place.serve()  # the one before let go of nothing, as where it was killed
    with pytest.raises(RunBusy, match=r"trains on it since .* each rank of it was heard"):
        served.join_handler.join(call_of(attempt="another", resume="latest"))
    trainer.connect(served)
    trainer.train(1000)
    trainer.leave()
    served.join_handler.join(call_of(attempt="another", resume="latest"))


# --- servers that stop -------------------------------------------------------------------------------


def test_a_server_that_stops_commits_what_was_acknowledged(place: Place, trainer: Trainer) -> None:
    trainer.take(5)
    place.restart()
    assert place.committed().sample_index == 20


def test_a_server_that_stops_waits_once_for_a_ledger_that_hangs_however_many_runs_it_has(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom_server.api.service.LET_GO_S", 0.1)
    answers = threading.Event()
    asked: list[str] = []

    class Hanging(FaultyLedger):
        def execute(self, command: commands.Command) -> int:
            if isinstance(command, commands.Release):
                asked.append(command.uid)
                answers.wait()
                raise LedgerUnavailable("no answer")
            return super().execute(command)

    ledger = Hanging(tmp_path / "ledger.db")
    runs = Runs(ledger)
    for number in range(6):
        path = folder / f"{tmp_path.name}-{number}.yaml"
        path.write_text(yaml.safe_dump(mixture(run=f"run-{number}")))
        runs.add(path, None)
    runs.stop()
    # It has stopped, though nobody was answered; and all were asked side by side.
    wait_for(lambda: len(asked) == 6, "the last of six releases")
    answers.set()
    for name in runs.names():
        runs.get(name).leadership.join(PATIENCE_S)
    ledger.close()


def test_a_server_that_stops_makes_no_more_blocks_ahead(place: Place) -> None:
    def makers() -> set[threading.Thread]:
        return {
            thread for thread in threading.enumerate() if thread.name.startswith(f"{RUN}-ahead")
        }

    before = makers()
    Trainer(place.serve()).take(2)
    ours = makers() - before
    assert ours
    place.stop()
    # The interpreter waits for them when it ends, and they for all that they have to do.
    for thread in ours:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_dates_are_the_wall_clocks_where_that_was_set_or_the_machine_slept_since_the_ledger_was_first_opened(
    made: Callable[..., Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, wall_clock = made(), time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: wall_clock() - 3600)
        SqliteLedger(place.ledger_path).close()
    trainer = Trainer(place.serve())
    trainer.train(3)
    opening = place.stored().opening
    assert opening is not None
    assert abs(time.time() - opening.opened_at) < 60
    for served in (trainer.ranks[0].served, place.restart()):
        age_s = served.stats.read().ledger.last_commit_age_s
        assert age_s is not None
        assert age_s < 60


@pytest.mark.parametrize(
    "error", [OSError("no more descriptors"), KeyboardInterrupt("of a library")]
)
def test_a_fault_that_nobody_expects_ends_the_launch_and_no_sample_is_lost(
    served: ServedRun, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = sequence(served)
    # The second burst is the first of more than one micro-step; after its fault, one good step at a time.
    fill, faults = Pipeline.fill, iter([None, SourceError("a row is bad"), None, None, error])
    bursts: list[int] = []
    over = threading.Event()

    def fails(pipeline: Pipeline, group: StepGroup, steps: int) -> None:
        fill(pipeline, group, steps)  # which has moved it on
        if threading.current_thread().name.endswith("producer") and not over.is_set():
            bursts.append(steps)
            if (fault := next(faults)) is not None:
                if fault is error:
                    over.set()
                raise fault

    monkeypatch.setattr(Pipeline, "fill", fails)
    trainer = Trainer(served)
    # Before anything is sent: what is produced then does not depend on how fast ranks consume.
    assert over.wait(PATIENCE_S)
    assert bursts == [1, 2, 1, 1, 1]
    with pytest.raises(SourceError, match=f"producing samples failed: {type(error).__name__}: "):
        trainer.take(1000)
    assert trainer.taken() == part(samples, 0, 12)  # three good steps of two ranks of two samples
    again = Trainer(served, state=trainer.state(), takeover=True)
    begin = trainer.index
    again.train(1000)
    assert again.taken() == part(samples, begin, again.index)
    assert again.index > begin
