"""litdata: prepacked chunks for its TokensLoader, mixed by CombinedStreamingDataset; in the trainer's process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset, optimize
from litdata.streaming.item_loader import TokensLoader

from benchmarks.peers.loop import END_OF_TEXT, SEED, SOURCES, WEIGHTS, Job, main

#: Blocks in a chunk file.
CHUNK_BLOCKS = 2_000


def _tokens_of(file: str) -> Iterator[torch.Tensor]:
    import pyarrow.parquet as pq

    for lists in pq.read_table(file)["ids"].chunks:
        offsets, values = lists.offsets.to_numpy(), lists.values.to_numpy()
        for row in range(len(lists)):
            yield torch.from_numpy(
                np.append(values[offsets[row] : offsets[row + 1]], np.int32(END_OF_TEXT))
            )


def prepare(job: Job, into: Path) -> None:
    for source in SOURCES:
        optimize(
            fn=_tokens_of,
            inputs=job.files(source),
            output_dir=str(into / source),
            chunk_size=job.block * CHUNK_BLOCKS,
            item_loader=TokensLoader(block_size=job.block),
            num_workers=1,
        )


def batches(job: Job) -> Iterator[torch.Tensor]:
    sources = [
        StreamingDataset(
            str(job.prepared / source), item_loader=TokensLoader(block_size=job.block), seed=SEED
        )
        for source in SOURCES
    ]
    mixed = CombinedStreamingDataset(sources, seed=SEED, weights=WEIGHTS, iterate_over_all=False)
    yield from StreamingDataLoader(mixed, batch_size=job.batch, num_workers=0, drop_last=True)


if __name__ == "__main__":
    main(batches, prepare)
