"""From the ids of one message to the tensors of its steps.

A message keeps its ids as they travelled. A step is widened when it is asked for, into memory that the
caches still hold: what waits takes an eighth of the room or a quarter of it, and is not written to main
memory and read back. numpy and not torch: its loops stay on this thread (and release the interpreter
lock), where torch's would start worker threads that compete with the trainer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from tokenloom.columns import Columns
from tokenloom.errors import ProtocolError

#: The label that losses ignore.
IGNORED = -100
#: Source and sample id of a padding sample.
PADDING = -1
#: Batches whose memory is kept for later ones: that in use, that being made, two for trainers that look ahead.
KEPT_BATCHES = 4


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

    rows: bool = False
    """Samples are rows in batches from buckets; ``sequence_length`` is 1, and ``id_type`` says nothing."""

    @property
    def id_bytes(self) -> int:
        """Width of an id on the wire."""
        return int(self.id_type[2:])

    def columns(self) -> Columns:
        """The memory for batches of this layout."""
        names = 2 + self.position_ids + self.document_ids
        return Columns((self.batch_size, self.sequence_length), KEPT_BATCHES * names)


class Message:
    """The steps of one message, free of wire types and checked: each becomes a batch when it is asked for."""

    def __init__(
        self,
        layout: Layout,
        *,
        begin_indices: Sequence[int],
        end_indices: Sequence[int],
        slices: Sequence[int],
        total_tokens: Sequence[int],
        ids: bytes | memoryview,
        source_ids: Sequence[int],
        document_counts: Sequence[int] = (),
        document_starts: Sequence[int] = (),
    ) -> None:
        count, width = len(end_indices), layout.sequence_length + layout.shifted
        samples = count * layout.batch_size
        expected = samples * width * layout.id_bytes
        if len(ids) != expected or len(source_ids) != samples:
            raise ProtocolError(
                f"{count} steps of {layout.batch_size} × {width} ids ({layout.id_type}) are {expected} bytes and "
                f"{samples} source ids, but {len(ids)} and {len(source_ids)} came"
            )
        self._layout = layout
        self._begin_indices = begin_indices
        self._end_indices = end_indices
        self._slices = slices
        self._total_tokens = total_tokens
        self._ids = np.frombuffer(ids, layout.id_type).reshape(count, layout.batch_size, width)
        self._source_ids = source_ids
        self._documents: _Documents | None = None
        if layout.position_ids or layout.document_ids:
            self._documents = _Documents(layout, count, document_counts, document_starts)

    def batch(self, step: int, columns: Columns) -> Batch:
        """The batch of a step, counted from 0 in the message.

        No tensor is a view of another. Autograd is told of each write, and must not take one into the labels, or
        into a later step, for one into the ids that it keeps.
        """
        size = self._layout.batch_size
        ids = self._ids[step]
        inputs, labels = columns.take(2)
        if self._layout.shifted:
            inputs[...], labels[...] = ids[:, :-1], ids[:, 1:]
        else:
            inputs[...] = labels[...] = ids
        sources = self._source_ids[step * size : (step + 1) * size]
        first = self._begin_indices[step] + self._slices[step] * size
        samples = np.arange(first, first + size)
        if PADDING in sources:
            padding = np.equal(sources, PADDING)
            labels[padding] = IGNORED
            samples[padding] = PADDING
        batch: Batch = {
            "input_ids": torch.from_numpy(inputs),
            "labels": torch.from_numpy(labels),
            "source_ids": torch.from_numpy(np.array(sources, np.int64)),
            "sample_ids": torch.from_numpy(samples),
            "sample_index": self._end_indices[step],
            "total_tokens": self._total_tokens[step],
        }
        if self._documents is not None:
            self._documents.add_to(batch, step, columns)
        return batch


class _Documents:
    """Positions that restart at each document, and numbers of the documents within each sample.

    Both are written as differences and summed in place.
    """

    def __init__(
        self, layout: Layout, steps: int, document_counts: Sequence[int], document_starts: Sequence[int]
    ) -> None:
        length, samples = layout.sequence_length, steps * layout.batch_size
        counts = np.array(document_counts, np.int64)
        starts = np.array(document_starts, np.int64)
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
        numbers = np.arange(len(begins)) - np.searchsorted(begins, sample_begins)[begins // length]
        step_begins = np.searchsorted(begins, sample_begins[:: layout.batch_size])
        # For each column: the jump at each begin, and what each further token adds.
        self._jumps: dict[str, tuple[NDArray[np.int64], int]] = {}
        if layout.position_ids:
            self._jumps["position_ids"] = 1 - np.diff(begins, prepend=0), 1
        if layout.document_ids:
            self._jumps["document_ids"] = np.diff(numbers, prepend=0), 0
        for jumps, _ in self._jumps.values():
            jumps[step_begins] = 0  # each step is summed on its own, from 0
        self._begins = begins % (layout.batch_size * length)
        self._bounds = [*step_begins.tolist(), len(begins)]

    def add_to(self, batch: Batch, step: int, columns: Columns) -> None:
        """Adds the columns of a step."""
        here = slice(self._bounds[step], self._bounds[step + 1])
        for name, (jumps, slope) in self._jumps.items():
            (column,) = columns.take(1)
            flat = column.reshape(-1)
            flat.fill(slope)
            flat[self._begins[here]] = jumps[here]
            np.cumsum(flat, out=flat)
            batch[name] = torch.from_numpy(column)  # type: ignore[literal-required]
