"""Real launchers and what they do to ranks: ``torchrun`` that restarts them in place, and a SLURM job that is requeued.
Each life has an attempt id of its own, and goes on exactly at the checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import support
from conftest import Corpus, StartServer
from support import launched
from support.launched import BEFORE_THE_DATASET, lives, trained_on
from support.server_process import ServerProcess
from support.trainer import Sample, Trainer

DEADLINE_S = 90.0


@contextlib.contextmanager
def torchrun(
    folder: Path, plan: dict[str, Any], *options: str
) -> Iterator[subprocess.Popen[bytes]]:
    """``torchrun`` and the ranks below it, which are in sessions of their own; killed at the end."""
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
    with (folder / "agent.log").open("wb") as log:
        agent = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment
        )
    try:
        yield agent
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (*psutil.Process(agent.pid).children(recursive=True), agent):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        agent.wait(DEADLINE_S)


def attempts_in_ledger(server: ServerProcess) -> list[str]:
    with contextlib.closing(
        sqlite3.connect(f"file:{server.ledger_file}?mode=ro", uri=True)
    ) as connection:
        return [
            attempt
            for (attempt,) in connection.execute("SELECT attempt FROM openings ORDER BY generation")
        ]


def test_ranks_that_torchrun_restarts_in_place_go_on_at_the_checkpoint_under_an_attempt_of_their_own(
    corpus: Corpus, sequence: list[Sample], start_server: StartServer, tmp_path: Path
) -> None:
    run = "in-place"
    server = start_server(corpus.mixture(run), flags=("--liveness", 1))
    crashes = [(0, 1, BEFORE_THE_DATASET), (1, 0, 5)]
    plan = {
        "url": server.url(run),
        "batch_size": 2,
        "until": 40,
        "checkpoint_every": 2,
        "crashes": [{"life": life, "rank": rank, "step": step} for life, rank, step in crashes],
    }
    with torchrun(
        tmp_path, plan, "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"
    ) as agent:
        assert agent.wait(DEADLINE_S) == 0, (tmp_path / "agent.log").read_text()
    job = lives(tmp_path)
    # The first life ended before all its ranks were there; the last one went on at the checkpoint.
    assert [(life.start, life.world_size) for life in job] == [(0, 2), (16, 2)]
    assert trained_on(job) == sequence[:40]
    for life in job:
        assert life.receipt.samples.items() <= dict(enumerate(sequence)).items()
    known = attempts_in_ledger(server)
    assert [life.attempt for life in job] == known
    assert len(set(known)) == 2


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
    stopped = ranks[1]
    stopped.pause()  # through all that follows
    ranks[0].kill()
    assert lines[0][-1]["state"] == lines[1][-1]["state"]
    checkpoint = lines[0][-1]["state"]

    # A wrapper starts them again within the step: who is of which launch cannot be told.
    for rank in step("again", 0, 0, state=checkpoint, steps=3):
        assert rank.wait() != 0
        assert "AttemptUsed" in rank.log() and "attempt=" in rank.log()

    # `scontrol requeue`: the same job and step, one restart more; then another step of the same job.
    for name, step_id, restarts, at in (("requeued", 0, 1, 20), ("next step", 1, 1, 32)):
        ranks = step(name, step_id, restarts, state=checkpoint, steps=3)
        assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].log() + ranks[1].log()
        received = ranks[0].receipt().samples | ranks[1].receipt().samples
        assert received == dict(enumerate(sequence[at : at + 12], at))
        checkpoint = ranks[0].lines()[-1]["state"]

    stopped.unpause()
    assert stopped.wait() != 0
    assert "Fenced" in stopped.log()
    known = attempts_in_ledger(server)
    assert known == [f"slurm-4711-{ids}-train" for ids in ("0-0", "0-1", "1-1")]
