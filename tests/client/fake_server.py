"""A protocol peer that follows the wire contract with synthetic ids, and breaks it on request.

It stands in for the faults which a true server cannot be told to produce: streams that break, fall
silent, are fenced or repeat data. Its samples are zeros.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc
from tokenloom import ConnectionOptions
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.dataloader_pb2_grpc import DataLoaderServicer, add_DataLoaderServicer_to_server
from tokenloom_proto.errors import named
from tokenloom_proto.seal import SNAPSHOT_FORMAT, SNAPSHOT_VERSION, canonical

SPECS = ["parquet:a:text", "txt:b:text"]
RUN_UID = "uid-of-the-fake-run"


@dataclass
class Script:
    """What the run is, and what goes wrong."""

    length: int = 8
    shifted: bool = False
    group_micro_steps: int = 2
    end_index: int = 10**9
    pad_last_step: bool = False
    start_index: int = 0
    skips: Sequence[str] = ()
    """What is passed over, as the trainer's log has it."""
    begins_late: int = 0
    """So far after a loaded state it begins, which is wrong."""
    join_errors: list[str] = field(default_factory=list)
    """One Join each fails with the next of these names; '' is UNAVAILABLE without a name."""
    report_errors: list[str] = field(default_factory=list)
    """One Report each fails with the next of these names."""
    on_message: Callable[[int, int], str | None] = field(default=lambda stream, begin: None)
    """(number of the stream, begin index) → 'silent', 'skip', 'end' (the stream, with OK), or an error's name."""


def ahead(steps: int, **timeouts: float) -> ConnectionOptions:
    """Of a client that fetches so many steps ahead."""
    return ConnectionOptions(prefetch_steps=steps, **timeouts)


