"""What every peer's program shares. Runs in the peers' environments: numpy, torch and the standard library only.

A peer is a module with ``batches(job)``, an iterator of tensors [batch, block], and, where it reads another form than
Parquet, ``prepare(job, into)``, which makes it once.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

WEIGHTS = (0.7, 0.25, 0.05)
SOURCES = ("0", "1", "2")
END_OF_TEXT = 0
SEED = 42

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Job:
    """What to read, and how."""

    #: The corpus: ``parquet/<source>/*.parquet``, for text with ``tokenizer.json``.
    corpus: Path
    #: What ``prepare`` made of it.
    prepared: Path
    variant: str
    block: int
    batch: int

    @property
    def is_text(self) -> bool:
        return (self.corpus / "tokenizer.json").exists()

    @property
    def column(self) -> str:
        return "text" if self.is_text else "ids"

    def files(self, source: str) -> list[str]:
        """A source's Parquet files in order."""
        return [str(path) for path in sorted((self.corpus / "parquet" / source).iterdir())]


class Tokenizer:
    """`tokenizers`, loaded where it is first used: also in worker processes."""

    def __init__(self, job: Job) -> None:
        self._path = str(job.corpus / "tokenizer.json")
        self._loaded: Any = None

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        if self._loaded is None:
            from tokenizers import Tokenizer as Loaded

            self._loaded = Loaded.from_file(self._path)
        return [
            encoding.ids
            for encoding in self._loaded.encode_batch_fast(texts, add_special_tokens=False)
        ]

    def flat(self, texts: Sequence[str]) -> Ids:
        """All texts' ids, each text's followed by the end-of-text id."""
        return np.concatenate([np.array([*ids, END_OF_TEXT], np.int32) for ids in self(texts)])

    def __getstate__(self) -> dict[str, Any]:
        return {"_path": self._path, "_loaded": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def flat_ids(lists: Any) -> Ids:
    """An Arrow array of lists as one flat array, each list's followed by the end-of-text id. No Python per token."""
    offsets, values = lists.offsets.to_numpy(), lists.values.to_numpy()
    ends = offsets[1:] - offsets[0] + np.arange(len(offsets) - 1)
    joined = np.empty(offsets[-1] - offsets[0] + len(ends), np.int32)
    is_id = np.ones(len(joined), bool)
    is_id[ends] = False
    joined[is_id] = values[offsets[0] : offsets[-1]]
    joined[ends] = END_OF_TEXT
    return joined


def pack(flat: Ids, block: int, carry: Ids) -> tuple[Ids, Ids]:
    """(whole blocks [n, block], what is left) of what was left before and what came."""
    joined = np.concatenate((carry, flat)) if len(carry) else flat
    whole = len(joined) // block * block
    return joined[:whole].reshape(-1, block), joined[whole:].copy()


def documents(job: Job, source: str) -> Iterator[Ids]:
    """A source's documents of ids, one by one."""
    import pyarrow.parquet as pq

    for file in job.files(source):
        for lists in pq.read_table(file)["ids"].chunks:
            offsets, values = lists.offsets.to_numpy(), lists.values.to_numpy()
            for row in range(len(lists)):
                yield values[offsets[row] : offsets[row + 1]]


def blocks(job: Job, source: str) -> Iterator[Ids]:
    """A source's ids, packed into blocks: what loaders read that do not pack."""
    import pyarrow.parquet as pq

    carry = np.empty(0, np.int32)
    for file in job.files(source):
        for lists in pq.read_table(file)["ids"].chunks:
            whole, carry = pack(flat_ids(lists), job.block, carry)
            yield from whole


def main(
    batches: Callable[[Job], Iterator[torch.Tensor]],
    prepare: Callable[[Job, Path], None] | None = None,
) -> None:
    """The program of a peer: prepares its data, or takes batches and says on the board how many, until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--prepared", type=Path, required=True)
    parser.add_argument("--variant", default="")
    parser.add_argument("--block", type=int, default=2_048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--board", type=Path)
    options = parser.parse_args()
    job = Job(options.corpus, options.prepared, options.variant, options.block, options.batch)
    if options.board is None:
        if prepare is not None:
            prepare(job, job.prepared)
        return
    # Loaders' helpers outlive a polite end: the group goes at once.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    torch.set_num_threads(1)
    cells = np.memmap(options.board, np.int64, "r+")
    tokens = 0
    for steps, batch in enumerate(batches(job), 1):
        if steps == 1 and tuple(batch.shape) != (job.batch, job.block):
            sys.exit(f"a batch has shape {tuple(batch.shape)}, expected {(job.batch, job.block)}")
        tokens += batch.numel()
        cells[0], cells[1] = tokens, steps
    cells[2] = 1
    signal.pause()
