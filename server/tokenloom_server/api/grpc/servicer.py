"""The RPCs of the data loader, each with the scope that it asks for: between the wire and the runs."""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Iterator

import grpc
from tokenloom_proto import dataloader_pb2 as wire

from tokenloom_server.api.auth import Access, Scope
from tokenloom_server.api.grpc import join, stream
from tokenloom_server.api.grpc.auth_interceptor import OTHER_RPCS, authorization_of
from tokenloom_server.api.grpc.detached_call import GoesOn
from tokenloom_server.api.grpc.rank_streams import RankStreams
from tokenloom_server.api.grpc.rpc import MAX_REPORT_BYTES, MAX_REQUEST_BYTES, Rpc, handlers_of, rpc, rpcs_of
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.api.service import Runs
from tokenloom_server.config.stream import TRAIN
from tokenloom_server.errors import ConfigError, JoinRefused, NotFound
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
    ) -> None:
        """``max_connections``: how many trainers and others may have at a time. ``rest_address``: of this server, for
        who knows its other one. ``serves_many``: one thread serves the ranks' streams of a run, until ``close``."""
        self._rest_address = rest_address
        self._runs = runs
        self._access = access
        self._max_connections = max_connections
        self._serves_many = serves_many
        self._streams: dict[RunCoordinator, RankStreams] = {}
        self._lock = threading.Lock()

    def handlers(self) -> grpc.GenericRpcHandler:
        return handlers_of(self, SERVICE.full_name)

    # Control, but to peek and to evaluate.
    @rpc(Scope.READ, wire.JoinRequest, max_bytes=MAX_REQUEST_BYTES, trains=True)
    def Join(self, request: wire.JoinRequest, context: grpc.ServicerContext) -> wire.JoinResponse:  # noqa: N802
        if _evaluates(request):
            return join.evaluation(self._runs.get(request.run), request)
        if request.peek:
            return join.peek(self._served(request.run, request.stream), request)
        self._require_control(context)
        if not request.rank and request.world_size > self._max_connections:
            # No error: behind a proxy ranks may share connections.
            _log.warning(
                "%s: %d ranks join, and this server may have %d connections at a time: the ranks beyond that find "
                "none; raise its limit of open files (ulimit -n)",
                request.run, request.world_size, self._max_connections,
            )  # fmt: skip
        return join.training(self._served(request.run, request.stream), request)

    # Control, but to peek and to evaluate.
    @rpc(Scope.READ, wire.StreamRequest, trains=True)
    def Stream(  # noqa: N802
        self, requests: Iterator[wire.StreamRequest], context: grpc.ServicerContext
    ) -> Iterator[wire.StreamResponse | bytes | GoesOn]:
        opened = stream.opening(requests, context)
        if _evaluates(opened):
            yield from stream.evaluation(self._runs.get(opened.run), opened, requests, context)
        elif opened.peek:
            yield from stream.peek(self._served(opened.run, opened.stream), opened, requests, context)
        else:
            self._require_control(context)
            served = self._served(opened.run, opened.stream)
            yield from stream.training(served, opened, requests, context, self._streams_of(served.coordinator))

    # Control where it is to be saved.
    @rpc(Scope.READ, wire.SnapshotRequest)
    def Snapshot(  # noqa: N802
        self, request: wire.SnapshotRequest, context: grpc.ServicerContext
    ) -> wire.SnapshotResponse:
        if request.save:
            self._require_control(context)
        served = self._served(request.run, request.stream)
        index = None if request.sample_index == -1 else request.sample_index
        if index is not None and index < 0:
            raise ConfigError(f"sample_index is {index}; expected one from 0 on, or -1 for the committed one")
        text, snapshot_id = served.snapshots.take(index, save=request.save)
        return wire.SnapshotResponse(snapshot_json=text, id=snapshot_id or "")

    @rpc(Scope.CONTROL, wire.RestoreRequest, max_bytes=MAX_REQUEST_BYTES)
    def Restore(self, request: wire.RestoreRequest, context: grpc.ServicerContext) -> wire.RestoreResponse:  # noqa: N802
        served = self._served(request.run, request.stream)
        kind = request.WhichOneof("point")
        for field in ("skip_samples", "skip_tokens"):
            if getattr(request, field) < 0:
                raise ConfigError(f"{field} is {getattr(request, field)}; expected a number from 0 on")
        point = served.start_points.restore(
            snapshot_id=request.snapshot_id if kind == "snapshot_id" else None,
            sample_index=request.sample_index if kind == "sample_index" else None,
            text=request.snapshot_json if kind == "snapshot_json" else None,
            skip_samples=request.skip_samples,
            skip_tokens=request.skip_tokens,
            undo_skip=request.undo_skip,
        )
        return wire.RestoreResponse(
            sample_index=point.sample_index,
            digest=point.digest,
            skips=point.skips or {},
        )

    @rpc(Scope.READ, wire.StatsRequest)
    def Stats(self, request: wire.StatsRequest, context: grpc.ServicerContext) -> wire.StatsResponse:  # noqa: N802
        if not request.run:
            about = {"runs": self._runs.names(), "rest_address": self._rest_address}
            return wire.StatsResponse(stats_json=json.dumps(about))
        return wire.StatsResponse(stats_json=self._runs.get(request.run).stats.read().model_dump_json())

    @rpc(Scope.READ, wire.PlanRequest)
    def Plan(self, request: wire.PlanRequest, context: grpc.ServicerContext) -> wire.PlanResponse:  # noqa: N802
        plan = self._runs.get(request.run).plan_from_start(request.until_tokens or None)
        return wire.PlanResponse(plan_json=plan.model_dump_json())

    @rpc(Scope.READ, wire.TokenizerRequest)
    def Tokenizer(  # noqa: N802
        self, request: wire.TokenizerRequest, context: grpc.ServicerContext
    ) -> wire.TokenizerResponse:
        definition = self._runs.get(request.run).coordinator.order.record.tokenizer
        if definition is None:
            return wire.TokenizerResponse()
        return wire.TokenizerResponse(tokenizer_json=definition.content.encode(), is_bytes=definition.is_bytes)

    @rpc(Scope.CONTROL, wire.ReportRequest, max_bytes=MAX_REPORT_BYTES)
    def Report(self, request: wire.ReportRequest, context: grpc.ServicerContext) -> wire.ReportResponse:  # noqa: N802
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

    def close(self) -> None:
        """Ends the threads of streams. To be called when the server takes no call any more."""
        for streams in self._streams.values():
            streams.stop()

    def _streams_of(self, coordinator: RunCoordinator) -> RankStreams | None:
        if not self._serves_many:
            return None
        with self._lock:
            if coordinator not in self._streams:
                self._streams[coordinator] = RankStreams(coordinator)
            return self._streams[coordinator]

    def _require_control(self, context: grpc.ServicerContext) -> None:
        """For a request that asks for more than its method's scope. Raises ``Forbidden``."""
        self._access.check(authorization_of(context.invocation_metadata()), Scope.CONTROL)

    def _served(self, run: str, stream: str) -> ServedRun:
        served = self._runs.get(run)
        if (stream or TRAIN) != TRAIN:
            raise NotFound(f"{stream!r} is not trained on, so it has no snapshots and no restores; expected {TRAIN!r}")
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
