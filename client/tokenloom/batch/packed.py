"""From the ids of one message to the tensors of its steps.

A message keeps its ids as they travelled. A step is widened when it is asked for, into memory that the
caches still hold: what waits takes an eighth of the room or a quarter of it, and is not written to main
memory and read back. numpy and not torch: its loops stay on this thread (and release the interpreter
lock), where torch's would start worker threads that compete with the trainer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import NotRequired

from tokenloom.batch.memory import Columns
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
    """Tokens of the whole run after this step, the same on every rank: ``sequence_length`` for every sample."""
    global_tokens: int
    """Real tokens of this step over all ranks, the same on each: positions of ``input_ids`` that are not padding."""
    global_label_tokens: int
    """Labels that a causal model predicts, over all ranks and all steps of the optimiser step that this batch belongs
    to (``accumulate``); the same in each of its batches. Those are the labels that are not −100; where labels equal
    ``input_ids`` (``labels: same``), without each sample's first, which has nothing before it. A sum of losses over
    these labels, divided by this number and summed over ranks and steps, is the mean over all of them."""
    position_ids: NotRequired[torch.Tensor]
    """Counted from 0 in each document (and in padding)."""
    document_ids: NotRequired[torch.Tensor]
    """Numbers of the documents within each sample; −1 at a sample's padding."""
    attention_mask: NotRequired[torch.Tensor]
    """1 at tokens, 0 at padding."""
    loss_mask: NotRequired[torch.Tensor]
    """1 where the label counts, 0 where it is −100."""
    cu_seqlens: NotRequired[torch.Tensor]
    """int32, [documents + 1]: where each document begins among the B · L tokens of the batch, and their end, as
    ``flash_attn_varlen_func`` takes it. A sample's padding counts as a document."""
    max_seqlen: NotRequired[int]
    """Tokens of the longest of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What is the same for all messages of a generation, as long as its batch size is."""

    batch_size: int
    sequence_length: int
    id_type: str
    """The numpy type of an id on the wire, such as ``<u2``."""
    shifted: bool
    """A sample travels as L + 1 ids, and labels are the ids one further."""
    lengths: bool = False
    """Samples may be padded, and travel with how many of their ids are not padding."""
    pads_left: bool = False
    loss_masks: bool = False
    """Samples travel with a bit for each id: whether it counts as a label."""
    mask_boundaries: bool = False
    """The first token of a document is no label for the document before it."""
    position_ids: bool = False
    document_ids: bool = False
    attention_mask: bool = False
    loss_mask: bool = False
    cu_seqlens: bool = False

    rows: bool = False
    """Samples are rows in batches from buckets; ``sequence_length`` is 1, and ``id_type`` says nothing."""

    @property
    def id_bytes(self) -> int:
        """Width of an id on the wire."""
        return int(self.id_type[2:])

    @property
    def width(self) -> int:
        """Ids of a sample on the wire."""
        return self.sequence_length + self.shifted

    @property
    def sample_bytes(self) -> int:
        """Bytes of a sample on the wire: its ids, its length, its mask's bits in whole uint32s."""
        return self.width * self.id_bytes + 4 * self.lengths + (-(-self.width // 32) * 4 if self.loss_masks else 0)

    @property
    def document_starts(self) -> bool:
        """Whether it takes to know where documents begin."""
        return self.position_ids or self.document_ids or self.cu_seqlens or self.mask_boundaries

    def columns(self) -> Columns:
        """The memory for batches of this layout."""
        names = 2 + self.position_ids + self.document_ids + self.attention_mask + self.loss_mask
        return Columns((self.batch_size, self.sequence_length), KEPT_BATCHES * names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the tensors of a step are made of, for who makes them elsewhere: little more than what travelled."""

    arrays: dict[str, NDArray[Any]]
    """``ids`` [B, width] as narrow as on the wire; ``source_ids`` and ``sample_ids`` [B], int64. As the layout is, and
    all else int32: ``begins`` and ``ends`` [B] of the tokens among a sample's ids; ``mask_bits`` [B, bytes], uint8, the
    first id's bit the lowest; ``boundaries``: the labels, row by row, that are the first token behind another document;
    ``document_begins``, and by column the jump there; ``cu_seqlens``."""
    numbers: dict[str, int]
    """What of the batch is no tensor."""
    slopes: dict[str, int]
    """For each column of documents, what each further token adds."""
    short: bool
    """Some samples have padding."""
    padded: bool
    """Some samples are padding."""


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
        tokens: Sequence[int],
        label_tokens: Sequence[int],
        ids: bytes | memoryview,
        source_ids: Sequence[int],
        document_counts: Sequence[int] = (),
        document_starts: Sequence[int] = (),
    ) -> None:
        count = len(end_indices)
        samples = count * layout.batch_size
        expected = samples * layout.sample_bytes
        if len(ids) != expected or len(source_ids) != samples:
            behind = " and what belongs to them" if layout.lengths or layout.loss_masks else ""
            raise ProtocolError(
                f"{count} steps of {layout.batch_size} × {layout.width} ids ({layout.id_type}){behind} are {expected} "
                f"bytes and {samples} source ids, but {len(ids)} and {len(source_ids)} came"
            )
        self._layout = layout
        self._begin_indices = begin_indices
        self._end_indices = end_indices
        self._slices = slices
        self._total_tokens = total_tokens
        self._tokens = tokens
        #: By step, over all ranks.
        self.label_tokens = label_tokens
        shape = count, layout.batch_size
        # Where each sample's tokens begin and end among its ids; None where all are full.
        self._filled: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
        self._mask_bits: NDArray[np.uint8] | None = None
        if layout.lengths or layout.loss_masks:
            raw = np.frombuffer(ids, np.uint8).reshape(*shape, layout.sample_bytes)
            at = layout.width * layout.id_bytes
            self._ids = raw[..., :at].view(layout.id_type)
            if layout.lengths:
                self._filled = _filled(layout, raw[..., at : at + 4].copy().view("<u4")[..., 0].astype(np.int64))
            if layout.loss_masks:
                self._mask_bits = raw[..., at + 4 * layout.lengths :]
        else:
            self._ids = np.frombuffer(ids, layout.id_type).reshape(*shape, layout.width)
        self._source_ids = source_ids
        self._documents: _Documents | None = None
        if layout.document_starts:
            filled = self._filled
            if filled is None and PADDING in source_ids:
                # All samples are full but those that fill up a last step, of which nothing is.
                ends = np.where(np.equal(source_ids, PADDING), 0, layout.width).reshape(shape)
                filled = np.zeros_like(ends), ends
            self._documents = _Documents(layout, count, document_counts, document_starts, filled)

    def batch(self, step: int, columns: Columns) -> Batch:
        """The batch of a step, counted from 0 in the message.

        No tensor is a view of another. Autograd is told of each write, and must not take one into the labels, or
        into a later step, for one into the ids that it keeps.
        """
        ids = self._ids[step]
        columns.fit((self._layout.batch_size, self._layout.sequence_length))
        inputs, labels = columns.take(2)
        if self._layout.shifted:
            inputs[...], labels[...] = ids[:, :-1], ids[:, 1:]
        else:
            inputs[...] = labels[...] = ids
        if self._filled is not None:
            self._ignore_padding(step, labels)
        if self._mask_bits is not None:
            width = self._layout.width
            counts = np.unpackbits(self._mask_bits[step], axis=1, count=width, bitorder="little")
            labels[counts[:, self._layout.shifted :] == 0] = IGNORED
        if self._layout.mask_boundaries and self._documents is not None:
            labels.reshape(-1)[self._documents.boundaries(step)] = IGNORED
        sources, samples = self._samples(step)
        if PADDING in sources:
            labels[np.equal(sources, PADDING)] = IGNORED
        batch: Batch = {
            "input_ids": torch.from_numpy(inputs),
            "labels": torch.from_numpy(labels),
            "source_ids": torch.from_numpy(np.array(sources, np.int64)),
            "sample_ids": torch.from_numpy(samples),
            "sample_index": self._end_indices[step],
            "total_tokens": self._total_tokens[step],
            "global_tokens": self._tokens[step],
            "global_label_tokens": self.label_tokens[step],
        }
        if self._documents is not None:
            self._documents.add_to(batch, step, columns)
        if self._layout.attention_mask:
            (attended,) = columns.take(1)
            attended[...] = self._attended(step, sources)
            batch["attention_mask"] = torch.from_numpy(attended)
        if self._layout.loss_mask:
            (counted,) = columns.take(1)
            np.not_equal(labels, IGNORED, out=counted, casting="unsafe")
            batch["loss_mask"] = torch.from_numpy(counted)
        return batch

    def parts(self, step: int) -> Parts:
        """What ``batch`` of a step is made of. The arrays may be views of the message."""
        sources, samples = self._samples(step)
        arrays: dict[str, NDArray[Any]] = {
            "ids": self._ids[step],
            "source_ids": np.array(sources, np.int64),
            "sample_ids": samples,
        }
        numbers = {
            "sample_index": self._end_indices[step],
            "total_tokens": self._total_tokens[step],
            "global_tokens": self._tokens[step],
            "global_label_tokens": self.label_tokens[step],
        }
        slopes: dict[str, int] = {}
        short = False
        if self._filled is not None:
            begins, ends = self._filled[0][step], self._filled[1][step]
            arrays |= {"begins": begins.astype(np.int32), "ends": ends.astype(np.int32)}
            short = bool((ends - begins < self._layout.width).any())
        if self._mask_bits is not None:
            arrays["mask_bits"] = self._mask_bits[step]
        if self._documents is not None:
            if self._layout.mask_boundaries:
                arrays["boundaries"] = self._documents.boundaries(step).astype(np.int32)
            slopes = self._documents.add_parts(arrays, numbers, step)
        return Parts(arrays=arrays, numbers=numbers, slopes=slopes, short=short, padded=PADDING in sources)

    def _samples(self, step: int) -> tuple[Sequence[int], NDArray[np.int64]]:
        """Source and sample id of each sample."""
        size = self._layout.batch_size
        sources = self._source_ids[step * size : (step + 1) * size]
        first = self._begin_indices[step] + self._slices[step] * size
        samples = np.arange(first, first + size)
        if PADDING in sources:
            samples[np.equal(sources, PADDING)] = PADDING
        return sources, samples

    def _ignore_padding(self, step: int, labels: NDArray[np.int64]) -> None:
        """Padding is no label; nor is a token that only padding stands before."""
        assert self._filled is not None
        begin, end = self._filled[0][step], self._filled[1][step]
        short = np.flatnonzero(end - begin < self._layout.width)
        if len(short):
            # Of the ids, the one that each label is.
            target = np.arange(self._layout.shifted, self._layout.width)
            begin, end = begin[short, None], end[short, None]
            padding = (target < begin + (begin > 0)) | (target >= end)
            labels[short] = np.where(padding, IGNORED, labels[short])

    def _attended(self, step: int, sources: Sequence[int]) -> NDArray[np.bool_]:
        """[B, L] where tokens are, or [B, 1]."""
        if self._filled is None:
            return np.not_equal(sources, PADDING)[:, None]
        at = np.arange(self._layout.sequence_length)
        found: NDArray[np.bool_] = (at >= self._filled[0][step][:, None]) & (at < self._filled[1][step][:, None])
        return found


def _filled(layout: Layout, lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where tokens begin and end among a sample's ids; [steps, B] each."""
    if (lengths > layout.width).any():
        raise ProtocolError(f"a sample of {layout.width} ids came with a length of {lengths.max()}")
    begins = layout.width - lengths if layout.pads_left else np.zeros_like(lengths)
    return begins, begins + lengths


class _Documents:
    """Where documents begin: positions that restart there, numbers of the documents within each sample, lengths of all.

    The columns are written as differences and summed in place. A sample's padding is treated as a document, of number
    −1.
    """

    def __init__(
        self,
        layout: Layout,
        steps: int,
        document_counts: Sequence[int],
        document_starts: Sequence[int],
        filled: tuple[NDArray[np.int64], NDArray[np.int64]] | None,
    ) -> None:
        """``filled``: where tokens begin and end in each sample, [steps, B] each; None where all are full."""
        length, samples = layout.sequence_length, steps * layout.batch_size
        counts = np.array(document_counts, np.int64)
        starts = np.array(document_starts, np.int64)
        if len(counts) != samples or counts.sum() != len(starts) or (starts > length).any():
            raise ProtocolError(
                f"document starts of {samples} samples of {length} tokens were asked for, but {len(counts)} counts "
                f"with a sum of {counts.sum()} and {len(starts)} positions came"
            )
        self._size = layout.batch_size * length
        owner = np.repeat(np.arange(samples), counts)
        # Labels that are a document's first token, for the document before: one further where they are shifted.
        own = (starts > 0) & (starts - layout.shifted < length)
        self._boundaries = (owner * length + starts - layout.shifted)[own]
        self._boundary_bounds = np.searchsorted(self._boundaries, np.arange(steps + 1) * self._size).tolist()
        inside = starts < length  # a shifted sample's last id is only a label here, and begins the next sample
        sample_begins = np.arange(samples) * length
        # What a sample continues counts as a document of its own, so each sample's begin is one, too.
        begins = np.union1d(sample_begins, owner[inside] * length + starts[inside])
        padding = np.empty(0, np.int64)
        if filled is not None:
            begin, end = filled[0].ravel(), filled[1].ravel()
            if layout.pads_left:
                short = (begin > 0) & (begin < length)
                begins = np.union1d(begins, (sample_begins + begin)[short])
                padding = sample_begins[begin > 0]
            else:
                padding = (sample_begins + end)[end < length]
                begins = np.union1d(begins, padding)
        # For each column: the jump at each begin, and what each further token adds.
        self._jumps: dict[str, tuple[NDArray[np.int64], int]] = {}
        if layout.position_ids:
            self._jumps["position_ids"] = 1 - np.diff(begins, prepend=0), 1
        if layout.document_ids:
            of_padding = np.isin(begins, padding, assume_unique=True)
            documents = np.cumsum(~of_padding)
            before: NDArray[np.int64] = (documents - ~of_padding)[np.searchsorted(begins, sample_begins)]
            numbers = np.where(of_padding, -1, documents - 1 - before[begins // length])
            self._jumps["document_ids"] = np.diff(numbers, prepend=0), 0
        step_begins = np.searchsorted(begins, sample_begins[:: layout.batch_size])
        # Each step is summed on its own, from 0.
        if layout.position_ids:
            self._jumps["position_ids"][0][step_begins] = 0
        if layout.document_ids:
            self._jumps["document_ids"][0][step_begins] = numbers[step_begins]
        self._begins = begins % self._size
        self._bounds = [*step_begins.tolist(), len(begins)]
        self._lengths = layout.cu_seqlens

    def boundaries(self, step: int) -> NDArray[np.int64]:
        """Which labels of a step, row by row, are a document's first token behind another document's last."""
        first, last = self._boundary_bounds[step : step + 2]
        found: NDArray[np.int64] = self._boundaries[first:last] - step * self._size
        return found

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
        if self._lengths:
            edges = self._edges(here)
            batch["cu_seqlens"] = torch.from_numpy(edges)
            batch["max_seqlen"] = int(np.diff(edges).max())

    def add_parts(self, arrays: dict[str, NDArray[Any]], numbers: dict[str, int], step: int) -> dict[str, int]:
        """Adds what the columns of a step are made of; returns what each further token adds to each of them."""
        here = slice(self._bounds[step], self._bounds[step + 1])
        if self._jumps:
            arrays["document_begins"] = self._begins[here].astype(np.int32)
            arrays |= {name: jumps[here].astype(np.int32) for name, (jumps, _) in self._jumps.items()}
        if self._lengths:
            arrays["cu_seqlens"] = edges = self._edges(here)
            numbers["max_seqlen"] = int(np.diff(edges).max())
        return {name: slope for name, (_, slope) in self._jumps.items()}

    def _edges(self, here: slice) -> NDArray[np.int32]:
        return np.append(self._begins[here], self._size).astype(np.int32)
