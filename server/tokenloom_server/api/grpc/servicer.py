"""The RPCs: between the wire and the runs."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import grpc
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.seal import canonical

from tokenloom_server.api.auth import Access, Scope
from tokenloom_server.api.grpc.auth_interceptor import MAX_REQUEST_BYTES, abort, authorization_of
from tokenloom_server.api.grpc.messages import encode_delivery, encode_slice
from tokenloom_server.api.service import Runs, ServedRun
from tokenloom_server.config.stream import TRAIN
from tokenloom_server.core.state import State, digest_hex
from tokenloom_server.errors import ConfigError, JoinRefused, LimitExceeded, NotFound, TokenloomError
from tokenloom_server.order.pipeline import BatchPlan
from tokenloom_server.order.record import Order
from tokenloom_server.replay.evaluation import EvaluationCall, Slice
from tokenloom_server.replay.peek import PeekCall
from tokenloom_server.run.coordinator import RunCoordinator
from tokenloom_server.run.delivery import Delivery, EndOfData, Waiting
from tokenloom_server.run.join_call import JoinCall
from tokenloom_server.run.losses import Report
from tokenloom_server.run.sizing import steps_of
from tokenloom_server.run.views import Session

_log = logging.getLogger(__name__)

#: A stream that has nothing to send says so this often, seconds.
HEARTBEAT_S = 2.0
#: How long the end of a client's stream waits for its last commit, seconds.
_FINISH_S = 2.0
#: A stream whose first message does not come within this time is ended, seconds: it has a thread.
OPEN_TIMEOUT_S = 30.0

#: What a request without a snapshot may have: it is names and numbers.
SMALL_REQUEST_BYTES = 2**16
#: A report has some twenty bytes for each source.
MAX_REPORT_BYTES = 2**20

SERVICE = wire.DESCRIPTOR.services_by_name["DataLoader"]
_ID_TYPES = {1: wire.ID_TYPE_UINT8, 2: wire.ID_TYPE_UINT16, 4: wire.ID_TYPE_UINT32}


class DataLoader:
    """Translates between the wire and the runs; decides nothing."""

    def __init__(self, runs: Runs, access: Access) -> None:
        self._runs = runs
        self._access = access

    def Join(self, request: wire.JoinRequest, context: grpc.ServicerContext) -> wire.JoinResponse:  # noqa: N802
        with _errors(context):
            _read(request)
            if _evaluates(request):
                return self._evaluation_join(request, context)
            if not request.peek:
                self._needs_control(context)
            served = self._served(request.run, request.stream)
            if request.peek:
                return self._peek_join(served, request, context)
            call = JoinCall(
                rank=request.rank,
                world_size=request.world_size,
                batch_size=request.batch_size,
                attempt=request.attempt,
                nonce=request.nonce,
                resume=request.resume,
                state=request.state_json,
                process=request.process,
                takeover=request.takeover,
                batch_sizes=tuple((size.total_tokens, size.batch_size) for size in request.batch_sizes),
                accumulate=request.accumulate or 1,
                fork=request.fork,
            )
            joined = served.join_handler.join(call)
            opening = joined.opening
            return _join_response(
                served.coordinator,
                joined.uid,
                joined.start,
                opening.start_state,
                generation=opening.generation,
                lineage=opening.generation,
                group_steps=opening.group_steps,
                batch_size=opening.batch_size,
                skipped=opening.skipped,
                plans=steps_of(opening).plans,
            )
        raise AssertionError("unreachable: the context aborts")

    def Stream(  # noqa: N802
        self, requests: Iterator[wire.StreamRequest], context: grpc.ServicerContext
    ) -> Iterator[wire.StreamResponse | bytes]:
        with _errors(context):
            with _within(OPEN_TIMEOUT_S, context):
                first = next(requests, None)
            _read(first)
            if first is None or first.WhichOneof("kind") != "open":
                raise JoinRefused("a stream begins with StreamOpen")
            opened = first.open
            if _evaluates(opened):
                yield from self._evaluation(opened, requests, context)
                return
            if not opened.peek:
                self._needs_control(context)
            served = self._served(opened.run, opened.stream)
            if opened.peek:
                yield from self._peek(served, opened, requests, context)
                return
            coordinator = served.coordinator
            session = coordinator.attach(
                opened.run_uid,
                opened.generation,
                opened.rank,
                opened.nonce,
                opened.received_through,
                opened.committed_through,
                opened.received_digest,
                opened.server_epoch,
                opened.attempt,
                opened.process,
            )
            try:
                progress = opened.progress
                coordinator.progress(session, progress.consumed_through, progress.credit_steps, progress.digest)
                yield from self._responses(
                    coordinator, _Slot(coordinator, session), requests, opened.document_starts, context
                )
            finally:
                coordinator.detach(session)

    def Snapshot(  # noqa: N802
        self, request: wire.SnapshotRequest, context: grpc.ServicerContext
    ) -> wire.SnapshotResponse:
        with _errors(context):
            _read(request)
            if request.save:
                self._needs_control(context)
            self._served(request.run, request.stream)
            index = None if request.sample_index == -1 else request.sample_index
            if index is not None and index < 0:
                raise ConfigError(f"sample_index is {index}; expected one from 0 on, or -1 for the committed one")
            text, snapshot_id = self._runs.snapshot(request.run, index, request.save)
            return wire.SnapshotResponse(snapshot_json=text, id=snapshot_id or "")
        raise AssertionError("unreachable: the context aborts")

    def Restore(self, request: wire.RestoreRequest, context: grpc.ServicerContext) -> wire.RestoreResponse:  # noqa: N802
        with _errors(context):
            _read(request)
            self._served(request.run, request.stream)
            kind = request.WhichOneof("point")
            for field in ("skip_samples", "skip_tokens"):
                if getattr(request, field) < 0:
                    raise ConfigError(f"{field} is {getattr(request, field)}; expected a number from 0 on")
            point = self._runs.restore(
                request.run,
                snapshot_id=request.snapshot_id if kind == "snapshot_id" else None,
                sample_index=request.sample_index if kind == "sample_index" else None,
                text=request.snapshot_json if kind == "snapshot_json" else None,
                skip_samples=request.skip_samples,
                skip_tokens=request.skip_tokens,
            )
            return wire.RestoreResponse(
                sample_index=point.sample_index,
                digest=point.digest,
                skipped_samples=point.skipped_samples,
                start_index=point.start_index,
            )
        raise AssertionError("unreachable: the context aborts")

    def Stats(self, request: wire.StatsRequest, context: grpc.ServicerContext) -> wire.StatsResponse:  # noqa: N802
        with _errors(context):
            _read(request)
            return wire.StatsResponse(stats_json=self._runs.stats(request.run).model_dump_json())
        raise AssertionError("unreachable: the context aborts")

    def Plan(self, request: wire.PlanRequest, context: grpc.ServicerContext) -> wire.PlanResponse:  # noqa: N802
        with _errors(context):
            _read(request)
            plan = self._runs.plan_from_start(request.run, request.until_tokens or None)
            return wire.PlanResponse(plan_json=plan.model_dump_json())
        raise AssertionError("unreachable: the context aborts")

    def Tokenizer(  # noqa: N802
        self, request: wire.TokenizerRequest, context: grpc.ServicerContext
    ) -> wire.TokenizerResponse:
        with _errors(context):
            _read(request)
            definition = self._runs.get(request.run).coordinator.order.tokenizer
            if definition is None:
                return wire.TokenizerResponse()
            return wire.TokenizerResponse(tokenizer_json=definition.content.encode(), is_bytes=definition.is_bytes)
        raise AssertionError("unreachable: the context aborts")

    def Report(self, request: wire.ReportRequest, context: grpc.ServicerContext) -> wire.ReportResponse:  # noqa: N802
        with _errors(context):
            _read(request)
            served = self._served(request.run, request.stream)
            sources = {each.source_id: (each.loss, each.tokens) for each in request.sources}
            if len(sources) < len(request.sources):
                twice = next(i for i, n in Counter(each.source_id for each in request.sources).items() if n > 1)
                raise ConfigError(f"sources: source_id {twice} is reported twice; report each once, over all ranks")
            report = Report(
                sample_index=request.sample_index,
                total_tokens=request.total_tokens,
                step=request.step,
                sources=sources,
                loss=request.loss if request.HasField("loss") else None,
                learning_rate=request.learning_rate if request.HasField("learning_rate") else None,
            )
            served.losses.add(request.run_uid, request.generation, request.attempt, report)
            return wire.ReportResponse()
        raise AssertionError("unreachable: the context aborts")

    def handlers(self) -> grpc.GenericRpcHandler:
        """The service as gRPC takes it. Deliveries come as bytes already, the rest as messages."""
        unary, both = grpc.unary_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        methods: dict[str, Any] = {
            "Join": unary(
                self.Join, _bounded(wire.JoinRequest, MAX_REQUEST_BYTES), wire.JoinResponse.SerializeToString
            ),
            "Stream": both(self.Stream, _bounded(wire.StreamRequest, SMALL_REQUEST_BYTES), _serialised),
            "Snapshot": unary(
                self.Snapshot,
                _bounded(wire.SnapshotRequest, SMALL_REQUEST_BYTES),
                wire.SnapshotResponse.SerializeToString,
            ),
            "Restore": unary(
                self.Restore, _bounded(wire.RestoreRequest, MAX_REQUEST_BYTES), wire.RestoreResponse.SerializeToString
            ),
            "Stats": unary(
                self.Stats, _bounded(wire.StatsRequest, SMALL_REQUEST_BYTES), wire.StatsResponse.SerializeToString
            ),
            "Plan": unary(
                self.Plan, _bounded(wire.PlanRequest, SMALL_REQUEST_BYTES), wire.PlanResponse.SerializeToString
            ),
            "Tokenizer": unary(
                self.Tokenizer,
                _bounded(wire.TokenizerRequest, SMALL_REQUEST_BYTES),
                wire.TokenizerResponse.SerializeToString,
            ),
            "Report": unary(
                self.Report, _bounded(wire.ReportRequest, MAX_REPORT_BYTES), wire.ReportResponse.SerializeToString
            ),
        }
        return grpc.method_handlers_generic_handler(SERVICE.full_name, methods)

    def _needs_control(self, context: grpc.ServicerContext) -> None:
        """For a request that asks for more than its method's scope. Raises ``Forbidden``."""
        self._access.check(authorization_of(context.invocation_metadata()), Scope.CONTROL)

    def _served(self, run: str, stream: str) -> ServedRun:
        served = self._runs.get(run)
        if (stream or TRAIN) != TRAIN:
            raise NotFound(f"{stream!r} is not trained on, so it has no snapshots and no restores; expected {TRAIN!r}")
        return served

    def _evaluation_join(self, request: wire.JoinRequest, context: grpc.ServicerContext) -> wire.JoinResponse:
        served = self._runs.get(request.run)
        kept, samples = served.evaluations.join(_evaluation_call(request), lambda: not context.is_active())
        order = kept.order
        return wire.JoinResponse(
            **_layout(order),
            run_uid=served.coordinator.uid,
            start_digest=digest_hex(0),
            sources=[
                wire.Source(id=source.id, spec=source.source, alias=source.name)
                for source in order.config.sources
                if source.presence != "dropped"
            ],
            group_steps=served.coordinator.message_steps(request.batch_size),
            server_epoch=served.coordinator.lease.epoch,
            batch_size=request.batch_size,
            stream_samples=samples,
        )

    def _evaluation(
        self, opened: wire.StreamOpen, requests: Iterator[wire.StreamRequest], context: grpc.ServicerContext
    ) -> Iterator[wire.StreamResponse | bytes]:
        served, progress = self._runs.get(opened.run), opened.progress
        call = _evaluation_call(opened)
        place = served.evaluations.open(opened.run_uid, call, opened.received_through, opened.received_digest)
        place.progress(progress.consumed_through, progress.credit_steps, progress.digest)
        yield from self._responses(served.coordinator, place, requests, opened.document_starts, context)

    def _peek_join(
        self, served: ServedRun, request: wire.JoinRequest, context: grpc.ServicerContext
    ) -> wire.JoinResponse:
        if request.batch_sizes:
            raise JoinRefused(
                "a peek has steps of one batch size, and a schedule was asked for: give batch_size a number"
            )
        call = PeekCall(
            rank=request.rank,
            world_size=request.world_size,
            batch_size=request.batch_size,
            resume=request.resume,
            state=request.state_json,
        )
        found = served.peeks.join(call, lambda: not context.is_active())
        batch_size = served.coordinator.order.config.global_batch_size or request.batch_size
        return _join_response(
            served.coordinator,
            found.uid,
            found.state,
            served.coordinator.timeline.encode(found.state),
            generation=0,
            lineage=found.generation,
            group_steps=served.coordinator.message_steps(batch_size),
            batch_size=batch_size,
        )

    def _peek(
        self,
        served: ServedRun,
        opened: wire.StreamOpen,
        requests: Iterator[wire.StreamRequest],
        context: grpc.ServicerContext,
    ) -> Iterator[wire.StreamResponse | bytes]:
        begin, progress = opened.received_through, opened.progress
        with served.peeks.open(opened.run_uid, begin, opened.batch_size, opened.received_digest) as peek:
            peek.progress(progress.consumed_through, progress.credit_steps, progress.digest)
            yield from self._responses(served.coordinator, peek, requests, opened.document_starts, context)

    def _responses(
        self,
        coordinator: RunCoordinator,
        place: _Place,
        requests: Iterator[wire.StreamRequest],
        with_starts: bool,
        context: grpc.ServicerContext,
    ) -> Iterator[wire.StreamResponse | bytes]:
        """What a place gets, until the data end, the client closes its side, or the generation is over."""
        reader = _Reader(place, requests)
        reader.start()
        try:
            while context.is_active():
                if reader.error is not None:
                    raise reader.error
                if reader.closed:
                    place.finish(reader.said_goodbye)
                    return
                found = place.next(HEARTBEAT_S, lambda: reader.closed or reader.error is not None)
                committed, epoch = coordinator.committed_through, coordinator.lease.epoch
                if isinstance(found, Delivery):
                    yield encode_delivery(
                        coordinator.timeline, place.rank, found, committed, epoch, document_starts=with_starts
                    )
                elif isinstance(found, Slice):
                    yield encode_slice(found, committed, epoch, document_starts=with_starts)
                elif isinstance(found, EndOfData):
                    end = wire.EndOfData(
                        end_index=found.end_index, reason=found.reason, dropped_samples=found.dropped_samples
                    )
                    yield wire.StreamResponse(end_of_data=end, committed_through=committed, server_epoch=epoch)
                elif isinstance(found, Waiting):
                    heartbeat = wire.Heartbeat(waiting_for=found.waiting_for)
                    yield wire.StreamResponse(heartbeat=heartbeat, committed_through=committed, server_epoch=epoch)
        finally:
            # The reader ends with the call; it is only told that nobody listens any more.
            reader.stopped = True


