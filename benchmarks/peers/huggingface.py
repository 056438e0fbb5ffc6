"""Hugging Face datasets, two ways.

``streaming``  Parquet as an IterableDataset, packed in a batched map over Arrow tables with numpy (the fast way).
``map``        prepacked blocks from save_to_disk, memory-mapped, under torchdata's StatefulDataLoader.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.peers.loop import SEED, SOURCES, WEIGHTS, Job, Tokenizer, flat_ids, main

#: Rows that are packed at a time; the rest of them that fills no block is dropped, as such maps do.
ROWS, TEXT_ROWS = 1_000, 100


class Pack:
    """An Arrow table of documents as one of blocks."""

    def __init__(self, job: Job) -> None:
        self._block = job.block
        self._tokenizer = Tokenizer(job) if job.is_text else None

    def __call__(self, table: pa.Table) -> pa.Table:
        if self._tokenizer is not None:
            flat = self._tokenizer.flat(table["text"].to_pylist())
        else:
            flat = np.concatenate([flat_ids(lists) for lists in table["ids"].chunks])
        whole = len(flat) // self._block * self._block
        ends = pa.array(np.arange(0, whole + 1, self._block, dtype=np.int32))
        return pa.table({"input_ids": pa.ListArray.from_arrays(ends, pa.array(flat[:whole]))})


def prepare(job: Job, into: Path) -> None:
    for source in SOURCES:
        cache = str(into / "cache")
        found = datasets.load_dataset(
            "parquet", data_files=job.files(source), split="train", cache_dir=cache
        )
        packed = found.with_format("arrow").map(
            Pack(job),
            batched=True,
            batch_size=ROWS,
            remove_columns=["ids"],
            load_from_cache_file=False,
        )
        packed.save_to_disk(str(into / source))
        shutil.rmtree(cache)


def batches(job: Job) -> Iterator[torch.Tensor]:
    datasets.disable_progress_bars()
    parts: list[Any]
    if job.variant == "streaming":
        parts = [
            datasets.load_dataset(
                "parquet", data_files=job.files(source), split="train", streaming=True
            )
            .with_format("arrow")
            .map(
                Pack(job),
                batched=True,
                batch_size=TEXT_ROWS if job.is_text else ROWS,
                remove_columns=[job.column],
            )
            for source in SOURCES
        ]
    else:
        parts = [datasets.load_from_disk(str(job.prepared / source)) for source in SOURCES]
    mixed = datasets.interleave_datasets(
        parts, probabilities=list(WEIGHTS), seed=SEED, stopping_strategy="first_exhausted"
    ).with_format("torch")
    options: dict[str, Any] = {"batch_size": job.batch, "num_workers": 0, "drop_last": True}
    loader: Any = (
        torch.utils.data.DataLoader(mixed, **options)
        if job.variant == "streaming"
        else StatefulDataLoader(mixed, **options)
    )
    for batch in loader:
        yield batch["input_ids"]


if __name__ == "__main__":
    main(batches, prepare)
