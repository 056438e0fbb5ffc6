"""Opening a source: from a spec, and the files it had when the run began, to rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenloom_server.config.row_rules import PLAIN, RowRules
from tokenloom_server.config.spec import Spec
from tokenloom_server.errors import SourceError
from tokenloom_server.sources import locations
from tokenloom_server.sources.arrow import ArrowSource
from tokenloom_server.sources.base import Shard, Source
from tokenloom_server.sources.jsonl import open_jsonl
from tokenloom_server.sources.megatron import MegatronSource
from tokenloom_server.sources.npy import NpySource
from tokenloom_server.sources.parquet import ParquetSource
from tokenloom_server.sources.txt import open_txt
from tokenloom_server.storage.hub.splits import kind_of
from tokenloom_server.storage.io_stats import IoStats


def open_source(
    spec: Spec,
    base_dir: Path,
    shards: tuple[Shard, ...] | None = None,
    index_dir: Path | None = None,
    io_stats: IoStats | None = None,
    *,
    end_of_text_id: int | None = None,
    rules: RowRules = PLAIN,
) -> Source:
    """Opens a source in seconds, whatever its size.

    ``shards`` are the ones of the run's manifest; ``None`` resolves the location now. Relative paths are below
    ``base_dir``. Indexes of text and flat arrays are cached in ``index_dir``; ``None`` keeps them in memory only.
    ``io_stats`` is what all readers of a run share of remote storage. ``end_of_text_id`` ends the documents of
    ``npy:``;
    other schemes need none. ``rules``: which rows are read, and what of them. Raises ``SourceError`` naming the source,
    and the file where it is one file's fault.
    """
    if shards is None:
        shards = locations.shards(spec, base_dir)
    if not shards:
        raise SourceError(f"source {str(spec)!r} has no files in the run's manifest")
    kind = reader_of(spec, shards)
    if kind in ("txt", "megatron", "npy") and not rules.plain:
        raise SourceError(
            f"source {str(spec)!r} has no columns, as it is of {kind} files; leave filter and template out"
        )
    match kind:
        case "parquet":
            return ParquetSource(spec, shards, base_dir, io_stats, rules)
        case "arrow":
            return ArrowSource(spec, shards, base_dir, io_stats, rules)
        case "jsonl":
            return open_jsonl(spec, shards, base_dir, index_dir, io_stats, rules)
        case "txt":
            return open_txt(spec, shards, base_dir, index_dir, io_stats, rules)
        case "megatron":
            return MegatronSource(spec, shards, base_dir, io_stats)
        case "npy":
            return NpySource(spec, shards, base_dir, index_dir, end_of_text_id, io_stats)
    raise SourceError(f"source {str(spec)!r}: no reader for {shards[0].path!r}")


def reader_of(spec: Spec, shards: Sequence[Shard]) -> str | None:
    """Which of the schemes of files reads a source: on the Hub, what its files are by their names."""
    return kind_of(shards[0].path) if spec.scheme == "hf" else spec.scheme
