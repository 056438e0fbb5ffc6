"""From the ids of one message to the arrays of its micro-steps.

A message keeps its ids as they travelled. A micro-step is widened when it is asked for, into memory that the
caches still hold: what waits takes an eighth of the room or a quarter of it, and is not written to main
memory and read back. numpy and not torch: its loops stay on this thread (and release the interpreter
lock), where torch's would start worker threads that compete with the trainer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tokenloom.batch.documents import DocumentColumns, Filled
from tokenloom.batch.layout import IGNORED, PADDING, Layout, NumpyBatch, Samples, StepNumbers
from tokenloom.batch.memory import ArrayPool
from tokenloom.errors import ProtocolError


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
