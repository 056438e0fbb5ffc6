"""The RPCs of the data loader, each with the scope that it asks for: between the wire and the runs."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

from google.protobuf.message import Message
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.process import MAX_LENGTH
from tokenloom_proto.seal import canonical
from tokenloom_proto.versions import own_release, require_compatible

from tokenloom_server.api import audit
from tokenloom_server.api.auth import Access, Scope, Token
from tokenloom_server.api.grpc.messages import encode_delivery, hand_over
from tokenloom_server.api.grpc.rpc import MAX_REPORT_BYTES, MAX_REQUEST_BYTES, Call, Rpc, rpc
from tokenloom_server.api.grpc.stream import (
    NO_OPENING,
    ClientStream,
    Item,
    RankSource,
    StreamSource,
)
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.api.service import Runs
from tokenloom_server.config.source import SourceConfig
from tokenloom_server.config.stream import TRAIN
from tokenloom_server.core import caller
from tokenloom_server.core.caller import Caller
from tokenloom_server.core.state import State, digest_hex
from tokenloom_server.errors import (
    ConfigError,
    Forbidden,
    JoinRefused,
    NotFound,
    TokenloomError,
    Unauthenticated,
)
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.replay.evaluation import EvaluationCall
from tokenloom_server.replay.peek import PeekCall
from tokenloom_server.run.coordinator import RunCoordinator
from tokenloom_server.run.join_call import MAX_WORLD_SIZE, JoinCall
from tokenloom_server.run.losses import Report
from tokenloom_server.run.sizing import batch_plans_of

_Call = TypeVar("_Call", JoinCall, PeekCall, EvaluationCall, Report)
_ID_TYPES = {1: wire.ID_TYPE_UINT8, 2: wire.ID_TYPE_UINT16, 4: wire.ID_TYPE_UINT32}


def join_training(served: ServedRun, request: wire.JoinRequest) -> wire.JoinResponse:
    """A rank of a launch."""
    call = call_of(
        JoinCall,
        request,
        state=request.state_json,
        process=request.process[:MAX_LENGTH],
        batch_sizes=tuple((size.total_tokens, size.batch_size) for size in request.batch_sizes),
        accumulate=request.accumulate or 1,
    )
    before = served.coordinator.view().generation
    joined = served.join_handler.join(call)
    opening, plans = joined.opening, batch_plans_of(joined.opening).plans
    if call.rank == 0 and opening.generation != before.number:
        opened = f"generation {opening.generation} with {opening.world_size} ranks"
        opened += f" at sample {joined.start.sample_index}"
        opened += ", taking over" if call.takeover else ""
        audit.changed(
            served,
            f"opened {opened} (before: generation {before.number} with {len(before.ranks)} ranks)",
            "launch",
        )
    return _response(
        served.coordinator,
        joined.uid,
        joined.start,
        opening.start_state,
        opening.generation,
        generation=opening.generation,
        group_micro_steps=opening.group_micro_steps,
        batch_size=opening.batch_size,
        batch_plans=[
            wire.BatchPlan(
                begin_index=plan.start_index,
                batch_size=plan.batch_size,
                group_micro_steps=plan.group_micro_steps,
            )
            for plan in (plans if len(plans) > 1 else ())
        ],
        skips=served.coordinator.timeline.skips_from(joined.start),
    )


def join_peek(served: ServedRun, request: wire.JoinRequest) -> wire.JoinResponse:
    """A reader that takes no part in the run."""
    if request.batch_sizes:
        raise JoinRefused(
            "a peek has micro-steps of one batch size, and a schedule was asked for: give batch_size a number"
        )
    generation, state = served.peeks.join(call_of(PeekCall, request, state=request.state_json))
    batch_size = served.coordinator.order.config.global_batch_size or request.batch_size
    return _response(
        served.coordinator,
        served.coordinator.uid,
        state,
        served.coordinator.timeline.encode(state),
        generation,
        group_micro_steps=served.coordinator.message_steps(batch_size),
        batch_size=batch_size,
    )


def join_evaluation(served: ServedRun, request: wire.JoinRequest) -> wire.JoinResponse:
    """A rank that evaluates on a stream beside training."""
    kept, samples = served.evaluations.join(call_of(EvaluationCall, request))
    return wire.JoinResponse(
        **_layout(kept.factory),
        run_uid=served.coordinator.uid,
        start_digest=digest_hex(0),
        sources=[
            _named(source) for source in kept.factory.config.sources if source.presence != "dropped"
        ],
        group_micro_steps=served.coordinator.message_steps(request.batch_size),
        server_epoch=served.coordinator.lease.epoch,
        batch_size=request.batch_size,
        stream_samples=samples,
    )


def call_of(kind: type[_Call], message: Message, **others: Any) -> _Call:
    """A call of ``others``, and of what a message has under the names of its remaining fields."""
    same = {
        field.name: getattr(message, field.name)
        for field in fields(kind)
        if field.name not in others
    }
    return kind(**others, **same)


def _response(
    coordinator: RunCoordinator,
    uid: str,
    start: State,
    start_state: str,
    lineage: int,
    **further: Any,
) -> wire.JoinResponse:
    """``lineage``: the generation that snapshots name."""
    timeline = coordinator.timeline
    factory = timeline.at(start.sample_index)
    # Those that phases and revisions bring later, too: ids are never given twice.
    sources = [
        *factory.config.sources,
        *timeline.segments[-1].config.sources[len(factory.config.sources) :],
    ]
    return wire.JoinResponse(
        run_uid=uid,
        start_index=start.sample_index,
        start_digest=digest_hex(start.digest),
        start_tokens=start.total_tokens,
        sources=[_named(source) for source in sources],
        snapshot_template=canonical(coordinator.template(uid, lineage)).encode(),
        base=wire.Base(sample_index=start.sample_index, resume_state=start_state.encode()),
        server_epoch=coordinator.lease.epoch,
        global_batch_size=factory.config.global_batch_size or 0,
        **_layout(factory),
        **further,
    )


def _named(source: SourceConfig) -> wire.Source:
    return wire.Source(id=source.id, spec=source.source, alias=source.name)


def _layout(factory: PipelineFactory) -> dict[str, Any]:
    """What a ``JoinResponse`` says of how samples travel."""
    layout: dict[str, Any] = {
        **factory.sample_form(),
        "sample_lengths": factory.form.lengths,
        "pads_left": factory.form.lengths and factory.form.padding == "left",
        "loss_masks": factory.form.masked,
        "mask_boundaries": factory.config.mask_boundaries,
    }
    if factory.config.batching is None:
        layout["id_type"] = _ID_TYPES[factory.record.dtype.itemsize]
        layout["labels"] = (
            wire.LABELS_SHIFTED if factory.config.labels == "shifted" else wire.LABELS_SAME
        )
    return layout


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
        hands_over: bool = False,
    ) -> None:
        """``max_connections``: how many trainers and others may have at a time. ``rest_address``: of this server, for
        who knows its other one. ``hands_over``: clients are in this process, and get micro-steps without a message
        around them."""
        self._deliver: Callable[..., Item] = hand_over if hands_over else encode_delivery
        self._rest_address = rest_address
        self._runs = runs
        self._access = access
        self._max_connections = max_connections
        self._release = own_release()

    @classmethod
    @cache
    def rpcs(cls) -> Mapping[str, Rpc]:
        """By name."""
        return {name: method.rpc for name, method in vars(cls).items() if hasattr(method, "rpc")}

    def respond(self, name: str, data: bytes, call: Call) -> bytes:
        """Does what a call asks for, and answers. Raises what is wrong with it."""
        with caller.serving(self._caller(call), call.is_active):
            answer: Message = getattr(self, name)(self.rpcs()[name].parse(data), call)
        return answer.SerializeToString()

    def open(self, data: bytes, call: Call) -> ClientStream:
        """Begins the stream that a call is; ``data`` is its first message. Raises what is wrong with it."""
        with caller.serving(self._caller(call), call.is_active):
            return self.Stream(self.rpcs()["Stream"].parse(data), call)

    def count_error(self, method: str, address: str, error: TokenloomError) -> None:
        """A call of a method ended with an error."""
        if isinstance(error, Unauthenticated | Forbidden):
            self._access.refusals.note(method, address, str(error))
        self._runs.rpc_errors.add(method, error.grpc_status, error.name)

    # Training, but to peek and to evaluate.
    @rpc(Scope.READ, wire.JoinRequest, max_bytes=MAX_REQUEST_BYTES, trains=True)
    def Join(self, request: wire.JoinRequest, call: Call) -> wire.JoinResponse:
        require_compatible(request.release, self._release)
        answer = self._join(request, call)
        answer.release = self._release
        return answer

    def _join(self, request: wire.JoinRequest, call: Call) -> wire.JoinResponse:
        if _evaluates(request):
            return join_evaluation(self._runs.get(request.run), request)
        if request.peek:
            return join_peek(self._served(request.run, request.stream), request)
        self._require(Scope.TRAIN, call)
        if not request.rank and request.world_size > self._max_connections:
            # No error: behind a proxy ranks may share connections.
            _log.warning(
                "%s: %d ranks join, and this server may have %d connections at a time: the ranks beyond that find "
                "none; raise its limit of open files (ulimit -n)",
                request.run, request.world_size, self._max_connections,
            )  # fmt: skip
        return join_training(self._served(request.run, request.stream), request)

    # Training, but to peek and to evaluate.
    @rpc(Scope.READ, wire.StreamRequest, trains=True, streams=True)
    def Stream(self, first: wire.StreamRequest, call: Call) -> ClientStream:
        if first.WhichOneof("kind") != "open":
            raise JoinRefused(NO_OPENING)
        opened = first.open
        evaluates = _evaluates(opened)
        scope = Scope.READ if evaluates or opened.peek else Scope.TRAIN
        token = self._require(scope, call)
        served = (
            self._runs.get(opened.run) if evaluates else self._served(opened.run, opened.stream)
        )
        recheck = self._access.hold(call, token, scope, opened.run)
        served.closers.add(call.cancel)
        call.until_end.callback(served.closers.discard, call.cancel)
        source = _source(served, opened, call, evaluates)
        return ClientStream(served.coordinator, source, opened, self._deliver, recheck, call)

    # Control where it is to be saved.
    @rpc(Scope.READ, wire.SnapshotRequest)
    def Snapshot(self, request: wire.SnapshotRequest, call: Call) -> wire.SnapshotResponse:
        if request.save:
            self._require(Scope.CONTROL, call)
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
    def Restore(self, request: wire.RestoreRequest, call: Call) -> wire.RestoreResponse:
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
    def Stats(self, request: wire.StatsRequest, call: Call) -> wire.StatsResponse:
        if not request.run:
            about = {"runs": self._runs.names(), "rest_address": self._rest_address}
            return wire.StatsResponse(stats_json=json.dumps(about))
        return wire.StatsResponse(
            stats_json=self._runs.get(request.run).stats.read().model_dump_json()
        )

    @rpc(Scope.READ, wire.PlanRequest)
    def Plan(self, request: wire.PlanRequest, call: Call) -> wire.PlanResponse:
        plan = self._runs.get(request.run).plan_from_start(request.until_tokens or None)
        return wire.PlanResponse(plan_json=plan.model_dump_json())

    @rpc(Scope.READ, wire.TokenizerRequest)
    def Tokenizer(self, request: wire.TokenizerRequest, call: Call) -> wire.TokenizerResponse:
        definition = self._runs.get(request.run).coordinator.order.record.tokenizer
        if definition is None:
            return wire.TokenizerResponse()
        return wire.TokenizerResponse(
            tokenizer_json=definition.content.encode(), is_bytes=definition.is_bytes
        )

    @rpc(Scope.TRAIN, wire.ReportRequest, max_bytes=MAX_REPORT_BYTES)
    def Report(self, request: wire.ReportRequest, call: Call) -> wire.ReportResponse:
        served = self._served(request.run, request.stream)
        sources = {each.source_id: (each.loss, each.tokens) for each in request.sources}
        if len(sources) < len(request.sources):
            twice = next(
                i for i, n in Counter(each.source_id for each in request.sources).items() if n > 1
            )
            raise ConfigError(
                f"sources: source_id {twice} is reported twice; report each once, over all ranks"
            )
        report = call_of(
            Report,
            request,
            sources=sources,
            loss=request.loss if request.HasField("loss") else None,
            learning_rate=request.learning_rate if request.HasField("learning_rate") else None,
        )
        served.losses.add(request.run_uid, request.generation, request.attempt, report)
        return wire.ReportResponse()

    def _caller(self, call: Call) -> Caller:
        """Who makes a call, for whom its work is done."""
        return self._require(Scope.READ, call).caller(call.address)

    def _require(self, scope: Scope, call: Call) -> Token:
        """For a request that asks for more than its method's scope. Raises ``Forbidden``."""
        return self._access.check(call.authorization, scope)

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


def _source(
    served: ServedRun, opened: wire.StreamOpen, call: Call, evaluates: bool
) -> StreamSource:
    """What a stream sends."""
    uid, index, digest = opened.run_uid, opened.received_through, opened.received_digest
    if evaluates:
        return served.evaluations.open(uid, call_of(EvaluationCall, opened), index, digest)
    if opened.peek:
        return call.until_end.enter_context(
            served.peeks.open(uid, index, opened.batch_size, digest)
        )
    sessions = served.coordinator.sessions
    session = sessions.attach(
        uid,
        opened.generation,
        opened.rank,
        opened.nonce,
        index,
        opened.committed_through,
        digest,
        opened.server_epoch,
        opened.attempt,
        opened.process,
        opened.number,
    )
    call.until_end.callback(sessions.detach, session)
    return RankSource(sessions, session)
