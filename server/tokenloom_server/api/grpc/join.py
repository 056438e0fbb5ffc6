"""The Join RPC: of trainers, of peeks and of evaluations."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from google.protobuf.message import Message
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.process import MAX_LENGTH
from tokenloom_proto.seal import canonical

from tokenloom_server.api import audit
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.config.source import SourceConfig
from tokenloom_server.core.state import State, digest_hex
from tokenloom_server.errors import JoinRefused
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.replay.evaluation import EvaluationCall
from tokenloom_server.replay.peek import PeekCall
from tokenloom_server.run.coordinator import RunCoordinator
from tokenloom_server.run.join_call import JoinCall
from tokenloom_server.run.losses import Report
from tokenloom_server.run.sizing import batch_plans_of

_Call = TypeVar("_Call", JoinCall, PeekCall, EvaluationCall, Report)
_ID_TYPES = {1: wire.ID_TYPE_UINT8, 2: wire.ID_TYPE_UINT16, 4: wire.ID_TYPE_UINT32}


def training(served: ServedRun, request: wire.JoinRequest) -> wire.JoinResponse:
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


def peek(served: ServedRun, request: wire.JoinRequest) -> wire.JoinResponse:
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


def evaluation(served: ServedRun, request: wire.JoinRequest) -> wire.JoinResponse:
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
