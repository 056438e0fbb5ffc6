"""Rows of Parquet files: counts from the footers, rows from the one row group where reading begins."""

from __future__ import annotations

import bisect
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from tokenloom_server.errors import SourceError
from tokenloom_server.sources import columns, files, parquet_lists, parquet_pages
from tokenloom_server.sources.base import Content, Rows
from tokenloom_server.sources.parquet_pages import CheckedPages, Chunks, Unusual
from tokenloom_server.sources.scheme import ReadRequest
from tokenloom_server.sources.selection import Selection
from tokenloom_server.sources.sharded import ShardedSource
from tokenloom_server.storage.arrow_input import for_arrow
from tokenloom_server.storage.file import File, LocalFile, Range
from tokenloom_server.storage.remote import RemoteFile

_log = logging.getLogger(__name__)
_ReadLists = Callable[[int], Iterator[pa.Array]]

#: Bytes that are decoded at once: less than a piece, since one that is a little larger would become two.
BATCH_BYTES = 7 << 17

#: Rows that are decoded at once, at most: a dictionary may hide how large they are.
BATCH_ROWS = 1 << 13

#: Bytes of the footers that are kept, and the footer that goes beyond.
HELD_FOOTERS_BYTES = 1 << 22

#: Bytes at the end of a file that usually have all of its footer.
TAIL_BYTES = 1 << 16

#: Bytes of a column chunk that are read from the file at once.
BUFFER_BYTES = 1 << 20


