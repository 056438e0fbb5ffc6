"""Micro-steps on their way to a trainer, free of wire types: what ``Batches`` says, as it is used in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class DeliveredBucket(NamedTuple):
    """What the rows of a micro-step are."""

    name: str
    source: str
    #: By column its name, dtype and the shape of one sample's tensor.
    columns: Sequence[tuple[str, str, Sequence[int]]]
    #: Of each of this rank's samples; empty where all have as many.
    sample_bytes: Sequence[int]


class Delivered(NamedTuple):
    """Consecutive micro-steps of one rank. What is not explained here, ``Batches`` and ``MicroStep`` of the wire
    contract explain; sequences have an entry for each micro-step."""

    begin_index: int
    end_indices: Sequence[int]
    slices: Sequence[int]
    total_tokens: Sequence[int]
    real_tokens: Sequence[int]
    tokens: Sequence[int]
    label_tokens: Sequence[int]
    digests: Sequence[str]
    #: Of each sample.
    source_ids: Sequence[int]
    ids: bytes | memoryview
    document_counts: Sequence[int]
    document_starts: Sequence[int]
    #: The sample index of a state boundary, and its resume state.
    base: tuple[int, bytes] | None
    counts: bytes
    buckets: Sequence[DeliveredBucket]
    #: Of the ledger, and the server's number, as ``StreamResponse`` has them.
    committed_through: int
    server_epoch: int
