"""Rows of Arrow files, mapped and not copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc

from tokenloom_server.errors import TokenloomError
from tokenloom_server.sources import files
from tokenloom_server.sources.arrow import headers
from tokenloom_server.sources.arrow.file import ArrowFile, open_arrow
from tokenloom_server.sources.arrow.headers import Batches
from tokenloom_server.sources.base import Rows
from tokenloom_server.sources.scheme import ReadRequest
from tokenloom_server.sources.selection import Selection
from tokenloom_server.sources.sharded import ShardedSource
from tokenloom_server.storage.file import File, LocalFile, Range
from tokenloom_server.storage.urls import is_remote

_Out = TypeVar("_Out")

#: Files that a source keeps mapped at most: a process has 65,530 mappings on Linux, for thousands of sources.
MAPPED_FILES = 16


class ArrowSource(ShardedSource):
    """A source of Arrow IPC files, in stream format (as `datasets` writes them) or in file format.

    A local file stays mapped as long as an iterator, or an array that came from it, is alive; of a remote one a record
    batch is read at a time.
    """

    def __init__(self, request: ReadRequest) -> None:
        """Walks the batch headers up to the first shard that has rows.

        Raises ``SourceError`` for an empty file, a missing column, a type that is not supported, and
        when no shard has a row.
        """
        super().__init__(request)
        self._batches: dict[int, Batches] = {}
        #: Mapped files by shard and time of modification: of shuffled blocks the next one of a file is soon wanted.
        self._mapped: dict[tuple[int, int], ArrowFile] = {}
        self._refuse_empty_files("an Arrow file")
        self._refuse_without_rows(self._has_rows)

    def row_count(self, shard: int) -> int:
        if shard not in self._batches:
            schema = self._open_arrow(shard, again=True).schema
            self._selection(shard, schema)
            self._scan(shard, schema)
        return int(self._batches[shard].ends[-1])

    def check(self, shard: int) -> object:
        opened = self._open_arrow(shard)
        opened.file.close()
        return self._selection(shard, opened.schema)

    def blocks(self, shard: int) -> npt.NDArray[np.int64]:
        rows = self.row_count(shard)
        # Other streams are followed from their beginning.
        by_itself = self._batches[shard].plain or self._open_arrow(shard).is_file_format
        if not by_itself:
            return np.array([0, rows], np.int64)
        # Of a remote file, what is read by itself is a record batch.
        is_local = not is_remote(self._shards[shard].path)
        return self._batches[shard].blocks() if is_local else self._batches[shard].ends

    def _read(self, shard: int, row: int) -> Iterator[Rows]:
        opened = self._open_arrow(shard, again=True)
        file, schema = opened.file, opened.schema
        selection = self._selection(shard, schema)
        first_batch, first_row = 0, 0
        if row > 0:
            ends = self._scan(shard, schema).ends
            self._check_row(shard, row, int(ends[-1]))
            first_batch = int(np.searchsorted(ends, row, "right")) - 1
            first_row = int(ends[first_batch])
        known = self._batches.get(shard)
        begin = 0
        if first_batch and known is not None and known.plain:
            begin = [*known.offsets, file.size][first_batch]
        fields = [schema.get_field_index(name) for name in selection.fields]
        with file:
            file.plan([Range(begin, file.size)])
            batches = self._read_batches(shard, opened, fields, first_batch)
            yield from self._read_from(shard, batches, selection, first_row, row)

    def _read_from(
        self, shard: int, batches: Iterator[Any], selection: Selection, first_row: int, row: int
    ) -> Iterator[Rows]:
        where = self._where(self._shards[shard])
        while True:
            try:
                batch = next(batches, None)
            except (pa.ArrowException, OSError) as error:
                raise self._damaged(shard, error, f"after row {first_row}: ") from None
            if batch is None:
                return
            yield from selection.rows_from(row, batch, first_row, where)
            first_row += len(batch)

    def _read_batches(
        self, shard: int, opened: ArrowFile, fields: list[int], first: int
    ) -> Iterator[Any]:
        """These fields, and perhaps others, of each record batch from the ``first`` on."""
        options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
        if opened.is_file_format:
            # Of a file, though not of a stream, Arrow copies the fields that are included; that only pays where it
            # spares decompressing the others.
            known = self._batches.get(shard)
            is_compressed = not (known is not None and known.plain) and self._headers(
                shard, headers.is_compressed
            )
            reader = (
                pa.ipc.open_file(opened.stream, options=options) if is_compressed else opened.reader
            )
            for i in range(first, reader.num_record_batches):
                yield reader.get_batch(i)
            return
        batches = self._batches.get(shard)
        if first and batches is not None and batches.plain:
            for i, offset in enumerate(batches.offsets[first:], first):
                yield opened.batch(i, offset)
            return
        # Dictionaries come before the batches that need them: the stream has to be followed.
        opened.stream.seek(0)
        for i, batch in enumerate(pa.ipc.open_stream(opened.stream, options=options)):
            if i >= first:
                yield batch

    def _has_rows(self, shard: int) -> bool:
        """Whether a shard has a row, by its first batch that is not empty: no walk over all headers."""
        opened = self._open_arrow(shard, again=True)
        selection = self._selection(shard, opened.schema)
        try:
            fields = [opened.schema.get_field_index(name) for name in selection.fields[:1]]
            return any(len(batch) for batch in self._read_batches(shard, opened, fields, 0))
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(shard, error) from None
        finally:
            opened.file.close()

    def _scan(self, shard: int, schema: pa.Schema) -> Batches:
        if shard not in self._batches:
            block_rows = headers.block_rows(schema.metadata or {})
            self._batches[shard] = self._headers(shard, headers.scan)._replace(
                block_rows=block_rows
            )
        return self._batches[shard]

    def _headers(self, shard: int, read: Callable[[File], _Out]) -> _Out:
        """What the headers of a file say. Not by its mapping: Arrow has the kernel fetch all that is looked at."""
        try:
            with self._open(self._shards[shard]) as file:
                return read(file)
        except (ValueError, OSError) as error:
            raise self._damaged(shard, error) from None

    def _open_arrow(self, shard: int, *, again: bool = False) -> ArrowFile:
        """``again``: see ``_open``."""
        file = self._open(self._shards[shard], again=again)
        key = (shard, file.modified_ns) if isinstance(file, LocalFile) else None
        opened = self._mapped.get(key) if key is not None else None
        if opened is not None:
            file.close()
            return opened
        try:
            opened = open_arrow(file)
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(shard, error) from None
        # A stream's reader has a position, so each iterator has its own.
        if key is not None and opened.is_file_format:
            if len(self._mapped) >= MAPPED_FILES:
                self._mapped.clear()
            self._mapped[key] = opened
        return opened

    def _damaged(self, shard: int, error: Exception, place: str = "") -> TokenloomError:
        return files.unreadable(self._where(self._shards[shard]), "Arrow", error, place)
