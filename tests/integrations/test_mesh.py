"""Model-parallel groups from a DeviceMesh: the example, killed and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.killed import EXAMPLES, kill_and_resume, two_runs
from support.scripts import Forks


@pytest.mark.parametrize(
    ("processes_per_rank", "arguments"),
    [(4, ["--tp", 2, "--pp", 2]), (2, ["--cp", 2, "--load-balanced"])],
    ids=["TP2-PP2-DP2", "CP2-DP2"],
)
def test_a_job_on_a_mesh_goes_on_with_other_replicas(
    processes_per_rank: int, arguments: list[object], torch_forks: Forks, tmp_path: Path
) -> None:
    with two_runs(tmp_path) as urls:
        kill_and_resume(
            torch_forks,
            EXAMPLES / "model_parallel.py",
            urls,
            tmp_path,
            world_size=2 * processes_per_rank,
            resumed_world_sizes=[2 * processes_per_rank, processes_per_rank],
            processes_per_rank=processes_per_rank,
            arguments=arguments,
        )