class ParquetSource(ShardedSource):
    """A source of Parquet files."""

    def __init__(self, request: ReadRequest) -> None:
        """Opens footers up to the first that has rows.

        Raises ``SourceError`` for an empty file, a missing column, a type that is not supported, and
        when no shard has a row.
        """
        super().__init__(request)
        self._group_ends: dict[int, npt.NDArray[np.int64]] = {}
        #: Whether it was said that files do not say where their columns lie.
        self._is_unplanned = False
        #: Footers of the files that were last opened at a row; a shuffled reader opens its file for each row group.
        self._footers: dict[int, _Footer] = {}
        self._refuse_empty_files("a Parquet file")
        with self._open_parquet(0, again=True):
            pass
        self._refuse_without_rows(self.row_count)

    def row_count(self, shard: int) -> int:
        if shard not in self._group_ends:
            with self._open(self._shards[shard]) as file:
                metadata = _metadata_of(file)
                if metadata is not None:
                    self._learn(shard, metadata, metadata.schema.to_arrow_schema())
        if shard not in self._group_ends:
            with self._open_parquet(shard):
                pass
        return int(self._group_ends[shard][-1])

    def check(self, shard: int) -> int:
        return self.row_count(shard)

    def blocks(self, shard: int) -> npt.NDArray[np.int64]:
        self.row_count(shard)
        return self._group_ends[shard]

    def _read(self, shard: int, row: int) -> Iterator[Rows]:
        with self._open_parquet(shard) as (file, stream, parquet):
            ends = self._group_ends[shard]
            self._check_row(shard, row, int(ends[-1]))
            chunks = self._chunks(shard, parquet, keep=row > 0)
            if isinstance(file, RemoteFile):
                ranges = self._ranges(file, chunks[0], int(np.searchsorted(ends, row, "right")) - 1)
                # The footer is read before: within a read that is planned, it would be asked for while it is read.
                first = [*islice(ranges, 1)]
                file.plan(chain(first, ranges))
            expect = partial(stream.expect, chunks)
            yield from self._read_groups(
                parquet, expect, self._lists(file, parquet, chunks[0]), shard, row
            )

    def _read_groups(
        self,
        file: Any,
        expect: Callable[[int], None],
        lists: _ReadLists | None,
        shard: int,
        row: int,
    ) -> Iterator[Rows]:
        where = self._where(self._shards[shard])
        selection = self._selection(shard, file.schema_arrow)
        ends = self._group_ends[shard].tolist()
        size = _BatchSize()
        # The first entry is 0, so that entry g is where row group g begins.
        for group in range(bisect.bisect_right(ends, row) - 1, len(ends) - 1):
            first_row, last_row = ends[group], ends[group + 1]
            expect(group)
            for batch in self._read_group(file, group, size, where, lists, selection):
                fits = first_row + len(batch) <= last_row
                pieces = selection.rows_from(row, batch, first_row, where) if fits else iter(())
                first_row += len(batch)
                del batch
                yield from columns.let_go(pieces) if self._content is Content.IDS else pieces
            if first_row != last_row:
                raise SourceError(
                    f"{where}: row group {group} has {first_row - ends[group]} rows, but the footer says "
                    f"{last_row - ends[group]}; the file is damaged: write or copy it again"
                )

    def _read_group(
        self,
        file: Any,
        group: int,
        size: _BatchSize,
        where: str,
        lists: _ReadLists | None,
        selection: Selection,
    ) -> Iterator[pa.RecordBatch]:
        """What is read of one row group, in record batches of about ``BATCH_BYTES`` or of a page."""
        done = 0

        def as_batch(array: pa.Array) -> pa.RecordBatch:
            nonlocal done
            done += len(array)
            return pa.RecordBatch.from_arrays([array], [self._spec.column])

        if lists is not None:
            try:
                yield from map(as_batch, lists(group))
                return
            except Unusual as error:
                _log.debug(
                    "%s: row group %d is left to Arrow from row %d on: %s",
                    where,
                    group,
                    done,
                    error,
                )
        try:
            for batch in file.iter_batches(
                size.rows(file.metadata.row_group(group)),
                row_groups=[group],
                columns=selection.paths,  # a struct's leaf may go by the same name, and comes along
                use_threads=False,
            ):
                size.saw(batch)
                if done < len(batch):
                    yield batch.slice(done)
                done -= min(done, len(batch))
        except parquet_pages.FAULTS as error:
            raise files.refused(where, error) or SourceError(
                f"{where} cannot be read in row group {group} ({error}); {files.fault_of(error)}"
            ) from None

    def _lists(self, file: File, parquet: pq.ParquetFile, chunks: Chunks) -> _ReadLists | None:
        """The fast reader, where the column is one of those that it is for."""
        # A filter needs other columns beside it, row by row; and a field within a structure has other levels.
        usual = (
            self._content is Content.IDS
            and self._rules.plain
            and self._spec.column in parquet.schema_arrow.names
        )
        column = parquet_lists.list_column(parquet, self._spec.column) if usual else None
        return (
            partial(parquet_lists.read_lists, file, column, chunks) if column is not None else None
        )

    def _ranges(self, file: File, chunks: Chunks, group: int) -> Iterator[Range]:
        """The column's chunk in a row group and in each after it; ends where the file does not say where it lies."""
        try:
            for chunk in chunks.from_group(file, group):
                yield Range(chunk.start, chunk.start + chunk.size)
        except parquet_pages.FAULTS as error:
            if not self._is_unplanned:
                _log.warning(
                    "%s: nothing of it is read ahead (%s); nor of others like it", file.name, error
                )
            self._is_unplanned = True

    def _chunks(self, shard: int, parquet: pq.ParquetFile, keep: bool) -> list[Chunks]:
        """The chunks of the column, and of others that are read; ``keep``: the file's footer is likely to be needed
        again."""
        known = self._footers.pop(shard, None)
        if known is None:
            names = [parquet.schema.column(i).path for i in range(len(parquet.schema))]
            read = [f"{column}." for column in self._rules.reads(self._spec.column)]
            leaves = [
                i
                for column in read
                for i, name in enumerate(names)
                if f"{name}.".startswith(column)
            ]
            known = _Footer(parquet.metadata, [Chunks(leaf) for leaf in leaves or [0]])
        if keep:
            self._footers[shard] = known
            held = sum(each.metadata.serialized_size for each in self._footers.values())
            while held > HELD_FOOTERS_BYTES and len(self._footers) > 1:
                held -= self._footers.pop(next(iter(self._footers))).metadata.serialized_size
        return known.chunks

    @contextlib.contextmanager
    def _open_parquet(
        self, shard: int, *, again: bool = False
    ) -> Iterator[tuple[File, CheckedPages, Any]]:
        """A shard, what Arrow reads it by, and its ``ParquetFile``, whose schema was checked and whose row groups are
        known."""
        file = self._open(self._shards[shard], again=again)
        stream = CheckedPages(file, self._rules.most_bytes)
        with file, self._parquet(shard, stream) as parquet:
            if shard not in self._group_ends:
                self._learn(shard, parquet.metadata, parquet.schema_arrow)
            yield file, stream, parquet

    def _learn(self, shard: int, metadata: pq.FileMetaData, schema: pa.Schema) -> None:
        self._selection(shard, schema)
        self._group_ends[shard] = _group_ends(metadata)

    def _parquet(self, shard: int, stream: CheckedPages) -> Any:
        known = self._footers.get(shard)
        try:
            # Without pre_buffer and with a buffer, pages are read as they are decoded: the column chunk
            # of a large row group is never in memory as a whole.
            return pq.ParquetFile(
                stream.for_arrow(),
                metadata=known.metadata if known is not None else None,
                pre_buffer=False,
                buffer_size=BUFFER_BYTES,
                page_checksum_verification=True,
            )
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise files.unreadable(self._where(self._shards[shard]), "Parquet", error) from None


