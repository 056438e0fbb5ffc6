"""torchdata.nodes: a hand-written source node (Parquet row groups, packed by numpy) under its weighted sampler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import torchdata.nodes as tn

from benchmarks.peers.loop import SEED, SOURCES, WEIGHTS, Ids, Job, Tokenizer, flat_ids, main, pack


class PackedParquet(tn.BaseNode):
    """Blocks of a source. Its state is a row group, a block in it, and what was left before."""

    def __init__(self, job: Job, source: str) -> None:
        super().__init__()
        self._groups = [
            (file, group)
            for file in job.files(source)
            for group in range(pq.read_metadata(file).num_row_groups)
        ]
        self._column, self._block = job.column, job.block
        self._tokenizer = Tokenizer(job) if job.is_text else None

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        state = initial_state or {"group": 0, "row": 0, "carry": np.empty(0, np.int32)}
        self._group, self._row, self._carry = state["group"], state["row"], state["carry"]
        self._blocks: Ids | None = None

    def next(self) -> Ids:
        while True:
            if self._blocks is None:
                if self._group >= len(self._groups):
                    raise StopIteration
                self._fill()
            assert self._blocks is not None
            if self._row < len(self._blocks):
                block: Ids = self._blocks[self._row]
                self._row += 1
                return block
            self._group, self._row, self._carry, self._blocks = self._group + 1, 0, self._left, None

    def get_state(self) -> dict[str, Any]:
        return {"group": self._group, "row": self._row, "carry": self._carry}

    def _fill(self) -> None:
        file, group = self._groups[self._group]
        column = pq.ParquetFile(file).read_row_group(group, columns=[self._column])[self._column]
        if self._tokenizer is not None:
            flat = self._tokenizer.flat(column.to_pylist())
        else:
            flat = np.concatenate([flat_ids(lists) for lists in column.chunks])
        self._blocks, self._left = pack(flat, self._block, self._carry)


def batches(job: Job) -> Iterator[torch.Tensor]:
    sources = {source: PackedParquet(job, source) for source in SOURCES}
    weights = dict(zip(SOURCES, WEIGHTS, strict=True))
    mixed = tn.MultiNodeWeightedSampler(
        sources, weights, stop_criteria=tn.StopCriteria.FIRST_DATASET_EXHAUSTED, seed=SEED
    )
    batched = tn.Mapper(
        tn.Batcher(mixed, job.batch, drop_last=True), lambda rows: torch.from_numpy(np.stack(rows))
    )
    yield from tn.Loader(batched, restart_on_stop_iteration=False)


if __name__ == "__main__":
    main(batches)
