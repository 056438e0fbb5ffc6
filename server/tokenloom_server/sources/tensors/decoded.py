"""Decoded columns: where the bytes of any of their rows lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenloom_server.errors import SourceError
from tokenloom_server.sources.tensors.column import Column, storage_of

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
            for place, begin, size in zip(places.tolist(), offsets.tolist(), sizes.tolist(), strict=True):
                out[place : place + size] = data[begin : begin + size]


class LocatedRows(NamedTuple):
    """Where the values of consecutive rows of a request lie, as ``DecodedColumn.locate`` returns it."""

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
    """A list's level: a fixed ``size``, or ``offsets`` into the level below. ``begin`` is that of the array."""

    begin: int
    size: int
    offsets: npt.NDArray[Any] | None
    valid: npt.NDArray[np.bool_] | None
    #: The one length of all lists of this level, if they have one.
    even: int | None


class DecodedColumn:
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
        """Of some rows of the part: their dims [n, d], sizes and offsets in bytes [n], and the buffer of these."""
        if not self._column.is_tensor:
            items = rows + self._leaf_begin
            self._refuse_null(self._leaf_valid, rows, rows, rows + 1)
            begins = self._text_offsets[items].astype(np.int64)
            return np.empty((len(rows), 0), np.int64), self._text_offsets[items + 1] - begins, begins, self._data
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
        shapes = np.stack(dims, axis=1) if dims else np.empty((len(rows), 0), np.int64)
        return shapes, sizes, (begins + self._leaf_begin) * size, self._data

    def _lengths(self, level: _Level, number: int, rows: _Int64s, begins: _Int64s, ends: _Int64s) -> _Int64s:
        """By row, the one length of its lists at a level. Raises ``SourceError`` where they have several."""
        assert level.offsets is not None
        if level.even is not None:
            return np.where(ends > begins, level.even, 0).astype(np.int64)
        offsets = level.offsets
        if not number:
            items = begins + level.begin
            own: _Int64s = (offsets[items + 1] - offsets[items]).astype(np.int64)
            return own
        row_lengths = np.zeros(len(rows), np.int64)
        for i, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
            lengths = np.diff(offsets[level.begin + begin : level.begin + end + 1])
            if len(lengths):
                row_lengths[i] = lengths[0]
                if (lengths != lengths[0]).any():
                    raise SourceError(
                        f"{self._where}: row {self._first_row + int(rows[i])} has lists of lengths "
                        f"{int(lengths.min())} to {int(lengths.max())} in dimension {number}, so it is no tensor; "
                        "leave the column out of batching.columns"
                    )
        return row_lengths

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
    present: npt.NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return present


def _numbers(buffer: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if buffer is None or not buffer.size:
        return np.zeros(1 if dtype != np.uint8 else 0, dtype)
    numbers: npt.NDArray[Any] = np.frombuffer(buffer, dtype, count=buffer.size // dtype.itemsize)
    return numbers


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
    kind = storage_of(kind)
    return bool(pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind))
