"""From the ids of one message to the arrays of its micro-steps.

A message keeps its ids as they travelled. A micro-step is widened when it is asked for, into memory that the
caches still hold: what waits takes an eighth of the room or a quarter of it, and is not written to main
memory and read back. numpy and not torch: its loops stay on this thread (and release the interpreter
lock), where torch's would start worker threads that compete with the trainer's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tokenloom.batch.layout import IGNORED, PADDING, Layout, NumpyBatch, Samples, StepNumbers
from tokenloom.errors import ProtocolError

#: Batches whose memory is kept for later ones: that in use, that being made, two for trainers that look ahead.
KEPT_BATCHES = 4


class ArrayPool:
    """Gives out int64 arrays of one shape, uninitialised. Not for several threads at once.

    Whoever takes one holds it by a reference, as a tensor made by ``torch.from_numpy`` does for as long as its
    storage lives, whatever view of it, graph or numpy array that is for. At most ``keep`` are kept for later:
    where all of them are held, a new one takes the oldest one's place, which is then its holder's alone.
    """

    @classmethod
    def of(cls, layout: Layout) -> ArrayPool:
        """The memory for batches of a layout."""
        of_tokens = layout.columns - {"cu_seqlens"}
        return cls((layout.batch_size, layout.sequence_length), KEPT_BATCHES * (2 + len(of_tokens)))

    def __init__(self, shape: tuple[int, ...], keep: int) -> None:
        self._shape = shape
        self._keep = keep
        # The first is never given out: its count of references is that of an array which nobody holds, however
        # this interpreter counts.
        self._arrays: list[NDArray[np.int64]] = [np.empty(0, np.int64)]

    def fit(self, shape: tuple[int, ...]) -> None:
        """From now on arrays have this shape; those of another one are their holders' alone."""
        if shape != self._shape:
            self._shape = shape
            del self._arrays[1:]

    def take(self, count: int) -> list[NDArray[np.int64]]:
        """Arrays that nobody else holds, those first made among them: they are the likeliest to be cached."""
        held = list(map(sys.getrefcount, self._arrays))
        taken, index = [], 0
        for _ in range(count):
            try:
                index = held.index(held[0], index + 1)
            except ValueError:
                taken.append(self._make())
            else:
                taken.append(self._arrays[index])
        return taken

    def _make(self) -> NDArray[np.int64]:
        self._arrays.append(np.empty(self._shape, np.int64))
        if len(self._arrays) > 1 + self._keep:
            del self._arrays[1]
        return self._arrays[-1]


# The columns that follow from where documents begin: positions, numbers of documents, lengths for attention.
#
# Positions restart at each document, and its number goes up by one. So both are written as differences, zero nearly
# everywhere, and summed in place. A sample's padding is treated as a document, of number −1.


#: Where tokens begin and end among the ids of each sample; [micro-steps, B] each.
Filled = tuple[NDArray[np.int64], NDArray[np.int64]]


