"""Accelerate without Trainer: the example, killed and resumed, and what the loader refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from support.forks import Forks
from support.killed import EXAMPLES, kill_and_resume, two_runs
from tokenloom import LaunchOptions, RemoteDataset
from tokenloom.integrations.accelerate import TokenloomLoader


def test_a_loop_with_accelerate_that_is_killed_goes_on_as_if_nothing_had_been(
    transformers_forks: Forks, tmp_path: Path
) -> None:
    with two_runs(tmp_path) as urls:
        kill_and_resume(
            transformers_forks,
            EXAMPLES / "accelerate_loop.py",
            urls,
            tmp_path,
            resumed_world_sizes=[2, 1],
            arguments=["--accumulate", 2],
        )


def test_a_checkpoint_holds_whole_optimiser_steps_only(tmp_path: Path) -> None:
    with two_runs(tmp_path / "runs") as urls, RemoteDataset(urls[0], 4) as dataset:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        layer = accelerator.prepare(torch.nn.Linear(1, 1))
        for number, _ in enumerate(TokenloomLoader(accelerator, dataset), start=1):
            with accelerator.accumulate(layer):
                pass
            if number == 3:
                with pytest.raises(
                    RuntimeError, match=r"midst of an optimiser step \(batch 3 of steps of 2\)"
                ):
                    accelerator.save_state(tmp_path / "half")
            if number == 4:
                accelerator.save_state(tmp_path / "whole")
                break
        accelerator.free_memory()
        state = dataset.state_dict()

        other = Accelerator(cpu=True, gradient_accumulation_steps=3)
        other.prepare(torch.nn.Linear(1, 1))
        with RemoteDataset(urls[0], 4) as again:
            TokenloomLoader(other, again)
            other.load_state(tmp_path / "whole")
            assert again.state_dict() == state
        assert other.step == 0, "counted from here on every process, the new ones included"


def test_a_dataset_of_other_ranks_or_steps_is_refused() -> None:
    dataset = RemoteDataset(
        "grpc://127.0.0.1:1/run", 4, rank=0, world_size=2, launch=LaunchOptions(attempt="a")
    )
    with pytest.raises(
        ValueError, match="the dataset is rank 0 of 2, but Accelerate runs 1 processes"
    ):
        TokenloomLoader(Accelerator(cpu=True), dataset)
    dataset = RemoteDataset("grpc://127.0.0.1:1/run", 4, accumulate=2)
    with pytest.raises(
        ValueError, match="has accumulate=2, but Accelerate has gradient_accumulation_steps=3"
    ):
        TokenloomLoader(Accelerator(cpu=True, gradient_accumulation_steps=3), dataset)
