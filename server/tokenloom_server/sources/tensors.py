"""The columns of rows that are tensors: which Arrow types are delivered, as which dtypes, and where their bytes lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenloom_server.errors import SourceError
from tokenloom_server.sources import arrays

STRING, BINARY = "string", "binary"

#: What a batch has beside its columns.
RESERVED = frozenset(
    {"source_ids", "sample_ids", "dataset_id", "bucket", "sample_index", "total_tokens"}
)

#: By a type that Arrow does not have, the types that its bits are stored in.
STORED_AS = {
    "bfloat16": ("uint16", "int16"),
    "float8_e4m3fn": ("uint8", "int8"),
    "float8_e5m2": ("uint8", "int8"),
}


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


def item_bytes(dtype: str) -> int:
    """Bytes of an item of a column's dtype; 0 for strings and binary."""
    if dtype in (STRING, BINARY):
        return 0
    if dtype in STORED_AS:
        return 2 if dtype == "bfloat16" else 1
    return np.dtype(dtype).itemsize


def _storage_of(kind: pa.DataType) -> pa.DataType:
    while isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    return kind


def described(kind: pa.DataType) -> tuple[str, tuple[int | None, ...]] | None:
    """dtype and dims of a column's type; None for one that does not travel."""
    dims: list[int | None] = []
    if isinstance(kind, pa.FixedShapeTensorType):
        if kind.permutation not in (None, list(range(len(kind.shape)))):
            return None
        dims, kind = list(kind.shape), kind.value_type
    kind = _storage_of(kind)
    while arrays.is_list(kind):
        dims.append(kind.list_size if pa.types.is_fixed_size_list(kind) else None)
        kind = _storage_of(kind.value_type)
    if not dims and pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_boolean(kind):
        return "bool", tuple(dims)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return np.dtype(kind.to_pandas_dtype()).name, tuple(dims)
    if dims:
        return None
    if arrays.is_text(kind):
        return STRING, ()
    if (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    ) and not pa.types.is_decimal(kind):
        return BINARY, ()
    return None


# Decoded columns: where the bytes of any of their rows lie.


#: Values of fewer bytes are gathered by numpy for many rows at once; each larger one is a copy of its own.
_GATHERED_BYTES = 512

_Int64s = npt.NDArray[np.int64]
_Bytes = npt.NDArray[np.uint8]


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
            for place, begin, size in zip(
                places.tolist(), offsets.tolist(), sizes.tolist(), strict=True
            ):
                out[place : place + size] = data[begin : begin + size]


class LocatedRows(NamedTuple):
    """Where the values of consecutive rows of a request lie: their dims [n, d], and their sizes and offsets [n] in the
    bytes of ``data``."""

    rows: slice
    dims: _Int64s
    sizes: _Int64s
    offsets: _Int64s
    data: _Bytes


def joined(pieces: Sequence[LocatedRows]) -> Values:
    return Values(
        np.concatenate([piece.dims for piece in pieces]),
        np.concatenate([piece.sizes for piece in pieces]),
        np.concatenate([piece.offsets for piece in pieces]),
        [(piece.rows, piece.data) for piece in pieces],
    )


class _Level(NamedTuple):
    """A list's level: a fixed ``size``, with ``begin`` as that of the array, or ``offsets`` into the level below."""

    begin: int
    size: int
    offsets: npt.NDArray[Any] | None
    valid: npt.NDArray[np.bool_] | None
    even: int | None
    """The one length of all lists of this level, if they have one."""

    @classmethod
    def of(cls, array: pa.Array) -> _Level:
        if pa.types.is_fixed_size_list(array.type):
            size = array.type.list_size
            return cls(array.offset, size, None, _valid(array), size)
        offsets = arrays.offsets(array)
        lengths = np.diff(offsets)
        even = int(lengths[0]) if len(lengths) and (lengths == lengths[0]).all() else None
        return cls(0, 0, offsets, _valid(array), even)


