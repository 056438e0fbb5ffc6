"""The RPCs of the data loader, each with the scope that it asks for: between the wire and the runs."""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import partial
from urllib.parse import unquote

import grpc
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.delivered import Delivered
from tokenloom_proto.release import own_release, require_compatible

from tokenloom_server.api import audit
from tokenloom_server.api.auth import Access, Scope, Token
from tokenloom_server.api.grpc import join, stream
from tokenloom_server.api.grpc.auth_interceptor import OTHER_RPCS, authorization_of
from tokenloom_server.api.grpc.detached_call import GoesOn
from tokenloom_server.api.grpc.messages import encode_delivery, hand_over
from tokenloom_server.api.grpc.rank_streams import RankStreams
from tokenloom_server.api.grpc.rpc import (
    MAX_REPORT_BYTES,
    MAX_REQUEST_BYTES,
    Rpc,
    handlers_of,
    rpc,
    rpcs_of,
)
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.api.service import Runs
from tokenloom_server.config.stream import TRAIN
from tokenloom_server.core import caller
from tokenloom_server.core.caller import Caller
from tokenloom_server.errors import (
    ConfigError,
    Forbidden,
    JoinRefused,
    NotFound,
    TokenloomError,
    Unauthenticated,
)
from tokenloom_server.run.coordinator import RunCoordinator
from tokenloom_server.run.join_call import MAX_WORLD_SIZE
from tokenloom_server.run.losses import Report

_log = logging.getLogger(__name__)

SERVICE = wire.DESCRIPTOR.services_by_name["DataLoader"]


