"""Opening a source: from a spec, and the files it had when the run began, to rows; of one file, to its columns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from tokenloom_server.config.catalog import Spec
from tokenloom_server.config.row_rules import PLAIN, RowRules
from tokenloom_server.errors import SourceError
from tokenloom_server.sources.base import Content, Shard, Source
from tokenloom_server.sources.scheme import ReadRequest, Scheme, scheme_of
from tokenloom_server.storage.io_stats import IoStats
from tokenloom_server.storage.remote import open_file
from tokenloom_server.storage.urls import is_remote


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


def columns_of(scheme: Scheme, path: str, base_dir: Path) -> Mapping[str, Content | None]:
    """The columns of a file, by its path or URL, before a spec says what is read of it: names in the file's order; None
    for what is neither text nor lists of integers.

    Raises ``SourceError`` naming a file that cannot be read as one of the scheme.
    """
    try:
        with open_file(path, base_dir) as file:
            return scheme.columns(file, path)
    except (pa.ArrowException, OSError, ValueError, RecursionError) as error:
        shown = path if is_remote(path) else str(base_dir / path)
        raise SourceError(
            f"{shown!r} cannot be read as {scheme.name} ({type(error).__name__}: {error})"
        ) from None
