"""Samples as a peek's stream brings them: decoded from its messages, and shown as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.resume import NamedSource
from tokenloom_server.packing.base import Batch, Feature
from tokenloom_server.packing.buckets import described, size_of
from tokenloom_server.packing.samples import SampleFormat

from tokenloom_tools.text import Decode


@dataclass(frozen=True, slots=True, kw_only=True)
class PeekedSample:
    """One sample of a run."""

    index: int
    source: str
    spec: str
    #: Its tokens, without padding; for a row, nothing.
    ids: npt.NDArray[np.integer[Any]]
    #: How many documents have tokens in it.
    documents: int
    #: The rolling digest after it; of a batch of rows after its last one.
    digest: str
    #: Total tokens of the run after it.
    total_tokens: int
    #: Its ids as they travel, without padding: where labels are the next ids, one more.
    ids_with_label: npt.NDArray[np.integer[Any]]
    #: Where documents begin among these, ascending; not where it goes on with one from the sample before.
    starts: tuple[int, ...]
    #: Of a row that travels as it is, its columns, for people.
    row: Mapping[str, Any] | None = None

    @property
    def tokens(self) -> int:
        """How many tokens it counts as, without padding; a row is one."""
        return len(self.ids) if self.row is None else 1

    def text(self, decode: Decode | None, most: int | None = None) -> str:
        """Its text, of the first ``most`` tokens if given; its ids where the run has no tokeniser."""
        if self.row is not None:
            return json.dumps(self.row, ensure_ascii=False)
        ids = self.ids[:most].tolist()
        return decode(ids) if decode is not None else " ".join(map(str, ids))

    def document(self, decode: Decode | None) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "sample": self.index,
            "source": self.source,
            "spec": self.spec,
            "tokens": self.tokens,
            **({} if self.row is None else {"row": self.row}),
            "documents": self.documents,
            "digest": self.digest,
            "ids": self.ids.tolist(),
            "text": decode(self.ids.tolist()) if decode is not None else None,
        }


def format_of(joined: wire.JoinResponse) -> SampleFormat:
    """How samples of ids travel."""
    return SampleFormat(
        length=joined.sequence_length,
        width=joined.sequence_length + (joined.labels == wire.LABELS_SHIFTED),
        dtype=np.dtype(f"u{int(joined.id_type)}"),
        lengths=joined.sample_lengths,
        masked=joined.loss_masks,
        padding="left" if joined.pads_left else "right",
    )


def decode_batches(
    joined: wire.JoinResponse, sources: Mapping[int, NamedSource], batches: wire.Batches
) -> Iterator[PeekedSample]:
    """The samples of a message of a peek; ``sources`` by number."""
    return (_rows if joined.global_batch_size else _samples)(joined, sources, batches)


def _samples(
    joined: wire.JoinResponse, sources: Mapping[int, NamedSource], batches: wire.Batches
) -> Iterator[PeekedSample]:
    """Samples of ids, one for each micro-step."""
    form = format_of(joined)
    length = form.length
    size, first = form.sample_bytes, 0
    samples = [batches.ids[begin : begin + size] for begin in range(0, len(batches.ids), size)]
    for step, sample, source, count in zip(
        batches.micro_steps, samples, batches.source_ids, batches.document_counts, strict=True
    ):
        starts = batches.document_starts[first : first + count]
        first += count
        ids = form.ids(sample)
        begin = form.begin(len(ids))
        inside = sum(start < length for start in starts)
        yield PeekedSample(
            index=step.end_index - 1,
            source=sources[source].alias,
            spec=sources[source].spec,
            # Of a sample that is full, the last id may be only a label.
            ids=ids[: length - begin],
            # What goes on from the sample before is a document of this one, too.
            documents=inside + (begin not in starts),
            digest=step.digest,
            total_tokens=step.total_tokens,
            ids_with_label=ids,
            starts=tuple(start - begin for start in starts),
        )


def _rows(
    joined: wire.JoinResponse, sources: Mapping[int, NamedSource], batches: wire.Batches
) -> Iterator[PeekedSample]:
    """Rows that travel as they are; each micro-step is a batch of them."""
    size, offset, data = joined.global_batch_size, 0, memoryview(batches.ids)
    nothing = np.empty(0, np.uint8)
    for number, (step, bucket) in enumerate(zip(batches.micro_steps, batches.buckets, strict=True)):
        batch = Batch(
            bucket.name,
            tuple(
                Feature(column.name, column.dtype, tuple(column.shape)) for column in bucket.columns
            ),
        )
        source = sources[batches.source_ids[number * size]]
        for row in range(size):
            own = bucket.sample_bytes[row] if bucket.sample_bytes else size_of(batch, data[offset:])
            yield PeekedSample(
                index=step.end_index - size + row,
                source=source.alias,
                spec=source.spec,
                ids=nothing,
                documents=1,
                digest=step.digest,
                total_tokens=step.total_tokens - size + row + 1,
                ids_with_label=nothing,
                starts=(),
                row={"bucket": batch.bucket, **described(batch, data[offset : offset + own])},
            )
            offset += own
