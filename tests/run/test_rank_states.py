"""What a rank and a run do, in one word, wherever people look: stats, command line and metrics."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from prometheus_client import generate_latest
from support.served import PATIENCE_S, Place, Trainer, call_of, printed
from support.waiting import wait_for
from tokenloom_server.api.metrics import create_registry
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.run.resume_points import ResumePoints


def test_a_rank_that_said_goodbye_is_finished_and_one_whose_connection_broke_is_away(
    place: Place, served: ServedRun, trainer: Trainer
) -> None:
    trainer.train(2)
    gone, ended = trainer.ranks
    served.coordinator.sessions.detach(gone.session)
    served.coordinator.sessions.leave(ended.session)
    served.coordinator.sessions.detach(ended.session)
    assert [rank.state for rank in served.stats.read().ranks] == ["away", "finished"]
    assert "rank 0: away, at sample 8" in printed(served.stats.read())
    assert "rank 1: finished, at sample 8" in printed(served.stats.read())
    text = generate_latest(create_registry(place.runs, version="0")).decode()
    assert 'tokenloom_rank_info{rank="0",run="test",state="away",stream="train"} 1.0' in text
    assert 'tokenloom_rank_info{rank="1",run="test",state="finished",stream="train"} 1.0' in text
    gone.connect(served)
    assert [rank.state for rank in served.stats.read().ranks] == ["connected", "finished"]


def test_of_a_run_whose_ranks_all_said_goodbye_a_trainer_is_waited_for(
    place: Place, served: ServedRun, trainer: Trainer
) -> None:
    trainer.train(2)
    trainer.leave()
    assert {rank.state for rank in served.stats.read().ranks} == {"finished"}
    assert served.stats.read().waiting_for == "a trainer"
    # A server that did not hear the goodbye does not say that there was one.
    assert {rank.state for rank in place.restart().stats.read().ranks} == {"away"}


def test_while_a_launch_is_opened_the_run_says_so(
    place: Place, served: ServedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, opening, may_go_on = ResumePoints.forward, threading.Event(), threading.Event()

    def slow(*args: Any, **options: Any) -> Any:
        opening.set()
        assert may_go_on.wait(PATIENCE_S)
        return forward(*args, **options)

    monkeypatch.setattr(ResumePoints, "forward", slow)
    assert not served.stats.read().opening
    rank_0 = threading.Thread(target=lambda: served.join_handler.join(call_of(0)), daemon=True)
    rank_0.start()
    assert opening.wait(PATIENCE_S)
    stats = served.stats.read()
    assert (stats.opening, stats.waiting_for) == (True, "the launch that is being opened")
    assert "a launch is being opened" in printed(served.stats.read())
    text = generate_latest(create_registry(place.runs, version="0")).decode()
    assert 'tokenloom_opening{run="test",stream="train"} 1.0' in text
    may_go_on.set()
    wait_for(lambda: not served.stats.read().opening, "the opening")
    assert served.stats.read().generation == 1
