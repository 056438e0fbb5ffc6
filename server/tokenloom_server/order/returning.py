"""Sources that come back into a run's mixture, and where they go on.

``State.preserved`` has sources that no mixture of the run has: what an older data loader's checkpoint says of them, or
where they stood in the run that this one was forked from. Where one goes on is worked out once, and stands in the
content of the revision that brings it, so that every replay does the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from tokenloom_server.core.state import FileCursor, SourceState
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.foreign_payload import entries_of, normalised
from tokenloom_server.order.foreign_rows import position_of


class Returning(NamedTuple):
    """A source that comes back, as the content of a revision has it."""

    source: int
    #: What ``State.preserved`` has of it; empty for a source of the run's own that was dropped.
    entry: str
    #: Epoch, shard and row of its cursor, and the rows before that; empty where the run knows it by itself,
    #: None where it is read from its first row.
    place: Sequence[int] | None

    def carried(self, known: SourceState) -> SourceState:
        """The source as it goes on; ``known``: as it was in the run."""
        if self.place:
            *cursor, rows = self.place
            return replace(known, cursor=FileCursor(*cursor), rows=rows)
        if self.place is None and known.cursor is not None:
            return replace(known, cursor=FileCursor(0, 0, 0), exhausted=False, dropped_tokens=0)
        return known


def returning(
    preserved: Iterable[str], factory: PipelineFactory, first: int = 0, *, from_start: bool = False
) -> list[Returning]:
    """Those of the preserved sources that are among a mixture's, from the ``first`` id on. Raises ``SnapshotInvalid``
    for one that cannot go on."""
    specs, base_dir = factory.record.specs, factory.resources.base_dir
    back = []
    for text in preserved:
        fields = json.loads(text)
        spec, place = normalised(fields["spec"], factory.config, base_dir), None
        if spec not in specs[first:]:
            continue
        source = specs.index(spec)
        if not from_start:
            # Not the tokens of a row that has begun: they count under the options that the source had.
            (entry,) = entries_of({"datasets": [fields]})
            cursor, rows, _ = position_of(f"spec {spec!r}", entry, source, factory)
            place = cursor.epoch, cursor.shard, cursor.row, rows
        back.append(Returning(source, text, place))
    return back
