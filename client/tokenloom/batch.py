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
    shape = (count, layout.batch_size, width)
    expected = int(np.prod(shape)) * np.dtype(layout.id_type).itemsize
    if len(steps.ids) != expected or len(steps.source_ids) != count * layout.batch_size:
        raise ProtocolError(
            f"{count} steps of {layout.batch_size} × {width} ids ({layout.id_type}) are {expected} bytes and "
            f"{count * layout.batch_size} source ids, but {len(steps.ids)} and {len(steps.source_ids)} came"
        )
    ids = np.frombuffer(steps.ids, layout.id_type).reshape(shape)
    inputs = ids[..., : layout.sequence_length].astype(np.int64)
    labels = ids[..., 1:].astype(np.int64) if layout.shifted else inputs.copy()
    sources = np.array(steps.source_ids, np.int64).reshape(count, layout.batch_size)
    first = np.array(steps.begin_indices, np.int64) + np.array(steps.slices, np.int64) * layout.batch_size
    samples = first[:, None] + np.arange(layout.batch_size)
    padding = sources == PADDING
    if padding.any():
        labels[padding] = IGNORED
        samples[padding] = PADDING
    documents = _documents(steps, layout)
    columns = {"input_ids": inputs, "labels": labels, "source_ids": sources, "sample_ids": samples, **documents}
    views = {name: torch.from_numpy(column).unbind(0) for name, column in columns.items()}
    return [
        Batch(sample_index=end, total_tokens=tokens, **dict(zip(views, tensors, strict=True)))  # type: ignore[typeddict-item]
        for end, tokens, *tensors in zip(steps.end_indices, steps.total_tokens, *views.values(), strict=True)
    ]


def _documents(steps: Steps, layout: Layout) -> dict[str, NDArray[np.int64]]:
    """Positions that restart at each document, and numbers of the documents within each sample."""
    if not (layout.position_ids or layout.document_ids):
        return {}
    samples, length = len(steps.end_indices) * layout.batch_size, layout.sequence_length
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
    # What a sample continues counts as a document of its own, so each sample's begin is a segment's.
    begins = np.union1d(sample_begins, sample_of * length + starts[inside])
    lengths = np.diff(begins, append=samples * length)
    shape = (len(steps.end_indices), layout.batch_size, length)
    columns = {}
    if layout.position_ids:
        positions = np.arange(samples * length)
        positions -= np.repeat(begins, lengths)
        columns["position_ids"] = positions.reshape(shape)
    if layout.document_ids:
        first = np.searchsorted(begins, sample_begins)
        numbers = np.arange(len(begins)) - first[begins // length]
        columns["document_ids"] = np.repeat(numbers, lengths).reshape(shape)
    return columns
