"""Rows that are ready tensors: which columns travel, and the values of any rows of a source, in any order.

A part is what is decoded at once: a record batch of an Arrow file, a row group of a Parquet file. Arrow files that are
not compressed are mapped; of others the parts used last are kept, up to ``KEPT_BYTES``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from tokenloom_server.config.spec import Spec
from tokenloom_server.errors import SourceError
from tokenloom_server.sources import arrow_headers, files
from tokenloom_server.sources.base import Shard
from tokenloom_server.sources.open import reader_of
from tokenloom_server.storage.arrow_input import for_arrow
from tokenloom_server.storage.file import File
from tokenloom_server.storage.io_stats import IoStats
from tokenloom_server.storage.local import LocalFile

#: Decoded parts that a source keeps for the next batches, bytes; the one in use is kept in any case.
KEPT_BYTES = 256 * 2**20
#: And so many parts at most: one that is mapped takes no memory but for what describes it.
KEPT_PARTS = 1024
#: Values of fewer bytes are gathered by numpy for many rows at once; each larger one is a copy of its own.
_GATHERED_BYTES = 512
#: Files of a source that are open at once.
OPEN_FILES = 64

STRING, BINARY = "string", "binary"

#: What a batch has beside its columns.
RESERVED = frozenset({"source_ids", "sample_ids", "dataset_id", "bucket", "sample_index", "total_tokens"})

_Int64s = npt.NDArray[np.int64]
_Bytes = npt.NDArray[np.uint8]

#: What stands for a type that Arrow does not have.
STORED_AS = {"bfloat16": ("uint16", "int16"), "float8_e4m3fn": ("uint8", "int8"), "float8_e5m2": ("uint8", "int8")}


@dataclass(frozen=True, slots=True)
class Column:
    """A column that travels. ``dtype``: that of its items by its torch name, ``string`` or ``binary``; ``item_bytes``:
    of one item, 0 for the latter two. ``dims``: of each row's value, None where they are the row's own."""

    name: str
    dtype: str
    item_bytes: int
    dims: tuple[int | None, ...]

    @property
    def is_tensor(self) -> bool:
        return self.item_bytes > 0


class Values(NamedTuple):
    """A column's values in some rows. ``dims`` [n, number of dimensions]: the shape in each row. ``parts``: of which
    rows (positions in what was asked for), and what has them; ``offsets`` [n]: where each row's items begin there, in
    bytes. Of strings: ``sizes`` [n] in bytes, and no dims."""

    dims: _Int64s
    sizes: _Int64s
    offsets: _Int64s
    parts: list[tuple[slice, _Bytes]]

    def copy_to(self, out: _Bytes, begins: _Int64s) -> None:
        """Writes each row's bytes into ``out``, from ``begins`` [n] on."""
        for rows, data in self.parts:
            offsets, sizes, places = self.offsets[rows], self.sizes[rows], begins[rows]
            least, most = int(sizes.min()), int(sizes.max())
            if least == most < _GATHERED_BYTES:
                if most:
                    windows = np.lib.stride_tricks.sliding_window_view(data, most)
                    out[places[:, None] + np.arange(most)] = windows[offsets]
                continue
            for place, begin, size in zip(places.tolist(), offsets.tolist(), sizes.tolist(), strict=True):
                out[place : place + size] = data[begin : begin + size]


