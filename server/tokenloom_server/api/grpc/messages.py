"""Deliveries as messages: the bytes of a ``StreamResponse``, with the ids copied once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.delivered import Delivered, DeliveredBucket

from tokenloom_server.core.numbers import varint
from tokenloom_server.core.state import digest_hex
from tokenloom_server.errors import Fenced
from tokenloom_server.order.steps import StepGroup
from tokenloom_server.packing.samples import Sample
from tokenloom_server.replay.evaluation import Slice
from tokenloom_server.run.generation import Delivery, EndOfData, Waiting

_LENGTH_DELIMITED = 2
_STEPS_KEY = bytes((wire.Batches.MICRO_STEPS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED,))
_SLICE_KEY = bytes((wire.MicroStep.SLICE_FIELD_NUMBER << 3,))


def encode_delivery(
    rank: int, delivery: Delivery, committed_through: int, epoch: int, *, document_starts: bool
) -> bytes:
    """A serialised ``StreamResponse`` with ``batches``.

    protobuf would copy the ids into a message, then into its serialised form. They are by far the most
    of it, so everything else is serialised by protobuf and they are put in between: fields may come in
    any order (protobuf.dev, *Encoding*, "Field Order").
    """
    group, first, last, with_base = delivery
    counts: list[int] = []
    starts: npt.NDArray[np.uint32] = np.empty(0, np.uint32)
    if document_starts:
        counts, starts = group.document_starts(rank, first, last)
    batches = wire.Batches(
        begin_index=group.step_begin(first),
        source_ids=group.source_ids[rank, first:last].ravel().tolist(),
        document_counts=counts,
        document_starts=starts.tolist(),
        base=wire.Base(sample_index=group.begin, resume_state=group.resume_state.encode())
        if with_base
        else None,
        buckets=[
            wire.Bucket(
                name=bucket.name,
                source=bucket.source,
                columns=[
                    wire.Column(name=name, dtype=dtype, shape=shape)
                    for name, dtype, shape in bucket.columns
                ],
                sample_bytes=bucket.sample_bytes,
            )
            for bucket in _buckets(group, rank, first, last)
        ],
        counts=counts_of(group, first, last),
    ).SerializeToString() + _step_infos(group, first, last, rank)
    ids = _ids(rank, delivery)
    size = sum(map(len, ids)) if group.of_rows else len(ids) * len(ids[0])
    ids_key = _key(wire.Batches.IDS_FIELD_NUMBER) + varint(size)
    batches_key = _key(wire.StreamResponse.BATCHES_FIELD_NUMBER) + varint(
        len(batches) + len(ids_key) + size
    )
    rest = wire.StreamResponse(
        committed_through=committed_through, server_epoch=epoch
    ).SerializeToString()
    return b"".join((batches_key, batches, ids_key, *ids, rest))


def hand_over(
    rank: int, delivery: Delivery, committed_through: int, epoch: int, *, document_starts: bool
) -> Delivered:
    """As ``encode_delivery``, for a client in this process: what its message would be read as."""
    group, first, last, with_base = delivery
    counts, starts = (
        group.document_starts(rank, first, last)
        if document_starts
        else ([], np.empty(0, np.uint32))
    )
    steps, marks = range(first, last), group.marks[first:last]
    real = [group.real_tokens(step) for step in steps]
    return Delivered(
        begin_index=group.step_begin(first),
        end_indices=[mark.sample_index for mark in marks],
        slices=[group.slice_of(step, rank) for step in steps],
        total_tokens=[mark.total_tokens for mark in marks],
        real_tokens=[group.run_real_tokens(step) for step in steps],
        tokens=[tokens for tokens, _ in real],
        label_tokens=[labels for _, labels in real],
        digests=[digest_hex(mark.digest) for mark in marks],
        source_ids=group.source_ids[rank, first:last].ravel().tolist(),
        ids=b"".join(_ids(rank, delivery)),
        document_counts=counts,
        document_starts=starts.tolist(),
        base=(group.begin, group.resume_state.encode()) if with_base else None,
        counts=counts_of(group, first, last),
        buckets=list(_buckets(group, rank, first, last)),
        committed_through=committed_through,
        server_epoch=epoch,
    )


def response_of(
    item: EndOfData | Waiting, committed_through: int, epoch: int
) -> wire.StreamResponse:
    """What a stream says where it has no samples."""
    response = wire.StreamResponse(committed_through=committed_through, server_epoch=epoch)
    if isinstance(item, EndOfData):
        end = wire.EndOfData(
            end_index=item.end_index, reason=item.reason, dropped_samples=item.dropped_samples
        )
        response.end_of_data.CopyFrom(end)
    else:
        response.heartbeat.waiting_for = item.waiting_for
        response.heartbeat.SetInParent()
    return response


def encode_slice(
    part: Slice, committed_through: int, epoch: int, *, document_starts: bool
) -> wire.StreamResponse:
    """Micro-steps of an evaluation."""
    counts, starts = part.starts if document_starts else ([], [])
    batches = wire.Batches(
        begin_index=part.begin,
        micro_steps=[
            wire.MicroStep(
                end_index=end,
                slice=part.rank,
                total_tokens=total,
                digest=digest,
                tokens=tokens,
                label_tokens=labels,
                real_tokens=real,
            )
            for end, total, real, digest, (tokens, labels) in zip(
                part.ends, part.tokens, part.real_tokens, part.digests, part.real, strict=True
            )
        ],
        ids=part.ids,
        source_ids=part.source_ids,
        document_counts=counts,
        document_starts=starts,
    )
    return wire.StreamResponse(
        batches=batches, committed_through=committed_through, server_epoch=epoch
    )


def _step_infos(group: StepGroup, first: int, last: int, rank: int) -> bytes:
    """``Batches.micro_steps`` of the micro-steps [first, last). What is the same for all ranks is made once."""
    parts: list[bytes] = []
    for step in range(first, last):
        common = group.step_infos.get(step)
        if common is None:
            mark = group.marks[step]
            tokens, label_tokens = group.real_tokens(step)
            info = wire.MicroStep(
                end_index=mark.sample_index,
                total_tokens=mark.total_tokens,
                digest=digest_hex(mark.digest),
                tokens=tokens,
                label_tokens=label_tokens,
                real_tokens=group.run_real_tokens(step),
            )
            common = group.step_infos[step] = info.SerializeToString()
        place = group.slice_of(step, rank)
        own = _SLICE_KEY + varint(place) if place else b""
        parts += (_STEPS_KEY, varint(len(common) + len(own)), common, own)
    return b"".join(parts)


def counts_of(group: StepGroup, first: int, last: int) -> bytes:
    """``Batches.counts`` of a message with the micro-steps [first, last), made once for all ranks."""
    counts = group.message_counts.get((first, last))
    if counts is None:
        numbers = [column.tolist() for column in group.source_counts(first, last)]
        fields = dict(
            zip(("entries", "source_ids", "samples", "padding_tokens"), numbers, strict=True)
        )
        new = group.marks[last - 1].stage.config.sources[len(group.base.sources) :]
        counts = wire.SourceCounts(
            **fields, specs=[source.source for source in new]
        ).SerializeToString()
        group.message_counts[first, last] = counts
    return counts


def _ids(rank: int, delivery: Delivery) -> list[Sample]:
    ids = delivery.group.ids(rank, delivery.first, delivery.last)
    if not ids:
        raise Fenced(f"a newer stream of rank {rank} has consumed what this one was about to send")
    return ids


def _buckets(group: StepGroup, rank: int, first: int, last: int) -> Iterator[DeliveredBucket]:
    """Of each micro-step that is a batch of rows."""
    if not group.of_rows:
        return
    for step in range(first, last):
        batch = group.batch_of(step)
        sizes = list(map(len, group.ids(rank, step, step + 1)))
        source = group.marks[step].stage.config.sources[int(group.source_ids[rank, step, 0])].name
        yield DeliveredBucket(
            batch.bucket, source, batch.features, sizes if len(set(sizes)) > 1 else ()
        )


def _key(field: int) -> bytes:
    return varint(field << 3 | _LENGTH_DELIMITED)
