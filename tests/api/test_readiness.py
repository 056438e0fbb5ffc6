"""Whether a server is alive, whether it can serve, and whether a run is well: three questions."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client import generate_latest
from support.corpora import mixture, write_corpus
from support.ports import free_port
from support.redis_server import RedisServer
from support.served import Trainer, never, runs_of
from tokenloom_proto.threads import Background
from tokenloom_server.api.metrics import create_registry
from tokenloom_server.api.rest.server import RestServer
from tokenloom_server.api.server import ServeOptions, Server
from tokenloom_server.api.service import Runs
from tokenloom_server.errors import LedgerUnavailable, NotLeader, OrderMismatch


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    """Two runs of one server."""
    folder = write_corpus(tmp_path / "corpus")
    paths = [folder / f"{name}.yaml" for name in ("one", "two")]
    for path in paths:
        path.write_text(
            yaml.safe_dump(mixture(run=path.stem, window_micro_steps=6)), encoding="utf-8"
        )
    with runs_of(tmp_path, *paths) as runs:
        yield runs


@contextmanager
def answering(runs: Runs) -> Iterator[Callable[[str], httpx.Response]]:
    """What REST answers to a GET."""
    server = RestServer("127.0.0.1", 0)
    server.start(runs)
    try:
        yield lambda path: httpx.get(f"http://{server.address}{path}", trust_env=False, timeout=60)
    finally:
        server.stop()


def test_one_run_whose_order_differs_ends_its_own_ranks_by_name_and_the_others_stay_in_service(
    runs: Runs,
) -> None:
    one, two = (runs.get(name) for name in ("one", "two"))
    trainers = Trainer(one), Trainer(two)
    for trainer in trainers:
        trainer.train(2)
    rank = trainers[0].ranks[1]
    with pytest.raises(OrderMismatch):
        one.coordinator.sessions.attach(
            rank.joined.uid, 1, 1, rank.call.nonce, rank.consumed, 0, "f" * 32
        )
    for rank in trainers[0].ranks:
        with pytest.raises(OrderMismatch, match=r"rank 1 has digest f+ at sample 8"):
            one.coordinator.sessions.next_for(rank.session, 5.0, never)
    trainers[1].train(3)
    with answering(runs) as get:
        assert get("/readyz").status_code == 200
        assert str(get("/v1/runs/one/stats").json()["error"]).startswith(
            "OrderMismatch: rank 1 has digest ffff"
        )
        assert get("/v1/runs/two/stats").json()["error"] is None
    text = generate_latest(create_registry(runs, version="0")).decode()
    assert "tokenloom_ready 1.0" in text
    assert 'tokenloom_failed{run="one",stream="train"} 1.0' in text
    assert 'tokenloom_failed{run="two",stream="train"} 0.0' in text


def test_a_file_that_was_replaced_below_a_mount_of_itself_is_said_to_be_the_former_one(
    tmp_path: Path,
) -> None:
    folder = write_corpus(tmp_path / "corpus")
    path = folder / "mixture.yaml"
    path.write_text(yaml.safe_dump(mixture()), encoding="utf-8")
    with (
        path.open() as mounted,
        runs_of(tmp_path, Path(f"/proc/self/fd/{mounted.fileno()}")) as runs,
    ):
        (name,) = runs.names()
        assert runs.reload(name) == "Nothing is new in the file."
        path.unlink()  # a mount of a file keeps what it was, without a name, as does a descriptor
        assert runs.reload(name).startswith("Nothing is new: the file was replaced")


def test_a_server_is_ready_while_one_of_its_runs_can_be_served(runs: Runs) -> None:
    one, two = (runs.get(name).coordinator for name in ("one", "two"))
    trainer = Trainer(runs.get("two"))
    trainer.train(1)
    runs.get("one").leadership.end(5.0)
    one.leadership.lose(NotLeader("another server has it"))
    assert one.not_ready() == "stands by: another server has it"
    assert runs.not_ready() is None
    two.committer._note_absence(8, LedgerUnavailable("away on purpose"))
    assert "run one: stands by: " in (runs.not_ready() or "")
    assert "run two: the ledger is away: away on purpose" in (runs.not_ready() or "")
    trainer.train(1)
    assert runs.not_ready() is None


def test_a_thread_that_ended_stands_in_the_runs_own_state(runs: Runs) -> None:
    ended = Background("ended", {}.popitem)
    ended.start()
    ended.join()
    one = runs.get("one")
    one.coordinator._workers = (*one.coordinator._workers, ended)
    assert runs.not_ready() is None
    assert "its thread ended fails, and goes on: KeyError" in (one.stats.read().error or "")


def test_a_process_that_waits_for_a_slow_ledger_as_it_starts_says_that_it_is_alive(
    tmp_path: Path,
) -> None:
    folder = write_corpus(tmp_path / "corpus")
    path = folder / "one.yaml"
    path.write_text(yaml.safe_dump(mixture(run="one")), encoding="utf-8")
    redis = RedisServer(tmp_path).start()
    rest = f"127.0.0.1:{free_port()}"
    options = ServeOptions(
        mixtures=[path],
        grpc="127.0.0.1:0",
        rest=rest,
        ledger=redis.url(),
        ready_file=None,
        index_dir=tmp_path,
    )
    servers: list[Server] = []
    os.kill(redis.pid, signal.SIGSTOP)
    try:
        starting = threading.Thread(target=lambda: servers.append(Server(options)))
        starting.start()
        deadline = time.monotonic() + 120
        answer = None
        while answer is None and time.monotonic() < deadline:
            try:
                answer = httpx.get(f"http://{rest}/healthz", trust_env=False, timeout=60)
            except httpx.ConnectError:
                time.sleep(0.02)
        assert answer is not None
        assert json.loads(answer.text)["status"] == "alive"
        assert not servers
        assert httpx.get(f"http://{rest}/readyz", trust_env=False, timeout=60).status_code == 503
    finally:
        os.kill(redis.pid, signal.SIGCONT)
        starting.join(120)
        for server in servers:
            server.close()
        redis.kill()
    assert servers, "it serves once the ledger answers"