class DocumentColumns:
    """The columns of documents of one message."""

    def __init__(
        self,
        layout: Layout,
        steps: int,
        document_counts: Sequence[int],
        document_starts: Sequence[int],
        filled: Filled | None,
    ) -> None:
        """``document_counts``: how many documents begin in each sample; ``document_starts``: where, sample by sample.
        ``filled``: None where all samples are full. Raises ``ProtocolError``."""
        length, samples = layout.sequence_length, steps * layout.batch_size
        counts = np.array(document_counts, np.int64)
        starts = np.array(document_starts, np.int64)
        if len(counts) != samples or counts.sum() != len(starts) or (starts > length).any():
            raise ProtocolError(
                f"document starts of {samples} samples of {length} tokens were asked for, but {len(counts)} counts "
                f"with a sum of {counts.sum()} and {len(starts)} positions came"
            )
        self._step_size = layout.batch_size * length
        sample_begins = np.arange(samples) * length
        owner_begins = np.repeat(sample_begins, counts)
        # Labels that are a document's first token, for the document before: one further where they are shifted.
        has_label = (starts > 0) & (starts - layout.shifted < length)
        self._boundaries = (owner_begins + starts - layout.shifted)[has_label]
        self._boundary_bounds = np.searchsorted(
            self._boundaries, np.arange(steps + 1) * self._step_size
        ).tolist()
        inside = (
            starts < length
        )  # a shifted sample's last id is only a label here, and begins the next sample
        begins, padding = _begins(layout, sample_begins, (owner_begins + starts)[inside], filled)
        step_begins = np.searchsorted(begins, sample_begins[:: layout.batch_size])
        # For each column: the jump at each begin, and what each further token adds. Each micro-step is summed by
        # itself, from 0.
        self._jumps: dict[str, tuple[NDArray[np.int64], int]] = {}
        if "position_ids" in layout.columns:
            jumps = 1 - np.diff(begins, prepend=0)
            jumps[step_begins] = 0
            self._jumps["position_ids"] = jumps, 1
        if "document_ids" in layout.columns:
            numbers = _numbers(begins, padding, sample_begins, length)
            jumps = np.diff(numbers, prepend=0)
            jumps[step_begins] = numbers[step_begins]
            self._jumps["document_ids"] = jumps, 0
        self._begins = begins % self._step_size
        self._bounds = [*step_begins.tolist(), len(begins)]
        self._has_lengths = "cu_seqlens" in layout.columns

    def boundaries(self, step: int) -> NDArray[np.int64]:
        """Which labels of a micro-step, row by row, are a document's first token after another document's last."""
        first, last = self._boundary_bounds[step : step + 2]
        labels: NDArray[np.int64] = self._boundaries[first:last] - step * self._step_size
        return labels

    def add_to(self, batch: NumpyBatch, step: int, pool: ArrayPool) -> None:
        """Adds the columns of a micro-step."""
        here = slice(self._bounds[step], self._bounds[step + 1])
        for name, (jumps, slope) in self._jumps.items():
            (column,) = pool.take(1)
            flat = column.reshape(-1)
            flat.fill(slope)
            flat[self._begins[here]] = jumps[here]
            np.cumsum(flat, out=flat)
            batch[name] = column  # type: ignore[literal-required]
        if self._has_lengths:
            edges = self._edges(here)
            batch["cu_seqlens"] = edges
            batch["max_seqlen"] = int(np.diff(edges).max())

    def add_parts(
        self, arrays: dict[str, NDArray[Any]], numbers: dict[str, int], step: int
    ) -> dict[str, int]:
        """Adds what the columns of a micro-step are made of; returns what each further token adds to each of them."""
        here = slice(self._bounds[step], self._bounds[step + 1])
        if self._jumps:
            arrays["document_begins"] = self._begins[here].astype(np.int32)
            arrays |= {
                name: jumps[here].astype(np.int32) for name, (jumps, _) in self._jumps.items()
            }
        if self._has_lengths:
            arrays["cu_seqlens"] = edges = self._edges(here)
            numbers["max_seqlen"] = int(np.diff(edges).max())
        return {name: slope for name, (_, slope) in self._jumps.items()}

    def _edges(self, here: slice) -> NDArray[np.int32]:
        return np.append(self._begins[here], self._step_size).astype(np.int32)


