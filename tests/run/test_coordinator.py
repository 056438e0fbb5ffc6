"""A run at work: what it waits for, what stops it, and what its threads do when something is wrong."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.corpora import CODE, WIKI, flat, write_corpus
from support.served import PATIENCE_S, Place, Rank, Trainer, call_of, never, printed, serving
from tokenloom_proto.threads import Background
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.errors import SourceError
from tokenloom_server.order.pipeline import Pipeline
from tokenloom_server.reports.stats import RunStats
from tokenloom_server.run.generation import Waiting


def test_each_source_says_where_it_resumes(
    served: ServedRun, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer.take(9)
    state = served.resume_points.forward(served.resume_points.parse(trainer.state()))
    with caplog.at_level(logging.INFO):
        Trainer(served, state=trainer.state())
    cursor = state.sources[0].cursor
    line = f"resume: spec={CODE} sample_row={state.sources[0].rows} shard=data/code-{cursor.shard}.parquet"
    assert f"{line} offset={cursor.row}" in caplog.messages
    assert sum(message.startswith("resume: spec=") for message in caplog.messages) == 4


def test_a_wait_names_the_rank_that_holds_the_others_back(served: ServedRun) -> None:
    coordinator = served.coordinator
    assert coordinator.view().waiting == Waiting("a trainer", "ranks")
    first = Rank(served, call_of(0))
    first.take(6)
    assert coordinator.sessions.next_for(first.session, 0.1, never) == Waiting(
        "rank 1 to connect", "ranks"
    )
    Rank(served, call_of(1)).take(2)
    first.take(2)
    assert coordinator.sessions.next_for(first.session, 0.1, never) == Waiting(
        "rank 1 to go on from sample 8", "ranks"
    )


def test_what_a_run_waits_for_has_a_reason(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    served = place.serve()
    coordinator, io_stats = served.coordinator, served.coordinator.order.resources.io_stats
    may_fill, fill = threading.Event(), Pipeline.fill

    def when_allowed(pipeline: Pipeline, *arguments: Any) -> None:
        may_fill.wait(PATIENCE_S)
        fill(pipeline, *arguments)

    monkeypatch.setattr(Pipeline, "fill", when_allowed)
    trainer = Trainer(served)
    # Its ranks have nothing, and samples are still being made.
    assert coordinator.sessions.next_for(trainer.ranks[0].session, 0.0, never) == Waiting(
        "samples to be read and tokenised", "rows"
    )
    assert served.stats.read().waiting_reason == "rows"
    with io_stats.waiting("s3://bucket/a.parquet") as wait:
        assert coordinator.view().waiting.reason == "rows"
        wait.since -= 3
        assert coordinator.view().waiting == Waiting(
            "storage: s3://bucket/a.parquet (for 3 s)", "storage"
        )
    may_fill.set()
    # Full window, nobody consumes: training sets the pace.
    deadline = time.monotonic() + PATIENCE_S
    while (reason := served.stats.read().waiting_reason) != "ranks" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert reason == "ranks"
    place.ledger.away = True
    trainer.take(6)
    assert coordinator.sessions.next_for(trainer.ranks[0].session, 0.2, never).reason == "ledger"  # type: ignore[union-attr]
    place.ledger.away = False
    # The lease is not this server's for now.
    coordinator._lease.doubt("another server")
    stats = served.stats.read()
    assert (stats.waiting_for, stats.waiting_reason) == ("the lease: another server", "lease")


def test_ranks_say_how_long_they_waited_for_data(
    served: ServedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.recorder.end(20)
    clock = [100.0]
    monkeypatch.setattr(served.coordinator._context, "clock", lambda: clock[0])
    first, second = (Rank(served, call_of(rank)) for rank in range(2))
    assert served.stats.read().data_wait_share is None

    def report(seconds: float, *waited: float) -> RunStats:
        clock[0] += seconds
        for rank, waited_s in zip((first, second), waited, strict=True):
            served.coordinator.sessions.progress(rank.session, rank.consumed, 9, "", waited_s)
        return served.stats.read()

    report(0, 0, 0)
    stats = report(10, 9, 1)
    assert [rank.waited_s for rank in stats.ranks] == [9, 1]
    # The one that waits least: the other may wait for that one.
    assert stats.data_wait_share == pytest.approx(0.1)
    assert "the data sets the pace: ranks waited for data 10% of the last half a minute" in printed(
        stats
    )
    for _ in range(5):
        stats = report(10, 9, 1)
    assert stats.data_wait_share == 0
    assert "training sets the pace: ranks waited for data 0%" in printed(stats)
    assert (
        "rank 0: connected, at sample 0 (lag 0), heard 0.0 s ago, waited 9.0 s for data"
        in printed(stats)
    )
    # A hostile, or an older, client changes nothing.
    for waited_s in math.nan, math.inf, -5.0, 0.0:
        stats = report(1, waited_s, waited_s)
        assert [rank.waited_s for rank in stats.ranks] == [9, 1]
    # The one that hardly waits holds the other up, once that is so for minutes.
    assert stats.straggler is None
    for seconds in range(60, 400, 60):
        stats = report(60, 9 + seconds * 2 / 3, 1)
    held_up = "rank 1 holds the others up: they waited 59% of the last 7 minutes"
    assert held_up in printed(stats)
    served.recorder.step()
    stats = report(60, 400, 55)
    assert stats.straggler is None and "sets the pace" in printed(stats)
    served.recorder.step()
    events = served.history.events(-math.inf, math.inf, ["straggler"]).events
    assert [event.text for event in events] == [held_up, "no rank holds the others up any more"]
    # Who is gone sets no pace.
    for rank in (first, second):
        served.coordinator.sessions.detach(rank.session)
    assert served.stats.read().data_wait_share is None


def test_a_missing_file_stops_the_run_after_all_that_came_before_it(tmp_path: Path) -> None:
    here = write_corpus(tmp_path / "own")
    with serving(here, tmp_path, flat([CODE, WIKI], window_micro_steps=40)) as served:
        trainer = Trainer(served, world_size=1, batch_size=1)
        (here / "data/code-1.parquet").unlink()
        with pytest.raises(SourceError, match=r"code-1\.parquet"):
            trainer.take(1000)
        assert trainer.taken()
        assert served.coordinator.not_ready() is None, (
            "the attempt that goes on after it must reach the server"
        )


def test_every_good_step_before_a_bad_row_is_delivered_and_committed_then_the_error_names_the_line(
    tmp_path: Path,
) -> None:
    rows = [f"document number {i} of some" for i in range(500)]
    lines = [json.dumps({"text": text}) for text in rows]
    lines[400] = '{"text": "cut off'
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    document = flat(["jsonl:rows.jsonl:text"], "weighted", sequence_length=16)
    with serving(tmp_path, tmp_path, document) as served:
        trainer = Trainer(served, batch_size=1)
        steps = sum(len(text) + 1 for text in rows[:400]) // 16 // 2
        assert len(trainer.train(steps)) == steps * 2 == served.coordinator.committed_through
        for rank in trainer.ranks:
            with pytest.raises(SourceError, match=r"rows\.jsonl.*line 401"):
                rank.take(1)


def test_what_still_produces_when_the_interpreter_ends_is_no_fault(
    served: ServedRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    producing, ends = threading.Event(), threading.Event()

    def fill(*_: Any) -> None:
        producing.set()
        ends.wait(PATIENCE_S)
        raise RuntimeError("cannot schedule new futures after shutdown")

    monkeypatch.setattr(Pipeline, "fill", fill)
    Rank(served, call_of(world_size=1))
    assert producing.wait(PATIENCE_S)
    served.coordinator.stop(0.01)
    ends.set()
    for worker in served.coordinator._workers:
        worker.join(PATIENCE_S)
    assert served.coordinator.view().error is None
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_dead_thread_is_a_reason_not_to_be_ready(place: Place, served: ServedRun) -> None:
    assert place.runs.not_ready() is None
    ended = Background("ended", {}.popitem)
    ended.start()
    ended.join()
    served.coordinator._workers = (*served.coordinator._workers, ended)
    assert "its thread ended fails, and goes on: KeyError" in (place.runs.not_ready() or "")
