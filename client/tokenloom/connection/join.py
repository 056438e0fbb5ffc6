"""Join: what a dataset asks for, what the server answers, and how long to ask."""

from __future__ import annotations

import json
import logging
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import grpc
import numpy as np
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto import process
from tokenloom_proto.address import Address
from tokenloom_proto.credentials import Credentials
from tokenloom_proto.dataloader_pb2_grpc import DataLoaderStub
from tokenloom_proto.resume import counts_at, real_tokens, sources_of
from tokenloom_proto.threads import Loop
from tokenloom_proto.versions import own_release

from tokenloom.batch.arrays import ArrayMaker, BatchMaker
from tokenloom.batch.layout import Layout
from tokenloom.connection.channel import (
    Retry,
    failure,
    is_named,
    retry_for_s,
    retryable,
    summary,
    times_out,
)
from tokenloom.connection.options import ConnectionOptions
from tokenloom.connection.server import RunServer
from tokenloom.connection.topology import Topology
from tokenloom.errors import ProtocolError
from tokenloom.snapshot import Base, Point

# Where the batch size of a generation changes, and how many of its micro-steps may be fetched ahead.


#: Groups of micro-steps that are fetched ahead: one to take from, one to follow it, and two on their way while the
#: server hears that it may send them.
PREFETCH_GROUPS = 4


class BatchPlan(NamedTuple):
    """Where micro-steps of one batch size begin, their samples per rank, and how many lie between state boundaries."""

    begin_index: int
    batch_size: int
    group_micro_steps: int


