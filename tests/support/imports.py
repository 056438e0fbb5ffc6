"""Older data loaders' checkpoints, as a run takes them up."""

from __future__ import annotations

import json
from typing import Any

from tokenloom_server.core.state import State
from tokenloom_server.order import foreign_checkpoint, foreign_payload
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.snapshot import ResumePoint
from tokenloom_server.order.timeline import Timeline


def import_into(order: PipelineFactory | Timeline, document: dict[str, Any]) -> ResumePoint:
    """Where a run goes on from a payload."""
    payload = foreign_payload.read(json.dumps(document))
    assert payload is not None
    return foreign_checkpoint.resume_point(
        payload, order if isinstance(order, Timeline) else Timeline(order)
    )


def import_entries(
    order: PipelineFactory | Timeline, *entries: dict[str, Any], **beside: Any
) -> ResumePoint:
    """From one of these datasets, with more fields beside them."""
    return import_into(order, {"resume_state": {"datasets": list(entries), **beside}})


def state_of(point: ResumePoint) -> State:
    """The state that an import begins with."""
    assert point.base is not None
    return point.base
