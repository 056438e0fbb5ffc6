"""The rows of a source that another data loader had given, from the file of flags that the mixture file names."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from tokenloom_proto.files import read_file

from tokenloom_server.config.source import SeenConfig
from tokenloom_server.errors import ConfigError, SourceChanged
from tokenloom_server.order.exclusions import MAX_BYTES
from tokenloom_server.packing.samples import Int64s


def load(
    seen: SeenConfig, base_dir: Path, row_counts: Sequence[int], file_counts: Collection[int]
) -> Mapping[int, Int64s]:
    """By shard, ascending, the rows that were seen; ``row_counts``: the rows of each shard;
    ``file_counts``: how many of these there were when the flags were made.

    Raises ``SourceChanged`` for a file that is not what it was, ``ConfigError`` for one that holds no flags, or not
    those of so many rows.
    """
    path = base_dir / seen.file
    try:
        digest = hashlib.sha256(read_file(path, MAX_BYTES)).hexdigest()
        flags = np.load(path, allow_pickle=False) if digest == seen.sha256 else None
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(
            f"seen.file: {seen.file!r} cannot be read: {error}; write it with numpy.save"
        ) from None
    if flags is None:
        raise SourceChanged(
            f"seen.file: {seen.file!r} lists the rows that another loader gave, and has another content now: found "
            f"sha256 {digest}, expected {seen.sha256}; put the file back as it was"
        )
    ends = np.cumsum(row_counts)
    shapes = [(ends[count - 1],) for count in file_counts]
    if not isinstance(flags, np.ndarray) or flags.dtype != np.bool_ or flags.shape not in shapes:
        actual = (
            f"{flags.dtype} of shape {flags.shape}"
            if isinstance(flags, np.ndarray)
            else "several arrays"
        )
        raise ConfigError(
            f"seen.file: {seen.file!r} holds {actual}, expected one bool for each of the source's {ends[-1]} rows: it "
            "is of other data, or no file of flags; make it again for these"
        )
    parts = np.split(flags, ends[:-1])
    return {shard: np.flatnonzero(part) for shard, part in enumerate(parts) if part.any()}


def with_seen(excluded: Mapping[int, Int64s], seen: Mapping[int, Int64s]) -> Mapping[int, Int64s]:
    """The rows of both, by shard."""
    shards = excluded.keys() | seen.keys()
    nothing = np.zeros(0, np.int64)
    return {
        shard: np.union1d(excluded.get(shard, nothing), seen.get(shard, nothing))
        for shard in shards
    }