class _Place(Protocol):
    """Where a stream comes from: a slot of the run, a peek at it, or an evaluation."""

    @property
    def rank(self) -> int: ...

    @property
    def name(self) -> str: ...

    def next(self, timeout_s: float, interrupted: Callable[[], bool]) -> Delivery | Slice | EndOfData | Waiting: ...

    def progress(self, consumed_through: int, credit_steps: int, digest: str) -> None: ...

    def wake(self) -> None: ...

    def finish(self, said_goodbye: bool) -> None:
        """The client's side is closed; ``said_goodbye``: by the client."""


class _Slot(NamedTuple):
    """A rank's stream."""

    coordinator: RunCoordinator
    session: Session

    @property
    def rank(self) -> int:
        return self.session.rank

    @property
    def name(self) -> str:
        return f"{self.coordinator.name}-rank-{self.session.rank}"

    def next(self, timeout_s: float, interrupted: Callable[[], bool]) -> Delivery | EndOfData | Waiting:
        return self.coordinator.next_for(self.session, timeout_s, interrupted)

    def progress(self, consumed_through: int, credit_steps: int, digest: str) -> None:
        self.coordinator.progress(self.session, consumed_through, credit_steps, digest)

    def wake(self) -> None:
        self.coordinator.wake(self.session)

    def finish(self, said_goodbye: bool) -> None:
        self.coordinator.finish(self.session, _FINISH_S)
        if said_goodbye:
            self.coordinator.leave(self.session)


