"""Whether a dataset was made for the processes and the steps that its framework has."""

from __future__ import annotations

from tokenloom.datasets.training import TrainingDataset


def check_processes(dataset: TrainingDataset, processes: int, runs: str, after: str) -> None:
    """Raises ``ValueError`` for another number of ranks. ``runs``: who has so many processes; ``after``: what starts
    the process group."""
    if dataset.world_size != processes:
        raise ValueError(
            f"the dataset is rank {dataset.rank} of {dataset.world_size}, but {runs} {processes} processes: make the "
            f"RemoteDataset after {after}, which starts the process group, and without rank and world_size"
        )


def check_accumulate(dataset: TrainingDataset, accumulate: int, has: str) -> None:
    """Raises ``ValueError`` for batches that count the labels of other steps than the framework makes. ``has``: its
    option for how many batches a step has."""
    if dataset.accumulate not in (1, accumulate):
        raise ValueError(
            f"the dataset has accumulate={dataset.accumulate}, but {has}={accumulate}, so global_label_tokens would be "
            "of other steps: make them equal, or leave accumulate out"
        )