class FeatureSource:
    """The columns of a source's rows. For one thread at a time."""

    def __init__(
        self,
        spec: Spec,
        shards: tuple[Shard, ...],
        base_dir: Path,
        io_stats: IoStats,
        *,
        names: Sequence[str] | None,
        dtypes: Mapping[str, str],
    ) -> None:
        """``names``: the columns that are wanted, None for all that can travel. Opens the first file.

        Raises ``SourceError`` for a file that cannot be read, and for a column that is missing or cannot travel.
        """
        self._spec = spec
        self._shards = shards
        self._base_dir = base_dir
        self._io_stats = io_stats
        self._dtypes = dtypes
        self._names = names
        self._kind = reader_of(spec, shards)
        if self._kind not in ("parquet", "arrow"):
            raise SourceError(
                f"{self.where(0)} cannot be read row by row in any order, as batching does; expected parquet or arrow "
                "files"
            )
        self._opened: OrderedDict[int, _Guarded] = OrderedDict()
        self._kept: OrderedDict[tuple[int, int], tuple[int, list[_Decoded]]] = OrderedDict()
        self._kept_bytes = 0
        first = self._schema_of(0)
        wanted = list(first.names) if names is None else list(names)
        columns = []
        #: Columns that do not travel, and why.
        self.left_out: dict[str, str] = {}
        for name in wanted:
            try:
                columns.append(self._column(first, name, 0))
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
        return self._shards

    def where(self, shard: int) -> str:
        """How messages name a shard."""
        return files.where(self._spec, self._shards[shard])

    def part_ends(self, shard: int) -> _Int64s:
        """[parts + 1]: where each part begins, and the shard's number of rows."""
        return self._file(shard).ends

    def bucket_arrays(self, shard: int, column: str) -> Iterator[Any]:
        """One column of a shard, part by part, as Arrow arrays; nothing of it is kept, so threads may do this side by
        side."""
        file = self._open(shard)
        try:
            yield from self._column_of(file, shard, column)
        finally:
            file.close()

    def _column_of(self, file: _Guarded, shard: int, column: str) -> Iterator[Any]:
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
        for shard in range(min(len(self._shards), 16)):
            file = self._file(shard)
            sizes += file.size_of([column.name for column in self.columns])
            rows += int(file.ends[-1])
        fixed = sum(column.item_bytes * int(np.prod([int(dim or 0) for dim in column.dims])) for column in self.columns)
        return max(1, fixed, sizes // max(1, rows))

    def take(self, shards: _Int64s, rows: _Int64s) -> list[Values]:
        """By column, the values of some rows (both [n]; fastest where consecutive ones lie in one part).

        Raises ``SourceError`` naming file, row and column of what is null, ragged or damaged.
        """
        parts = np.empty(len(rows), np.int64)
        firsts = np.empty(len(rows), np.int64)
        for shard in np.unique(shards).tolist():
            ends, own = self._file(shard).ends, shards == shard
            found = np.searchsorted(ends, rows[own], "right") - 1
            parts[own], firsts[own] = found, ends[found]
        breaks = np.flatnonzero((np.diff(shards) != 0) | (np.diff(parts) != 0)) + 1
        edges = [0, *breaks.tolist(), len(rows)]
        pieces: list[list[_Piece]] = [[] for _ in self.columns]
        for begin, end in pairwise(edges):
            shard, part = int(shards[begin]), int(parts[begin])
            for own, decoded in zip(pieces, self._part(shard, part), strict=True):
                own.append(_Piece(slice(begin, end), *decoded.locate(rows[begin:end] - firsts[begin])))
        return [_joined(own) for own in pieces]

    def _part(self, shard: int, part: int) -> list[_Decoded]:
        key = (shard, part)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key][1]
        file = self._file(shard)
        arrays = file.read(part, [column.name for column in self.columns])
        first = int(file.ends[part])
        decoded: list[_Decoded] = []
        for column, array in zip(self.columns, arrays, strict=True):
            checked = self._checked(shard, part, column.name, array)
            decoded.append(_Decoded(column, checked, first, f"{self.where(shard)}: column {column.name!r}"))
        size = 0 if file.mapped else sum(array.nbytes for array in arrays)
        self._kept[key] = (size, decoded)
        self._kept_bytes += size
        while len(self._kept) > 1 and (self._kept_bytes > KEPT_BYTES or len(self._kept) > KEPT_PARTS):
            _, (gone, _) = self._kept.popitem(last=False)
            self._kept_bytes -= gone
        return decoded

    def _checked(self, shard: int, part: int, name: str, array: Any) -> Any:
        # Files can lie: a wild offset would be read out of bounds.
        try:
            array.validate(full=True)
        except pa.ArrowException as error:
            raise SourceError(
                f"{self.where(shard)}: column {name!r} is damaged in part {part} ({error}): write or copy it again"
            ) from None
        return array

    def _schema_of(self, shard: int) -> Any:
        file = self._open(shard)
        file.close()
        return file.schema

    def _file(self, shard: int) -> _Guarded:
        found = self._opened.get(shard)
        if found is None:
            found = self._open(shard)
            try:
                self._check(shard, found.schema)
            except SourceError:
                found.close()
                raise
            self._opened[shard] = found
            if len(self._opened) > OPEN_FILES:
                self._opened.popitem(last=False)[1].close()
        self._opened.move_to_end(shard)
        return found

    def _open(self, shard: int) -> _Guarded:
        if not self._shards[shard].size:
            raise SourceError(f"{self.where(shard)} is empty (0 bytes), expected a {self._kind} file")
        file = files.open_shard(self._spec, self._shards[shard], self._base_dir, self._io_stats)
        try:
            found = _ParquetFile(file) if self._kind == "parquet" else _arrow_file(file)
        except BaseException as error:
            file.close()
            if not isinstance(error, pa.ArrowException | OSError | ValueError):
                raise
            raise SourceError(
                f"{self.where(shard)} is not a readable {self._kind} file ({error}); it is truncated or "
                "damaged: write or copy it again"
            ) from None
        if isinstance(file, LocalFile):
            file.close()  # Arrow opens it itself
        return _Guarded(found, file, self.where(shard))

    def _check(self, shard: int, schema: Any) -> None:
        for column in self.columns:
            here = self._column(schema, column.name, shard)
            if here != column:
                raise SourceError(
                    f"{self.where(shard)}: column {column.name!r} has {here.dtype} of shape {_shape(here)}, but the "
                    f"source's first file has {column.dtype} of shape {_shape(column)}; name them as two sources"
                )

    def _column(self, schema: Any, name: str, shard: int) -> Column:
        """Raises ``SourceError`` for a column that is missing, or cannot travel."""
        found = schema.get_all_field_indices(name)
        if len(found) != 1:
            raise SourceError(
                f"{self.where(shard)} has {len(found) or 'no'} column{'s' if found else ''} named {name!r}; its "
                f"columns are {', '.join(schema.names)}"
            )
        kind = schema.field(found[0]).type
        if name in RESERVED:
            raise SourceError(
                f"{self.where(shard)}: column {name!r} has a name that every batch uses for something of its own "
                f"({', '.join(sorted(RESERVED))}); rename it, or leave it out of batching.columns"
            )
        described = _described(kind)
        if described is None:
            raise SourceError(
                f"{self.where(shard)}: column {name!r} is of type {kind}, which does not travel; expected numbers, "
                "booleans, text, binary, or lists of numbers, as regular as a tensor: leave it out of batching.columns"
            )
        dtype, dims = described
        own = self._dtypes.get(name)
        if own is not None:
            if dtype not in STORED_AS[own]:
                raise SourceError(
                    f"{self.where(shard)}: batching.dtypes says that column {name!r} is {own}, which is stored as "
                    f"{STORED_AS[own][0]}, but it is of type {kind}"
                )
            dtype = own
        return Column(name, dtype, item_bytes(dtype), dims)