class _Reader(threading.Thread):
    """Reads a client's progress while the stream's own thread sends."""

    def __init__(self, place: _Place, requests: Iterator[wire.StreamRequest]) -> None:
        super().__init__(name=f"{place.name}-progress", daemon=True)
        self._place = place
        self._requests = requests
        self.closed = False
        self.stopped = False
        self.said_goodbye = False
        self.error: TokenloomError | None = None

    def run(self) -> None:
        try:
            for request in self._requests:
                if self.stopped:
                    return
                _read(request)
                if request.WhichOneof("kind") != "progress":
                    raise JoinRefused("a stream is opened once; after StreamOpen it carries Progress")
                progress = request.progress
                self._place.progress(progress.consumed_through, progress.credit_steps, progress.digest)
            self.said_goodbye = not self.stopped
        except TokenloomError as error:
            self.error = error
        except Exception as error:
            # The call is over: gRPC ends the iterator with an error of its own.
            _log.debug("%s: the request stream ended: %s", self.name, error)
        self.closed = True
        self._place.wake()


def _join_response(
    coordinator: RunCoordinator,
    uid: str,
    start: State,
    start_state: str,
    *,
    generation: int,
    lineage: int,
    group_steps: int,
    batch_size: int,
    skipped: int = 0,
    plans: Sequence[BatchPlan] = (),
) -> wire.JoinResponse:
    """``lineage``: the generation that snapshots name."""
    timeline = coordinator.timeline
    order = timeline.at(start.sample_index)
    # Those that phases and revisions bring later, too: ids are never given twice.
    sources = [*order.config.sources, *timeline.segments[-1].order.config.sources[len(order.config.sources) :]]
    return wire.JoinResponse(
        run_uid=uid,
        generation=generation,
        start_index=start.sample_index,
        start_digest=digest_hex(start.digest),
        start_tokens=start.total_tokens,
        sources=[wire.Source(id=source.id, spec=source.source, alias=source.name) for source in sources],
        group_steps=group_steps,
        snapshot_template=canonical(order.template(uid, coordinator.stream, lineage)).encode(),
        base=wire.Base(sample_index=start.sample_index, resume_state=start_state.encode()),
        server_epoch=coordinator.lease.epoch,
        skipped_samples=skipped,
        global_batch_size=order.config.global_batch_size or 0,
        batch_size=batch_size,
        batch_plans=[
            wire.BatchPlan(begin_index=plan.start_index, batch_size=plan.batch_size, group_steps=plan.group_steps)
            for plan in (plans if len(plans) > 1 else ())
        ],
        **_layout(order),
    )


