"""A server that dies and comes back: ranks go on within their generation, without loss and without repetition."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
from conftest import Corpus, Rpc, StartServer
from support.server_process import ServerProcess
from support.trainer import Sample, World
from tokenloom import Fenced


def wait_for(happened: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds:g} s"
        time.sleep(0.02)


def committed_index(calls: Rpc, run: str) -> int:
    return int(json.loads(calls.snapshot(run))["sample_index"])


@pytest.mark.parametrize(("ledger", "prefetch_steps"), [("sqlite", 1), ("redis", 1000)], indirect=["ledger"])
def test_ranks_survive_a_server_that_is_killed_and_started_again(
    corpus: Corpus,
    sequence: list[Sample],
    start_server: StartServer,
    rpc: Callable[[ServerProcess], Rpc],
    ledger: str,
    prefetch_steps: int,
) -> None:
    run = "survivors"
    server = start_server(corpus.mixture(run, window_micro_steps=6), ledger=ledger)
    with World(server.url(run), 2, 2, prefetch_steps=prefetch_steps) as world:
        world.steps(5)
        generation = world.ranks[0].generation
        before = [world.state(4 * step) for step in range(6)]
        time.sleep(0.1)
        server.kill()
        # Each rank still has what it had fetched, in part; and state needs no server.
        buffered = min(prefetch_steps, 2)
        if prefetch_steps > 1:
            world.steps(buffered)
        assert [world.state(4 * step) for step in range(6)] == before
        dead = world.state()
        server.start()
        back = time.monotonic()
        texts = {world.sample_index: dead}
        world.steps(3)
        assert time.monotonic() - back < 8, "the ranks noticed late that the server is back"
        texts[world.sample_index] = world.state()
        while world.step() is not None:
            texts[world.sample_index] = world.state()
        assert world.receipt.sequence() == sequence[: world.sample_index]
        assert len(sequence) - world.sample_index < 4
        assert {rank.generation for rank in world.ranks} == {generation}
    calls = rpc(server)
    wait_for(lambda: committed_index(calls, run) == world.sample_index, "the commit of the last step")
    for index, state in [*enumerate(before), *texts.items()]:
        at = 4 * index if index < len(before) and state is before[index] else index
        assert calls.snapshot(run, at) == state["tokenloom"]


@pytest.mark.parametrize("last_micro_step", ["drop", "pad"])
def test_a_server_that_is_killed_when_all_was_sent_ends_the_run_all_the_same(
    corpus: Corpus,
    sequence: list[Sample],
    start_server: StartServer,
    rpc: Callable[[ServerProcess], Rpc],
    last_micro_step: str,
) -> None:
    run = f"ending-{last_micro_step}"
    server = start_server(corpus.mixture(run, last_micro_step=last_micro_step))
    with World(server.url(run), 2, 4, prefetch_steps=1000) as world:
        world.steps(3)
        wait_for(lambda: all(rank.end_reason for rank in world.ranks), "the end of the data")
        server.kill()
        world.run()  # out of the ranks' buffers
        kept = len(sequence) // 8 * 8 if last_micro_step == "drop" else len(sequence)
        assert world.receipt.sequence() == sequence[:kept]
        server.start()
        calls = rpc(server)
        # The ranks come back to report what they had.
        wait_for(lambda: committed_index(calls, run) == kept, "the commit of the last step")
        assert world.step() is None
        assert world.sample_index == kept
    with World(server.url(run), resume="latest") as world:
        assert world.run().receipt.sequence(kept) == sequence[kept:]


def test_a_run_that_ended_with_padding_is_committed_and_goes_on_after_restarts(
    corpus: Corpus, sequence: list[Sample], start_server: StartServer, rpc: Callable[[ServerProcess], Rpc]
) -> None:
    run = "padded"
    server = start_server(corpus.mixture(run, last_micro_step="pad"))
    with World(server.url(run), 2, 4) as world:
        world.steps(5)
        last = world.run().state()
        assert world.receipt.sequence() == sequence
    for _ in range(2):
        assert rpc(server).snapshot(run) == last["tokenloom"]
        server.kill()
        server.start()
    with World(server.url(run), 3, 1, state=last) as world:
        assert world.step() is None
        assert world.sample_index == len(sequence)
        assert "exhausted" in (world.ranks[2].end_reason or "")


def test_a_rank_of_an_older_launch_is_fenced_and_never_served_again(corpus: Corpus, start_server: StartServer) -> None:
    run = "fenced"
    server = start_server(corpus.mixture(run))
    with World(server.url(run), 2, 1, prefetch_steps=2) as old:
        state = old.steps(3).state()
        with World(server.url(run), 1, 1, state=state) as new:
            new.steps(2)
            for rank in old.ranks:
                with pytest.raises(Fenced, match=r"generation 1 .* is over: generation 2"):
                    for _ in range(10):
                        next(iter(rank))
            server.kill()
            server.start()
            new.steps(10)
        assert new.receipt.sequence(6)
