"""Attempts on one run: a running job is not ended by mistake, and a rank that stops holds nobody for ever."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import Corpus, StartServer
from support.server_process import ServerProcess
from support.trainer import Trainer, World
from support.waiting import wait_for
from tokenloom import ConnectionOptions, RankStalled, RemoteDataset, RunBusy
from tokenloom_proto.errors import JoinRefused

LIVENESS_S = 5.0


@pytest.fixture
def trained(corpus: Corpus, start_server: StartServer, tmp_path: Path) -> Any:
    """A server, and a trainer in a process of its own that waits in the middle of its run."""
    server = start_server(corpus.mixture("busy"), flags=("--liveness", LIVENESS_S, "--lease", 1.5))
    trainer = Trainer(tmp_path, "held", {}, url=server.url("busy"), batch_size=1, pause_at=5)
    wait_for(lambda: len(trainer.lines()) == 5, "five steps")
    yield server, trainer
    trainer.kill()


def test_a_second_launch_is_refused_while_the_first_lives_and_may_take_over_on_purpose(
    trained: tuple[ServerProcess, Trainer],
) -> None:
    server, trainer = trained
    began = time.monotonic()
    with RemoteDataset(server.url("busy"), 1, resume="latest") as second, pytest.raises(RunBusy) as refusal:
        iter(second)
    # It asked for the liveness and a margin, in case that the first was gone.
    assert LIVENESS_S < time.monotonic() - began < LIVENESS_S + 60
    text = str(refusal.value)
    assert "generation 1" in text
    assert "1 ranks" in text
    assert "since 20" in text
    assert "takeover=True" in text
    assert trainer.running()
    with RemoteDataset(server.url("busy"), 1, resume="latest", takeover=True) as second:
        next(iter(second))
        assert second.generation == 2
        trainer.go_on()
        assert trainer.wait() != 0
        assert "Fenced" in trainer.log()
        assert len(trainer.lines()) == 5, "what was buffered is dropped"


def test_a_restarted_server_knows_that_the_run_is_alive(trained: tuple[ServerProcess, Trainer]) -> None:
    server, trainer = trained
    time.sleep(LIVENESS_S)  # the lease carries the last sign of life, at each renewal
    server.kill()
    trainer.pause()  # it will not come back in time to show itself
    server.start()
    with (
        RemoteDataset(
            server.url("busy"), 1, resume="latest", connection=ConnectionOptions(connect_timeout_s=1.5)
        ) as second,
        pytest.raises(RunBusy),
    ):
        iter(second)
    trainer.unpause()


def test_a_launch_whose_rank_0_was_killed_keeps_nobody_out_but_one_that_stands_still_does(
    corpus: Corpus, start_server: StartServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server(corpus.mixture("killed"), flags=("--liveness", 60, "--lease", 1.5))

    def launched(**options: Any) -> RemoteDataset:
        connection = ConnectionOptions(connect_timeout_s=3)
        return RemoteDataset(server.url("killed"), 1, resume="latest", connection=connection, **options)

    for restarted in (False, True):  # after a restart the ledger knows which process it is
        plan = {"url": server.url("killed"), "batch_size": 1, "pause_at": 5, "options": {"resume": "latest"}}
        trainer = Trainer(tmp_path, f"{restarted}", {}, **plan)
        wait_for(lambda trainer=trainer: len(trainer.lines()) == 5, "five steps")
        trainer.pause()
        with launched() as second, pytest.raises(RunBusy, match=r"so another may begin in \d\d s or later"):
            iter(second)
        trainer.kill()
        if restarted:
            server.kill()
            server.start()
        # Its stream ends a moment after it: until then a launch is refused, and comes again.
        with launched() as second:
            wait_for(lambda second=second: second.stats()["ranks"][0]["state"] == "away", "the stream's end")
            next(iter(second))
        trainer.kill()
    assert caplog.text.count("so another may begin in") == 2


def test_a_job_that_said_goodbye_and_the_same_process_need_not_wait(corpus: Corpus, start_server: StartServer) -> None:
    server = start_server(corpus.mixture("again"), flags=("--liveness", 60))
    first = RemoteDataset(server.url("again"), 1)
    next(iter(first))
    # A notebook's cell that is run again: the first is still there.
    second = RemoteDataset(server.url("again"), 1, resume="fresh")
    next(iter(second))
    assert (first.generation, second.generation) == (1, 2)
    # And once more, behind a restart of the server, which hears whose run it is from the stream that comes back.
    server.kill()
    server.start()
    with RemoteDataset(
        server.url("again"), 1, resume="latest", connection=ConnectionOptions(connect_timeout_s=30)
    ) as third:
        next(iter(third))
        assert third.generation == 3
    first.close()
    second.close()


def test_a_rank_that_stops_is_named_and_the_others_get_an_error(
    corpus: Corpus, start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server(corpus.mixture("stalled", window_micro_steps=3), flags=("--rank-timeout", 2))
    with World(server.url("stalled"), 2, 1, prefetch_steps=2) as world:
        world.steps(2)
        iterator = iter(world.ranks[0])
        with pytest.raises(
            RankStalled, match=r"rank 1 \(connected, last heard \d s ago, at sample 4, \d+ less than the"
        ):
            for _ in range(10):
                next(iterator)
    assert "rank 1 (connected" in server.log
    # A new attempt is not kept out by the old one's error.
    with World(server.url("stalled"), 2, 1, resume="latest") as world:
        world.steps(2)


def test_one_rank_with_another_batch_size_ends_the_launch_at_once_and_every_rank_says_why(
    corpus: Corpus, start_server: StartServer
) -> None:
    url = start_server(corpus.mixture("unequal", window_micro_steps=4)).url("unequal")

    def end_of(rank: int, batch_size: int, seconds: float) -> str:
        time.sleep(seconds)
        with (
            RemoteDataset(url, batch_size, rank=rank, world_size=3, attempt="unequal") as dataset,
            pytest.raises(JoinRefused) as refusal,
        ):
            for _ in dataset:
                pass
        return str(refusal.value)

    began = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        # Rank 0 streams, rank 1 is refused, rank 2 comes last.
        ends = list(pool.map(end_of, range(3), (2, 3, 2), (0.0, 1.0, 2.0)))
    assert time.monotonic() - began < 150, "the rank timeout was waited for"
    reason = "rank 1 has batch size 3, but rank 0 of attempt 'unequal' opened it with 2"
    assert all(reason in end for end in ends[:2])
    assert "rank 1 has batch size 3, but rank 0 of attempt … (every rank gets this; rank 0 says it in full)" in ends[2]