def _layout(order: Order) -> dict[str, Any]:
    """What a ``JoinResponse`` says of how samples travel."""
    return {
        "sequence_length": order.config.sequence_length,
        "id_type": _ID_TYPES[order.dtype.itemsize] if order.config.batching is None else wire.ID_TYPE_UNSPECIFIED,
        "labels": _labels(order),
        "vocab_size": order.vocab_size,
        "sample_lengths": order.form.lengths,
        "pads_left": order.form.lengths and order.form.padding == "left",
        "loss_masks": order.form.masked,
        "mask_boundaries": order.config.mask_boundaries,
    }


def _evaluates(request: wire.JoinRequest | wire.StreamOpen) -> bool:
    """Whether it is for a stream beside training."""
    if (request.stream or TRAIN) == TRAIN:
        return False
    if request.peek:
        raise JoinRefused(
            f"stream {request.stream!r} is not trained on, so there is nothing to peek at: leave peek out"
        )
    return True


def _evaluation_call(request: wire.JoinRequest | wire.StreamOpen) -> EvaluationCall:
    return EvaluationCall(
        stream=request.stream,
        rank=request.rank,
        world_size=request.world_size,
        batch_size=request.batch_size,
        samples=request.samples,
    )


def _labels(order: Order) -> wire.Labels:
    if order.config.batching is not None:
        return wire.LABELS_UNSPECIFIED
    return wire.LABELS_SHIFTED if order.config.labels == "shifted" else wire.LABELS_SAME


