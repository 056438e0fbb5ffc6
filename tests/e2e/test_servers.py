"""Servers that die, come back, stand by and stop: ranks go on within their generation, without loss or repetition."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Corpus, Rpc, StartServer
from support.server_process import MAIN, CommandLine, ServerProcess, server_forks
from support.trainer import Sample, World
from support.waiting import wait_for

LEASE = ("--lease", 2)


def wait_for_commit(server: ServerProcess, run: str, sample_index: int) -> None:
    def committed() -> int:
        return int(server.get(f"/v1/runs/{run}/stats")["sample_index"])

    wait_for(lambda: committed() == sample_index, f"the commit of sample {sample_index}")


@pytest.mark.parametrize(
    ("ledger", "prefetch_steps"), [("sqlite", 1), ("redis", 1000)], indirect=["ledger"]
)
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
        server.kill()
        # State needs no server.
        assert [world.state(4 * step) for step in range(6)] == before
        dead = world.state()
        server.start()
        texts = {world.sample_index: dead}
        while world.step() is not None:
            texts[world.sample_index] = world.state()
        assert world.receipt.sequence() == sequence[: world.sample_index]
        assert len(sequence) - world.sample_index < 4
        assert {rank.generation for rank in world.ranks} == {generation}
    calls = rpc(server)
    wait_for_commit(server, run, world.sample_index)
    for index, state in [*enumerate(before), *texts.items()]:
        at = 4 * index if index < len(before) and state is before[index] else index
        assert calls.snapshot(run, at) == state["tokenloom"]


def both(first: ServerProcess, second: ServerProcess, run: str) -> str:
    return f"grpc://{first.grpc},{second.grpc}/{run}"


@pytest.mark.parametrize("ledger", ["sqlite", "redis"])
def test_ranks_go_over_to_the_standby_when_their_server_dies(
    corpus: Corpus,
    sequence: list[Sample],
    start_server: StartServer,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
    ledger: str,
) -> None:
    run = "taken-over"
    url = "sqlite:///../shared.db" if ledger == "sqlite" else request.getfixturevalue("redis_url")
    mixture = corpus.mixture(run, window_micro_steps=8)
    leader = start_server(mixture, ledger=url, flags=LEASE)
    standby = start_server(mixture, ledger=url, flags=(*LEASE, "--standby"))
    with World(both(leader, standby, run), 2, 2, prefetch_steps=2) as world:
        world.steps(5)
        generation = world.ranks[0].generation
        leader.kill()
        world.steps(6)
        # And back: the first comes again as the standby of the second, which ends in an orderly way.
        leader.start_with(*LEASE, "--standby")
        standby.terminate()
        world.steps(6)
        world.run()
        assert world.receipt.sequence() == sequence[: world.sample_index]
        assert {rank.generation for rank in world.ranks} == {generation}
        wait_for_commit(leader, run, world.sample_index)
    # A line of each rank for each of the two servers that went, however often it tried until another one led.
    assert caplog.text.count("broke, reconnecting") == 4
    assert "leads at server epoch 2" in standby.log
    assert "leads at server epoch 3" in leader.log
    assert "first batch" in standby.log


def test_a_second_server_is_refused_while_the_first_leads_or_waits_until_it_is_told_to_end(
    corpus: Corpus,
    start_server: StartServer,
    tokenloom: CommandLine,
    redis_url: str,
    tmp_path: Path,
) -> None:
    run = "led"
    mixture = corpus.mixture(run)
    # A leader that has no time for a while is to keep its lease.
    leader = start_server(mixture, ledger=redis_url, flags=("--lease", 60))
    serve = (
        "serve",
        mixture,
        "--ledger",
        redis_url,
        "--grpc",
        "127.0.0.1:0",
        "--rest",
        "127.0.0.1:0",
    )
    refused = tokenloom(*serve, *LEASE)
    assert refused.status == 2
    assert "LeaseHeld" in refused.output
    text = " ".join(refused.output.split())
    assert "is served by" in text
    assert leader.grpc in text
    assert "--standby" in text
    log = tmp_path / "waiting.log"
    log.touch()
    waiting = server_forks().fork(MAIN, [*serve, "--lease", 60], output=log)
    try:
        wait_for(lambda: "waiting up to 60 s" in log.read_text(), "the wait for the lease")
        waiting.send_signal(signal.SIGTERM)
        assert waiting.wait() == 0
    finally:
        waiting.kill()
    with World(leader.url(run), 1, 2) as world:
        world.steps(3)


def test_a_server_that_is_told_to_end_does_so_with_clients_connected_and_commits_what_they_acknowledged(
    corpus: Corpus, sequence: list[Sample], start_server: StartServer
) -> None:
    run = "stopped"
    server = start_server(corpus.mixture(run, window_micro_steps=2))
    with World(server.url(run), 2, 2, prefetch_steps=2) as world:
        for end in (server.interrupt, server.terminate):
            world.steps(4)
            assert end() == 0
            assert not server.ready_file.exists()
            assert "Traceback" not in server.log
            late = threading.Thread(
                target=world.steps, args=(4,)
            )  # it waits in next() while the server is away
            late.start()
            server.start()
            late.join(60)
            assert not late.is_alive()
        assert world.run().receipt.sequence() == sequence[: len(sequence) // 4 * 4]


def test_a_server_that_starts_removes_the_ready_file_of_one_that_was_killed(
    corpus: Corpus, start_server: StartServer
) -> None:
    server = start_server(corpus.mixture("ready"))
    server.kill()
    server.ready_file.write_text("of one that was killed")
    server.start()
    assert json.loads(server.ready_file.read_text()) == {
        "grpc": server.grpc,
        "rest": server.rest,
        "runs": ["ready"],
    }
    line = f"tokenloom is ready: gRPC on {server.grpc}, REST and page on http://{server.rest}/ (runs: ready)"
    assert server.log.splitlines().count(line) == 2