def item_bytes(dtype: str) -> int:
    """Bytes of an item of a column's dtype; 0 for strings and binary."""
    if dtype in (STRING, BINARY):
        return 0
    if dtype in STORED_AS:
        return 2 if dtype == "bfloat16" else 1
    return np.dtype(dtype).itemsize


def _shape(column: Column) -> str:
    return "[" + ", ".join("any" if dim is None else str(dim) for dim in column.dims) + "]"


def _storage(kind: Any) -> Any:
    while isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    return kind


def _described(kind: Any) -> tuple[str, tuple[int | None, ...]] | None:
    """dtype and dims of a column's type; None for one that does not travel."""
    dims: list[int | None] = []
    if isinstance(kind, pa.FixedShapeTensorType):
        if kind.permutation not in (None, list(range(len(kind.shape)))):
            return None
        dims, kind = list(kind.shape), kind.value_type
    kind = _storage(kind)
    while (fixed := pa.types.is_fixed_size_list(kind)) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        dims.append(kind.list_size if fixed else None)
        kind = _storage(kind.value_type)
    if not dims and pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_boolean(kind):
        return "bool", tuple(dims)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return np.dtype(kind.to_pandas_dtype()).name, tuple(dims)
    if dims:
        return None
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return STRING, ()
    if (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    ) and not pa.types.is_decimal(kind):
        return BINARY, ()
    return None


