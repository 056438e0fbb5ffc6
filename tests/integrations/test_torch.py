"""Plain PyTorch: the examples, killed and resumed."""

from __future__ import annotations

from pathlib import Path

from support.killed import EXAMPLES, kill_and_resume, two_runs
from support.scripts import Forks


def test_a_ddp_job_that_is_killed_goes_on_as_if_nothing_had_been(torch_forks: Forks, tmp_path: Path) -> None:
    with two_runs(tmp_path) as urls:
        kill_and_resume(torch_forks, EXAMPLES / "ddp.py", urls, tmp_path, resumed_world_sizes=[2, 1, 4])


def test_an_fsdp2_job_reshards_its_weights_and_its_data(torch_forks: Forks, tmp_path: Path) -> None:
    with two_runs(tmp_path) as urls:
        kill_and_resume(torch_forks, EXAMPLES / "fsdp2.py", urls, tmp_path, resumed_world_sizes=[2, 1])