@contextlib.contextmanager
def _within(seconds: float, context: grpc.ServicerContext) -> Iterator[None]:
    """Cancels the call where what is done here takes longer."""
    timer = threading.Timer(seconds, context.cancel)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def _errors(context: grpc.ServicerContext) -> Iterator[None]:
    """The one place where errors become statuses: name in the metadata, message in the details."""
    try:
        yield
    except TokenloomError as error:
        abort(context, error.grpc_status, error.name, str(error), error.retry_for_s)
    except (GeneratorExit, grpc.RpcError):
        raise
    except Exception as error:
        if not context.is_active():
            return
        _log.exception("a call failed")
        abort(context, "INTERNAL", "Internal", f"the server failed: {type(error).__name__}: {error}; see its log")


def _bounded(kind: Any, most_bytes: int) -> Callable[[bytes], Any]:
    """Reads a message of at most so many bytes. A larger one is not parsed, and an error comes in its place: what is
    raised here, gRPC passes on without a name."""

    def read(data: bytes) -> Any:
        if len(data) > most_bytes:
            name = kind.DESCRIPTOR.name
            return LimitExceeded(f"a {name} has {len(data)} bytes; expected at most {most_bytes}: send less")
        return kind.FromString(data)

    return read


def _read(request: Any) -> None:
    """Raises the error that came in place of a message."""
    if isinstance(request, TokenloomError):
        raise request


def _serialised(response: wire.StreamResponse | bytes) -> bytes:
    return response if isinstance(response, bytes) else response.SerializeToString()
