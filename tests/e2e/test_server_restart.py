"""A server that dies and comes back: ranks go on within their generation, without loss and without repetition."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
from conftest import Corpus, Rpc, StartServer
from support.server_process import ServerProcess
from support.trainer import Sample, World
from support.waiting import wait_for


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
