"""Hugging Face Trainer: the example, killed and resumed."""

from __future__ import annotations

from pathlib import Path

from support.killed import EXAMPLES, kill_and_resume, two_runs
from support.scripts import Forks


def test_a_trainer_that_is_killed_goes_on_as_if_nothing_had_been(transformers_forks: Forks, tmp_path: Path) -> None:
    with two_runs(tmp_path) as urls:
        kill_and_resume(transformers_forks, EXAMPLES / "hf_trainer.py", urls, tmp_path, resumed_world_sizes=[2, 1, 4])
