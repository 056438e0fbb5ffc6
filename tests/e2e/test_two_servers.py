"""Two servers and one run: one leads, the other stands by; ranks go over without being told."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Corpus, Rpc, StartServer
from support.server_process import CommandLine, ServerProcess
from support.trainer import Sample, World
from support.waiting import wait_for
from test_server_restart import committed_index

LEASE = ("--lease", 2)


def both(first: ServerProcess, second: ServerProcess, run: str) -> str:
    return f"grpc://{first.grpc},{second.grpc}/{run}"


@pytest.mark.parametrize("ledger", ["sqlite", "redis"])
def test_ranks_go_over_to_the_standby_when_their_server_dies(
    corpus: Corpus,
    sequence: list[Sample],
    start_server: StartServer,
    rpc: Callable[[ServerProcess], Rpc],
    request: pytest.FixtureRequest,
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
        killed = time.monotonic()
        world.steps(6)
        assert time.monotonic() - killed < 15
        # And back: the first comes again as the standby of the second, which ends in an orderly way.
        leader.start_with(*LEASE, "--standby")
        standby.terminate()
        world.steps(6)
        world.run()
        assert world.receipt.sequence() == sequence[: world.sample_index]
        assert {rank.generation for rank in world.ranks} == {generation}
        calls = rpc(leader)
        wait_for(lambda: committed_index(calls, run) == world.sample_index, "the commit of the last step")
    assert "leads at server epoch 2" in standby.log
    assert "leads at server epoch 3" in leader.log
    assert "first batch" in standby.log


def test_a_second_server_is_refused_while_the_first_leads(
    corpus: Corpus, start_server: StartServer, tokenloom: CommandLine, redis_url: str
) -> None:
    run = "led"
    mixture = corpus.mixture(run)
    leader = start_server(mixture, ledger=redis_url, flags=LEASE)
    refused = tokenloom(
        "serve", mixture, "--ledger", redis_url, "--grpc", "127.0.0.1:0", "--rest", "127.0.0.1:0", *LEASE
    )
    assert refused.status == 2
    assert "LeaseHeld" in refused.output
    text = " ".join(refused.output.split())
    assert "is served by" in text
    assert leader.grpc in text
    assert "--standby" in text
    with World(leader.url(run), 1, 2) as world:
        world.steps(3)


def test_a_server_that_waits_for_a_lease_ends_when_it_is_told_to(
    corpus: Corpus, start_server: StartServer, redis_url: str, tmp_path: Path
) -> None:
    mixture = corpus.mixture("waited-for")
    start_server(mixture, ledger=redis_url, flags=("--lease", 60))
    log = tmp_path / "waiting.log"
    ports = ("--grpc", "127.0.0.1:0", "--rest", "127.0.0.1:0")
    command = [sys.executable, "-m", "tokenloom_server", "serve", str(mixture), "--ledger", redis_url, *ports]
    with log.open("wb") as output:
        waiting = subprocess.Popen([*command, "--lease", "60"], stdout=output, stderr=output)
    try:
        wait_for(lambda: "waiting up to 60 s" in log.read_text(), "the wait for the lease")
        waiting.terminate()
        assert waiting.wait(10) == 0
    finally:
        waiting.kill()
        waiting.wait()
