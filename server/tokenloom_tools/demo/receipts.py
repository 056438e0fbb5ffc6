"""What a rank received, written as it trains, so that it can be proved afterwards.

Two files per rank, both only appended to, so that a SIGKILL costs at most the step under way:
``rank-0.samples`` has a fixed-size record for each sample, ``rank-0.steps.jsonl`` a line for each step.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from tokenloom import RemoteDataset

#: Structured arrays: ``sample_id``, ``source_id`` and ``ids`` of each sample.
Samples = NDArray[np.void]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of one rank. All but the loss is the same on every rank."""

    step: int
    """Counted from 1 in each launch."""
    sample_index: int
    total_tokens: int
    digest: str
    loss: float
    lr: float


def sample_type(sequence_length: int) -> np.dtype[np.void]:
    """One sample's record."""
    return np.dtype(
        [("sample_id", "<i8"), ("source_id", "<i4"), ("ids", "<u4", (sequence_length,))]
    )


def make_samples(sample_ids: ArrayLike, source_ids: ArrayLike, ids: ArrayLike) -> Samples:
    """Records from the columns of a batch."""
    rows = np.asarray(ids)
    samples = np.empty(len(rows), sample_type(rows.shape[1]))
    samples["sample_id"], samples["source_id"], samples["ids"] = sample_ids, source_ids, rows
    return samples


def received(
    batch: Mapping[str, Any],
    dataset: RemoteDataset,
    number: int,
    loss: float = 0.0,
    lr: float = 0.0,
) -> tuple[Samples, Step]:
    """The receipt of one step: the samples of its batch, and where the dataset stands after it."""
    step = Step(
        step=number,
        sample_index=dataset.sample_index,
        total_tokens=dataset.total_tokens,
        digest=dataset.digest,
        loss=loss,
        lr=lr,
    )
    return make_samples(batch["sample_ids"], batch["source_ids"], batch["input_ids"]), step


def receive(url: str, batch_size: int, samples: int) -> Receipts:
    """What one rank receives of the first ``samples`` samples of a run, in steps of ``batch_size``, without training:
    the uninterrupted run that the trainers' samples are compared with."""
    from tokenloom import RemoteDataset

    parts, steps = [], []
    with RemoteDataset(url, batch_size=batch_size, rank=0, world_size=1) as dataset:
        for number, batch in enumerate(dataset, start=1):
            rows, step = received(batch, dataset, number)
            parts.append(rows)
            steps.append(step)
            if dataset.sample_index >= samples:
                break
    return Receipts(np.concatenate(parts), steps)


class ReceiptWriter:
    """Appends the receipts of one rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Unbuffered: what was written is with the system, and outlives this process.
        self._samples = (folder / f"rank-{rank}.samples").open("wb", buffering=0)
        self._steps = (folder / f"rank-{rank}.steps.jsonl").open("wb", buffering=0)

    def write(self, samples: Samples, step: Step) -> None:
        """The samples first: a step that is on record has all of them."""
        self._samples.write(samples.tobytes())
        self._steps.write(json.dumps(asdict(step)).encode() + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._samples.close()
        self._steps.close()


@dataclass(frozen=True, slots=True)
class Receipts:
    """All that one rank received in one launch."""

    samples: Samples
    steps: list[Step]


def read_steps(folder: Path, rank: int) -> list[Step]:
    """The steps so far; a line that is being written does not count yet."""
    try:
        lines = (folder / f"rank-{rank}.steps.jsonl").read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    return [Step(**json.loads(line)) for line in lines]


def read(folder: Path, rank: int, sequence_length: int) -> Receipts:
    """The receipts of one rank; a record that was cut by a SIGKILL is left out."""
    record = sample_type(sequence_length)
    data = (folder / f"rank-{rank}.samples").read_bytes()
    samples = np.frombuffer(data, record, count=len(data) // record.itemsize)
    return Receipts(samples, read_steps(folder, rank))


def join(parts: Iterable[Samples]) -> Samples:
    """All samples of several ranks or launches, by sample index."""
    samples = np.concatenate(list(parts))
    return samples[np.argsort(samples["sample_id"], kind="stable")]