class _Piece(NamedTuple):
    """What ``_Decoded.locate`` found for consecutive rows of what was asked for."""

    rows: slice
    dims: _Int64s
    sizes: _Int64s
    offsets: _Int64s
    data: _Bytes


def _joined(pieces: Sequence[_Piece]) -> Values:
    return Values(
        np.concatenate([piece.dims for piece in pieces]),
        np.concatenate([piece.sizes for piece in pieces]),
        np.concatenate([piece.offsets for piece in pieces]),
        [(piece.rows, piece.data) for piece in pieces],
    )


class _Level(NamedTuple):
    """A list's level: a fixed ``size``, or ``offsets`` into the level below. ``begin`` is that of the array."""

    begin: int
    size: int
    offsets: npt.NDArray[Any] | None
    valid: npt.NDArray[np.bool_] | None
    #: The one length of all lists of this level, if they have one.
    even: int | None


class _Decoded:
    """One column of one part."""

    def __init__(self, column: Column, array: Any, first_row: int, where: str) -> None:
        self._column = column
        self._first_row = first_row
        self._where = where
        array = _plain(array)
        self._levels: list[_Level] = []
        if not column.is_tensor:
            self._texts(array)
            return
        shape = len(column.dims)
        tensor = isinstance(array.type, pa.FixedShapeTensorType)
        while isinstance(array.type, pa.BaseExtensionType):
            array = array.storage
        if tensor:
            size = array.type.list_size
            self._levels.append(_Level(array.offset, size, None, _valid(array), size))
            array, shape = array.values, 0
        for _ in range(shape):
            while isinstance(array.type, pa.BaseExtensionType):
                array = array.storage
            if pa.types.is_fixed_size_list(array.type):
                size = array.type.list_size
                self._levels.append(_Level(array.offset, size, None, _valid(array), size))
            else:
                wide = pa.types.is_large_list(array.type)
                offsets = _numbers(array.buffers()[1], np.dtype(np.int64 if wide else np.int32))
                lengths = np.diff(offsets[array.offset : array.offset + len(array) + 1])
                even = int(lengths[0]) if len(lengths) and (lengths == lengths[0]).all() else None
                self._levels.append(_Level(array.offset, 0, offsets, _valid(array), even))
            array = array.values
        while isinstance(array.type, pa.BaseExtensionType):
            array = array.storage
        self._leaf_valid = _valid(array)
        if pa.types.is_boolean(array.type):
            array = array.cast(pa.uint8())
        self._leaf_begin = array.offset
        self._data = _numbers(array.buffers()[1], np.dtype(np.uint8))
        self._is_tensor_type = tensor

    def _texts(self, array: Any) -> None:
        kind = array.type
        self._leaf_valid = _valid(array)
        self._leaf_begin = array.offset
        self._is_tensor_type = False
        if pa.types.is_fixed_size_binary(kind):
            self._text_offsets = np.arange(array.offset + len(array) + 1, dtype=np.int64) * kind.byte_width
            self._data = _numbers(array.buffers()[1], np.dtype(np.uint8))
            return
        wide = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
        self._text_offsets = _numbers(array.buffers()[1], np.dtype(np.int64 if wide else np.int32))
        self._data = _numbers(array.buffers()[2], np.dtype(np.uint8))

    def locate(self, rows: _Int64s) -> tuple[_Int64s, _Int64s, _Int64s, _Bytes]:
        """Of some rows of the part: their dims [n, d], sizes and offsets in bytes [n], and what these lie in."""
        if not self._column.is_tensor:
            at = rows + self._leaf_begin
            self._refuse_null(self._leaf_valid, rows, rows, rows + 1)
            begins = self._text_offsets[at].astype(np.int64)
            return np.empty((len(rows), 0), np.int64), self._text_offsets[at + 1] - begins, begins, self._data
        begins, ends = rows, rows + 1
        dims: list[_Int64s] = []
        for number, level in enumerate(self._levels):
            self._refuse_null(level.valid, rows, begins, ends)
            if level.offsets is None:
                dims.append(np.full(len(rows), level.size))
                begins, ends = begins * level.size, ends * level.size
                begins, ends = begins + level.begin * level.size, ends + level.begin * level.size
                continue
            dims.append(self._lengths(level, number, rows, begins, ends))
            begins, ends = (
                level.offsets[begins + level.begin].astype(np.int64),
                level.offsets[ends + level.begin].astype(np.int64),
            )
        self._refuse_null(self._leaf_valid, rows, begins, ends)
        size = self._column.item_bytes
        sizes = (ends - begins) * size
        if self._is_tensor_type:
            shape = [int(dim or 0) for dim in self._column.dims]
            dims = [np.full(len(rows), dim) for dim in shape]
        found = np.stack(dims, axis=1) if dims else np.empty((len(rows), 0), np.int64)
        return found, sizes, (begins + self._leaf_begin) * size, self._data

    def _lengths(self, level: _Level, number: int, rows: _Int64s, begins: _Int64s, ends: _Int64s) -> _Int64s:
        """By row, the one length of its lists at a level. Raises ``SourceError`` where they have several."""
        assert level.offsets is not None
        if level.even is not None:
            return np.where(ends > begins, level.even, 0).astype(np.int64)
        offsets = level.offsets
        if not number:
            at = begins + level.begin
            own: _Int64s = (offsets[at + 1] - offsets[at]).astype(np.int64)
            return own
        found = np.zeros(len(rows), np.int64)
        for i, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
            lengths = np.diff(offsets[level.begin + begin : level.begin + end + 1])
            if len(lengths):
                found[i] = lengths[0]
                if (lengths != lengths[0]).any():
                    raise SourceError(
                        f"{self._where}: row {self._first_row + int(rows[i])} has lists of lengths "
                        f"{int(lengths.min())} to {int(lengths.max())} in dimension {number}, so it is no tensor; "
                        "leave the column out of batching.columns"
                    )
        return found

    def _refuse_null(self, valid: npt.NDArray[np.bool_] | None, rows: _Int64s, begins: _Int64s, ends: _Int64s) -> None:
        if valid is None:
            return
        for row, begin, end in zip(rows.tolist(), begins.tolist(), ends.tolist(), strict=True):
            if not valid[begin:end].all():
                raise SourceError(
                    f"{self._where}: row {self._first_row + row} has a null; a tensor has none: fill it, take such "
                    "rows out, or leave the column out of batching.columns"
                )


