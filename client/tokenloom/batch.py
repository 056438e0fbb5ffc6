"""From the ids of one message to the tensors of its steps.

A whole message is widened at once (one pass of numpy, which releases the interpreter lock), and the
steps are views of it. numpy and not torch: its loops stay on this thread, where torch's would start
worker threads that compete with the trainer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from tokenloom.errors import ProtocolError

#: The label that losses ignore.
IGNORED = -100
#: Source and sample id of a padding sample.
PADDING = -1


class Batch(TypedDict):
    """One step of one rank: B samples of L tokens, all tensors int64 and writable."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    source_ids: torch.Tensor
    sample_ids: torch.Tensor
    sample_index: int
    """End of the step in the run's global order, the same on every rank: what ``state_dict(at=)`` takes."""
    total_tokens: int
    """Tokens of the whole run after this step, the same on every rank."""
    position_ids: NotRequired[torch.Tensor]
    document_ids: NotRequired[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What is the same for all messages of a generation."""

    batch_size: int
    sequence_length: int
    id_type: str
    """The numpy type of an id on the wire, such as ``<u2``."""
    shifted: bool
    """A sample travels as L + 1 ids, and labels are the ids one further."""
    position_ids: bool = False
    document_ids: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """One message, free of wire types."""

    begin_indices: Sequence[int]
    end_indices: Sequence[int]
    slices: Sequence[int]
    total_tokens: Sequence[int]
    ids: bytes
    source_ids: Sequence[int]
    document_counts: Sequence[int]
    document_starts: Sequence[int]


def decode(steps: Steps, layout: Layout) -> list[Batch]:
    """The batches of a message, in order."""
    count, width = len(steps.end_indices), layout.sequence_length + layout.shifted
    expected = count * layout.batch_size * width * np.dtype(layout.id_type).itemsize
    if len(steps.ids) != expected or len(steps.source_ids) != count * layout.batch_size:
        raise ProtocolError(
            f"{count} steps of {layout.batch_size} × {width} ids ({layout.id_type}) are {expected} bytes and "
            f"{count * layout.batch_size} source ids, but {len(steps.ids)} and {len(steps.source_ids)} came"
        )
    ids = np.frombuffer(steps.ids, layout.id_type).reshape(count, layout.batch_size, width)
    names = ["input_ids", "labels"]
    names += [name for name in ("position_ids", "document_ids") if getattr(layout, name)]
    shape = (len(names), count, layout.batch_size, layout.sequence_length)
    # One block for all of them: large enough for huge pages, where fresh ones cost more than the widening.
    columns = dict(zip(names, np.empty(shape, np.int64), strict=True))
    columns["input_ids"][...] = ids[..., : layout.sequence_length]
    columns["labels"][...] = ids[..., int(layout.shifted) :]
    if len(names) > 2:
        _documents(steps, columns)
    columns["source_ids"] = sources = np.array(steps.source_ids, np.int64).reshape(count, layout.batch_size)
    first = np.array(steps.begin_indices, np.int64) + np.array(steps.slices, np.int64) * layout.batch_size
    columns["sample_ids"] = samples = first[:, None] + np.arange(layout.batch_size)
    padding = sources == PADDING
    if padding.any():
        columns["labels"][padding] = IGNORED
        samples[padding] = PADDING
    views = {name: torch.from_numpy(column).unbind(0) for name, column in columns.items()}
    return [
        Batch(sample_index=end, total_tokens=tokens, **dict(zip(views, tensors, strict=True)))  # type: ignore[typeddict-item]
        for end, tokens, *tensors in zip(steps.end_indices, steps.total_tokens, *views.values(), strict=True)
    ]


def _documents(steps: Steps, columns: dict[str, NDArray[np.int64]]) -> None:
    """Positions that restart at each document, and numbers of the documents within each sample.

    Both are written as differences and summed in place.
    """
    samples, length = columns["input_ids"].size // columns["input_ids"].shape[-1], columns["input_ids"].shape[-1]
    counts = np.array(steps.document_counts, np.int64)
    starts = np.array(steps.document_starts, np.int64)
    if len(counts) != samples or counts.sum() != len(starts) or (starts > length).any():
        raise ProtocolError(
            f"document starts of {samples} samples of {length} tokens were asked for, but {len(counts)} counts "
            f"with a sum of {counts.sum()} and {len(starts)} positions came"
        )
    inside = starts < length  # a shifted sample's last id is only a label here, and begins the next sample
    sample_of = np.repeat(np.arange(samples), counts)[inside]
    sample_begins = np.arange(samples) * length
    # What a sample continues counts as a document of its own, so each sample's begin is one, too.
    begins = np.union1d(sample_begins, sample_of * length + starts[inside])
    if "position_ids" in columns:
        jumps = np.ones(len(begins), np.int64)
        jumps[0] = 0
        jumps[1:] -= np.diff(begins)
        _sum_up(columns["position_ids"], begins, jumps, 1)
    if "document_ids" in columns:
        numbers = np.arange(len(begins)) - np.searchsorted(begins, sample_begins)[begins // length]
        _sum_up(columns["document_ids"], begins, np.diff(numbers, prepend=0), 0)


def _sum_up(column: NDArray[np.int64], begins: NDArray[np.int64], jumps: NDArray[np.int64], slope: int) -> None:
    """Fills a column with what starts at 0, grows by ``slope`` each token and jumps at each begin."""
    flat = column.reshape(-1)
    flat.fill(slope)
    flat[begins] = jumps
    np.cumsum(flat, out=flat)
