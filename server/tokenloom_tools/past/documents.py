"""Which documents the tokens of samples are of, by source: the samples are made already, and their rows are read once
more from the cursors before them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import xxhash
from tokenloom_server.core.state import (
    DIGEST_MODULUS,
    DIGEST_MULTIPLIER,
    EpochCursor,
    SourceState,
    digest_hex,
)
from tokenloom_server.errors import OrderMismatch
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.steps import StepGroup
from tokenloom_server.packing.buckets import described
from tokenloom_server.packing.samples import Mask

from tokenloom_tools.reports.trace import TracedDocument, TracedPart, TracedSample
from tokenloom_tools.text import Decode

#: How many ids before a part of a document are decoded with it: more than any character has.
CONTEXT_IDS = 8


class SourceSamples(NamedTuple):
    """The samples of one source in a group of one rank and one pick a step: the state of the source before them, and
    which micro-steps of the group they are."""

    source: int
    state: SourceState
    steps: Sequence[int]


def explain(
    factory: PipelineFactory, group: StepGroup, decode: Decode | None, with_text: bool
) -> Iterator[list[TracedSample]]:
    """The samples of a group, of one rank and one pick a micro-step, source by source, with their documents and without
    their places: those are a generation's.

    ``with_text``: their ids come too, and with ``decode`` the text. Raises ``OrderMismatch`` where the rows have other
    tokens than the samples, and what reading them raises.
    """
    explained = _of_tokens if factory.config.batching is None else _of_rows
    picks = group.source_ids[0, : len(group.marks), 0]
    for source in np.unique(picks).tolist():
        steps = np.flatnonzero(picks == source).tolist()
        samples = SourceSamples(source, group.base.sources[source], steps)
        yield explained(factory, group, samples, decode, with_text)


def _of_tokens(
    factory: PipelineFactory,
    group: StepGroup,
    samples: SourceSamples,
    decode: Decode | None,
    with_text: bool,
) -> list[TracedSample]:
    source, paths = samples.source, factory.record.shard_paths[samples.source]
    explained = []
    spans_by_sample = factory.spans(source, samples.state, len(samples.steps))
    for number, step in enumerate(samples.steps):
        spans = next(spans_by_sample, [])
        travelling = group.ids(0, step, step + 1)[0]
        ids = factory.form.ids(travelling)
        ids_again = np.concatenate([span.ids for span in spans]) if spans else ids[:0]
        if not np.array_equal(ids, ids_again):
            raise OrderMismatch(
                f"sample {group.begin + step} of run {factory.name!r} has other tokens than its rows of "
                f"{factory.record.specs[source]!r} when they are read again: the data or the tokeniser changed just now"
            )
        documents, begin = [], factory.form.begin(len(ids))
        position, labels = begin, _labels(factory, group, step)
        for span in spans:
            counted = labels[position - begin :][: len(span.ids)]
            documents.append(
                TracedDocument.of(
                    span,
                    position=position,
                    shard=paths[span.shard],
                    shard_index=span.shard,
                    fim=span.middle,
                    text=decode(span.ids.tolist()) if decode is not None else None,
                    parts=_parts(span.ids.tolist(), counted, decode)
                    if with_text and not counted.all()
                    else None,
                )
            )
            position += len(span.ids)
        explained.append(
            _traced(
                factory,
                samples,
                number,
                travelling,
                sample=group.begin + step,
                tokens=factory.config.sequence_length,
                digest=digest_hex(group.marks[step].digest),
                documents=documents,
                ids=ids.tolist() if with_text else None,
            )
        )
    return explained


def _labels(factory: PipelineFactory, group: StepGroup, step: int) -> Mask:
    """Which ids of a micro-step's only sample count for the loss, 0 or 1 for each; of its first that is not decided."""
    labels = factory.form.loss_mask(group.ids(0, step, step + 1)[0]).copy()
    if factory.config.mask_boundaries:
        _, starts = group.document_starts(0, step, step + 1)
        positions = starts.astype(np.int64) - factory.form.begin(len(labels))
        labels[positions[(positions > 0) & (positions < len(labels))]] = 0
    return labels


def _parts(ids: list[int], counted: Mask, decode: Decode | None) -> list[TracedPart]:
    """The parts of a document's ids that count for the loss, and that do not."""
    parts = []
    for begin, end in pairwise([0, *(np.flatnonzero(np.diff(counted)) + 1).tolist(), len(ids)]):
        text = None
        if decode is not None:
            # Decoders leave out a first blank, so some of what stands before it is decoded, too, and taken away.
            before = ids[max(0, begin - CONTEXT_IDS) : begin]
            text = decode(before + ids[begin:end])[len(decode(before)) :]
        parts.append(TracedPart(tokens=end - begin, counts=bool(counted[begin]), text=text))
    return parts


def _of_rows(
    factory: PipelineFactory,
    group: StepGroup,
    samples: SourceSamples,
    decode: Decode | None,
    with_text: bool,
) -> list[TracedSample]:
    """Samples that are rows, by the batches that they came in."""
    source, epochs = samples.source, factory.readers.bucket_epochs(samples.source)
    paths, size = factory.record.shard_paths[source], epochs.size
    cursor = (
        samples.state.cursor if isinstance(samples.state.cursor, EpochCursor) else EpochCursor(0, 0)
    )
    epoch, number = cursor.epoch, cursor.rows // size
    explained = []
    for batch_number, step in enumerate(samples.steps):
        while number == epochs.count(epoch):
            epoch, number = epoch + 1, 0
        shards, rows = epochs.rows_of(epoch, number)
        number += 1
        batch = group.batch_of(step)
        digest = group.marks[step - 1].digest if step else group.base.digest
        for place, travelling in enumerate(group.ids(0, step, step + 1)):
            digest = (
                digest * DIGEST_MULTIPLIER + xxhash.xxh3_128_intdigest(travelling, source)
            ) % DIGEST_MODULUS
            row = {"bucket": batch.bucket, **described(batch, travelling)} if with_text else None
            document = TracedDocument(
                position=0,
                shard=paths[int(shards[place])],
                shard_index=int(shards[place]),
                row=int(rows[place]),
                epoch=epoch,
                begin=0,
                end=1,
                row_tokens=1,
                text=json.dumps(row, ensure_ascii=False) if row is not None else None,
            )
            explained.append(
                _traced(
                    factory,
                    samples,
                    batch_number * size + place,
                    travelling,
                    sample=group.begin + step * size + place,
                    tokens=1,
                    digest=digest_hex(digest),
                    documents=[document],
                )
            )
    return explained


def _traced(
    factory: PipelineFactory, samples: SourceSamples, number: int, travelling: Any, **fields: Any
) -> TracedSample:
    """The sample of that number among these, from 0, whose ids travel so."""
    config = factory.config.sources[samples.source]
    return TracedSample(
        generation=0,
        status="committed",
        micro_step=None,
        rank=None,
        place=None,
        source_id=samples.source,
        source=config.name,
        spec=config.source,
        source_sample=samples.state.samples + number,
        hash=f"{xxhash.xxh3_128_intdigest(travelling, samples.source):032x}",
        **fields,
    )
