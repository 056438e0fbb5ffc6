"""torchtitan: a trainer that uses its loader as torchtitan does, killed and resumed."""

from __future__ import annotations

from pathlib import Path

from support.forks import Forks
from support.killed import kill_and_resume, two_runs


def test_a_job_with_torchtitans_protocol_goes_on_with_another_data_parallel_degree(
    torch_forks: Forks, tmp_path: Path
) -> None:
    with two_runs(tmp_path, labels="shifted") as urls:
        kill_and_resume(
            torch_forks,
            Path(__file__).with_name("titan_trainer.py"),
            urls,
            tmp_path,
            resumed_world_sizes=[4],
            processes_per_rank=2,
            samples=160,
            first_steps=11,
            arguments=["--tp", 2],
        )
