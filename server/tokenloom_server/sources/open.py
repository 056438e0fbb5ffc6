"""Opening a source: from a spec, and the files it had when the run began, to rows."""

from __future__ import annotations

from pathlib import Path

from tokenloom_server.config.row_rules import PLAIN, RowRules
from tokenloom_server.config.spec import Spec
from tokenloom_server.errors import SourceError
from tokenloom_server.sources.base import Shard, Source
from tokenloom_server.sources.scheme import ReadRequest, scheme_of
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
    """Opens a source in seconds, whatever its size; the parameters are those of ``ReadRequest``.

    ``shards``: those of the run's manifest; None: those that the location has now. Raises ``SourceError`` naming the
    source, and the file where it is one file's fault.
    """
    if shards is None:
        shards = scheme_of(spec).shards(spec, base_dir)
    if not shards:
        raise SourceError(f"source {str(spec)!r} has no files in the run's manifest")
    reader = scheme_of(spec).reader(shards)
    if not reader.has_columns and not rules.plain:
        raise SourceError(
            f"source {str(spec)!r} has no columns, as it is of {reader.name} files; leave filter and template out"
        )
    return reader.open(
        ReadRequest(
            spec=spec,
            shards=shards,
            base_dir=base_dir,
            index_dir=index_dir,
            io_stats=io_stats or IoStats(),
            rules=rules,
            end_of_text_id=end_of_text_id,
        )
    )