def _valid(array: Any) -> npt.NDArray[np.bool_] | None:
    """Which items of an array (counted from its own begin) are there; None for all."""
    if not array.null_count:
        return None
    found: npt.NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return found


def _numbers(buffer: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if buffer is None or not buffer.size:
        return np.zeros(1 if dtype != np.uint8 else 0, dtype)
    found: npt.NDArray[Any] = np.frombuffer(buffer, dtype, count=buffer.size // dtype.itemsize)
    return found


def _plain(array: Any) -> Any:
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _plain(array.dictionary_decode())
    if pa.types.is_string_view(kind):
        return array.cast(pa.large_string())
    if pa.types.is_binary_view(kind):
        return array.cast(pa.large_binary())
    return _plain(array.storage) if isinstance(kind, pa.BaseExtensionType) and not _is_list(kind) else array


def _is_list(kind: Any) -> bool:
    kind = _storage(kind)
    return bool(pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind))


class _File(Protocol):
    """An opened file."""

    @property
    def schema(self) -> Any: ...

    @property
    def ends(self) -> _Int64s:
        """[parts + 1]: where each part begins, and the number of rows."""

    @property
    def mapped(self) -> bool:
        """Whether its parts take no memory of their own."""

    def read(self, part: int, names: Sequence[str]) -> list[Any]:
        """Columns of a part, as arrays."""

    def size_of(self, names: Sequence[str]) -> int:
        """About how many bytes columns have, decoded."""


class _Guarded:
    """Implements ``_File``: names the file in what goes wrong, and closes it."""

    def __init__(self, file: _File, opened: File, where: str) -> None:
        self._file = file
        self._opened = opened
        self._where = where
        self.schema, self.ends, self.mapped = file.schema, file.ends, file.mapped

    def read(self, part: int, names: Sequence[str]) -> list[Any]:
        try:
            arrays = self._file.read(part, names)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise SourceError(
                f"{self._where} cannot be read in part {part} ({error}); it is damaged: write or copy it again"
            ) from None
        rows = int(self.ends[part + 1] - self.ends[part])
        for name, array in zip(names, arrays, strict=True):
            if len(array) != rows:
                raise SourceError(
                    f"{self._where}: part {part} has {len(array)} rows of column {name!r}, but says that it has "
                    f"{rows}; it is damaged: write or copy it again"
                )
        return arrays

    def size_of(self, names: Sequence[str]) -> int:
        return self._file.size_of(names)

    def close(self) -> None:
        """What was read of it stays."""
        self._opened.close()


class _ParquetFile:
    def __init__(self, file: File) -> None:
        self._file = pq.ParquetFile(for_arrow(file), page_checksum_verification=True)
        metadata = self._file.metadata
        self.schema = self._file.schema_arrow
        counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self.ends: _Int64s = np.cumsum([0, *counts], dtype=np.int64)
        self.mapped = False

    def read(self, part: int, names: Sequence[str]) -> list[Any]:
        table = self._file.read_row_group(part, columns=list(names), use_threads=False)
        return [_one(table.column(name)) for name in names]

    def size_of(self, names: Sequence[str]) -> int:
        metadata = self._file.metadata
        # A row group's whole size: Arrow ends the process where a damaged column's is asked for.
        return sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))


