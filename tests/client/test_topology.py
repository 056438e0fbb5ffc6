"""Rank, world size and the attempt that all ranks of a launch share."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.trainer import trainer_forks
from tokenloom.connection.topology import LaunchOptions, Topology, _shared, resolve

VARIABLES = ["RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_STEP_ID"]
VARIABLES += ["SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID"]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def topology(
    rank: int | None = None,
    world_size: int | None = None,
    attempt: str | None = None,
    **options: Any,
) -> Topology:
    return resolve(
        "run",
        stream="train",
        rank=rank,
        world_size=world_size,
        launch=LaunchOptions(attempt=attempt),
        timeout_s=5,
        **options,
    )


def test_a_process_without_a_launcher_is_the_only_rank_and_makes_its_own_attempt() -> None:
    one, other = topology(), topology()

    assert (one.rank, one.world_size) == (0, 1)
    assert one.attempt != other.attempt


def test_torchruns_variables_give_the_rank_and_arguments_win_over_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "8")

    assert topology(attempt="mine") == Topology(7, 8, "mine")
    assert topology(1, 2, "mine") == Topology(1, 2, "mine")


def test_ranks_of_a_slurm_step_share_an_attempt_that_a_restart_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_PROCID", "0")
    first = topology()
    monkeypatch.setenv("SLURM_PROCID", "1")
    second = topology()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    restarted = topology()

    assert (first.rank, second.rank, second.world_size) == (0, 1, 2)
    assert first.attempt == second.attempt != restarted.attempt


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ("RANK=1 WORLD_SIZE=2", r"init_process_group before making.*SLURM job step.*attempt="),
        # Torchrun starts ranks again within a step.
        (
            "RANK=1 WORLD_SIZE=2 SLURM_JOB_ID=77 SLURM_STEP_ID=0 TORCHELASTIC_RUN_ID=x",
            "init_process_group before making the dataset",
        ),
        ("WORLD_SIZE=2", "WORLD_SIZE is 2 but RANK is not set"),
        ("SLURM_JOB_ID=77 SLURM_NTASKS=2", "SLURM_NTASKS is 2 but SLURM_PROCID is not set.*srun"),
        # The shell of salloc, as a step of its own; and a batch script.
        (
            "SLURM_JOB_ID=77 SLURM_NTASKS=2 SLURM_PROCID=0 SLURM_STEP_ID=4294967290",
            "SLURM_NTASKS is 2 but this shell is none of these tasks",
        ),
        ("SLURM_JOB_ID=77 SLURM_NTASKS=2 SLURM_PROCID=0", "needs an attempt id.*SLURM job step"),
        ("RANK=3", "RANK is '3' but WORLD_SIZE is not set.*init_process_group"),
        ("RANK=first WORLD_SIZE=2", "RANK='first' and WORLD_SIZE='2' must be integers"),
    ],
)
def test_a_launcher_that_does_not_say_enough_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, variables: str, message: str
) -> None:
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))

    with pytest.raises(ValueError, match=message):
        topology()
    # One process alone need not know its rank in a job of which it is no task.
    attempt = None if "RANK" in variables or "WORLD_SIZE" in variables else "alone"
    if attempt:
        assert topology(attempt=attempt, single=True) == Topology(0, 1, attempt)


@pytest.mark.parametrize(
    ("rank", "world_size", "message"),
    [
        (2, 2, "rank 2 is not below world_size 2"),
        (0, None, "give both rank and world_size"),
        (None, 2, "give both rank and world_size"),
        (-1, 2, "takes no part"),
    ],
)
def test_a_rank_that_does_not_fit_its_world_is_refused(
    rank: int, world_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        topology(rank, world_size, "mine")
    with pytest.raises(ValueError, match="attempt is empty"):
        topology(0, 2, "")


def resolved(store: dist.Store, ranks: Collection[int], timeout_s: float = 20) -> dict[int, str]:
    """The attempts that ranks of a world of three get through a store, all at once."""
    with ThreadPoolExecutor(3) as pool:
        asked = {
            rank: pool.submit(_shared, store, "run/train/of-3", rank, 3, timeout_s)
            for rank in ranks
        }
        return {rank: attempt.result() for rank, attempt in asked.items()}


def test_what_an_earlier_life_left_in_the_store_is_not_taken_for_the_attempt() -> None:
    store = dist.HashStore()
    first = resolved(store, (0, 1, 2))
    # Of the next life, rank 0 comes alone, then only the others do: the store has all sorts of rests.
    for ranks in ((0,), (0, 2), (1, 2)):
        with pytest.raises(ValueError, match=r"waited 0\.2 s for rank"):
            resolved(store, ranks, timeout_s=0.2)
    lives = [first, *(resolved(store, order) for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)))]

    assert [len(set(life.values())) for life in lives] == [1, 1, 1, 1]
    assert len({life[0] for life in lives}) == 4


def test_ranks_that_are_waited_for_in_vain_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"rank 0 waited 0\.1 s for rank 1, 2 to make a dataset .*every rank"
    ):
        resolved(dist.HashStore(), (0,), timeout_s=0.1)
    with pytest.raises(ValueError, match=r"rank 2 waited 0\.1 s for rank 0 to make its dataset"):
        resolved(dist.HashStore(), (2,), timeout_s=0.1)


RANK_OF_A_GROUP = """
import sys
import torch.distributed as dist
from support.trainer import trainer_forks
from tokenloom import LaunchOptions, RemoteDataset

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
url = "grpc://127.0.0.1:1/run"
made = [RemoteDataset(url, 1), RemoteDataset(url + "-2", 1), RemoteDataset(url, 1)]
alone = dist.new_group([rank], use_local_synchronization=True)
made.append(RemoteDataset(url, 1, launch=LaunchOptions(process_group=alone)))
print(*[f"{d.rank}/{d.world_size}:{d._request.topology.attempt}" for d in made])
dist.barrier()
dist.destroy_process_group()
"""


def test_the_ranks_of_a_process_group_share_an_attempt_for_each_dataset(tmp_path: Path) -> None:
    script, outputs = tmp_path / "rank.py", [tmp_path / "0.txt", tmp_path / "1.txt"]
    script.write_text(RANK_OF_A_GROUP, encoding="utf-8")
    ranks = [
        trainer_forks().fork(script, [rank, tmp_path / "store"], output=output)
        for rank, output in enumerate(outputs)
    ]
    statuses = [rank.wait() for rank in ranks]
    answers = [output.read_text(encoding="utf-8") for output in outputs]

    assert statuses == [0, 0], answers
    slots = [[slot.split(":") for slot in answer.split()] for answer in answers]
    assert [[place for place, _ in rank] for rank in slots] == [
        ["0/2", "0/2", "0/2", "0/1"],
        ["1/2", "1/2", "1/2", "0/1"],
    ]
    attempts = [[attempt for _, attempt in rank] for rank in slots]
    assert attempts[0][:3] == attempts[1][:3]
    assert len({*attempts[0], *attempts[1]}) == 5