def _begins(
    layout: Layout,
    sample_begins: NDArray[np.int64],
    documents: NDArray[np.int64],
    filled: Filled | None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where documents and paddings begin among all tokens of the message, and which of these are paddings."""
    # What a sample continues counts as a document of its own, so each sample's begin is one, too.
    begins = np.union1d(sample_begins, documents)
    if filled is None:
        return begins, np.empty(0, np.int64)
    length = layout.sequence_length
    begin, end = filled[0].ravel(), filled[1].ravel()
    if layout.pads_left:
        short = (begin > 0) & (begin < length)
        return np.union1d(begins, (sample_begins + begin)[short]), sample_begins[begin > 0]
    padding = (sample_begins + end)[end < length]
    return np.union1d(begins, padding), padding


def _numbers(
    begins: NDArray[np.int64],
    padding: NDArray[np.int64],
    sample_begins: NDArray[np.int64],
    length: int,
) -> NDArray[np.int64]:
    """The number of the document at each begin, counted from 0 in each sample; −1 for padding."""
    is_padding = np.isin(begins, padding, assume_unique=True)
    documents = np.cumsum(~is_padding)
    before: NDArray[np.int64] = (documents - ~is_padding)[np.searchsorted(begins, sample_begins)]
    return np.where(is_padding, -1, documents - 1 - before[begins // length])


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the tensors of a micro-step are made of, for who makes them elsewhere: little more than what travelled."""

    arrays: dict[str, NDArray[Any]]
    """``ids`` [B, width] as narrow as on the wire; ``source_ids`` and ``sample_ids`` [B], int64. As the layout is, and
    all else int32: ``begins`` and ``ends`` [B] of the tokens among a sample's ids; ``mask_bits`` [B, bytes], uint8, the
    first id's bit the lowest; ``boundaries``: the labels, row by row, that are the first token after another document;
    ``document_begins``, and by column the jump there; ``cu_seqlens``."""
    numbers: dict[str, int]
    """The numbers of the batch."""
    slopes: dict[str, int]
    """For each column of documents, what each further token adds."""
    short: bool
    """Some samples have padding."""
    padded: bool
    """Some samples are padding."""


class Message:
    """The micro-steps of one message, free of wire types and checked: each becomes a batch when it is asked for."""

    def __init__(
        self,
        layout: Layout,
        steps: StepNumbers,
        *,
        ids: bytes | memoryview,
        document_counts: Sequence[int] = (),
        document_starts: Sequence[int] = (),
    ) -> None:
        count = len(steps.end_indices)
        samples = count * layout.batch_size
        expected = samples * layout.sample_bytes
        if len(ids) != expected or len(steps.source_ids) != samples:
            beside = " and what belongs to them" if layout.lengths or layout.loss_masks else ""
            raise ProtocolError(
                f"{count} micro-steps of {layout.batch_size} × {layout.width} ids ({layout.id_type}){beside} are "
                f"{expected} bytes and {samples} source ids, but {len(ids)} and {len(steps.source_ids)} came"
            )
        self._layout = layout
        self._steps = steps
        #: By micro-step, over all ranks.
        self.label_tokens = steps.label_tokens
        # A sample is its ids, then its length, then its mask's bits.
        raw = np.frombuffer(ids, np.uint8).reshape(count, layout.batch_size, layout.sample_bytes)
        ids_end = layout.width * layout.id_bytes
        length_end = ids_end + 4 * layout.lengths
        self._ids = raw[..., :ids_end].view(layout.id_type)
        # None where all samples are full.
        self._filled: Filled | None = None
        if layout.lengths:
            lengths = raw[..., ids_end:length_end].copy().view("<u4")[..., 0].astype(np.int64)
            self._filled = _filled(layout, lengths)
        self._mask_bits: NDArray[np.uint8] | None = (
            raw[..., length_end:] if layout.loss_masks else None
        )
        self._samples = Samples(steps, layout.batch_size)
        padding = self._samples.padding
        self._documents: DocumentColumns | None = None
        if layout.document_starts:
            filled = self._filled
            if filled is None and padding is not None:
                # All samples are full but those that fill up a last micro-step, of which nothing is.
                ends = np.where(padding, 0, layout.width)
                filled = np.zeros_like(ends), ends
            self._documents = DocumentColumns(
                layout, count, document_counts, document_starts, filled
            )

    def batch(self, step: int, pool: ArrayPool) -> NumpyBatch:
        """The batch of a micro-step, counted from 0 in the message.

        No array is a view of another. Autograd hears of each write to a tensor over one, and must not take one into
        the labels, or into a later micro-step, for one into the ids that it keeps.
        """
        layout, ids = self._layout, self._ids[step]
        pool.fit((layout.batch_size, layout.sequence_length))
        inputs, labels = pool.take(2)
        if layout.shifted:
            inputs[...], labels[...] = ids[:, :-1], ids[:, 1:]
        else:
            inputs[...], labels[...] = ids, ids
        self._ignore(step, labels)
        batch = cast(
            "NumpyBatch",
            {
                "input_ids": inputs,
                "labels": labels,
                **self._samples.of_batch(step),
                **self._steps.of_batch(step),
            },
        )
        if self._documents is not None:
            self._documents.add_to(batch, step, pool)
        if "attention_mask" in layout.columns:
            (attended,) = pool.take(1)
            attended[...] = self._attended(step)
            batch["attention_mask"] = attended
        if "loss_mask" in layout.columns:
            (counted,) = pool.take(1)
            np.not_equal(labels, IGNORED, out=counted, casting="unsafe")
            batch["loss_mask"] = counted
        return batch

    def parts(self, step: int) -> Parts:
        """What ``batch`` of a micro-step is made of. The arrays may be views of the message."""
        arrays: dict[str, NDArray[Any]] = {"ids": self._ids[step], **self._samples.of_batch(step)}
        numbers = self._steps.of_batch(step)
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
        padding = self._samples.padding
        padded = padding is not None and bool(padding[step].any())
        return Parts(arrays=arrays, numbers=numbers, slopes=slopes, short=short, padded=padded)

    def _ignore(self, step: int, labels: NDArray[np.int64]) -> None:
        """Marks the labels of a micro-step that no loss is wanted for."""
        layout = self._layout
        if self._filled is not None:
            self._ignore_padding(self._filled[0][step], self._filled[1][step], labels)
        if self._mask_bits is not None:
            counts = np.unpackbits(
                self._mask_bits[step], axis=1, count=layout.width, bitorder="little"
            )
            labels[counts[:, layout.shifted :] == 0] = IGNORED
        if layout.mask_boundaries and self._documents is not None:
            labels.reshape(-1)[self._documents.boundaries(step)] = IGNORED
        if self._samples.padding is not None:
            labels[self._samples.padding[step]] = IGNORED

    def _ignore_padding(
        self, begin: NDArray[np.int64], end: NDArray[np.int64], labels: NDArray[np.int64]
    ) -> None:
        """Padding is no label; nor is a token that only padding stands before. ``begin`` and ``end``: [B], of the
        tokens."""
        short = np.flatnonzero(end - begin < self._layout.width)
        if len(short):
            # Of the ids, the one that each label is.
            target = np.arange(self._layout.shifted, self._layout.width)
            begin, end = begin[short, None], end[short, None]
            padding = (target < begin + (begin > 0)) | (target >= end)
            labels[short] = np.where(padding, IGNORED, labels[short])

    def _attended(self, step: int) -> NDArray[np.bool_]:
        """[B, L] where tokens are, or [B, 1]."""
        attended: NDArray[np.bool_]
        if self._filled is None:
            attended = np.not_equal(self._samples.source_ids[step], PADDING)[:, None]
        else:
            position = np.arange(self._layout.sequence_length)
            begin, end = (bound[step][:, None] for bound in self._filled)
            attended = (position >= begin) & (position < end)
        return attended


def _filled(layout: Layout, lengths: NDArray[np.int64]) -> Filled:
    """Where tokens begin and end among a sample's ids; [micro-steps, B] each."""
    if (lengths > layout.width).any():
        raise ProtocolError(f"a sample of {layout.width} ids came with a length of {lengths.max()}")
    begins = layout.width - lengths if layout.pads_left else np.zeros_like(lengths)
    return begins, begins + lengths
