"""Rows that are ready tensors: which columns travel, and the values of any rows of a source, in any order.

A part is what is decoded at once: a record batch of an Arrow file, a row group of a Parquet file. Arrow files that are
not compressed are mapped; of others the parts used last are kept, up to ``KEPT_BYTES``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenloom_server.errors import SourceError
from tokenloom_server.sources import files
from tokenloom_server.sources.base import Shard, TensorFile
from tokenloom_server.sources.scheme import ReadRequest, scheme_of
from tokenloom_server.sources.tensors import (
    RESERVED,
    STORED_AS,
    Column,
    DecodedColumn,
    LocatedRows,
    Values,
    described,
    item_bytes,
    joined,
)
from tokenloom_server.storage.file import File, LocalFile

#: Decoded parts that a source keeps for the next batches, bytes; the one in use is kept in any case.
KEPT_BYTES = 256 * 2**20
#: And so many parts at most: a mapped part takes memory for its description alone.
KEPT_PARTS = 1024
#: Files of a source that are open at once.
OPEN_FILES = 64

_Int64s = npt.NDArray[np.int64]


class FeatureSource:
    """The columns of a source's rows. For one thread at a time."""

    def __init__(
        self, request: ReadRequest, *, names: Sequence[str] | None, dtypes: Mapping[str, str]
    ) -> None:
        """``names``: the columns that are wanted, None for all that can travel. Opens the first file.

        Raises ``SourceError`` for a file that cannot be read, and for a column that is missing or cannot travel.
        """
        self._request = request
        self._dtypes = dtypes
        self._scheme = scheme_of(request.spec).reader(request.shards)
        if not self._scheme.reads_any_row:
            raise SourceError(
                f"{self.where(0)} cannot be read row by row in any order, as batching does; expected parquet or arrow "
                "files"
            )
        self._opened: OrderedDict[int, _NamedFile] = OrderedDict()
        self._kept: OrderedDict[tuple[int, int], tuple[int, list[DecodedColumn]]] = OrderedDict()
        self._kept_bytes = 0
        first = self._open(0)
        first.close()
        columns = []
        #: Columns that do not travel, and why.
        self.left_out: dict[str, str] = {}
        for name in first.schema.names if names is None else names:
            try:
                columns.append(self._column(first.schema, name, 0))
            except SourceError as error:
                if names is not None or name in dtypes:
                    raise
                self.left_out[name] = str(error)
        if not columns:
            raise SourceError(
                f"{self.where(0)} has no column that can travel: {'; '.join(self.left_out.values()) or 'it has none'}"
            )
        #: In the order in which they travel.
        self.columns: tuple[Column, ...] = tuple(columns)

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self._request.shards

    def where(self, shard: int) -> str:
        """How messages name a shard."""
        return files.where(self._request.spec, self.shards[shard])

    def bucket_arrays(self, shard: int, column: str) -> Iterator[pa.Array]:
        """One column of a shard, part by part, as Arrow arrays; nothing of it is kept, so threads may do this side by
        side."""
        with closing(self._open(shard)) as file:
            if column not in file.schema.names:
                raise SourceError(
                    f"{self.where(shard)} has no column {column!r}, which bucket_by names; its columns are "
                    f"{', '.join(file.schema.names)}"
                )
            for part in range(len(file.ends) - 1):
                yield self._checked(shard, part, column, file.read(part, [column])[0])

    def sample_bytes(self) -> int:
        """About how many bytes a row takes as it travels, by the sizes of columns in the files' own words; where they
        do not say, by those of the files."""
        sizes = rows = 0
        for shard in range(min(len(self.shards), 16)):
            file = self._file(shard)
            sizes += file.decoded_bytes
            rows += int(file.ends[-1])
        fixed = sum(
            column.item_bytes * int(np.prod([int(dim or 0) for dim in column.dims]))
            for column in self.columns
        )
        return max(1, fixed, sizes // max(1, rows))

    def take(self, shards: _Int64s, rows: _Int64s) -> list[Values]:
        """By column, the values of some rows (both [n]; fastest where consecutive ones lie in one part).

        Raises ``SourceError`` naming file, row and column of what is null, ragged or damaged.
        """
        parts = np.empty(len(rows), np.int64)
        firsts = np.empty(len(rows), np.int64)
        for shard in np.unique(shards).tolist():
            ends, own = self._file(shard).ends, shards == shard
            own_parts = np.searchsorted(ends, rows[own], "right") - 1
            parts[own], firsts[own] = own_parts, ends[own_parts]
        breaks = np.flatnonzero((np.diff(shards) != 0) | (np.diff(parts) != 0)) + 1
        pieces: list[list[LocatedRows]] = [[] for _ in self.columns]
        for begin, end in pairwise([0, *breaks.tolist(), len(rows)]):
            shard, part = int(shards[begin]), int(parts[begin])
            for own, decoded in zip(pieces, self._part(shard, part), strict=True):
                own.append(decoded.locate(rows[begin:end] - firsts[begin], slice(begin, end)))
        return [joined(own) for own in pieces]

    def _part(self, shard: int, part: int) -> list[DecodedColumn]:
        key = (shard, part)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key][1]
        file = self._file(shard)
        arrays = file.read(part, [column.name for column in self.columns])
        decoded: list[DecodedColumn] = []
        for column, array in zip(self.columns, arrays, strict=True):
            where = f"{self.where(shard)}: column {column.name!r}"
            checked = self._checked(shard, part, column.name, array)
            decoded.append(DecodedColumn(column, checked, int(file.ends[part]), where))
        size = 0 if file.mapped else sum(array.nbytes for array in arrays)
        self._kept[key] = (size, decoded)
        self._kept_bytes += size
        while len(self._kept) > 1 and (
            self._kept_bytes > KEPT_BYTES or len(self._kept) > KEPT_PARTS
        ):
            _, (gone, _) = self._kept.popitem(last=False)
            self._kept_bytes -= gone
        return decoded

    def _checked(self, shard: int, part: int, name: str, array: pa.Array) -> pa.Array:
        # Files can lie: a wild offset would be read out of bounds.
        try:
            array.validate(full=True)
        except pa.ArrowException as error:
            raise SourceError(
                f"{self.where(shard)}: column {name!r} is damaged in part {part} ({error}): write or copy it again"
            ) from None
        return array

    def _file(self, shard: int) -> _NamedFile:
        file = self._opened.get(shard)
        if file is None:
            file = self._open(shard)
            try:
                self._check(shard, file.schema)
            except SourceError:
                file.close()
                raise
            self._opened[shard] = file
            if len(self._opened) > OPEN_FILES:
                self._opened.popitem(last=False)[1].close()
        self._opened.move_to_end(shard)
        return file

    def _open(self, shard: int) -> _NamedFile:
        if not self.shards[shard].size:
            raise SourceError(
                f"{self.where(shard)} is empty (0 bytes), expected a {self._scheme.name} file"
            )
        file = self._request.open(self.shards[shard])
        try:
            opened = self._scheme.open_tensors(file)
        except BaseException as error:
            file.close()
            if not isinstance(error, pa.ArrowException | OSError | ValueError):
                raise
            raise files.unreadable(self.where(shard), self._scheme.name, error) from None
        if isinstance(file, LocalFile):
            file.close()  # Arrow opens it itself
        return _NamedFile(opened, file, self.where(shard))

    def _check(self, shard: int, schema: pa.Schema) -> None:
        for column in self.columns:
            here = self._column(schema, column.name, shard)
            if here != column:
                raise SourceError(
                    f"{self.where(shard)}: column {column.name!r} has {here.dtype} of shape {_shape(here)}, but the "
                    f"source's first file has {column.dtype} of shape {_shape(column)}; name them as two sources"
                )

    def _column(self, schema: pa.Schema, name: str, shard: int) -> Column:
        """Raises ``SourceError`` for a column that is missing, or cannot travel."""
        indices = schema.get_all_field_indices(name)
        if len(indices) != 1:
            raise SourceError(
                f"{self.where(shard)} has {len(indices) or 'no'} column{'s' if indices else ''} named {name!r}; its "
                f"columns are {', '.join(schema.names)}"
            )
        kind = schema.field(indices[0]).type
        if name in RESERVED:
            raise SourceError(
                f"{self.where(shard)}: column {name!r} has a name that every batch uses for something of its own "
                f"({', '.join(sorted(RESERVED))}); rename it, or leave it out of batching.columns"
            )
        travels_as = described(kind)
        if travels_as is None:
            raise SourceError(
                f"{self.where(shard)}: column {name!r} is of type {kind}, which does not travel; expected numbers, "
                "booleans, text, binary, or lists of numbers, as regular as a tensor: leave it out of batching.columns"
            )
        dtype, dims = travels_as
        own = self._dtypes.get(name)
        if own is not None:
            if dtype not in STORED_AS[own]:
                raise SourceError(
                    f"{self.where(shard)}: batching.dtypes says that column {name!r} is {own}, which is stored as "
                    f"{STORED_AS[own][0]}, but it is of type {kind}"
                )
            dtype = own
        return Column(name, dtype, item_bytes(dtype), dims)


def _shape(column: Column) -> str:
    return "[" + ", ".join("any" if dim is None else str(dim) for dim in column.dims) + "]"


class _NamedFile:
    """A ``TensorFile`` that can be closed, and whose errors name the file."""

    def __init__(self, file: TensorFile, opened: File, where: str) -> None:
        self._file = file
        self._opened = opened
        self._where = where
        self.schema, self.ends, self.mapped = file.schema, file.ends, file.mapped
        self.decoded_bytes = file.decoded_bytes

    def read(self, part: int, names: Sequence[str]) -> list[pa.Array]:
        try:
            arrays = self._file.read(part, names)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise SourceError(
                f"{self._where} cannot be read in part {part} ({error}); {files.fault_of(error)}"
            ) from None
        rows = int(self.ends[part + 1] - self.ends[part])
        for name, array in zip(names, arrays, strict=True):
            if len(array) != rows:
                raise SourceError(
                    f"{self._where}: part {part} has {len(array)} rows of column {name!r}, but says that it has "
                    f"{rows}; it is damaged: write or copy it again"
                )
        return arrays

    def close(self) -> None:
        """What was read of it stays."""
        self._opened.close()
