"""Training scripts as a launcher runs them, one process for each rank, that may be killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .forks import Forks
from .ports import free_port

#: Longer than any job here takes on two busy cores.
JOB_DEADLINE_S = 90.0


@dataclass(frozen=True, slots=True)
class Job:
    """The ranks of one launch of a script."""

    forks: Forks
    pids: tuple[int, ...]
    folder: Path

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text(encoding="utf-8", errors="replace")

    def wait(self) -> None:
        """Until every rank has ended, well; raises with what they printed otherwise."""
        deadline = time.monotonic() + JOB_DEADLINE_S
        while (waiting := [pid for pid in self.pids if self.forks.status(pid) is None]) and time.monotonic() < deadline:
            if any(self.forks.status(pid) for pid in self.pids):
                break
            time.sleep(0.02)
        statuses = [self.forks.status(pid) for pid in self.pids]
        if any(status != 0 for status in statuses):
            for pid in waiting:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"the ranks ended with {statuses}:\n{self.output[-8000:]}")

    def kill(self) -> None:
        """SIGKILL for every rank, as the end of a preempted node; waits until they are gone."""
        for pid in self.pids:
            if self.forks.status(pid) is None:
                os.kill(pid, signal.SIGKILL)
        while any(self.forks.status(pid) is None for pid in self.pids):
            time.sleep(0.01)


def launch(
    forks: Forks,
    script: Path,
    arguments: Sequence[object],
    *,
    world_size: int,
    folder: Path,
    environment: Mapping[str, str] | None = None,
) -> Job:
    """Starts a script on every rank, with the variables that torchrun sets."""
    folder.mkdir(parents=True, exist_ok=True)
    port = str(free_port())
    pids = []
    for rank in range(world_size):
        variables = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            **(environment or {}),
        }
        rank_process = forks.fork(
            script.resolve(), arguments, output=folder / "output.txt", folder=folder, environment=variables
        )
        pids.append(rank_process.pid)
    return Job(forks, tuple(pids), folder)
