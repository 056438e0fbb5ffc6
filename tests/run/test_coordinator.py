"""A run at work: what it waits for, what stops it, and what its threads do when something is wrong."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.corpora import CODE, WIKI, flat, write_corpus
from support.served import PATIENCE_S, Place, Rank, Trainer, call_of, never, serving
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.errors import SourceError
from tokenloom_server.order.pipeline import Pipeline
from tokenloom_server.run.delivery import Waiting


def test_a_group_has_the_more_messages_the_more_its_state_costs(
    made: Callable[..., Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = made().serve().coordinator
    message = coordinator.message_steps(2)
    assert coordinator.group_micro_steps(2, 2) == message
    monkeypatch.setattr("tokenloom_server.run.sizing.SOURCES_PER_MESSAGE", 2)
    assert coordinator.group_micro_steps(2, 2) == (1 + len(coordinator.order.record.specs) // 2) * message
    # Many ranks: less than one message for each, but a step at least.
    monkeypatch.setattr("tokenloom_server.run.sizing.GROUP_BYTES", 3 * 64 * 2 * coordinator.timeline.sample_bytes)
    assert [coordinator.group_micro_steps(64, 2), coordinator.group_micro_steps(10_000, 2)] == [3, 1]


def test_each_source_says_where_it_resumes(
    served: ServedRun, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer.take(9)
    state = served.history.forward(served.history.parse(trainer.state()))
    with caplog.at_level(logging.INFO):
        Trainer(served, state=trainer.state())
    cursor = state.sources[0].cursor
    line = f"resume: spec={CODE} sample_row={state.sources[0].rows} shard=data/code-{cursor.shard}.parquet"
    assert f"{line} offset={cursor.row}" in caplog.messages
    assert sum(message.startswith("resume: spec=") for message in caplog.messages) == 4


def test_a_wait_names_the_rank_that_holds_the_others_back(served: ServedRun) -> None:
    coordinator = served.coordinator
    assert coordinator.view().waiting_for == "a trainer"
    first = Rank(served, call_of(0))
    first.take(6)
    assert coordinator.next_for(first.session, 0.1, never) == Waiting("rank 1 to connect")
    Rank(served, call_of(1)).take(2)
    first.take(2)
    assert coordinator.next_for(first.session, 0.1, never) == Waiting("rank 1 to go on from sample 8")


def test_a_missing_file_stops_the_run_after_all_that_came_before_it(tmp_path: Path) -> None:
    here = write_corpus(tmp_path / "own")
    with serving(here, tmp_path, flat([CODE, WIKI], window_micro_steps=40)) as served:
        trainer = Trainer(served, world_size=1, batch_size=1)
        (here / "data/code-1.parquet").unlink()
        with pytest.raises(SourceError, match=r"code-1\.parquet"):
            trainer.take(1000)
        assert trainer.taken()
        assert served.coordinator.not_ready() is None, "the attempt that goes on after it must reach the server"


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_good_step_before_a_bad_row_is_delivered_and_committed_then_the_error_names_the_line(
    tmp_path: Path, world_size: int
) -> None:
    rows = [f"document number {i} of some" for i in range(500)]
    lines = [json.dumps({"text": text}) for text in rows]
    lines[400] = '{"text": "cut off'
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    document = flat(["jsonl:rows.jsonl:text"], "weighted", sequence_length=16)
    with serving(tmp_path, tmp_path, document) as served:
        trainer = Trainer(served, world_size=world_size, batch_size=1)
        steps = sum(len(text) + 1 for text in rows[:400]) // 16 // world_size
        assert len(trainer.train(steps)) == steps * world_size == served.coordinator.committed_through
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
    ended = threading.Thread(name="ended", target=int)
    ended.start()
    ended.join()
    served.coordinator._workers = (*served.coordinator._workers, ended)
    assert "its thread ended has ended" in (place.runs.not_ready() or "")