class _ArrowBatches:
    """An Arrow file whose batches are read one by one."""

    def __init__(self, source: Any, batches: arrow_headers.Batches, reader: Any, mapped: bool, size: int) -> None:
        """``reader``: of the file format; None for a stream."""
        self._source = source
        self._batches = batches
        self._reader = reader
        self._size = size
        self.mapped = mapped
        self.ends: _Int64s = batches.ends
        if reader is not None:
            self.schema = reader.schema
        else:
            source.seek(0)
            self.schema = pa.ipc.open_stream(source).schema

    def read(self, part: int, names: Sequence[str]) -> list[Any]:
        if self._reader is not None:
            batch = self._reader.get_batch(part)
        else:
            self._source.seek(self._batches.offsets[part])
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(self._source), self.schema)
        return [batch.column(name) for name in names]

    def size_of(self, names: Sequence[str]) -> int:
        return self._size


class _ArrowStream:
    """A stream with dictionaries, which stand before the batches that need them: it is followed once, mapped."""

    def __init__(self, source: Any, ends: _Int64s, size: int) -> None:
        source.seek(0)
        reader = pa.ipc.open_stream(source)
        self.schema = reader.schema
        self._read = list(reader)
        self._size = size
        self.ends = ends
        self.mapped = True

    def read(self, part: int, names: Sequence[str]) -> list[Any]:
        return [self._read[part].column(name) for name in names]

    def size_of(self, names: Sequence[str]) -> int:
        return self._size


def _arrow_file(file: File) -> _File:
    batches, compressed = arrow_headers.scan(file), arrow_headers.is_compressed(file)
    is_file = arrow_headers.is_file_format(file.read_at(0, 8))
    local = isinstance(file, LocalFile)
    source = pa.memory_map(str(file.path)) if isinstance(file, LocalFile) else for_arrow(file)
    mapped = local and not compressed
    if is_file:
        return _ArrowBatches(source, batches, pa.ipc.open_file(source), mapped, file.size)
    if batches.plain or compressed:
        if not batches.plain and any(pa.types.is_dictionary(field.type) for field in pa.ipc.open_stream(source).schema):
            raise ValueError("a compressed stream with dictionaries is read from its begin only; write it uncompressed")
        return _ArrowBatches(source, batches, None, mapped, file.size)
    if not local:
        raise ValueError("a stream with dictionaries is read from its begin only; keep it locally, or write parquet")
    return _ArrowStream(source, batches.ends, file.size)


def _one(chunked: Any) -> Any:
    """A column as one array."""
    return chunked.chunk(0) if chunked.num_chunks == 1 else chunked.combine_chunks()
