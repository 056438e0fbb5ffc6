"""One global sequence for any number of ranks and any batch size, with the server stopped and killed in between."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from conftest import Corpus, StartServer
from support.ports import free_port
from support.server_process import ServerProcess
from support.trainer import Receipt, Sample, Trainer, World, rolling_digest

RUNS = ("rewound", "processes", "loader-0", "loader-1", "workers")


@pytest.fixture(scope="module")
def server(corpus: Corpus, serve: StartServer) -> ServerProcess:
    """Serves a run for each test that needs no server of its own."""
    mixtures = [corpus.mixture(run, window_micro_steps=2) for run in RUNS]
    return serve(*mixtures)


def plain_counters(server: ServerProcess, run: str) -> tuple[int, dict[str, int], dict[str, int], dict[str, int]]:
    """(sample index, samples, rows and tokens by spec) in the ledger, read as any outsider may."""
    if server.ledger.startswith("redis"):
        with redis.Redis(port=urlsplit(server.ledger).port or 0, decode_responses=True) as client:
            uid = client.hget("tokenloom:runs", f"{run}/train")
            key = f"tokenloom:{{{uid}}}:train"
            counters = [_numbers(client.hgetall(f"{key}:{name}")) for name in ("samples", "rows", "tokens")]
            return int(client.hget(key, "sample_index") or 0), counters[0], counters[1], counters[2]
    connection = sqlite3.connect(f"file:{server.ledger_file}?mode=ro", uri=True)
    try:
        (run_id,) = connection.execute("SELECT id FROM runs WHERE name = ? AND stream = 'train'", (run,)).fetchone()
        (index,) = connection.execute("SELECT sample_index FROM committed WHERE run = ?", (run_id,)).fetchone()
        rows = connection.execute(
            "SELECT spec, samples, rows, tokens FROM counters WHERE run = ?", (run_id,)
        ).fetchall()
    finally:
        connection.close()
    by_name: list[dict[str, int]] = [{row[0]: row[1 + i] for row in rows} for i in range(3)]
    return index, by_name[0], by_name[1], by_name[2]


def _numbers(found: Any) -> dict[str, int]:
    return {spec: int(value) for spec, value in found.items()}


def assert_counted(server: ServerProcess, run: str, corpus: Corpus, committed: list[Sample]) -> None:
    """The ledger holds exactly what a recount of the tensors gives."""
    index, samples, rows, tokens = plain_counters(server, run)
    assert index == len(committed)
    assert tokens == corpus.tokens(committed)
    assert rows == corpus.rows(committed)
    assert samples == {spec: count // len(committed[0].ids) for spec, count in tokens.items()}


def test_4_2_3_and_1_ranks_with_other_batch_sizes_get_one_sequence_with_the_server_stopped_and_killed_in_between(
    corpus: Corpus, sequence: list[Sample], start_server: StartServer, ledger: str
) -> None:
    run = "elastic"
    server = start_server(corpus.mixture(run, window_micro_steps=3), ledger=ledger)
    received = Receipt()
    state: dict[str, str] | None = None
    plan = [
        (4, 3, 3, server.terminate),  # a trainer that was stopped in order
        (2, 5, 2, server.kill),
        (3, 2, 6, server.kill),
        (1, 4, None, lambda: None),
    ]
    for world_size, batch_size, steps, stop in plan:
        with World(server.url(run), world_size, batch_size, state=state, prefetch_steps=3) as world:
            if steps is None:
                world.run()
            else:
                world.steps(steps)
                # What is fetched and not trained on is fetched again by the next one.
                time.sleep(0.1)
            state = world.state()
        received.samples.update(world.receipt.samples)
        assert len(received.samples) == world.sample_index, "a sample came twice, or is missing"
        assert_counted(server, run, corpus, received.sequence())
        stop()
        if steps is not None:
            assert_counted(server, run, corpus, received.sequence())
            server.start()
    assert received.sequence() == sequence[: len(received.samples)]
    assert len(sequence) - len(received.samples) < 4  # of an incomplete last step
    assert world.digest == rolling_digest(received.sequence())


def test_ranks_in_processes_of_their_own_share_an_attempt_by_their_process_group_and_may_be_killed(
    server: ServerProcess, sequence: list[Sample], tmp_path: Path
) -> None:
    run = "processes"
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        Trainer(
            tmp_path, f"rank-{rank}", group | {"RANK": str(rank)},
            url=server.url(run), batch_size=2, steps=6, process_group=True, options={"prefetch_steps": 2},
        )
        for rank in range(2)
    ]  # fmt: skip
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].log() + ranks[1].log()
    lines = [rank.lines() for rank in ranks]
    assert [line["state"] for line in lines[0]] == [line["state"] for line in lines[1]]
    received = Receipt({**ranks[0].receipt().samples, **ranks[1].receipt().samples})
    assert received.sequence() == sequence[:24]

    alone = Trainer(tmp_path, "alone", {}, url=server.url(run), batch_size=3, state=lines[0][3]["state"])
    deadline = time.monotonic() + 60
    while len(alone.lines()) < 5 and alone.running() and time.monotonic() < deadline:
        time.sleep(0.01)
    alone.kill()
    first = alone.receipt().sequence(16)
    assert first == sequence[16 : 16 + len(first)]
    with World(server.url(run), state=alone.lines()[-1]["state"]) as world:
        assert world.run().receipt.sequence(16 + len(first)) == sequence[16 + len(first) :]
