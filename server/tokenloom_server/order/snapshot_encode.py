"""Writing a state as ``resume_state``, and a snapshot around it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenloom_proto.seal import canonical, seal_texts

from tokenloom_server.core.state import (
    ChildState,
    Cursor,
    Lane,
    State,
    digest_hex,
)
from tokenloom_server.order.snapshot_document import SKIPPED
from tokenloom_server.order.state_shape import Shape


def encode_state(
    state: State,
    shape: Shape,
    revisions: Sequence[Mapping[str, Any]] = (),
    origin: Mapping[str, Any] | None = None,
) -> str:
    """``resume_state``: the canonical JSON of a state. ``revisions``: what changed the mixture file's own rules;
    ``origin``: where the run was forked from."""
    datasets = []
    for i, (source, spec) in enumerate(zip(state.sources, shape.specs, strict=True)):
        entry: dict[str, Any] = {
            "id": i,
            "spec": spec,
            **_place(source.cursor, shape, i),
            "epoch": source.cursor.epoch,
            "row_token_offset": source.cursor.offset,
            "samples": source.samples,
            "rows": source.rows,
            "token_offset": source.tokens,
        }
        if shape.best_fit and source.cursor.offset:
            entry |= {"row_token_offset": 0, "packed_samples": source.cursor.offset}
        if source.exhausted:
            entry |= {"exhausted": True, "dropped_tokens": source.dropped_tokens}
        if source.lanes:
            entry["lanes"] = [_encode_lane(lane) for lane in source.lanes]
        if source.skipped_samples:
            entry |= {name: getattr(source, name) for name in SKIPPED}
        entry |= {name: count for name, count in source.tally._asdict().items() if count}
        if shape.names[i] is not None:
            entry["alias"] = shape.names[i]
        datasets.append(entry)
    datasets += [{**json.loads(entry), "unknown": True} for entry in state.preserved]
    fields = {
        "sample_index": state.sample_index,
        "digest": digest_hex(state.digest),
        "total_tokens": state.total_tokens,
        "datasets": datasets,
        "nodes": [_encode_node(children) for children in state.nodes],
        "mixture": shape.mixture,
    }
    if state.imported is not None:
        fields["imported"] = {
            "sample_index": state.imported.sample_index,
            "digest": digest_hex(state.imported.digest),
        }
    if revisions:
        fields["revisions"] = list(revisions)
    if origin is not None:
        fields["origin"] = origin
    return canonical(fields)


def _place(cursor: Cursor, shape: Shape, source: int) -> dict[str, Any]:
    """Where a cursor stands within its epoch, by names that say what it is."""
    shuffle = shape.shuffles[source]
    named = {} if shuffle == "none" else {"shuffle": shuffle}
    if shuffle == "rows":
        return {**named, "window": cursor.shard, "window_row": cursor.row}
    return {
        **named,
        "shard": shape.shards[source][cursor.shard],
        "shard_index": cursor.shard,
        "row_offset": cursor.row,
    }


def _encode_lane(lane: Lane) -> list[int]:
    cursor = lane.cursor
    tally = lane.tally if any(lane.tally) else ()
    return [cursor.epoch, cursor.shard, cursor.row, cursor.offset, lane.samples, lane.rows, *tally]


def _encode_node(children: tuple[ChildState, ...]) -> list[list[int]]:
    rows = [[child.samples, child.tokens, child.credit, int(child.exhausted)] for child in children]
    if any(child.weight or child.total for child in children):
        rows = [[*row, child.weight, child.total] for row, child in zip(rows, children, strict=True)]
    return rows


def compose(template: Mapping[str, Any], resume_state: str, index: int, digest: str, tokens: int) -> str:
    """The sealed snapshot at a sample index; ``resume_state`` as ``encode_state`` wrote it. The client does the same
    with what the wire carries."""
    position = {"sample_index": index, "digest": digest, "total_tokens": tokens}
    texts = {key: canonical(value) for key, value in {**template, **position}.items()}
    return seal_texts(texts | {"resume_state": resume_state})
