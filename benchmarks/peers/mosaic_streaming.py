"""MosaicML streaming: prepacked blocks in MDS files, streams with proportions; in the trainer's process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

# streaming imports torchvision for pictures. The torchvision that pip finds is built for CUDA: beside the CPU build of
# torch it has no operators, and its import fails where it describes them. Declared here, and never called.
_OPERATORS = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402

from benchmarks.peers.loop import SEED, SOURCES, WEIGHTS, Job, blocks, main  # noqa: E402


class Blocks(StreamingDataset):
    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.from_numpy(super().__getitem__(number)["tokens"].copy())


def prepare(job: Job, into: Path) -> None:
    for source in SOURCES:
        columns = {"tokens": f"ndarray:int32:{job.block}"}
        with MDSWriter(out=str(into / source), columns=columns, size_limit="32mb") as writer:
            for block in blocks(job, source):
                writer.write({"tokens": np.ascontiguousarray(block)})


def batches(job: Job) -> Iterator[torch.Tensor]:
    # What an earlier process left in shared memory makes the next one fail.
    clean_stale_shared_memory()
    streams = [
        Stream(local=str(job.prepared / source), proportion=weight)
        for source, weight in zip(SOURCES, WEIGHTS, strict=True)
    ]
    dataset = Blocks(streams=streams, batch_size=job.batch, shuffle=False, shuffle_seed=SEED)
    yield from StreamingDataLoader(dataset, batch_size=job.batch, num_workers=0, drop_last=True)


if __name__ == "__main__":
    main(batches, prepare)
