"""Training scripts as a launcher runs them, one process for each rank, that may be killed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .forks import Fork, Forks
from .ports import free_port

#: Longer than any job here takes on two busy cores.
JOB_DEADLINE_S = 400.0


@dataclass(frozen=True, slots=True)
class Job:
    """The ranks of one launch of a script."""

    ranks: tuple[Fork, ...]
    folder: Path

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text(encoding="utf-8", errors="replace")

    def statuses(self) -> list[int | None]:
        """How each rank ended; None for one that runs."""
        return [rank.poll() for rank in self.ranks]

    def wait(self) -> None:
        """Until every rank has ended, well; raises with what they printed otherwise."""
        deadline = time.monotonic() + JOB_DEADLINE_S
        while (
            None in (statuses := self.statuses())
            and not any(statuses)
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        if any(status != 0 for status in statuses):
            self.kill()
            raise AssertionError(f"the ranks ended with {statuses}:\n{self.output[-8000:]}")

    def kill(self) -> None:
        """SIGKILL for every rank, as the end of a preempted node; waits until they are gone."""
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.wait()


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
    ranks = []
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
        output = folder / "output.txt"
        ranks.append(
            forks.fork(
                script.resolve(), arguments, output=output, folder=folder, environment=variables
            )
        )
    return Job(tuple(ranks), folder)
