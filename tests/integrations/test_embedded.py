"""A mixture file in place of a server's address: the server inside the job, and the same samples without one."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
import yaml
from support.killed import EXAMPLES, kill_and_resume
from support.scripts import Forks
from support.server_process import ServerProcess
from support.trainer import World
from tokenloom import ConfigError, LeaseHeld, RemoteDataset, SourceError, TokenloomError, embedded, topology
from tokenloom.embedded import Embedded, machine, reachable_host
from tokenloom.topology import Topology

#: Of a server on a busy machine; an idle one takes two seconds.
STARTS_WITHIN_S = 60.0


def sample(folder: Path, **fields: object) -> Path:
    """The sample mixture in a folder of its own, with ``fields`` in place of its own; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(EXAMPLES / "compose" / "data", folder / "data")
    found = yaml.safe_load((EXAMPLES / "compose" / "mixture.yaml").read_text(encoding="utf-8"))
    path = folder / "mixture.yaml"
    path.write_text(yaml.safe_dump(found | fields), encoding="utf-8")
    return path


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    return sample(tmp_path / "mixture")


def servers(mixture: Path) -> list[psutil.Process]:
    """The processes that serve the file, of whomever."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(mixture) in process.cmdline() and "serve" in process.cmdline():
                found.append(process)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            pass
    return found


def wait_for_none(mixture: Path, within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while servers(mixture):
        assert time.monotonic() < deadline, "a server outlived the process that it was for"
        time.sleep(0.02)


def test_a_job_with_its_server_inside_goes_on_behind_a_kill(torch_forks: Forks, tmp_path: Path) -> None:
    """The kill ends the server, too, and its restart waits for no lease."""
    alone, killed = sample(tmp_path / "a"), sample(tmp_path / "b")

    kill_and_resume(
        torch_forks,
        EXAMPLES / "ddp.py",
        (str(alone), str(killed)),
        tmp_path,
        resumed_world_sizes=[2, 1],
    )

    wait_for_none(alone)
    wait_for_none(killed)
