"""Tokenloom's own ``LocalDataset``, as a peer: its threads in the trainer's process, without a server."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenloom import LocalDataset

from benchmarks.peers.loop import Job, main
from benchmarks.workloads import WORKLOADS


def batches(job: Job) -> Iterator[torch.Tensor]:
    workload = WORKLOADS["text" if job.is_text else job.variant]
    with tempfile.TemporaryDirectory() as folder:
        for batch in LocalDataset(workload.write(Path(folder)), job.batch):
            yield batch["input_ids"]


if __name__ == "__main__":
    main(batches)
