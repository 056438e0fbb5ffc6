"""``resume_state`` of version 1, which has no ``version``: read as one of version 2.

Its entries wrote every cursor as one of a file or of a window, and the beginning as the first row of the first one. A
lane was a list of numbers, the fourth of which counted tokens of a row or, with best fit, samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenloom_server.core.state import MAX_COUNTER, RowCounts
from tokenloom_server.order.state_shape import Shape, ShapeAt

#: In place of ``packed_samples``: the rows that are packed together are packed once more, under other rules.
_PACKED_AGAIN = 2**52
_FILE, _WINDOW = ("shard_index", "row_offset"), ("window", "window_row")


def upgraded(resume: Any, shape_at: ShapeAt | None) -> Any:
    """A ``resume_state`` as one of version 2; whatever is no ``resume_state`` stays as it is, and is refused later.

    ``shape_at``: of the run's states, where it is known.
    """
    if not isinstance(resume, dict) or "version" in resume or not isinstance(resume.get("datasets"), list):
        return resume
    index, shape = resume.get("sample_index"), None
    if shape_at is not None and isinstance(index, int) and 0 <= index <= MAX_COUNTER:
        shape = shape_at(index, 0)
    return {**resume, "version": 2, "datasets": [_dataset(entry, shape) for entry in resume["datasets"]]}


def _dataset(entry: Any, shape: Shape | None) -> Any:
    if not isinstance(entry, dict) or "unknown" in entry:
        return entry
    names = _WINDOW if entry.get("shuffle") == "rows" else _FILE
    fields = _place(entry, names, shape)
    if isinstance(entry.get("lanes"), list):
        fields["lanes"] = [_lane(lane, names, shape) for lane in entry["lanes"]]
    return fields


def _lane(numbers: Any, names: tuple[str, str], shape: Shape | None) -> Any:
    if not isinstance(numbers, list) or len(numbers) not in (6, 6 + len(RowCounts._fields)):
        return numbers
    count = "packed_samples" if shape is not None and shape.best_fit else "row_token_offset"
    fields = ("epoch", *names, count, "samples", "rows", *RowCounts._fields)
    return _place({"row_token_offset": 0, **dict(zip(fields, numbers, strict=False))}, names, shape)


def _place(entry: Mapping[str, Any], names: tuple[str, str], shape: Shape | None) -> dict[str, Any]:
    """The entry with its cursor as version 2 has it."""
    cursor = ("epoch", *names, "row_token_offset", "packed_samples")
    others = {name: value for name, value in entry.items() if name not in (*cursor, "shard")}
    if not any(entry.get(name) for name in cursor):
        # A fork, or another data loader's checkpoint, may put a source that gave samples back to its first row.
        is_back = entry.get("samples") and entry.get("shuffle", "none") == "none" and "shard" in entry
        return dict(entry) if is_back else others
    if shape.in_batches if shape is not None else str(entry.get("spec")).endswith(":*"):
        return {**others, "epoch": entry.get("epoch"), "epoch_rows": entry.get(names[1])}
    if entry.get("packed_samples") == _PACKED_AGAIN:
        return {name: value for name, value in entry.items() if name != "packed_samples"}
    return dict(entry)
