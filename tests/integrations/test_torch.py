"""Plain PyTorch: the examples, killed and resumed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.forks import Forks
from support.killed import (
    EXAMPLES,
    STEPS_DEADLINE_S,
    kill_and_resume,
    same_runs,
    steps_of,
    two_runs,
)
from support.scripts import Job, launch


def test_a_ddp_job_that_is_killed_goes_on_as_if_nothing_had_been(
    torch_forks: Forks, tmp_path: Path
) -> None:
    with two_runs(tmp_path) as urls:
        kill_and_resume(
            torch_forks, EXAMPLES / "ddp.py", urls, tmp_path, resumed_world_sizes=[2, 1]
        )


def test_an_fsdp2_job_reshards_its_weights_and_its_data(torch_forks: Forks, tmp_path: Path) -> None:
    with two_runs(tmp_path) as urls:
        kill_and_resume(
            torch_forks, EXAMPLES / "fsdp2.py", urls, tmp_path, resumed_world_sizes=[2, 1]
        )


def test_a_job_that_is_killed_before_its_first_checkpoint_needs_nobody(
    torch_forks: Forks, tmp_path: Path
) -> None:
    record = tmp_path / "record.jsonl"
    arguments = [
        "--checkpoint",
        tmp_path / "checkpoint",
        "--record",
        record,
        "--samples",
        80,
        "--every",
        1000,
    ]
    with same_runs(tmp_path, 1) as (url,):

        def start() -> Job:
            return launch(
                torch_forks,
                EXAMPLES / "ddp.py",
                [url, *arguments],
                world_size=2,
                folder=tmp_path / "job",
            )

        job, deadline = start(), time.monotonic() + STEPS_DEADLINE_S
        while len(before := steps_of(record)) < 5 and time.monotonic() < deadline:
            time.sleep(0.002)
        job.kill()
        before = steps_of(record)
        assert "begun again" not in job.output
        # The same command, and nothing else.
        job = start()
        job.wait()
    after = steps_of(record)[len(before) :]
    assert [step.sample_index for step in after] == list(range(8, 88, 8))
    assert after[: len(before)] == before
    assert job.output.count("begun again at sample 0 (resume='fresh', no state loaded)") == 1


#: Which loader with how many workers, and on how many ranks it goes on.
LOADERS = {("torch", 0): 1, ("stateful", 1): 1, ("torchdata", 0): 1, ("torchdata", 1): 2}


@pytest.fixture(scope="module")
def loader_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A server of a run for each loader, of one to leave alone, which is trained on once, and of one more."""
    with same_runs(tmp_path_factory.mktemp("loaders"), 2 + len(LOADERS)) as (alone, more, *others):
        yield {
            "alone": alone,
            "more": more,
            "others": dict(zip(LOADERS, others, strict=True)),
            "steps": None,
        }


@pytest.mark.parametrize(("loader", "workers"), LOADERS)
def test_a_job_with_a_loader_goes_on_behind_the_batch_trained_on(
    loader: str, workers: int, torch_forks: Forks, loader_runs: dict[str, Any], tmp_path: Path
) -> None:
    loader_runs["steps"] = kill_and_resume(
        torch_forks,
        EXAMPLES / "loaders.py",
        (loader_runs["alone"], loader_runs["others"][loader, workers]),
        tmp_path,
        resumed_world_sizes=[LOADERS[loader, workers]],
        arguments=["--loader", loader, "--workers", workers],
        alone=loader_runs["steps"],
    )


def test_a_loader_with_a_worker_has_the_state_of_each_batch_that_it_gave(
    torch_forks: Forks, loader_runs: dict[str, Any], tmp_path: Path
) -> None:
    script = Path(__file__).with_name("loader_states.py")
    launch(torch_forks, script, [loader_runs["more"]], world_size=1, folder=tmp_path).wait()
