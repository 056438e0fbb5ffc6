"""Columns as Arrow arrays: which types a source may have, and how an array becomes ``Rows``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from tokenloom_server.errors import SourceError
from tokenloom_server.sources import arrays
from tokenloom_server.sources.base import Content, Rows
from tokenloom_server.spec import Spec

#: Bytes of text or ids in one ``Rows``, unless a single row is larger.
PIECE_BYTES = 1 << 20

#: Rows in one ``Rows``: bounds the offsets of rows that are empty or nearly so.
PIECE_ROWS = 1 << 16

#: Rows that are decoded from a dictionary at once: short codes may stand for long texts.
DECODE_ROWS = 1 << 12

EXPECTED = "text (string), or lists of integers"


def content_of(kind: Any) -> Content | None:
    """What a column of an Arrow type holds; ``None`` for a type that is neither text nor ids."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
        return Content.TEXT if content_of(kind) is Content.TEXT else None
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return Content.TEXT
    return Content.IDS if _is_any_list(kind) and pa.types.is_integer(kind.value_type) else None


def _is_any_list(kind: Any) -> bool:
    return bool(
        pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or pa.types.is_fixed_size_list(kind)
        or pa.types.is_list_view(kind)
        or pa.types.is_large_list_view(kind)
    )


def check_schema(schema: Any, spec: Spec, path: str) -> Content:
    """What the spec's column holds in a file.

    Raises ``SourceError`` naming the file when the column is missing, there twice, or of another type.
    """
    where = f"source {str(spec)!r}: {path!r}"
    try:
        names = schema.names
    except UnicodeDecodeError as error:
        raise SourceError(f"{where} has a column whose name is not UTF-8 ({error.object!r}); it is damaged") from None
    found = schema.get_all_field_indices(spec.column)
    if not found:
        raise SourceError(f"{where} has no column {spec.column!r}; its columns are {', '.join(names)}")
    if len(found) > 1:
        raise SourceError(f"{where} has {len(found)} columns named {spec.column!r}; rename all but one")
    kind = schema.field(found[0]).type
    content = content_of(kind)
    if content is None:
        others = [field.name for field in schema if content_of(field.type) is not None]
        hint = f"; columns of such a type: {', '.join(others)}" if others else ""
        raise SourceError(f"{where}: column {spec.column!r} is of type {kind}, expected {EXPECTED}{hint}")
    return content


def check_same(content: Content, expected: Content, spec: Spec, path: str) -> None:
    """Raises ``SourceError`` when a shard holds ids and the source text, or the other way round."""
    if content is not expected:
        raise SourceError(
            f"source {str(spec)!r}: {path!r}: column {spec.column!r} holds {content.value}, "
            f"but the source's first shard holds {expected.value}; name them as two sources"
        )


def rows(array: Any, first_row: int, where: str, *, valid: bool = False) -> Iterator[Rows]:
    """Cuts an array of a permitted type into ``Rows`` without nulls: a null becomes an empty row.

    Zero copy, except where nulls are replaced and where dictionaries, views or fixed-size lists are
    decoded. ``valid=True`` skips the check of offsets and UTF-8 for arrays that were made here.
    Raises ``SourceError`` that begins with ``where`` and names the row.
    """
    if not valid:
        _validate(array, first_row, where)
    step = DECODE_ROWS if pa.types.is_dictionary(array.type) else max(len(array), 1)
    for start in range(0, len(array), step):
        plain = _without_nulls(_plain(array.slice(start, step)))
        if not pa.types.is_string(plain.type) and not pa.types.is_large_string(plain.type):
            _check_items(plain, first_row + start, where)
        yield from _pieces(plain, first_row + start)


def _validate(array: Any, first_row: int, where: str) -> None:
    # Files can lie: a wild offset would be read out of bounds, and invalid UTF-8 would reach tokenisers.
    try:
        array.validate(full=True)
        return
    except pa.ArrowException as error:
        reason = str(error)
    for i in range(len(array)):
        try:
            array.slice(i, 1).validate(full=True)
        except pa.ArrowException:
            raise SourceError(f"{where}: row {first_row + i} is damaged: {reason}") from None
    raise SourceError(f"{where}: rows from {first_row} on are damaged: {reason}")


def _plain(array: Any) -> Any:
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _plain(array.dictionary_decode())
    if pa.types.is_string_view(kind):
        return array.cast(pa.large_string())
    return array


def _without_nulls(array: Any) -> Any:
    is_list = _is_any_list(array.type)
    if array.null_count == 0 and (not is_list or _has_offsets(array.type)):
        return array
    if not is_list:
        return arrays.filled(array)
    # Made anew from lengths and items, also for views and fixed sizes: Arrow allows anything to lie under
    # a null, and its own cast from views to lists was found to lose rows of slices (pyarrow 26).
    offsets = np.zeros(len(array) + 1, np.int64)
    np.cumsum(arrays.lengths(array), out=offsets[1:])
    return arrays.lists(offsets, array.flatten())


def _has_offsets(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _offsets(array: Any) -> np.ndarray[Any, np.dtype[Any]]:
    wide = pa.types.is_large_string(array.type) or pa.types.is_large_list(array.type)
    buffer = array.buffers()[1]
    if buffer is None or buffer.size == 0:
        return np.zeros(len(array) + 1, np.int64)
    end = array.offset + len(array) + 1
    return np.frombuffer(buffer, np.int64 if wide else np.int32, count=end)[array.offset :]


def _check_items(array: Any, first_row: int, where: str) -> None:
    if array.values.null_count == 0:
        return
    for i in range(len(array)):
        if array.slice(i, 1).flatten().null_count:
            raise SourceError(f"{where}: row {first_row + i} has a null among its ids; expected integers only")


class Reach(NamedTuple):
    """So many first rows of an array, with so many bytes of text or ids."""

    rows: int
    bytes: int


def reach(array: Any, size: int) -> Reach:
    """The first rows of an array of ``Rows``, up to the one that reaches ``size`` bytes; all where none does."""
    if pa.types.is_struct(array.type):
        array = array.field(0)  # ids, and their loss mask beside them
    offsets = _offsets(array)
    is_text = pa.types.is_string(array.type) or pa.types.is_large_string(array.type)
    item = 1 if is_text else array.type.value_type.bit_width // 8
    ends = (offsets[1:].astype(np.int64) - offsets[0]) * item
    rows = min(int(np.searchsorted(ends, size)) + 1, len(array))
    return Reach(rows, int(ends[rows - 1]) if rows else 0)


def _pieces(array: Any, first_row: int) -> Iterator[Rows]:
    is_text = pa.types.is_string(array.type) or pa.types.is_large_string(array.type)
    limit = PIECE_BYTES if is_text else PIECE_BYTES * 8 // array.type.value_type.bit_width
    offsets = _offsets(array)
    start, count = 0, len(array)
    while start < count:
        # searchsorted wants one type on both sides, or it converts all of the offsets.
        end = offsets.dtype.type(min(int(offsets[start]) + limit, np.iinfo(offsets.dtype).max))
        fits = int(np.searchsorted(offsets, end, "right")) - 1
        stop = min(max(fits, start + 1), start + PIECE_ROWS, count)
        yield Rows(first_row + start, array.slice(start, stop - start))
        start = stop
