"""Checks that the rows which a state's cursors point to exist, and those that it counts. Reading would find a missing
one only later."""

from __future__ import annotations

from collections.abc import Sequence

from tokenloom_server.core.state import Cursor, EpochCursor, State, WindowCursor, row_cursor, tokens_in_row
from tokenloom_server.errors import SnapshotInvalid
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.timeline import Timeline


def check_cursors(timeline: Timeline, state: State) -> None:
    """Raises ``SnapshotInvalid`` naming the field of ``resume_state``, its value, and what the source has."""
    factory = timeline.at(state.sample_index)
    # A revision, or the run that this one was forked from, may have had more epochs than there are from now on.
    has_other_epochs = timeline.revisions or timeline.origin is not None
    epochs = None if has_other_epochs else timeline.epochs_until(state.sample_index)
    for i, source in enumerate(state.sources):
        cursors = [lane.cursor for lane in source.lanes] or [source.cursor]
        for cursor in cursors:
            _check_cursor(factory, i, cursor, epochs)
        # Rows that are packed together may lie in several epochs, and are counted again where a phase begins.
        one_by_one = factory.config.packing != "best_fit" and factory.config.batching is None
        # Nothing is read for a source that gave nothing yet: storage may be away.
        if source.rows and epochs is not None and state.imported is None and one_by_one:
            begun = max((cursor.epoch + 1 for cursor in cursors if cursor is not None), default=0)
            rows = factory.readers.counted_rows(i)
            if rows is not None and source.rows > rows * begun:
                raise SnapshotInvalid(
                    f"resume_state.datasets.{i}: rows is {source.rows}, but it began {begun} epochs of {rows} rows"
                )


def _check_cursor(factory: PipelineFactory, i: int, cursor: Cursor | None, epochs: Sequence[float] | None) -> None:
    config = factory.config.sources[i]
    first = row_cursor(cursor)
    if cursor is None or first is None:
        return
    around, rows = factory.readers.rows_around(i, first)
    if isinstance(first, EpochCursor):
        field, row, has_begun = "epoch_rows", first.rows, False
    else:
        in_window = isinstance(first, WindowCursor)
        field, row = "window_row" if in_window else "row_offset", first.row
        has_begun = first is not cursor or tokens_in_row(cursor) > 0 or (in_window and not rows)
    if row > rows or (row == rows and has_begun):
        raise SnapshotInvalid(f"resume_state.datasets.{i}: {field} is {row}, but {around} has {rows} rows")
    if epochs is not None and cursor.epoch >= epochs[i]:
        raise SnapshotInvalid(
            f"resume_state.datasets.{i}: epoch is {cursor.epoch}, but {config.source!r} is read for {epochs[i]} "
            "epochs, counted from 0"
        )
