"""Where the entries of another data loader's checkpoint stand in the files of this run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os.path import normpath
from pathlib import PurePath

from tokenloom_server.core.state import FileCursor
from tokenloom_server.errors import SnapshotInvalid
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.foreign_payload import Entry
from tokenloom_server.sources.scheme import scheme_of

#: Rows of earlier shards are counted as far as that costs no scan of more text than this, bytes.
_COUNTED_BYTES = 2**30


def cursor_of(where: str, entry: Entry, source: int, factory: PipelineFactory) -> FileCursor:
    config = factory.config.sources[source]
    if not config.in_file_order:
        raise SnapshotInvalid(
            f"{where}: shard and row_offset are a place in file order, but the mixture file reads the source with "
            f"shuffle: {config.shuffle} in {config.lanes} lanes, where other rows lie before it: leave both out to go "
            "on from there, or take the entry out of the checkpoint's copy to read the source from its beginning"
        )
    shard = _shard(where, entry.shard, factory.record.shard_paths[source], factory)
    path, rows = factory.record.shard_paths[source][shard], factory.readers.open(source).row_count(shard)
    if entry.row_offset > rows:
        raise SnapshotInvalid(f"{where}: row_offset is {entry.row_offset}, but {path} has {rows} rows")
    epochs = factory.config.epochs[source]
    if entry.epoch >= epochs:
        raise SnapshotInvalid(
            f"{where}: epoch is {entry.epoch}, but the mixture file reads the source for {epochs:g} epochs, counted "
            "from 0: raise its epochs"
        )
    return FileCursor(entry.epoch, shard, entry.row_offset)


def _shard(where: str, path: str, paths: Sequence[str], factory: PipelineFactory) -> int:
    """The position of a shard: its path as it stands, or the one path that is the same but for where it begins."""
    if path in paths:
        return paths.index(path)
    base_dir = factory.resources.base_dir
    same = [i for i, known in enumerate(paths) if normpath(base_dir / known) == normpath(base_dir / path)]
    if not same:
        same = [i for i, known in enumerate(paths) if _ends_alike(PurePath(path), PurePath(known))]
    if len(same) == 1:
        return same[0]
    if same:
        raise SnapshotInvalid(
            f"{where}: shard {path!r} may be each of {names_of(paths[i] for i in same)}; write the path as the mixture "
            "file's source has it"
        )
    raise SnapshotInvalid(
        f"{where}: shard {path!r} is none of the source's files; expected one of {names_of(paths)}. Where files were "
        "moved, write their new paths into the checkpoint's copy"
    )


def _ends_alike(a: PurePath, b: PurePath) -> bool:
    """Whether one path is the end of the other: relative to another folder."""
    shorter = min(len(a.parts), len(b.parts))
    return a.parts[-shorter:] == b.parts[-shorter:]


def rows_before(source: int, cursor: FileCursor, factory: PipelineFactory) -> tuple[int, bool]:
    """Rows before a cursor since the source's beginning, and whether those of earlier shards are among them: text has
    to be read for that."""
    shards = factory.record.shards[source]
    passed = range(len(shards)) if cursor.epoch else range(cursor.shard)
    scanned = not scheme_of(factory.config.sources[source].spec).reader(shards).stores_row_counts
    if scanned and sum(shards[i].size for i in passed) > _COUNTED_BYTES:
        return cursor.row, False
    reader = factory.readers.open(source)
    counts = [reader.row_count(i) for i in passed]
    return cursor.epoch * sum(counts) + sum(counts[: cursor.shard]) + cursor.row, True


def names_of(values: Iterable[str]) -> str:
    names = [repr(value) for value in values]
    return ", ".join(names[:5]) + (f", … ({len(names)} in all)" if len(names) > 5 else "")
