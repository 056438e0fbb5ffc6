"""Sources in tests: opened by the text of a spec, and their rows as Python has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
from tokenloom_server.config.row_rules import RowRules
from tokenloom_server.sources.base import Source
from tokenloom_server.sources.open import open_source

from support.catalog import spec_of


def opened(
    folder: Path, spec: str, index_dir: Path | None = None, *, end: int | None = None, **rules: Any
) -> Source:
    """The source of a spec below a folder; ``end`` is the end-of-text id, ``rules`` are fields of ``RowRules``."""
    return open_source(
        spec_of(spec), folder, None, index_dir, end_of_text_id=end, rules=RowRules(**rules)
    )


def rows_of(source: Source, row: int = 0, shard: int = 0) -> list[Any]:
    """All rows of a shard from a row on, after a check that the pieces follow one another and hold no null."""
    result: list[Any] = []
    for rows in source.read(shard, row):
        assert rows.first_row == row + len(result)
        assert len(rows.column) > 0
        assert rows.column.null_count == 0
        rows.column.validate(full=True)
        result += rows.column.to_pylist()
    return result


def all_rows(folder: Path, spec: str, **rules: Any) -> list[Any]:
    """All rows of a source, shard after shard."""
    source = opened(folder, spec, **rules)
    return [row for shard in range(len(source.shards)) for row in rows_of(source, shard=shard)]


def write_table(
    path: Path, table: pa.Table, block_rows: int | None = None, new: Any = None, **options: Any
) -> None:
    """A Parquet file, or by its ending an Arrow file in blocks of rows; ``new``: by default ``pa.ipc.new_stream``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=block_rows, **options)
        return
    settings = pa.ipc.IpcWriteOptions(**options)
    with (
        pa.OSFile(str(path), "wb") as file,
        (new or pa.ipc.new_stream)(file, table.schema, options=settings) as writer,
    ):
        writer.write_table(table, max_chunksize=block_rows)