class StepSchedule:
    """The micro-steps of a generation. Immutable."""

    def __init__(
        self,
        plans: Sequence[BatchPlan],
        *,
        world_size: int,
        accumulate: int = 1,
        prefetch_steps: int | None = None,
    ) -> None:
        """``prefetch_steps`` are fetched ahead, where it is not None. Raises ``ProtocolError``."""
        for before, after in pairwise(plans):
            steps, rest = divmod(
                after.begin_index - before.begin_index, world_size * before.batch_size
            )
            if rest or steps < 1:
                raise ProtocolError(
                    f"micro-steps of {world_size} × {before.batch_size} samples from {before.begin_index} on cannot "
                    f"end at {after.begin_index}, where the server changes the batch size"
                )
        self.plans = tuple(plans)
        self._begins = [plan.begin_index for plan in plans]
        self._step_samples = [world_size * plan.batch_size for plan in plans]
        # An optimiser step is taken from, and one more is on its way.
        self._ahead = [
            prefetch_steps or max(PREFETCH_GROUPS * plan.group_micro_steps, 2 * accumulate)
            for plan in plans
        ]

    def number_at(self, sample_index: int) -> int:
        """Which of the plans has the micro-step that begins at a sample index."""
        return max(0, bisect_right(self._begins, sample_index) - 1)

    def capacity_steps(self, sample_index: int) -> int:
        """Micro-steps to hold at most, for who has consumed what lies before a sample index: the least that any plan
        has whose micro-steps are among them, so that larger micro-steps take no more memory than their own plan's."""
        number = self.number_at(sample_index)
        capacity = total = self._ahead[number]
        steps = 0
        while number + 1 < len(self.plans):
            steps += (
                self._begins[number + 1] - max(sample_index, self._begins[number])
            ) // self._step_samples[number]
            if total <= steps:
                break
            number += 1
            capacity = min(capacity, self._ahead[number])
            total = max(steps, capacity)
        return total

    def half_of_capacity(self, sample_index: int) -> int:
        """Half of these micro-steps, at least one, in samples."""
        return (
            max(1, self.capacity_steps(sample_index) // 2)
            * self._step_samples[self.number_at(sample_index)]
        )


log = logging.getLogger("tokenloom")

#: A server that has not answered by then is asked whether it goes forward to a far sample, and then again and again.
SOON_S, WATCH_EVERY_S = 0.5, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a dataset asks for."""

    server: RunServer
    stream: str
    topology: Topology
    options: ConnectionOptions
    batch_size: int = 0
    """Samples per rank and micro-step; 0 where there are ``batch_sizes``, or the run says it."""
    batch_sizes: tuple[tuple[int, int], ...] = ()
    """Pairs (total tokens, batch size) instead of that."""
    accumulate: int = 1
    resume: str = ""
    state: str = ""
    fork: bool = False
    """``state`` is another run's."""
    takeover: bool = False
    peek: bool = False
    samples: int | None = None
    """How many samples of a stream to evaluate on, 0 for all of it. None: the stream is trained on."""
    columns: frozenset[str] = frozenset()
    maker: Callable[[Layout], BatchMaker] = ArrayMaker
    """Makes the batches of a layout, as what the dataset gives: arrays, or tensors, or tensors on a device."""

    @property
    def address(self) -> Address:
        """Where the run is served."""
        return self.server.address

    @property
    def credentials(self) -> Credentials:
        """What to show there."""
        return self.server.credentials

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
    """All sources in the order of their ids: those of the answer to the Join, and those that a revision added up to a
    state boundary."""
    known = {source.id: source for source in opened}
    for source_id, source in sources_of(base.resume_state).items():
        known[source_id] = Source(source_id, source.spec, source.alias)
    return [known[source_id] for source_id in sorted(known)]


class SampleForm(NamedTuple):
    """What the samples of a run are like, for who makes a model for them. Lengths are of its present phase."""

    sequence_length: int
    vocab_size: int
    pad_id: int
    end_of_text_id: int | None


class RunFacts(NamedTuple):
    """What is known of a run once it is joined; the same on all of its ranks."""

    generation: int
    start_index: int
    """The sample index at which this attempt began."""
    form: SampleForm
    labels: str
    """``"same"`` as the input ids, or ``"shifted"``."""
    rows: bool
    """Batches are rows from buckets."""
    batch_size: int
    """Samples per rank and micro-step, at the start."""
    sources: list[Source]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What the server answered to a Join."""

    run_uid: str
    facts: RunFacts
    """What of it the trainer may know."""
    start: Point
    layout: Layout
    schedule: StepSchedule
    template: bytes
    server_epoch: int
    #: What the order passes over from ``start`` on, and did so far, for people.
    skips: list[str]
    #: How many samples a stream to evaluate on has.
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
        batch_sizes=[
            wire.BatchSize(total_tokens=tokens, batch_size=size)
            for tokens, size in request.batch_sizes
        ],
        accumulate=request.accumulate,
        attempt=request.topology.attempt,
        nonce=nonce,
        resume=request.resume,
        state_json=request.state.encode(),
        takeover=request.takeover,
        process=process.identity(),
        peek=request.peek,
        fork=request.fork,
        samples=request.samples or 0,
        release=own_release(),
    )
    retry = Retry(request.options.connect_timeout_s, len(request.address.targets))
    give_up_at = math.inf
    named_error: grpc.RpcError | None = None
    shown: grpc.RpcError | None = None
    while True:
        try:
            # Other ranks' Joins wait at the server for rank 0's, so one try may last as long as all.
            # And where samples are made for it, a Join waits for these.
            timeout_s = (
                max(retry.remaining_s(), 0.001)
                if request.samples is None
                else request.options.batch_timeout_s
            )
            return _opening(_answer(connect(), message, timeout_s, request), request)
        except grpc.RpcError as error:
            delay_s = retry.next_delay_s()
            if is_named(error):
                named_error = error
            # A run is busy for as long as its ranks are heard: those of a job that was just ended soon are not.
            busy_s = retry_for_s(error)
            if busy_s is not None:
                give_up_at = min(give_up_at, time.monotonic() + busy_s)
            stays_busy = busy_s is not None and time.monotonic() >= give_up_at
            if stays_busy or delay_s is None or not retryable(error, request.address):
                # A server's own words tell more than that the last try ran out of time.
                reason = named_error if named_error is not None and times_out(error) else error
                raise failure(reason, request.address, request.topology.rank) from None
            # Of several servers the one that leads says why, once all were asked; the others only that they stand by.
            if shown is None or not is_named(error, "NotLeader"):
                shown = error
            # A busy run counts down: on one rank.
            if (busy_s is None or not request.topology.rank) and retry.warns():
                left_s = max(0.0, min(retry.remaining_s(), give_up_at - time.monotonic()))
                log.warning(
                    "cannot join %s yet, trying for %.0f s more: %s",
                    request.address,
                    left_s,
                    summary(shown),
                )
        time.sleep(delay_s)


def _answer(
    stub: DataLoaderStub, message: wire.JoinRequest, timeout_s: float, request: Request
) -> wire.JoinResponse:
    """The answer to a Join. While it is waited for, the log says how far the server is on the way to a far sample."""
    metadata = request.credentials.metadata

    def watch() -> bool:
        with suppress(grpc.RpcError, ValueError):  # or the channel is closed by now
            question = wire.StatsRequest(run=request.address.run)
            stats = json.loads(
                stub.Stats(question, timeout=WATCH_EVERY_S, metadata=metadata).stats_json
            )
            if stats.get("going_forward"):
                log.warning(
                    "%s: the server goes forward %s", request.address, stats["going_forward"]
                )
        return not watcher.ending.wait(WATCH_EVERY_S)

    watcher = Loop("join", watch, "tokenloom", after_s=SOON_S)
    if not message.rank:
        watcher.start()
    try:
        answer: wire.JoinResponse = stub.Join(message, timeout=timeout_s, metadata=metadata)
        return answer
    finally:
        watcher.ending.set()


def _check(answer: wire.JoinResponse, request: Request) -> None:
    """Raises ``ProtocolError`` for an answer that this client cannot read, or whose batches lack the columns."""
    if answer.global_batch_size:
        if of_documents := request.columns & {"position_ids", "document_ids"}:
            raise ProtocolError(
                f"{request.address} gives batches of rows from buckets, which have no documents: leave "
                f"{' and '.join(sorted(of_documents))} out of columns"
            )
    elif answer.id_type not in (1, 2, 4) or answer.labels not in (
        wire.LABELS_SAME,
        wire.LABELS_SHIFTED,
    ):
        raise ProtocolError(
            f"the server sends ids of type {answer.id_type} and labels of kind {answer.labels}, which this client "
            "does not know: install the client of the server's version"
        )


def _form(answer: wire.JoinResponse) -> SampleForm:
    end_of_text_id = answer.end_of_text_id if answer.HasField("end_of_text_id") else None
    return SampleForm(answer.sequence_length, answer.vocab_size, answer.pad_id, end_of_text_id)


def _opening(answer: wire.JoinResponse, request: Request) -> Opening:
    _check(answer, request)
    of_rows = answer.global_batch_size > 0
    # The state there counts what sources gave; a run or an evaluation from its beginning has had nothing.
    state = json.loads(answer.base.resume_state) if answer.start_tokens else None
    counts = counts_at(state, answer.start_index, answer.start_tokens) if state else {}
    first = BatchPlan(answer.start_index, answer.batch_size, answer.group_micro_steps)
    plans = [
        BatchPlan(plan.begin_index, plan.batch_size, plan.group_micro_steps)
        for plan in answer.batch_plans
    ]
    return Opening(
        run_uid=answer.run_uid,
        facts=RunFacts(
            generation=answer.generation,
            start_index=answer.start_index,
            form=_form(answer),
            labels="shifted" if answer.labels == wire.LABELS_SHIFTED else "same",
            rows=of_rows,
            batch_size=first.batch_size,
            sources=[Source(source.id, source.spec, source.alias) for source in answer.sources],
        ),
        start=Point(
            answer.start_index,
            answer.start_tokens,
            real_tokens(answer.start_tokens, counts),
            answer.start_digest,
            Base(answer.base.sample_index, answer.base.resume_state),
        ),
        layout=Layout(
            batch_size=first.batch_size,
            sequence_length=answer.sequence_length,
            id_type=np.dtype(f"<u{int(answer.id_type) or 1}").str,
            rows=of_rows,
            shifted=answer.labels == wire.LABELS_SHIFTED,
            columns=request.columns,
            lengths=answer.sample_lengths,
            pads_left=answer.pads_left,
            loss_masks=answer.loss_masks,
            mask_boundaries=answer.mask_boundaries,
        ),
        schedule=StepSchedule(
            plans or [first],
            world_size=request.topology.world_size,
            accumulate=request.accumulate,
            prefetch_steps=request.options.prefetch_steps,
        ),
        template=answer.snapshot_template,
        server_epoch=answer.server_epoch,
        skips=list(answer.skips),
        samples=answer.stream_samples,
    )
