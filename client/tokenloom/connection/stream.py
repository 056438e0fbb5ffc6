"""The stream of a slot that was joined, and its reconnects.

    trainer               buffer                      this module                   server
    next()  ── take ────▶ micro-steps ◀──── put ───── reader thread ◀── Batches ─── Stream
                          consumed_through ─────────▶ writer ────────── Progress ─▶

The reader thread also owns the reconnects: they stay within the generation, go on after the last
micro-step received, and never join again. The writer runs on gRPC's own thread, one for each stream.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import count, repeat
from operator import lt
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto import process
from tokenloom_proto.dataloader_pb2_grpc import DataLoaderStub
from tokenloom_proto.delivered import Delivered, DeliveredBucket
from tokenloom_proto.threads import Background

from tokenloom.batch.arrays import Steps
from tokenloom.batch.layout import StepNumbers
from tokenloom.batch.packed import Message
from tokenloom.batch.rows import Bucket, Feature, RowsMessage
from tokenloom.connection.buffer import SIGN_OF_LIFE_S, Step, StepBuffer
from tokenloom.connection.calls import Reporter
from tokenloom.connection.channel import Channels, Retry, failure, is_named, retryable, summary
from tokenloom.connection.join import Request, join
from tokenloom.errors import ProtocolError, ServerUnavailable
from tokenloom.snapshot import Base, Point

# What the server streams, read without copying the ids, as a ``Delivered``.
#
# protobuf would copy them twice: into its own memory, then into a Python ``bytes``. They are nearly all of a
# message, so they are found in the received bytes and left there, and protobuf reads what is around them.


#: Messages below this are left to protobuf: copying so few ids costs less than finding them.
SMALL_BYTES = 16 * 1024

_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
_BATCHES = wire.StreamResponse.BATCHES_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_IDS = wire.Batches.IDS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED


class Response(NamedTuple):
    """A ``StreamResponse``, whose batches (None where it has others) are beside it, not in it."""

    message: wire.StreamResponse
    delivered: Delivered | None


class _Unusual(Exception):
    """An encoding that this module does not take apart. Whether it is a valid one is protobuf's to say."""


def read(data: bytes | Delivered) -> Response:
    """Reads one message of the stream; within a process batches come without one. Raises ``ProtocolError`` for bytes
    that are none."""
    if isinstance(data, Delivered):
        about = wire.StreamResponse(
            committed_through=data.committed_through, server_epoch=data.server_epoch
        )
        return Response(about, data)
    try:
        if len(data) >= SMALL_BYTES:
            try:
                return _read_around_ids(data)
            except (_Unusual, IndexError):
                pass
        message = wire.StreamResponse.FromString(data)
    except DecodeError as error:
        raise ProtocolError(
            f"{len(data)} bytes came that are no StreamResponse of the wire contract ({error}): "
            "install the client of the server's version"
        ) from None
    if message.WhichOneof("kind") != "batches":
        return Response(message, None)
    return Response(message, _delivered(message, message.batches, message.batches.ids))


def _read_around_ids(data: bytes) -> Response:
    begin, content, end = _find(_BATCHES, data, 0, len(data))
    ids_begin, ids, ids_end = _find(_IDS, data, content, end)
    message = wire.StreamResponse.FromString(data[:begin] + data[end:])
    if message.WhichOneof("kind") is not None:
        raise _Unusual  # of a oneof the last one counts
    batches = wire.Batches.FromString(data[content:ids_begin] + data[ids_end:end])
    return Response(message, _delivered(message, batches, memoryview(data)[ids:ids_end]))


def _delivered(
    message: wire.StreamResponse, batches: wire.Batches, ids: bytes | memoryview
) -> Delivered:
    infos = list(batches.micro_steps)  # each look into what protobuf holds makes objects anew
    return Delivered(
        begin_index=batches.begin_index,
        end_indices=[info.end_index for info in infos],
        slices=[info.slice for info in infos],
        total_tokens=[info.total_tokens for info in infos],
        real_tokens=[info.real_tokens for info in infos],
        tokens=[info.tokens for info in infos],
        label_tokens=[info.label_tokens for info in infos],
        digests=[info.digest for info in infos],
        source_ids=batches.source_ids[:],
        ids=ids,
        document_counts=batches.document_counts,
        document_starts=batches.document_starts,
        base=(batches.base.sample_index, batches.base.resume_state)
        if batches.HasField("base")
        else None,
        counts=batches.counts,
        buckets=[
            DeliveredBucket(
                bucket.name,
                bucket.source,
                [(column.name, column.dtype, column.shape) for column in bucket.columns],
                bucket.sample_bytes,
            )
            for bucket in batches.buckets
        ],
        committed_through=message.committed_through,
        server_epoch=message.server_epoch,
    )


