"""Ray Data: read_parquet, map_batches to pack, mixed by weights, one streaming split."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from benchmarks.peers.loop import SOURCES, WEIGHTS, Ids, Job, Tokenizer, flat_ids, main

ROWS, TEXT_ROWS = 1_000, 100
OBJECT_STORE_BYTES = 2 << 30


class Pack:
    """A table of documents as blocks; a worker process keeps the tokeniser."""

    def __init__(self, job: Job) -> None:
        self._block = job.block
        self._tokenizer = Tokenizer(job) if job.is_text else None

    def __call__(self, table: pa.Table) -> dict[str, Ids]:
        if self._tokenizer is not None:
            flat = self._tokenizer.flat(table["text"].to_pylist())
        else:
            flat = np.concatenate([flat_ids(lists) for lists in table["ids"].chunks])
        whole = len(flat) // self._block * self._block
        return {"input_ids": flat[:whole].reshape(-1, self._block)}


def batches(job: Job) -> Iterator[torch.Tensor]:
    os.environ.update(
        RAY_DISABLE_IMPORT_WARNING="1", RAY_DEDUP_LOGS="0", RAY_USAGE_STATS_ENABLED="0"
    )
    import ray
    import ray.data

    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": {"PYTHONPATH": str(Path.cwd())}},
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = TEXT_ROWS if job.is_text else ROWS
    sources = [
        ray.data.read_parquet(job.files(source)).map_batches(
            Pack(job), batch_format="pyarrow", batch_size=rows
        )
        for source in SOURCES
    ]
    mixed = sources[0].mix(*sources[1:], weights=list(WEIGHTS))
    split = mixed.streaming_split(1, equal=False)[0]
    for batch in split.iter_torch_batches(batch_size=job.batch, drop_last=True, prefetch_batches=4):
        yield batch["input_ids"]


if __name__ == "__main__":
    main(batches)
