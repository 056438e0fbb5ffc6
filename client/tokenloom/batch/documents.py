"""The columns that follow from where documents begin: positions, numbers of documents, lengths for attention.

Positions restart at each document, and its number goes up by one. So both are written as differences, zero nearly
everywhere, and summed in place. A sample's padding is treated as a document, of number −1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenloom.batch.layout import Layout, NumpyBatch
from tokenloom.batch.memory import ArrayPool
from tokenloom.errors import ProtocolError

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