def _find(key: int, data: bytes, offset: int, end: int) -> tuple[int, int, int]:
    """Where the one field with a key begins, where its content does, and where both end.

    Raises ``_Unusual``, or ``IndexError``, unless there is exactly one (several would have to be merged).
    """
    field_bounds = None
    while offset < end:
        begin = offset
        field, offset = (data[offset], offset + 1) if data[offset] < 0x80 else _varint(data, offset)
        kind = field & 7
        if kind == _LENGTH_DELIMITED:
            size, offset = (
                (data[offset], offset + 1) if data[offset] < 0x80 else _varint(data, offset)
            )
            if field == key:
                if field_bounds is not None:
                    raise _Unusual
                field_bounds = begin, offset, offset + size
            offset += size
        elif kind == _VARINT:
            while data[offset] >= 0x80:
                offset += 1
            offset += 1
        elif kind == _FIXED64:
            offset += 8
        elif kind == _FIXED32:
            offset += 4
        else:
            raise _Unusual
    if field_bounds is None or offset != end:
        raise _Unusual
    return field_bounds


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    """A number of several bytes, and where it ends."""
    value = shift = 0
    while data[offset] >= 0x80:
        value |= (data[offset] & 0x7F) << shift
        shift += 7
        offset += 1
    if not data[offset]:
        raise _Unusual  # longer than need be
    return value | data[offset] << shift, offset + 1


log = logging.getLogger("tokenloom")

#: A stream on which something still came after so long was sound: the next break gets the whole reconnect budget again.
SOUND_STREAM_S = 10.0
#: How long close() waits for the server to take the last report.
FLUSH_S = 2.0

_STREAM = f"/{wire.DESCRIPTOR.services_by_name['DataLoader'].full_name}/Stream"


