"""Between numpy and Arrow. Arrow's own ways (`pa.array`, `pa.scalar`, `to_numpy`) import pandas where it is
installed: a quarter of a second of a server's start, and memory, for nothing. Nothing here imports Arrow's functions:
processes of functions need none, and would take a fifth more CPU to start."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def is_text(kind: pa.DataType) -> bool:
    """Whether a type is one of Arrow's layouts of text."""
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def is_list(kind: pa.DataType) -> bool:
    """Whether a type is one of lists, but for views of lists."""
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def plain(array: pa.Array) -> pa.Array:
    """The same values in a layout of their own: no dictionary, and no views of text or bytes."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        # Arrow takes no values out of views.
        return plain(
            pa.DictionaryArray.from_arrays(
                array.indices, plain(array.dictionary)
            ).dictionary_decode()
        )
    if pa.types.is_string_view(kind):
        return array.cast(pa.large_string())
    return array.cast(pa.large_binary()) if pa.types.is_binary_view(kind) else array


def numbers(array: pa.Array) -> npt.NDArray[Any]:
    """An array of integers without nulls, not copied."""
    kind = np.dtype(array.type.to_pandas_dtype())
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.empty(0, kind)
    return np.frombuffer(buffer, kind, len(array), array.offset * kind.itemsize)


def from_numbers(values: npt.NDArray[Any]) -> pa.Array:
    """An Arrow array of integers, not copied."""
    return pa.Array.from_buffers(
        pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)], 0
    )


def lists(begins: npt.NDArray[np.signedinteger[Any]], items: pa.Array) -> pa.Array:
    """Lists of items without nulls: list i lies between ``begins`` i and i + 1 (int32, or int64: large lists)."""
    kind = pa.list_(items.type) if begins.dtype == np.int32 else pa.large_list(items.type)
    return pa.Array.from_buffers(
        kind, len(begins) - 1, [None, pa.py_buffer(begins)], 0, children=[items]
    )


def strings(texts: list[str]) -> pa.LargeStringArray:
    """Python's strings as Arrow's."""
    encoded = [text.encode() for text in texts]
    begins = np.zeros(len(texts) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, encoded), np.int64, len(texts)), out=begins[1:])
    return pa.LargeStringArray.from_buffers(
        len(texts), pa.py_buffer(begins), pa.py_buffer(b"".join(encoded))
    )


def scalar(value: bytes) -> pa.LargeBinaryScalar:
    """Bytes as Arrow's scalar."""
    offsets = np.array([0, len(value)], np.int64)
    return pa.Array.from_buffers(
        pa.large_binary(), 1, [None, pa.py_buffer(offsets), pa.py_buffer(value)], 0
    )[0]


def offsets(array: pa.Array) -> npt.NDArray[Any]:
    """[rows + 1], not copied: where the rows of (large) text, bytes or lists begin in what they are made of."""
    buffer = array.buffers()[1]
    if buffer is None or buffer.size == 0:
        return np.zeros(len(array) + 1, np.int64)
    end = array.offset + len(array) + 1
    return np.frombuffer(buffer, np.int64 if _is_large(array.type) else np.int32, count=end)[
        array.offset :
    ]


def _is_large(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_large_string(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_large_list(kind)
    )


def filled(array: pa.Array) -> pa.Array:
    """An array of integers or strings with 0 or the empty string for each null."""
    zeros = pa.py_buffer(bytes(16))  # one number, or the two offsets of one string
    parts = [None, zeros] if pa.types.is_integer(array.type) else [None, zeros, pa.py_buffer(b"")]
    return array.fill_null(pa.Array.from_buffers(array.type, 1, parts, 0)[0])


def lengths(array: pa.Array) -> npt.NDArray[np.int64]:
    """How many items each list of any kind has; a null has none."""
    return numbers(filled(array.value_lengths())).astype(np.int64, copy=False)


def flags(array: pa.Array) -> npt.NDArray[np.bool_]:
    """An array of booleans without nulls."""
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(len(array), np.bool_)
    bits = np.unpackbits(
        np.frombuffer(buffer, np.uint8), count=array.offset + len(array), bitorder="little"
    )
    values: npt.NDArray[np.bool_] = bits[array.offset :].view(np.bool_)
    return values


def blanked(array: pa.Array, keep: npt.NDArray[np.bool_]) -> pa.Array:
    """(Large) strings or lists with a null for each row that is not to be kept; values under a null are not read."""
    width = 8 if _is_large(array.type) else 4
    if array.null_count:
        keep = keep & flags(array.is_valid())
    _, begins, *data = array.buffers()
    begins = (
        begins.slice(array.offset * width, (len(array) + 1) * width)
        if begins is not None
        else begins
    )
    valid = pa.py_buffer(np.packbits(keep, bitorder="little"))
    if is_list(array.type):
        return pa.Array.from_buffers(
            array.type, len(array), [valid, begins], children=[array.values]
        )
    return pa.Array.from_buffers(array.type, len(array), [valid, begins, *data])
