"""Where a source stands, as lines of the log say it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenloom_server.core.state import (
    EpochCursor,
    FileCursor,
    SourceState,
    State,
    WindowCursor,
    row_cursor,
)
from tokenloom_server.order.record import RunRecord


def position_line(spec: str, source: SourceState, shards: Sequence[str]) -> str:
    """``spec=… sample_row=… shard=… offset=…``: ``sample_row`` counts rows since the source's beginning, ``offset``
    those of the shard, window or epoch that is named beside it. ``shards``: the paths of the source's files."""
    return f"spec={spec} sample_row={source.rows} {_offset(source, shards)}"


def position_lines(record: RunRecord, state: State) -> Iterator[str]:
    """Of each source of a run."""
    return map(position_line, record.specs, state.sources, record.shard_paths)


def _offset(source: SourceState, shards: Sequence[str]) -> str:
    match row_cursor(source.cursor):
        case FileCursor(_, shard, row):
            return f"shard={shards[shard]} offset={row}"
        case WindowCursor(_, window, row):
            return f"window={window} offset={row}"
        case EpochCursor(epoch, rows):
            return f"epoch={epoch} offset={rows}"
    return "offset=0"
