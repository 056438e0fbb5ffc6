"""Writing a state as ``resume_state``, and a snapshot around it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenloom_proto.resume import counts_at, real_tokens
from tokenloom_proto.seal import SNAPSHOT_VERSION, canonical, seal_texts

from tokenloom_server.core.state import (
    ChildState,
    Cursor,
    EpochCursor,
    FileCursor,
    Lane,
    PackedCursor,
    RowCounts,
    SourceState,
    State,
    WindowCursor,
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
            **_place(source.cursor),
            "samples": source.samples,
            "rows": source.rows,
            "token_offset": source.tokens,
        }
        if "shard_index" in entry:
            entry["shard"] = shape.shards[i][entry["shard_index"]]
        if shape.shuffles[i] != "none":
            entry["shuffle"] = shape.shuffles[i]
        if source.exhausted:
            entry |= {"exhausted": True, "dropped_tokens": source.dropped_tokens}
        if source.lanes:
            entry["lanes"] = [_encode_lane(lane) for lane in source.lanes]
        entry |= _beside_the_order(source)
        if shape.names[i] is not None:
            entry["alias"] = shape.names[i]
        datasets.append(entry)
    datasets += [{**json.loads(entry), "unknown": True} for entry in state.preserved]
    fields = {
        "version": SNAPSHOT_VERSION,
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
    optional = {
        "clock_offset": state.clock_offset, "skips": state.skips, "revisions": list(revisions), "origin": origin
    }  # fmt: skip
    return canonical(fields | {name: value for name, value in optional.items() if value})


def _place(cursor: Cursor | None) -> dict[str, Any]:
    """Where a source or a lane stands, by names that say what it is; nothing at its beginning."""
    match cursor:
        case FileCursor(epoch, shard, row, tokens):
            return {
                "epoch": epoch,
                "shard_index": shard,
                "row_offset": row,
                "row_token_offset": tokens,
            }
        case WindowCursor(epoch, window, row, tokens):
            return {"epoch": epoch, "window": window, "window_row": row, "row_token_offset": tokens}
        case PackedCursor(first, samples):
            fields = _place(first)
            del fields["row_token_offset"]
            return {**fields, "packed_samples": samples}
        case EpochCursor(epoch, rows):
            return {"epoch": epoch, "epoch_rows": rows}
    return {}


def _beside_the_order(source: SourceState) -> dict[str, Any]:
    """What decides no sample: counters of what was passed over and of rows, and what the source is owed."""
    skipped = {name: getattr(source, name) for name in SKIPPED} if source.skipped_samples else {}
    owed = {"owed": f"{source.owed:x}"} if source.owed else {}
    return skipped | owed | _counts(source.row_counts)


def _counts(row_counts: RowCounts) -> dict[str, int]:
    return (
        {name: count for name, count in row_counts._asdict().items() if count}
        if any(row_counts)
        else {}
    )


def _encode_lane(lane: Lane) -> dict[str, Any]:
    return {
        **_place(lane.cursor),
        "samples": lane.samples,
        "rows": lane.rows,
        **_counts(lane.row_counts),
    }


def _encode_node(children: tuple[ChildState, ...]) -> list[list[int]]:
    rows = [[child.samples, child.tokens, child.credit, int(child.exhausted)] for child in children]
    if any(child.weight or child.total for child in children):
        rows = [
            [*row, child.weight, child.total] for row, child in zip(rows, children, strict=True)
        ]
    return rows


def compose(template: Mapping[str, Any], resume_state: str, there: str) -> str:
    """The sealed snapshot at a sample index: ``there`` is the state at it, ``resume_state`` the one at the boundary
    before it, both as ``encode_state`` wrote them. The client does the same with what the wire carries."""
    state = json.loads(there)
    place = {key: state[key] for key in ("sample_index", "total_tokens", "digest")}
    counts = counts_at(state, state["sample_index"], state["total_tokens"])
    fields = {
        **template,
        **place,
        "counts": counts,
        "real_tokens": real_tokens(state["total_tokens"], counts),
    }
    texts = {key: canonical(value) for key, value in fields.items()}
    return seal_texts(texts | {"resume_state": resume_state})
