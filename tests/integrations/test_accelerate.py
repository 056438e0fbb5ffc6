"""Accelerate without Trainer: the example, killed and resumed, and what the loader refuses."""

from __future__ import annotations

from pathlib import Path

from support.killed import EXAMPLES, kill_and_resume, two_runs
from support.scripts import Forks


def test_a_loop_with_accelerate_that_is_killed_goes_on_as_if_nothing_had_been(
    accelerate_forks: Forks, tmp_path: Path
) -> None:
    with two_runs(tmp_path) as urls:
        kill_and_resume(
            accelerate_forks,
            EXAMPLES / "accelerate_loop.py",
            urls,
            tmp_path,
            resumed_world_sizes=[2, 1],
            arguments=["--accumulate", 2],
        )
