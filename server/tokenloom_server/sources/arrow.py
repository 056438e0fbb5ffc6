"""``arrow:DIR:COLUMN``: Arrow files of a `datasets` ``save_to_disk`` folder, mapped and not copied."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from tokenloom_server.errors import SourceError
from tokenloom_server.rules import PLAIN, RowRules
from tokenloom_server.sources import arrow_headers, columns, files
from tokenloom_server.sources.arrow_headers import Batches
from tokenloom_server.sources.base import Rows, Shard
from tokenloom_server.sources.selection import Selection
from tokenloom_server.sources.sharded import ShardedSource
from tokenloom_server.spec import Spec

_Out = TypeVar("_Out")


class ArrowSource(ShardedSource):
    """A source of Arrow IPC files, in stream format (as `datasets` writes them) or in file format.

    A file stays mapped as long as an iterator, or an array that came from it, is alive.
    """

    def __init__(self, spec: Spec, shards: tuple[Shard, ...], base_dir: Path, rules: RowRules = PLAIN) -> None:
        """Walks the batch headers up to the first shard that has rows.

        Raises ``SourceError`` for an empty file, a missing column, a type that is not supported, and
        when no shard has a row.
        """
        super().__init__(spec, shards, base_dir, rules)
        self._batches: dict[int, Batches] = {}
        self._refuse_empty_files("an Arrow file")
        _, schema = self._open(0)
        self._content = columns.check_schema(schema, spec, shards[0].path)
        self._refuse_without_rows(self._has_rows)

    def row_count(self, shard: int) -> int:
        if shard not in self._batches:
            _, schema = self._open(shard)
            self._check(shard, schema)
            self._scan(shard)
        return int(self._batches[shard].ends[-1])

    def _read(self, shard: int, row: int) -> Iterator[Rows]:
        where = self._where(self._shards[shard])
        mapped, schema = self._open(shard)
        self._check(shard, schema)
        first_batch, first_row = 0, 0
        if row > 0:
            ends = self._scan(shard).ends
            if row > ends[-1]:
                raise SourceError(f"{where} has {ends[-1]} rows, but row {row} was asked for")
            first_batch = int(np.searchsorted(ends, row, "right")) - 1
            first_row = int(ends[first_batch])
        selection = Selection.of_schema(self._rules, self._spec.column, schema, where)
        fields = [schema.get_field_index(name) for name in selection.fields]
        batches = self._read_batches(shard, mapped, fields, first_batch)
        while True:
            try:
                batch = next(batches, None)
            except (pa.ArrowException, OSError) as error:
                raise self._damaged(shard, f"after row {first_row}: {error}") from None
            if batch is None:
                return
            behind = max(row - first_row, 0)
            if behind < len(batch):
                yield from selection.rows(batch.slice(behind), first_row + behind, where)
            first_row += len(batch)

    def _read_batches(self, shard: int, mapped: Any, fields: list[int], first: int) -> Iterator[Any]:
        """These fields, and perhaps others, of each record batch from the ``first`` on."""
        options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
        if _is_file_format(mapped):
            # Arrow copies the fields that it is told to include of a file, though not those of a stream;
            # that only pays where it spares decompressing the others.
            whole = not self._is_compressed(shard)
            reader = pa.ipc.open_file(mapped, options=None if whole else options)
            for i in range(first, reader.num_record_batches):
                yield reader.get_batch(i)
            return
        batches = self._batches.get(shard)
        mapped.seek(0)
        if first and batches is not None and batches.plain:
            schema = pa.ipc.read_schema(mapped)
            for i in range(first, len(batches.offsets)):
                mapped.seek(batches.offsets[i])
                yield pa.ipc.read_record_batch(pa.ipc.read_message(mapped), schema)
            return
        # Dictionaries come before the batches that need them: the stream has to be followed.
        for i, batch in enumerate(pa.ipc.open_stream(mapped, options=options)):
            if i >= first:
                yield batch

    def _has_rows(self, shard: int) -> bool:
        """Whether a shard has a row, by its first batch that is not empty: no walk over all headers."""
        mapped, schema = self._open(shard)
        self._check(shard, schema)
        try:
            column = columns.column_of(schema, self._spec.column, self._where(self._shards[shard]))
            fields = [schema.get_field_index(column.names[0])]
            return any(len(batch) for batch in self._read_batches(shard, mapped, fields, 0))
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(shard, str(error)) from None

    def _check(self, shard: int, schema: Any) -> None:
        path = self._shards[shard].path
        columns.check_same(columns.check_schema(schema, self._spec, path), self._content, self._spec, path)

    def _scan(self, shard: int) -> Batches:
        if shard not in self._batches:
            self._batches[shard] = self._headers(shard, arrow_headers.scan)
        return self._batches[shard]

    def _is_compressed(self, shard: int) -> bool:
        return self._headers(shard, arrow_headers.is_compressed)

    def _headers(self, shard: int, read: Callable[[memoryview], _Out]) -> _Out:
        """What the headers of a file say. A mapping of its own: Arrow's has the kernel fetch all that is looked at."""
        local = files.present(self._spec, self._shards[shard], self._base_dir)
        try:
            with local.open("rb") as file:
                # Unmapped with its last view, which an error may hold a little longer.
                return read(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
        except (ValueError, OSError) as error:
            raise self._damaged(shard, str(error)) from None

    def _open(self, shard: int) -> tuple[Any, Any]:
        """The mapped file and its schema."""
        local = files.present(self._spec, self._shards[shard], self._base_dir)
        try:
            mapped = pa.memory_map(str(local))
            if _is_file_format(mapped):
                return mapped, pa.ipc.open_file(mapped).schema
            mapped.seek(0)
            return mapped, pa.ipc.open_stream(mapped).schema
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(shard, str(error)) from None

    def _damaged(self, shard: int, reason: str) -> SourceError:
        return SourceError(
            f"{self._where(self._shards[shard])} is not a readable Arrow file ({reason}); "
            "it is truncated or damaged: write or copy it again"
        )


def _is_file_format(mapped: Any) -> bool:
    mapped.seek(0)
    return arrow_headers.is_file_format(memoryview(mapped.read_buffer(8)))
