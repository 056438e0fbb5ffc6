"""Real launchers and what they do to ranks: ``torchrun`` that restarts them in place or with other members, and a
SLURM job that is requeued. Each life has an attempt id of its own, and goes on exactly at the checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import support
from conftest import Corpus, StartServer
from support import launched
from support.launched import BEFORE_THE_DATASET, ENOUGH, lives, trained_on
from support.ports import free_port
from support.server_process import ServerProcess
from support.trainer import Sample, Trainer

DEADLINE_S = 240.0


def wait_for(happened: Callable[[], bool], what: str, agents: list[Agent]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not happened():
        ended = [agent for agent in agents if not agent.running()]
        assert not ended and time.monotonic() < deadline, f"no {what}:\n" + "\n".join(a.log() for a in agents)
        time.sleep(0.02)


class Agent:
    """``torchrun`` on one node, and the ranks under it."""

    def __init__(self, folder: Path, name: str, plan: dict[str, Any], *options: str) -> None:
        self._log = folder / f"{name}.log"
        tests = str(Path(support.__file__).parent.parent)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            # Else the agent's store outlives the ranks (torch 2.7 and later), and gloo, not we, takes a dead rank's
            # address from it. What we do with such a store is tested in tests/client/test_topology.py.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--monitor-interval", "0.1", *options]
        command += [launched.__file__, json.dumps({**plan, "folder": str(folder)})]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)

    def running(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> int:
        return self._process.wait(DEADLINE_S)

    def kill(self) -> None:
        """The node goes: agent and ranks at once. Ranks are in sessions of their own."""
        with contextlib.suppress(psutil.NoSuchProcess):
            agent = psutil.Process(self._process.pid)
            for process in (*agent.children(recursive=True), agent):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._process.wait(DEADLINE_S)

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    """Starts agents; what still runs is killed at the end."""
    agents: list[Agent] = []

    def start(plan: dict[str, Any], *options: str) -> Agent:
        agents.append(Agent(tmp_path, f"agent-{len(agents)}", plan, *options))
        return agents[-1]

    yield start
    for agent in agents:
        agent.kill()


def attempts_in_ledger(server: ServerProcess) -> list[str]:
    with contextlib.closing(sqlite3.connect(f"file:{server.ledger_file}?mode=ro", uri=True)) as connection:
        return [attempt for (attempt,) in connection.execute("SELECT attempt FROM openings ORDER BY generation")]


def test_ranks_that_torchrun_restarts_in_place_go_on_at_the_checkpoint_under_an_attempt_of_their_own(
    corpus: Corpus, sequence: list[Sample], start_server: StartServer, launch: Callable[..., Agent], tmp_path: Path
) -> None:
    run = "in-place"
    server = start_server(corpus.mixture(run), flags=("--liveness", 1))
    crashes = [(0, 1, BEFORE_THE_DATASET), (1, 0, 5)]
    plan = {
        "url": server.url(run),
        "batch_size": 2,
        "until": 40,
        "checkpoint_every": 2,
        "step_s": 0.0,
        "crashes": [{"life": life, "rank": rank, "step": step} for life, rank, step in crashes],
    }
    agent = launch(plan, "--standalone", "--nproc-per-node", "2", "--max-restarts", "2")
    assert agent.wait() == 0, agent.log()
    job = lives(tmp_path)
    # The first life ended before all its ranks were there; the last one went on at the checkpoint.
    assert [(life.start, life.world_size) for life in job] == [(0, 2), (16, 2)]
    assert trained_on(job) == sequence[:40]
    for life in job:
        assert life.receipt.samples.items() <= dict(enumerate(sequence)).items()
    known = attempts_in_ledger(server)
    assert [life.attempt for life in job] == known
    assert len(set(known)) == 2


def test_nodes_that_join_and_leave_a_torchrun_job_change_its_world_and_nothing_in_its_order(
    corpus: Corpus, sequence: list[Sample], start_server: StartServer, launch: Callable[..., Agent], tmp_path: Path
) -> None:
    run = "members"
    server = start_server(corpus.mixture(run), flags=("--liveness", 1))
    plan = {
        "url": server.url(run),
        "batch_size": 1,
        "until": len(sequence),
        "checkpoint_every": 1,
        "step_s": 0.1,
        "crashes": [],
    }
    options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--local-addr", "127.0.0.1"]
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", run]
    timing = "last_call_timeout=1,join_timeout=60,keep_alive_interval=1,keep_alive_max_attempt=6"

    def node(hosts_rendezvous: bool) -> Agent:
        return launch(plan, *options, "--rdzv-conf", f"is_host={int(hosts_rendezvous)},{timing}")

    def worlds() -> list[int]:
        return [life.world_size for life in lives(tmp_path) if life.receipt.samples]

    first = node(True)
    wait_for(lambda: worlds()[-1:] == [1], "step of the first node", [first])
    second = node(False)
    wait_for(lambda: worlds()[-1:] == [2], "step of both nodes", [first, second])
    second.kill()
    wait_for(lambda: worlds()[-2:] == [2, 1], "step of the node that is left", [first])
    (tmp_path / ENOUGH).touch()
    assert first.wait() == 0, first.log()
    job = lives(tmp_path)
    samples = trained_on(job)
    assert samples == sequence[: len(samples)]
    known = attempts_in_ledger(server)
    assert [life.attempt for life in job] == known
    assert len(set(known)) == len(known)


def test_a_slurm_job_that_is_requeued_goes_on_under_the_same_job_id(
    corpus: Corpus, sequence: list[Sample], start_server: StartServer, tmp_path: Path
) -> None:
    run = "requeued"
    server = start_server(corpus.mixture(run), flags=("--liveness", 1))

    def step(name: str, step_id: int, restarts: int, **plan: Any) -> list[Trainer]:
        """``srun`` with two tasks. SLURM sets the count of restarts from the first one on."""
        job = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": str(step_id), "SLURM_NTASKS": "2"}
        job |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
        return [
            Trainer(
                tmp_path, f"{name}-{rank}", job | {"SLURM_PROCID": str(rank)},
                url=server.url(run), batch_size=2, options={"prefetch_steps": 4}, **plan,
            )
            for rank in range(2)
        ]  # fmt: skip

    def wait_for_steps(ranks: list[Trainer], count: int) -> list[list[dict[str, Any]]]:
        deadline = time.monotonic() + DEADLINE_S
        while min(len(rank.lines()) for rank in ranks) < count:
            assert time.monotonic() < deadline and any(r.running() for r in ranks), ranks[0].log()
            time.sleep(0.02)
        return [rank.lines()[:count] for rank in ranks]

    ranks = step("first", 0, 0)
    lines = wait_for_steps(ranks, 5)
    for rank in ranks:
        rank.kill()
    assert lines[0][-1]["state"] == lines[1][-1]["state"]
    checkpoint = lines[0][-1]["state"]

    # `scontrol requeue`: the same job and step, one restart more; then another step of the same job.
    for name, step_id, restarts, at in (("requeued", 0, 1, 20), ("next step", 1, 1, 32)):
        ranks = step(name, step_id, restarts, state=checkpoint, steps=3)
        assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].log() + ranks[1].log()
        received = ranks[0].receipt().samples | ranks[1].receipt().samples
        assert received == dict(enumerate(sequence[at : at + 12], at))
        checkpoint = ranks[0].lines()[-1]["state"]

    known = attempts_in_ledger(server)
    assert known == [f"slurm-4711-{ids}-train" for ids in ("0-0", "0-1", "1-1")]