class Connection:
    """A slot that was taken, and the stream that fills the buffer. Made by joining."""

    def __init__(self, request: Request, nonce: str) -> None:
        """``nonce``: this process's name for its slot."""
        self._request = request
        self._nonce = nonce
        #: How often the stream was opened again.
        self.reconnects = 0
        self._channels = Channels(request.address, request.credentials)
        self._call: grpc.Call | None = None
        self._reporter: Reporter | None = None
        self._fell_silent = False
        self._heard_at = 0.0
        try:
            self.opening = join(
                lambda: DataLoaderStub(self._channels.renew()), request, self._nonce
            )
        except BaseException:
            self._channels.close()
            raise
        self._base = self.opening.start.base
        layout, plans = self.opening.layout, self.opening.schedule.plans
        self._layouts = [replace(layout, batch_size=plan.batch_size) for plan in plans]
        self._server_epoch = self.opening.server_epoch
        self.buffer = StepBuffer(request, self.opening, self.break_stream)
        self._thread = Background("stream", self._run, "tokenloom")
        self._thread.start()

    def take(self) -> tuple[dict[str, Any], Point] | None:
        """The next batch, and where the trainer stands after it; None at the end of the data. Raises what the
        background thread met."""
        return self.buffer.take()

    def report(self, losses: Mapping[int, tuple[float, int]], **numbers: Any) -> None:
        """Sends losses in the background, for monitoring: by source id the mean and the tokens it is of. ``numbers``
        are further fields of ``ReportRequest``."""
        if self._reporter is None:
            self._reporter = Reporter(self._request)
        report = wire.ReportRequest(
            run=self._request.address.run,
            stream=self._request.stream,
            run_uid=self.opening.run_uid,
            generation=self.opening.facts.generation,
            attempt=self._request.topology.attempt,
            sources=[
                wire.SourceLoss(source_id=i, loss=loss, tokens=tokens)
                for i, (loss, tokens) in losses.items()
            ],
            **numbers,
        )
        self._reporter.put(report)

    def close(self) -> None:
        """Reports the last micro-step, ends the stream and the thread; bounded, and quiet if the server is gone."""
        if self._reporter is not None:
            self._reporter.finish(FLUSH_S)
        self.buffer.close()
        if self._thread is not threading.current_thread():
            self._thread.join(FLUSH_S)
        if self._reporter is not None:
            self._reporter.join()
        if self._call is not None:
            self._call.cancel()
        self._channels.close()

    def break_stream(self) -> None:
        """Breaks a stream on which nothing comes, so that the reader thread opens another. Any thread may call."""
        self._fell_silent = True
        if self._call is not None:
            self._call.cancel()

    # The reader thread

    def _run(self) -> None:
        try:
            self._keep_streaming()
        except BaseException as error:
            self.buffer.fail(error)

    def _keep_streaming(self) -> None:
        retry = Retry(self._request.options.reconnect_timeout_s, len(self._request.address.targets))
        while True:
            began, received = time.monotonic(), self.buffer.received_through
            broken = self._read_stream()
            if broken is None:
                return
            if self.buffer.closing:
                self._report_once()
                return
            if self.buffer.received_through > received or self._heard_at - began > SOUND_STREAM_S:
                retry.reset()
            delay_s = retry.next_delay_s()
            if delay_s is None:
                raise ServerUnavailable(
                    f"{self._request.address} gave no stream for {retry.budget_s:g} s (reconnect_timeout_s); "
                    f"the last failure: {broken}"
                )
            # One line for each time that it breaks; while a batch is waited for, the buffer names the last failure.
            level = logging.WARNING if retry.tried == 1 else logging.DEBUG
            log.log(
                level,
                "the stream of %s broke, reconnecting in %.1f s: %s",
                self._request.address,
                delay_s,
                broken,
            )
            self.buffer.waits_for(f"a new connection ({broken})")
            self.reconnects += 1
            if self.buffer.pause(delay_s):
                self._report_once()
                return

    def _report_once(self) -> None:
        """On closing between two streams: one more try to say how far the trainer came."""
        if not self.buffer.nothing_to_commit():
            self._read_stream()

    def _read_stream(self) -> str | None:
        """Opens one stream and reads it to its end. Returns None where it ended because the client was done, else what
        broke it, so that another may be opened. Raises errors that another stream would not cure."""
        writer = _Writer(self)
        self.buffer.heard(0, "the stream to open")
        self._fell_silent = False
        # The server that answered the Join first, since it leads; after a break the next one.
        channel = self._channels.renew() if self.reconnects else self._channels.current()
        # The generated stub would have protobuf read what comes, and with it copy the ids.
        method: grpc.StreamStreamMultiCallable[wire.StreamRequest, bytes | Delivered] = (
            channel.stream_stream(
                _STREAM,
                request_serializer=wire.StreamRequest.SerializeToString,
                response_deserializer=None,
            )
        )
        call = self._call = method(iter(writer), metadata=self._request.credentials.metadata)
        try:
            for data in call:
                self._receive(read(data))
        except grpc.RpcError as error:
            if (
                self.buffer.closing
                or retryable(error, self._request.address)
                or self._is_elsewhere(error)
            ):
                return (
                    "the server was silent, without even a heartbeat"
                    if self._fell_silent
                    else summary(error)
                )
            raise failure(error, self._request.address, self._request.topology.rank) from None
        finally:
            writer.over = True
            self.buffer.wake_writer()
            call.cancel()
        return (
            None
            if writer.reported_all
            else "the server ended the stream before the end of the data"
        )

    def _is_elsewhere(self, error: grpc.RpcError) -> bool:
        """Whether a server no longer has the run, and another one may."""
        return is_named(error, "NotFound") and len(self._request.address.targets) > 1

    def _receive(self, response: Response) -> None:
        message = response.message
        self._heard_at = time.monotonic()
        self.buffer.heard(message.committed_through, message.heartbeat.waiting_for)
        self._server_epoch = max(self._server_epoch, message.server_epoch)
        if self.buffer.closing:
            return  # the rest is read only to let the server finish
        if response.delivered is not None:
            self.buffer.put(self._steps(response.delivered))
        elif message.HasField("end_of_data"):
            end = message.end_of_data
            self._check_begin(end.end_index, "the end of the data")
            if self.buffer.end_reason is None:
                dropped = end.dropped_samples
                note = (
                    f" ({dropped} samples of an incomplete last micro-step were not delivered)"
                    if dropped
                    else ""
                )
                log.info("%s ends: %s%s", self._request.address, end.reason, note)
            self.buffer.end(end.reason)

    def _steps(self, delivered: Delivered) -> list[Step]:
        begin_index, ends = delivered.begin_index, delivered.end_indices
        self._check_begin(begin_index, "a message")
        if delivered.base is not None:
            self._base = Base(*delivered.base)
        begins = [begin_index, *ends[:-1]]
        if not ends or not all(map(lt, begins, ends)):
            raise ProtocolError(
                f"the micro-steps of a message must ascend from {begin_index}, but end at {ends}"
            )
        numbers = StepNumbers(
            begin_indices=begins,
            end_indices=ends,
            slices=delivered.slices,
            total_tokens=delivered.total_tokens,
            real_tokens=delivered.real_tokens,
            tokens=delivered.tokens,
            label_tokens=delivered.label_tokens,
            source_ids=delivered.source_ids,
        )
        layout = self._layouts[self.opening.schedule.number_at(begin_index)]
        message: Steps
        if layout.rows:
            message = RowsMessage(
                layout.batch_size,
                numbers,
                data=delivered.ids,
                buckets=[_bucket(each) for each in delivered.buckets],
            )
        else:
            message = Message(
                layout,
                numbers,
                ids=delivered.ids,
                document_counts=delivered.document_counts,
                document_starts=delivered.document_starts,
            )
        counts = zip(repeat(delivered.counts), count(1))
        columns = zip(
            ends,
            numbers.total_tokens,
            numbers.real_tokens,
            delivered.digests,
            repeat(self._base),
            counts,
        )
        # As Point does it, without a call of Python's for each.
        points = map(partial(tuple.__new__, Point), columns)
        return list(zip(points, repeat(message), count()))

    def _check_begin(self, begin_index: int, message: str) -> None:
        if begin_index != self.buffer.received_through:
            raise ProtocolError(
                f"{message} came for sample index {begin_index}, but {self.buffer.received_through} is next: "
                "the server skips or repeats data"
            )

    def opening_request(self, consumed: Point) -> wire.StreamRequest:
        """The first message of a stream: who we are, and where it goes on."""
        request = self._request
        received_point = self.buffer.received
        return wire.StreamRequest(
            open=wire.StreamOpen(
                run=request.address.run,
                stream=request.stream,
                run_uid=self.opening.run_uid,
                generation=self.opening.facts.generation,
                attempt=request.topology.attempt,
                rank=request.topology.rank,
                nonce=self._nonce,
                received_through=received_point.sample_index,
                received_digest=received_point.digest,
                committed_through=self.buffer.committed_through,
                server_epoch=self._server_epoch,
                progress=self.progress(consumed),
                document_starts=self.opening.layout.document_starts,
                peek=request.peek,
                batch_size=0 if request.counted else self.opening.layout.batch_size,
                samples=request.samples or 0,
                world_size=0 if request.samples is None else request.topology.world_size,
                process=process.identity(),
                number=time.monotonic_ns() // 1000,
            )
        )

    def progress(self, consumed: Point) -> wire.Progress:
        """How far the trainer is, how many micro-steps may come beyond that, and how long it waited for data."""
        return wire.Progress(
            consumed_through=consumed.sample_index,
            digest=consumed.digest,
            credit_micro_steps=self.buffer.capacity_steps,
            waited_s=self.buffer.waited_s,
        )


def _bucket(bucket: DeliveredBucket) -> Bucket:
    features = tuple(Feature(name, dtype, tuple(shape)) for name, dtype, shape in bucket.columns)
    return Bucket(bucket.name, bucket.source, features, list(bucket.sample_bytes) or None)


class _Writer:
    """What goes up one stream: its opening, then the trainer's progress, then the end of our half."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        #: Set by the reader when the stream is over.
        self.over = False
        #: Whether the last message had all that the trainer consumed, after which our half of the stream ends.
        self.reported_all = False

    def __iter__(self) -> Iterator[wire.StreamRequest]:
        connection, buffer = self._connection, self._connection.buffer
        reported = buffer.consumed
        yield connection.opening_request(reported)
        reported_at = 0.0
        while True:
            consumed = buffer.next_report(reported.sample_index, reported_at, lambda: self.over)
            if self.over:
                return
            if consumed is not reported or time.monotonic() - reported_at >= SIGN_OF_LIFE_S:
                reported, reported_at = consumed, time.monotonic()
                yield wire.StreamRequest(progress=connection.progress(consumed))
            if buffer.closing or buffer.all_committed():
                self.reported_all = reported is buffer.consumed
                if self.reported_all:
                    return
