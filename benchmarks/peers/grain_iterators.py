"""grain, two ways.

``elastic``  its ElasticIterator over prepacked blocks (flat files of int32, mapped).
``parquet``  Parquet rows, tokenised where they are text, through ConcatThenSplitIterDataset.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import numpy as np
import torch
from absl import flags, logging
from grain._src.core import sharding

from benchmarks.peers.loop import (
    END_OF_TEXT,
    SEED,
    SOURCES,
    WEIGHTS,
    Ids,
    Job,
    Tokenizer,
    blocks,
    main,
)


class Blocks:
    """Prepacked blocks of a flat file, by number."""

    def __init__(self, path: Path, block: int) -> None:
        self._mapped = np.memmap(path, np.int32, "r").reshape(-1, block)

    def __len__(self) -> int:
        return len(self._mapped)

    def __getitem__(self, number: int) -> Ids:
        found: Ids = self._mapped[int(number)]
        return found


def prepare(job: Job, into: Path) -> None:
    into.mkdir(parents=True)
    for source in SOURCES:
        with (into / source).open("wb") as out:
            for block in blocks(job, source):
                out.write(block.tobytes())


def batches(job: Job) -> Iterator[torch.Tensor]:
    logging.set_verbosity(logging.ERROR)
    flags.FLAGS(sys.argv[:1])
    if job.variant == "elastic":
        sources = [
            grain.MapDataset.source(Blocks(job.prepared / source, job.block)) for source in SOURCES
        ]
        mixed = grain.MapDataset.mix(sources, weights=WEIGHTS)
        elastic = grain.experimental.ElasticIterator(
            mixed,
            job.batch,
            sharding.ShardOptions(0, 1),
            read_options=grain.ReadOptions(num_threads=2, prefetch_buffer_size=64),
        )
        for batch in elastic:
            yield torch.from_numpy(np.ascontiguousarray(batch))
        return
    tokenizer = Tokenizer(job)

    def tokens(row: dict[str, Any]) -> dict[str, Ids]:
        if job.is_text:
            return {"tokens": tokenizer.flat([row["text"]])}
        return {"tokens": np.append(row["ids"], np.int32(END_OF_TEXT)).astype(np.int32)}

    packed = [
        grain.experimental.ConcatThenSplitIterDataset(
            grain.experimental.ParquetIterDataset(job.files(source)).map(tokens),
            length_struct={"tokens": job.block},
        )
        for source in SOURCES
    ]
    for batch in (
        grain.IterDataset.mix(packed, weights=WEIGHTS)
        .seed(SEED)
        .batch(job.batch, drop_remainder=True)
    ):
        yield torch.from_numpy(np.ascontiguousarray(batch["tokens"]))


if __name__ == "__main__":
    main(batches, prepare)
