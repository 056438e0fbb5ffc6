"""Attempts on one run: a running job is not ended by mistake, and a rank that stops holds nobody for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Corpus, StartServer
from support.trainer import Trainer, World
from support.waiting import wait_for
from tokenloom import ConnectionOptions, LaunchOptions, RankStalled, RemoteDataset, RunBusy

#: So long nobody is waited for here who is only silent.
LIVENESS = ("--liveness", 60)


def test_a_second_launch_is_refused_while_the_first_lives_and_may_take_over_on_purpose(
    corpus: Corpus, start_server: StartServer, tmp_path: Path
) -> None:
    url = start_server(corpus.mixture("busy"), flags=LIVENESS).url("busy")
    trainer = Trainer(tmp_path, "held", {}, url=url, batch_size=1, pause_at=5)
    try:
        wait_for(lambda: len(trainer.lines()) == 5, "five steps")
        connection = ConnectionOptions(connect_timeout_s=3)
        with (
            RemoteDataset(url, 1, resume="latest", connection=connection) as second,
            pytest.raises(RunBusy) as refusal,
        ):
            iter(second)
        for part in ("generation 1", "1 ranks", "since 20", "takeover=True"):
            assert part in str(refusal.value)
        assert trainer.running()
        with RemoteDataset(url, 1, resume="latest", launch=LaunchOptions(takeover=True)) as second:
            next(iter(second))
            assert second.generation == 2
            trainer.go_on()
            assert trainer.wait() != 0
        assert "Fenced" in trainer.log()
        assert len(trainer.lines()) == 5, "what was buffered is dropped"
    finally:
        trainer.kill()


def test_a_launch_whose_rank_0_was_killed_keeps_nobody_out_but_one_that_stands_still_does(
    corpus: Corpus, start_server: StartServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server(corpus.mixture("killed"), flags=LIVENESS)

    def launched(**options: Any) -> RemoteDataset:
        connection = ConnectionOptions(connect_timeout_s=3)
        return RemoteDataset(
            server.url("killed"), 1, resume="latest", connection=connection, **options
        )

    plan = {
        "url": server.url("killed"),
        "batch_size": 1,
        "pause_at": 5,
        "options": {"resume": "latest"},
    }
    trainer = Trainer(tmp_path, "killed", {}, **plan)
    wait_for(lambda: len(trainer.lines()) == 5, "five steps")
    trainer.pause()
    with (
        launched() as second,
        pytest.raises(RunBusy, match=r"so another may begin in \d\d s or later"),
    ):
        iter(second)
    trainer.kill()
    # Its stream ends a moment after it: until then a launch is refused, and comes again.
    with launched() as second:
        wait_for(lambda: second.stats()["ranks"][0]["state"] == "away", "the stream's end")
        next(iter(second))
    assert caplog.text.count("so another may begin in") == 1


def test_a_rank_that_stops_is_named_and_the_others_get_an_error(
    corpus: Corpus, start_server: StartServer
) -> None:
    server = start_server(
        corpus.mixture("stalled", window_micro_steps=3), flags=("--rank-timeout", 5)
    )
    with World(server.url("stalled"), 2, 1, prefetch_steps=2) as world:
        world.steps(2)
        iterator = iter(world.ranks[0])
        with pytest.raises(
            RankStalled,
            match=r"rank 1 \(connected, last heard \d s ago, at sample 4, \d+ less than the",
        ):
            for _ in range(10):
                next(iterator)
    assert "rank 1 (connected" in server.log
    # A new attempt is not kept out by the old one's error.
    with World(server.url("stalled"), 2, 1, resume="latest") as world:
        world.steps(2)
