"""Sources that come back into a run's mixture, and where they go on.

``State.preserved`` has sources that no mixture of the run has: what an older data loader's checkpoint says of them, or
where they stood in the run that this one was forked from. Where one goes on is worked out once, and stands in the
content of the revision that brings it, so that every replay does the same.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from os.path import normpath
from pathlib import PurePath
from typing import NamedTuple

from tokenloom_server.core.state import FileCursor, SourceState
from tokenloom_server.errors import SnapshotInvalid
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.foreign_payload import Entry, entries_of, normalised
from tokenloom_server.sources.base import Source
from tokenloom_server.sources.scheme import scheme_of

#: Rows of earlier shards are counted as far as that costs no scan of more text than this, bytes.
_COUNTED_BYTES = 2**30


class Position(NamedTuple):
    """Where a source goes on, and how many rows of it lie before that; ``is_counted``: those of earlier shards, too,
    for which text has to be read."""

    cursor: FileCursor
    rows: int
    is_counted: bool


def position_of(where: str, entry: Entry, source: int, factory: PipelineFactory) -> Position:
    """Where an entry's source stands in this run's files.

    ``row_offset`` counts rows of the whole spec or of the shard. Where that is not said, both are tried, and the one
    that fits holds. Raises ``SnapshotInvalid``, beginning with ``where``, for a row that is not there, and where both
    fit and differ.
    """
    config, epochs = factory.config.sources[source], factory.config.epochs[source]
    if entry.was_drawn:
        raise SnapshotInvalid(
            f"{where}: it was shuffled or read in lanes, so row_offset is no place in file order"
        )
    if not config.in_file_order:
        raise SnapshotInvalid(
            f"{where}: shard and row_offset are a place in file order, but the mixture file reads the source with "
            f"shuffle: {config.shuffle} in {config.lanes} lanes, where other rows lie before it: leave both out to go "
            "on from there, or take the entry out of the checkpoint's copy to read the source from its beginning"
        )
    reader = factory.readers.open(source)
    paths = factory.record.shard_paths[source]
    shard = None if entry.shard is None else _shard(where, entry.shard, paths, factory)
    within, of_spec = [], _of_spec(entry, reader) if entry.reading != "shard" else []
    there = [cursor for cursor in of_spec if shard in (None, cursor.shard)]
    if (
        shard is not None
        and entry.reading != "spec"
        and entry.row_offset <= reader.row_count(shard)
    ):
        within = [FileCursor(entry.epoch or 0, shard, entry.row_offset)]
    fitting = within or there
    if not fitting or (within and there and within[0] not in there):
        raise SnapshotInvalid(f"{where}: {_both_readings(entry, shard, reader)}")
    cursor = next((cursor for cursor in fitting if cursor.epoch < epochs), fitting[0])
    if cursor.epoch >= epochs:
        raise SnapshotInvalid(
            f"{where}: epoch is {cursor.epoch}, but the mixture file reads the source for {epochs:g} epochs, counted "
            "from 0: raise its epochs"
        )
    if cursor in there and entry.epoch is None:
        return Position(cursor, entry.row_offset, True)
    return Position(cursor, *_rows_before(source, cursor, reader, factory))


def _of_spec(entry: Entry, reader: Source) -> list[FileCursor]:
    """The place of a row that is counted through the whole spec, and through its epochs where no epoch is named: before
    that row, and after the one before it, which lies in another shard or epoch where one ends. Counts the rows of no
    more shards than it must."""
    ends = [0]
    while ends[-1] <= entry.row_offset and len(ends) <= len(reader.shards):
        ends.append(ends[-1] + reader.row_count(len(ends) - 1))
    cursors = []
    for before, passed in ((entry.row_offset, 0), (entry.row_offset - 1, 1)):
        epoch, row = divmod(before, max(1, ends[-1]))
        shard = bisect_right(ends, row) - 1
        if epoch == 0 or (epoch > 0 and entry.epoch is None):
            cursors.append(
                FileCursor(epoch + (entry.epoch or 0), shard, row - ends[shard] + passed)
            )
    return cursors if ends[-1] else []


def _both_readings(entry: Entry, shard: int | None, reader: Source) -> str:
    """What a ``row_offset`` is within the shard and of the whole spec, and how to say which."""
    files, of_spec = reader.shards, _of_spec(entry, reader)
    within = (
        "it names no shard"
        if shard is None
        else f"{files[shard].path} has {reader.row_count(shard)} rows"
    )
    row = (
        f"row {of_spec[0].row} of {files[of_spec[0].shard].path}"
        if of_spec
        else "after the end of it"
    )
    return (
        f"row_offset is {entry.row_offset}, but {within}; counted through the whole spec that is {row}: say which of "
        "both it counts by row_offset_of: shard or spec, in the entry or beside datasets; or correct it and the shard "
        "in the checkpoint's copy"
    )


def _shard(where: str, path: str, paths: Sequence[str], factory: PipelineFactory) -> int:
    """The position of a shard: its path as it stands, or the one path that is the same but for where it begins."""
    if path in paths:
        return paths.index(path)
    base_dir = factory.resources.base_dir
    same = [
        i
        for i, known in enumerate(paths)
        if normpath(base_dir / known) == normpath(base_dir / path)
    ]
    if not same:
        same = [i for i, known in enumerate(paths) if _ends_alike(PurePath(path), PurePath(known))]
    if len(same) == 1:
        return same[0]
    fault = f"is none of the source's files; expected one of {names_of(paths)}"
    if same:
        fault = f"may be each of {names_of(paths[i] for i in same)}"
    raise SnapshotInvalid(
        f"{where}: shard {path!r} {fault}. Write the file's path as it is now into the checkpoint's copy"
    )


def _ends_alike(a: PurePath, b: PurePath) -> bool:
    """Whether one path is the end of the other: relative to another folder."""
    shorter = min(len(a.parts), len(b.parts))
    return a.parts[-shorter:] == b.parts[-shorter:]


def _rows_before(
    source: int, cursor: FileCursor, reader: Source, factory: PipelineFactory
) -> tuple[int, bool]:
    """As the two last fields of a ``Position``."""
    shards = factory.record.shards[source]
    passed = range(len(shards)) if cursor.epoch else range(cursor.shard)
    scanned = not scheme_of(factory.config.sources[source].spec).reader(shards).stores_row_counts
    if scanned and sum(shards[i].size for i in passed) > _COUNTED_BYTES:
        return cursor.row, False
    counts = [reader.row_count(i) for i in passed]
    return cursor.epoch * sum(counts) + sum(counts[: cursor.shard]) + cursor.row, True


def names_of(values: Iterable[str]) -> str:
    names = [repr(value) for value in values]
    return ", ".join(names[:5]) + (f", … ({len(names)} in all)" if len(names) > 5 else "")


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
