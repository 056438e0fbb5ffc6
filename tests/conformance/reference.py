"""What a client is to give, read off the wire in the plainest way: sample by sample, as the contract says it."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import grpc
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.dataloader_pb2_grpc import DataLoaderStub

from tests.support.digest import digest_after

#: The label that losses ignore.
IGNORED = -100


class Sample(NamedTuple):
    source_id: int
    input_ids: list[int]
    labels: list[int]
    total_tokens: int
    """Of the run after it."""
    digest: str
    """Of the run after it."""


def samples(target: str, run: str, count: int) -> list[Sample]:
    """The first samples of a run, fewer where the data end, by only looking: the run is not touched."""
    options = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(target, options=options) as channel:
        stub = DataLoaderStub(channel)
        joined = stub.Join(
            wire.JoinRequest(run=run, world_size=1, batch_size=1, peek=True, resume="0")
        )
        progress = wire.Progress(consumed_through=0, digest="0" * 32, credit_micro_steps=count)
        opened = wire.StreamOpen(
            run=run, run_uid=joined.run_uid, peek=True, batch_size=1, document_starts=True
        )
        opened.received_digest = "0" * 32
        opened.progress.CopyFrom(progress)
        requests: queue.SimpleQueue[wire.StreamRequest | None] = queue.SimpleQueue()
        requests.put(wire.StreamRequest(open=opened))
        # A client that closes its side gets no more: it stays open for as long as something is to come.
        call = stub.Stream(iter(requests.get, None))
        read: list[Sample] = []
        for response in call:
            if response.HasField("end_of_data"):
                break
            read += _samples(joined, response.batches, read[-1].digest if read else "0")
            if len(read) >= count:
                break
        requests.put(None)
        call.cancel()
    return read[:count]


def snapshot(target: str, run: str, sample_index: int = -1) -> str:
    """The server's state at a sample index, or the committed one."""
    with grpc.insecure_channel(target) as channel:
        asked = wire.SnapshotRequest(run=run, sample_index=sample_index)
        return str(DataLoaderStub(channel).Snapshot(asked).snapshot_json)


def _samples(joined: wire.JoinResponse, batches: wire.Batches, digest: str) -> Iterator[Sample]:
    """Of a message whose micro-steps have one sample each."""
    rolling = int(digest, 16)
    starts, begin = list(batches.document_starts), 0
    size = len(batches.ids) // max(1, len(batches.micro_steps))
    for number, (micro_step, source_id) in enumerate(
        zip(batches.micro_steps, batches.source_ids, strict=True)
    ):
        sample = batches.ids[number * size : (number + 1) * size]
        rolling = digest_after(rolling, source_id, sample)
        assert f"{rolling:032x}" == micro_step.digest, (
            "the digest is not of the bytes that travelled"
        )
        document_begins = starts[begin : begin + batches.document_counts[number]]
        begin += batches.document_counts[number]
        input_ids, labels = _split(joined, sample, document_begins)
        yield Sample(source_id, input_ids, labels, micro_step.total_tokens, micro_step.digest)


def _split(
    joined: wire.JoinResponse, sample: bytes, document_begins: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Input ids and labels of the bytes of a sample."""
    shifted = joined.labels == wire.LABELS_SHIFTED
    count, width = joined.sequence_length + shifted, int(joined.id_type)
    ids = [int.from_bytes(sample[i * width : (i + 1) * width], "little") for i in range(count)]
    rest = sample[count * width :]
    counts = [True] * count
    if joined.sample_lengths:
        length, rest = int.from_bytes(rest[:4], "little"), rest[4:]
        first = count - length if joined.pads_left else 0
        for i in range(count):
            # Padding counts not, nor what only padding stands before.
            counts[i] = first <= i < first + length and (first == 0 or i > first)
    if joined.loss_masks:
        for i in range(count):
            counts[i] = counts[i] and bool(rest[i // 8] >> (i % 8) & 1)
    if joined.mask_boundaries:
        for i in document_begins:
            # The first id of a sample has nothing before it that it could be a label for.
            counts[i] = counts[i] and i == 0
    labels = [token if counted else IGNORED for token, counted in zip(ids, counts, strict=True)]
    return ids[: joined.sequence_length], labels[shifted:]