class _Footer(NamedTuple):
    metadata: pq.FileMetaData
    chunks: list[Chunks]


def _group_ends(metadata: pq.FileMetaData) -> npt.NDArray[np.int64]:
    """[row groups + 1]: where each begins, and the file's number of rows."""
    counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    return np.array([0, *accumulate(counts)], np.int64)


def _metadata_of(file: File) -> pq.FileMetaData | None:
    """What the end of a local file says, by one read; None where Arrow does not find all of a footer there, so that it
    has to look at the file, and say what is wrong."""
    if isinstance(file, LocalFile):
        with contextlib.suppress(pa.ArrowException, OSError, UnicodeDecodeError):
            return pq.read_metadata(
                pa.BufferReader(file.read_at(max(0, file.size - TAIL_BYTES), TAIL_BYTES))
            )
    return None


class _BatchSize:
    """How many rows make ``BATCH_BYTES``: by the size of the row group at first, then by what was seen.

    The footer has the size of each column too, but Arrow ends the process where a damaged one is asked for.
    """

    def __init__(self) -> None:
        self._rows = 0
        self._bytes = 0

    def rows(self, group: Any) -> int:
        known = (
            (self._rows, self._bytes)
            if self._rows
            else (int(group.num_rows), int(group.total_byte_size))
        )
        return max(1, min(BATCH_ROWS, known[0] * BATCH_BYTES // max(known[1], 1)))

    def saw(self, batch: pa.RecordBatch) -> None:
        self._rows += len(batch)
        self._bytes += batch.nbytes


class ParquetTensors:
    """Implements ``TensorFile``: a part is a row group."""

    mapped = False

    def __init__(self, file: File) -> None:
        self._file = pq.ParquetFile(for_arrow(file), page_checksum_verification=True)
        self.schema = self._file.schema_arrow
        metadata = self._file.metadata
        self.ends = _group_ends(metadata)
        # By whole row groups: Arrow ends the process where the size of a damaged column is asked for.
        self.decoded_bytes = sum(
            metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)
        )

    def read(self, part: int, names: Sequence[str]) -> list[pa.Array]:
        table = self._file.read_row_group(part, columns=list(names), use_threads=False)
        columns = [table.column(name) for name in names]
        return [
            each.chunk(0) if each.num_chunks == 1 else each.combine_chunks() for each in columns
        ]