def eventually(condition: Callable[[], bool], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


class FakeServer(DataLoaderServicer):
    """One run for any number of ranks. Everything that was asked of it is kept for the tests to read."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.joins: list[wire.JoinRequest] = []
        self.opens: list[wire.StreamOpen] = []
        self.progress: list[wire.Progress] = []
        self.reports: list[wire.ReportRequest] = []
        self.half_closed = threading.Event()
        self.committed_through = 0
        self._lock = threading.Lock()

    def Join(self, request: wire.JoinRequest, context: grpc.ServicerContext) -> wire.JoinResponse:
        script = self.script
        with self._lock:
            self.joins.append(request)
            error = script.join_errors.pop(0) if script.join_errors else None
        if error is not None:
            _abort(context, error, "as the script says")
        start = script.start_index
        if request.state_json:
            start = json.loads(request.state_json)["sample_index"] + script.begins_late
        return wire.JoinResponse(
            run_uid=RUN_UID,
            generation=3,
            start_index=start,
            start_digest=digest_at(start),
            start_tokens=start * script.length,
            sequence_length=script.length,
            id_type=wire.IdType.Name(2),
            labels=wire.LABELS_SHIFTED if script.shifted else wire.LABELS_SAME,
            vocab_size=65536,
            sources=[wire.Source(id=0, spec=SPECS[0], alias="a"), wire.Source(id=1, spec=SPECS[1])],
            group_micro_steps=script.group_micro_steps,
            batch_size=request.batch_size,
            snapshot_template=json.dumps(template(request.run, request.stream)).encode(),
            base=base_at(start),
            skips=script.skips,
        )

    def Stream(
        self, requests: Iterator[wire.StreamRequest], context: grpc.ServicerContext
    ) -> Iterator[wire.StreamResponse]:
        opened = next(requests).open
        with self._lock:
            self.opens.append(opened)
            number = len(self.opens)
        join = next(join for join in reversed(self.joins) if join.rank == opened.rank)
        heard = _Heard(self, opened.progress)
        threading.Thread(target=heard.read, args=(requests,), daemon=True).start()
        start = (
            json.loads(join.state_json)["sample_index"]
            if join.state_json
            else self.script.start_index
        )
        group = join.world_size * join.batch_size * self.script.group_micro_steps
        begin, base_sent = opened.received_through, None
        while not heard.closed:
            steps = self._steps_from(
                begin, start + ((begin - start) // group + 1) * group, join, heard.progress
            )
            if not steps and begin >= self._last_end(join):
                end = wire.EndOfData(end_index=begin, reason="all sources are exhausted")
                yield wire.StreamResponse(end_of_data=end, committed_through=self.committed_through)
                while not heard.closed and context.is_active():
                    heard.wait_progress(context)
                    yield wire.StreamResponse(
                        heartbeat=wire.Heartbeat(), committed_through=self.committed_through
                    )
                return
            fault = self.script.on_message(number, begin) if steps else None
            if fault == "silent":
                heard.wait_closed(context)
                return
            if fault == "end":
                return
            if fault is not None and fault != "skip":
                _abort(context, fault, f"as the script says, at {begin}")
            if not steps:
                heard.wait_progress(context)
                if heard.idle:
                    yield wire.StreamResponse(
                        heartbeat=wire.Heartbeat(), committed_through=self.committed_through
                    )
                continue
            base = base_at(start + (begin - start) // group * group)
            message = self._message(begin, steps, join, opened, base)
            if base == base_sent:
                message.ClearField("base")
            base_sent = base
            if fault == "skip":
                message.begin_index += join.batch_size
            yield wire.StreamResponse(batches=message, committed_through=self.committed_through)
            begin = steps[-1]

    def Report(
        self, request: wire.ReportRequest, context: grpc.ServicerContext
    ) -> wire.ReportResponse:
        if self.script.report_errors:
            _abort(context, self.script.report_errors.pop(0), "as the script says")
        self.reports.append(request)
        return wire.ReportResponse()

    def _last_end(self, join: wire.JoinRequest) -> int:
        step = join.world_size * join.batch_size
        return (
            self.script.end_index
            if self.script.pad_last_step
            else self.script.end_index // step * step
        )

    def _steps_from(
        self, begin: int, boundary: int, join: wire.JoinRequest, progress: wire.Progress
    ) -> list[int]:
        step = join.world_size * join.batch_size
        limit = min(boundary, progress.consumed_through + progress.credit_micro_steps * step)
        last = self._last_end(join)
        return [
            min(end, last)
            for end in range(begin + step, limit + 1, step)
            if min(end, last) > end - step
        ]

    def _message(
        self,
        begin: int,
        ends: list[int],
        join: wire.JoinRequest,
        opened: wire.StreamOpen,
        base: wire.Base,
    ) -> wire.Batches:
        script, width = self.script, self.script.length + self.script.shifted
        message = wire.Batches(begin_index=begin, base=base)
        parts = [given_since(base.sample_index, begin)]
        parts += [given_since(at, end) for at, end in zip([begin, *ends[:-1]], ends, strict=True)]
        message.counts = wire.SourceCounts(
            entries=[2] * len(parts),
            source_ids=[0, 1] * len(parts),
            samples=[samples for part in parts for samples in part],
            specs=SPECS,
        ).SerializeToString()
        for at, end in zip([begin, *ends[:-1]], ends, strict=True):
            slice_ = (opened.rank + at) % join.world_size
            samples = min(end, script.end_index) - at
            message.micro_steps.add(
                end_index=end,
                slice=slice_,
                total_tokens=end * script.length,
                real_tokens=end * script.length,
                digest=digest_at(end),
                tokens=samples * script.length,
                label_tokens=samples * (width - 1),
            )
            for index in range(at + slice_ * join.batch_size, at + (slice_ + 1) * join.batch_size):
                message.source_ids.append(index % 2 if index < script.end_index else -1)
        message.ids = bytes(2 * width * len(message.source_ids))
        return message


class _Heard:
    """The newest progress of a stream; read on a thread of its own."""

    def __init__(self, server: FakeServer, progress: wire.Progress) -> None:
        self._server = server
        self._changed = threading.Condition()
        self.progress = progress
        self.closed = False
        self.idle = False

    def read(self, requests: Iterator[wire.StreamRequest]) -> None:
        with contextlib.suppress(grpc.RpcError, Exception):
            for request in requests:
                with self._changed:
                    self.progress = request.progress
                    self._server.progress.append(request.progress)
                    self._server.committed_through = request.progress.consumed_through
                    self._changed.notify_all()
            self._server.half_closed.set()
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def wait_progress(self, context: grpc.ServicerContext) -> None:
        with self._changed:
            seen = self.progress
            self.idle = not self._changed.wait_for(
                lambda: self.progress is not seen or self.closed, 0.2
            )

    def wait_closed(self, context: grpc.ServicerContext) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.closed or not context.is_active(), 30)


def digest_at(index: int) -> str:
    """Stands for the rolling digest: 0 at 0, and different everywhere."""
    return hashlib.md5(str(index).encode()).hexdigest() if index else "0" * 32


def template(run: str, stream: str) -> Mapping[str, Any]:
    """What is the same in all snapshots of the fake run."""
    place = {"run": run, "stream": stream or "train", "run_uid": RUN_UID}
    return {"format": SNAPSHOT_FORMAT, "version": SNAPSHOT_VERSION} | place


def base_at(index: int) -> wire.Base:
    """The resume state at a boundary, which knows no source yet."""
    state = {"sample_index": index, "total_tokens": index * 8, "datasets": []}
    return wire.Base(sample_index=index, resume_state=canonical(state).encode())


def given_since(boundary: int, index: int) -> list[int]:
    """Samples of each source up to a sample index."""
    return [sum(sample % 2 == source for sample in range(boundary, index)) for source in range(2)]


def _abort(context: grpc.ServicerContext, name: str, message: str) -> None:
    if name:
        context.set_trailing_metadata((("tokenloom-error", name),))
    status = named(name, message).grpc_status if name else "UNAVAILABLE"
    context.abort(grpc.StatusCode[status], message)


@contextlib.contextmanager
def serving(
    script: Script, port: int = 0, places: int | None = None
) -> Iterator[tuple[FakeServer, str, grpc.Server]]:
    """A fake server on loopback: (its record, the URL of its run, the gRPC server). It answers ``places`` calls at a
    time."""
    servicer = FakeServer(script)
    options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1)]
    server = grpc.server(
        futures.ThreadPoolExecutor(max_workers=16), options=options, maximum_concurrent_rpcs=places
    )
    add_DataLoaderServicer_to_server(servicer, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield servicer, f"grpc://127.0.0.1:{port}/fake", server
    finally:
        server.stop(0).wait(5)