class DecodedColumn:
    """One column of one part."""

    def __init__(self, column: Column, array: pa.Array, first_row: int, where: str) -> None:
        self._column = column
        self._first_row = first_row
        self._where = where
        array = _plain(array)
        self._is_tensor_type = isinstance(array.type, pa.FixedShapeTensorType)
        self._levels: list[_Level] = []
        for _ in range(1 if self._is_tensor_type else len(column.dims)):
            array = _stored(array)
            self._levels.append(_Level.of(array))
            array = array.values
        array = _stored(array)
        self._leaf_valid = _valid(array)
        if pa.types.is_boolean(array.type):
            array = array.cast(pa.uint8())
        self._leaf_begin = array.offset
        has_offsets = not column.is_tensor and not pa.types.is_fixed_size_binary(array.type)
        data = array.buffers()[2 if has_offsets else 1]
        self._data: _Bytes = (
            np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
        )
        if has_offsets:
            self._text_offsets = arrays.offsets(array)
        elif not column.is_tensor:
            self._text_offsets = (
                np.arange(array.offset, array.offset + len(array) + 1) * array.type.byte_width
            )

    def locate(self, rows: _Int64s, request: slice) -> LocatedRows:
        """Where the values of some rows [n] of the part lie, which are the rows ``request`` of a request."""
        begins, ends = rows, rows + 1
        if not self._column.is_tensor:
            self._refuse_null(self._leaf_valid, rows, begins, ends)
            begins, ends = (self._text_offsets[each].astype(np.int64) for each in (begins, ends))
            return LocatedRows(
                request, np.empty((len(rows), 0), np.int64), ends - begins, begins, self._data
            )
        dims: list[_Int64s] = []
        for number, level in enumerate(self._levels):
            self._refuse_null(level.valid, rows, begins, ends)
            if level.offsets is None:
                dims.append(np.full(len(rows), level.size))
                begins, ends = ((each + level.begin) * level.size for each in (begins, ends))
            else:
                dims.append(self._lengths(level, number, rows, begins, ends))
                begins, ends = (level.offsets[each].astype(np.int64) for each in (begins, ends))
        self._refuse_null(self._leaf_valid, rows, begins, ends)
        size = self._column.item_bytes
        if self._is_tensor_type:
            dims = [np.full(len(rows), int(dim or 0)) for dim in self._column.dims]
        shapes = np.stack(dims, axis=1) if dims else np.empty((len(rows), 0), np.int64)
        return LocatedRows(
            request, shapes, (ends - begins) * size, (begins + self._leaf_begin) * size, self._data
        )

    def _lengths(
        self, level: _Level, number: int, rows: _Int64s, begins: _Int64s, ends: _Int64s
    ) -> _Int64s:
        """By row, the one length of its lists at a level. Raises ``SourceError`` where they have several."""
        assert level.offsets is not None
        if level.even is not None:
            return np.where(ends > begins, level.even, 0).astype(np.int64)
        offsets = level.offsets
        if not number:
            own: _Int64s = (offsets[begins + 1] - offsets[begins]).astype(np.int64)
            return own
        row_lengths = np.zeros(len(rows), np.int64)
        for i, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
            lengths = np.diff(offsets[begin : end + 1])
            if len(lengths):
                row_lengths[i] = lengths[0]
                if (lengths != lengths[0]).any():
                    raise SourceError(
                        f"{self._where}: row {self._first_row + int(rows[i])} has lists of lengths "
                        f"{int(lengths.min())} to {int(lengths.max())} in dimension {number}, so it is no tensor; "
                        "leave the column out of batching.columns"
                    )
        return row_lengths

    def _refuse_null(
        self, valid: npt.NDArray[np.bool_] | None, rows: _Int64s, begins: _Int64s, ends: _Int64s
    ) -> None:
        if valid is None:
            return
        for row, begin, end in zip(rows.tolist(), begins.tolist(), ends.tolist(), strict=True):
            if not valid[begin:end].all():
                raise SourceError(
                    f"{self._where}: row {self._first_row + row} has a null; a tensor has none: fill it, take such "
                    "rows out, or leave the column out of batching.columns"
                )


def _valid(array: pa.Array) -> npt.NDArray[np.bool_] | None:
    """Which items of an array (counted from its own begin) are there; None for all."""
    return arrays.flags(array.is_valid()) if array.null_count else None


def _plain(array: pa.Array) -> pa.Array:
    """A column in a layout of its own; of extension types only tensors are left."""
    is_stored = isinstance(array.type, pa.BaseExtensionType) and not isinstance(
        array.type, pa.FixedShapeTensorType
    )
    return _plain(array.storage) if is_stored else arrays.plain(array)


def _stored(array: pa.Array) -> pa.Array:
    """The array that an extension type stands on; of others, itself."""
    while isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    return array
