"""Join: what a dataset asks for, what the server answers, and how long to ask."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import grpc
import numpy as np
import torch
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.credentials import Credentials
from tokenloom_proto.dataloader_pb2_grpc import DataLoaderStub
from tokenloom_proto.resume import sources_of

from tokenloom.connection import topology
from tokenloom.connection.address import Address
from tokenloom.batch.packed import Layout
from tokenloom.connection.channel import (
    Retry,
    failure,
    is_named,
    retry_for_s,
    retryable,
    summary,
    times_out,
)
from tokenloom.errors import ProtocolError
from tokenloom.connection.batch_schedule import BatchPlan, Ramp
from tokenloom.snapshot import Base, Point
from tokenloom.connection.topology import Topology

log = logging.getLogger("tokenloom")

#: While a server is away, the log says so at most this often.
WARN_EVERY_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a dataset asks for."""

    address: Address
    credentials: Credentials
    stream: str
    topology: Topology
    batch_size: int
    #: Pairs (total tokens, batch size) instead of that.
    batch_sizes: tuple[tuple[int, int], ...]
    accumulate: int
    resume: str
    state: str
    position_ids: bool
    document_ids: bool
    attention_mask: bool
    loss_mask: bool
    cu_seqlens: bool
    prefetch_steps: int | None
    takeover: bool
    peek: bool
    fork: bool
    connect_timeout_s: float
    reconnect_timeout_s: float
    batch_timeout_s: float
    device: torch.device | None = None
    """Where batches are made; None: in ordinary memory, by numpy."""
    #: Of a stream to evaluate on: how many samples, 0 for all of it. None: the stream is trained on.
    samples: int | None = None

    @property
    def counted(self) -> bool:
        """Whether what is consumed is to be committed."""
        return not self.peek and self.samples is None


@dataclass(frozen=True, slots=True)
class Source:
    """A source of the run: ``id`` is what ``source_ids`` holds."""

    id: int
    spec: str
    alias: str


def sources_at(base: Base, opened: Iterable[Source]) -> list[Source]:
    """By id: those that the Join was answered with, and those that a boundary has; a revision may have brought some."""
    known = {source.id: source for source in opened}
    found = sources_of(base.resume_state)
    known |= {number: Source(number, source.spec, source.alias) for number, source in found.items()}
    return [known[number] for number in sorted(known)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What the server answered to a Join."""

    run_uid: str
    generation: int
    start: Point
    layout: Layout
    sources: list[Source]
    ramp: Ramp
    template: bytes
    server_epoch: int
    #: Samples of the order that were jumped over right before ``start``.
    skipped_samples: int
    #: Of a stream to evaluate on: how many samples there are.
    samples: int = 0


def join(connect: Callable[[], DataLoaderStub], request: Request, nonce: str) -> Opening:
    """Takes the slot; waits for a server that is away, up to ``connect_timeout_s``.

    ``connect`` makes a new connection, for each try.
    """
    message = wire.JoinRequest(
        run=request.address.run,
        stream=request.stream,
        rank=request.topology.rank,
        world_size=request.topology.world_size,
        batch_size=request.batch_size,
        batch_sizes=[wire.BatchSize(total_tokens=tokens, batch_size=size) for tokens, size in request.batch_sizes],
        accumulate=request.accumulate,
        attempt=request.topology.attempt,
        nonce=nonce,
        resume=request.resume,
        state_json=request.state.encode(),
        takeover=request.takeover,
        process=topology.process(),
        peek=request.peek,
        fork=request.fork,
        samples=request.samples or 0,
    )
    metadata = request.credentials.metadata
    retry = Retry(request.connect_timeout_s, len(request.address.targets))
    give_up_at = math.inf
    told: grpc.RpcError | None = None
    warn_at = 0.0
    while True:
        try:
            # Other ranks' Joins wait at the server for rank 0's, so one try may last as long as all.
            # And where samples are made for it, a Join waits for these.
            timeout_s = max(retry.remaining_s(), 0.001) if request.samples is None else request.batch_timeout_s
            answer = connect().Join(message, timeout=timeout_s, metadata=metadata)
            return _opening(answer, request)
        except grpc.RpcError as error:
            delay_s = retry.next_delay_s()
            if is_named(error):
                told = error
            # A run is busy for as long as its ranks are heard: those of a job that was just ended soon are not.
            busy_s = retry_for_s(error)
            if busy_s is not None:
                give_up_at = min(give_up_at, time.monotonic() + busy_s)
            if not retryable(error) or delay_s is None or (busy_s is not None and time.monotonic() >= give_up_at):
                # A server's own words tell more than that the last try ran out of time.
                raise failure(told if told is not None and times_out(error) else error, request.address) from error
            if time.monotonic() >= warn_at:
                warn_at = time.monotonic() + WARN_EVERY_S
                log.warning("cannot join %s yet, trying again: %s", request.address, summary(error))
        time.sleep(delay_s)


def _opening(answer: wire.JoinResponse, request: Request) -> Opening:
    of_rows = answer.global_batch_size > 0
    if of_rows and (request.position_ids or request.document_ids):
        raise ProtocolError(
            f"{request.address} gives batches of rows from buckets, which have no documents: leave position_ids and "
            "document_ids out"
        )
    if not of_rows and (
        answer.id_type not in (1, 2, 4) or answer.labels not in (wire.LABELS_SAME, wire.LABELS_SHIFTED)
    ):
        raise ProtocolError(
            f"the server sends ids of type {answer.id_type} and labels of kind {answer.labels}, which this client "
            "does not know: install the client of the server's version"
        )
    first = BatchPlan(answer.start_index, answer.batch_size or request.batch_size, answer.group_steps)
    plans = [BatchPlan(plan.begin_index, plan.batch_size, plan.group_steps) for plan in answer.batch_plans]
    return Opening(
        run_uid=answer.run_uid,
        generation=answer.generation,
        start=Point(answer.start_index, answer.start_tokens, answer.start_digest, base_of(answer.base)),
        layout=Layout(
            batch_size=first.batch_size,
            sequence_length=answer.sequence_length,
            id_type=np.dtype(f"<u{int(answer.id_type) or 1}").str,
            rows=of_rows,
            shifted=answer.labels == wire.LABELS_SHIFTED,
            position_ids=request.position_ids,
            document_ids=request.document_ids,
            attention_mask=request.attention_mask,
            loss_mask=request.loss_mask,
            cu_seqlens=request.cu_seqlens,
            lengths=answer.sample_lengths,
            pads_left=answer.pads_left,
            loss_masks=answer.loss_masks,
            mask_boundaries=answer.mask_boundaries,
        ),
        sources=[Source(source.id, source.spec, source.alias) for source in answer.sources],
        ramp=Ramp(
            plans or [first],
            world_size=request.topology.world_size,
            accumulate=request.accumulate,
            prefetch_steps=request.prefetch_steps,
        ),
        template=answer.snapshot_template,
        server_epoch=answer.server_epoch,
        skipped_samples=answer.skipped_samples,
        samples=answer.stream_samples,
    )


def base_of(base: wire.Base) -> Base:
    """A boundary, free of wire types."""
    return Base(base.sample_index, base.resume_state)