class DataLoader:
    """Translates between the wire and the runs; decides nothing."""

    def __init__(
        self,
        runs: Runs,
        access: Access,
        max_connections: int = MAX_WORLD_SIZE,
        rest_address: str | None = None,
        *,
        serves_many: bool = False,
        hands_over: bool = False,
    ) -> None:
        """``max_connections``: how many trainers and others may have at a time. ``rest_address``: of this server, for
        who knows its other one. ``serves_many``: one thread serves the ranks' streams of a run, until ``close``.
        ``hands_over``: clients are in this process, and get micro-steps without a message around them."""
        self._deliver: Callable[..., bytes | Delivered] = (
            hand_over if hands_over else encode_delivery
        )
        self._rest_address = rest_address
        self._runs = runs
        self._access = access
        self._max_connections = max_connections
        self._serves_many = serves_many
        self._release = own_release()
        self._streams: dict[RunCoordinator, RankStreams] = {}
        self._lock = threading.Lock()

    def handlers(self) -> grpc.GenericRpcHandler:
        return handlers_of(self, SERVICE.full_name)

    def count_error(self, method: str, address: str, error: TokenloomError) -> None:
        """A call of a method ended with an error."""
        if isinstance(error, Unauthenticated | Forbidden):
            self._access.refusals.note(method, address, str(error))
        self._runs.rpc_errors.add(method, error.grpc_status, error.name)

    # Training, but to peek and to evaluate.
    @rpc(Scope.READ, wire.JoinRequest, max_bytes=MAX_REQUEST_BYTES, trains=True)
    def Join(self, request: wire.JoinRequest, context: grpc.ServicerContext) -> wire.JoinResponse:
        require_compatible(request.release, self._release)
        answer = self._join(request, context)
        answer.release = self._release
        return answer

    def _join(self, request: wire.JoinRequest, context: grpc.ServicerContext) -> wire.JoinResponse:
        if _evaluates(request):
            return join.evaluation(self._runs.get(request.run), request)
        if request.peek:
            return join.peek(self._served(request.run, request.stream), request)
        self._require(Scope.TRAIN, context)
        if not request.rank and request.world_size > self._max_connections:
            # No error: behind a proxy ranks may share connections.
            _log.warning(
                "%s: %d ranks join, and this server may have %d connections at a time: the ranks beyond that find "
                "none; raise its limit of open files (ulimit -n)",
                request.run, request.world_size, self._max_connections,
            )  # fmt: skip
        return join.training(self._served(request.run, request.stream), request)

    # Training, but to peek and to evaluate.
    @rpc(Scope.READ, wire.StreamRequest, trains=True)
    def Stream(
        self, requests: Iterator[wire.StreamRequest], context: grpc.ServicerContext
    ) -> Iterator[stream.Item | GoesOn]:
        opened = stream.opening(requests, context)
        looks = _evaluates(opened) or opened.peek
        scope = Scope.READ if looks else Scope.TRAIN
        responses: Generator[stream.Item | GoesOn, None, None]
        token = self._require(scope, context)
        with caller.serving(token.caller(unquote(context.peer())), context.is_active):
            served = (
                self._runs.get(opened.run)
                if _evaluates(opened)
                else self._served(opened.run, opened.stream)
            )
        recheck = self._access.hold(context, token, scope, opened.run)
        if _evaluates(opened):
            responses = stream.evaluation(served, opened, requests, context, self._deliver)
        elif opened.peek:
            responses = stream.peek(served, opened, requests, context, self._deliver)
        else:
            many = self._streams_of(served)
            responses = stream.training(
                served, opened, requests, context, self._deliver, recheck, many
            )
        served.closers.add(context.cancel)
        try:
            with closing(responses):
                for response in responses:
                    recheck()
                    yield response
        finally:
            served.closers.discard(context.cancel)

    # Control where it is to be saved.
    @rpc(Scope.READ, wire.SnapshotRequest)
    def Snapshot(
        self, request: wire.SnapshotRequest, context: grpc.ServicerContext
    ) -> wire.SnapshotResponse:
        if request.save:
            self._require(Scope.CONTROL, context)
        served = self._served(request.run, request.stream)
        index = None if request.sample_index == -1 else request.sample_index
        if index is not None and index < 0:
            raise ConfigError(
                f"sample_index is {index}; expected one from 0 on, or -1 for the committed one"
            )
        text, snapshot_id = served.snapshots.take(index, save=request.save)
        if request.save:
            audit.changed(served, f"saved the snapshot {snapshot_id}")
        return wire.SnapshotResponse(snapshot_json=text, id=snapshot_id or "")

    @rpc(Scope.CONTROL, wire.RestoreRequest, max_bytes=MAX_REQUEST_BYTES)
    def Restore(
        self, request: wire.RestoreRequest, context: grpc.ServicerContext
    ) -> wire.RestoreResponse:
        served = self._served(request.run, request.stream)
        kind = request.WhichOneof("point")
        for field in ("skip_samples", "skip_tokens"):
            if getattr(request, field) < 0:
                raise ConfigError(
                    f"{field} is {getattr(request, field)}; expected a number from 0 on"
                )
        with audit.pinning(served):
            point = served.restores.restore(
                snapshot_id=request.snapshot_id if kind == "snapshot_id" else None,
                sample_index=request.sample_index if kind == "sample_index" else None,
                text=request.snapshot_json if kind == "snapshot_json" else None,
                skip_samples=request.skip_samples,
                skip_tokens=request.skip_tokens,
                undo_skip=request.undo_skip,
            )
        return wire.RestoreResponse(
            sample_index=point.sample_index, digest=point.digest, skips=point.skips or {}
        )

    @rpc(Scope.READ, wire.StatsRequest)
    def Stats(
        self, request: wire.StatsRequest, context: grpc.ServicerContext
    ) -> wire.StatsResponse:
        if not request.run:
            about = {"runs": self._runs.names(), "rest_address": self._rest_address}
            return wire.StatsResponse(stats_json=json.dumps(about))
        return wire.StatsResponse(
            stats_json=self._runs.get(request.run).stats.read().model_dump_json()
        )

    @rpc(Scope.READ, wire.PlanRequest)
    def Plan(self, request: wire.PlanRequest, context: grpc.ServicerContext) -> wire.PlanResponse:
        plan = self._runs.get(request.run).plan_from_start(request.until_tokens or None)
        return wire.PlanResponse(plan_json=plan.model_dump_json())

    @rpc(Scope.READ, wire.TokenizerRequest)
    def Tokenizer(
        self, request: wire.TokenizerRequest, context: grpc.ServicerContext
    ) -> wire.TokenizerResponse:
        definition = self._runs.get(request.run).coordinator.order.record.tokenizer
        if definition is None:
            return wire.TokenizerResponse()
        return wire.TokenizerResponse(
            tokenizer_json=definition.content.encode(), is_bytes=definition.is_bytes
        )

    @rpc(Scope.TRAIN, wire.ReportRequest, max_bytes=MAX_REPORT_BYTES)
    def Report(
        self, request: wire.ReportRequest, context: grpc.ServicerContext
    ) -> wire.ReportResponse:
        served = self._served(request.run, request.stream)
        sources = {each.source_id: (each.loss, each.tokens) for each in request.sources}
        if len(sources) < len(request.sources):
            twice = next(
                i for i, n in Counter(each.source_id for each in request.sources).items() if n > 1
            )
            raise ConfigError(
                f"sources: source_id {twice} is reported twice; report each once, over all ranks"
            )
        report = join.call_of(
            Report,
            request,
            sources=sources,
            loss=request.loss if request.HasField("loss") else None,
            learning_rate=request.learning_rate if request.HasField("learning_rate") else None,
        )
        served.losses.add(request.run_uid, request.generation, request.attempt, report)
        return wire.ReportResponse()

    def close(self) -> None:
        """Ends the threads of streams. To be called when the server takes no call any more."""
        for coordinator in list(self._streams):
            self._forget(coordinator)

    def _streams_of(self, served: ServedRun) -> RankStreams | None:
        if not self._serves_many:
            return None
        coordinator = served.coordinator
        with self._lock:
            streams = self._streams.get(coordinator)
            if streams is None:
                count = partial(self.count_error, "Stream", "a rank")
                streams = self._streams[coordinator] = RankStreams(coordinator, count)
                served.closers.add(partial(self._forget, coordinator))
            return streams

    def _forget(self, coordinator: RunCoordinator) -> None:
        with self._lock:
            streams = self._streams.pop(coordinator, None)
        if streams is not None:
            streams.stop()

    def caller_of(self, context: grpc.ServicerContext) -> Caller:
        """Who makes a call, for whom its work is done."""
        return self._require(Scope.READ, context).caller(unquote(context.peer()))

    def _require(self, scope: Scope, context: grpc.ServicerContext) -> Token:
        """For a request that asks for more than its method's scope. Raises ``Forbidden``."""
        return self._access.check(authorization_of(context.invocation_metadata()), scope)

    def _served(self, run: str, stream: str) -> ServedRun:
        served = self._runs.get(run)
        if (stream or TRAIN) != TRAIN:
            raise NotFound(
                f"{stream!r} is not trained on, so it has no snapshots and no restores; expected {TRAIN!r}"
            )
        return served


def _evaluates(request: wire.JoinRequest | wire.StreamOpen) -> bool:
    """Whether it is for a stream beside training."""
    if (request.stream or TRAIN) == TRAIN:
        return False
    if request.peek:
        raise JoinRefused(
            f"stream {request.stream!r} is not trained on, so there is nothing to peek at: leave peek out"
        )
    return True


def rpcs() -> dict[str, Rpc]:
    """Every RPC of the server by its path, those of gRPC's own services, too."""
    own = {f"/{SERVICE.full_name}/{name}": rpc for name, rpc in rpcs_of(DataLoader).items()}
    return {**OTHER_RPCS, **own}
