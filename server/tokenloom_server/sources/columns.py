"""Columns as Arrow arrays: which types a source may have, and how an array becomes ``Rows``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tokenloom_server.config.row_rules import RowRules
from tokenloom_server.errors import SourceError, TokenloomError
from tokenloom_server.sources import arrays
from tokenloom_server.sources.base import BadRow, Content, Rows

_T = TypeVar("_T")

#: Bytes of text in one ``Rows``, and ids, unless a single row is larger.
PIECE_BYTES = 1 << 20
PIECE_IDS = 1 << 19

#: Rows in one ``Rows``: bounds the offsets of rows that are empty or nearly so.
PIECE_ROWS = 1 << 16

#: Rows that are decoded from a dictionary at once: short codes may stand for long texts.
DECODE_ROWS = 1 << 12

EXPECTED = "text (string), or lists of integers"


def content_of(kind: pa.DataType, *, is_mask: bool = False) -> Content | None:
    """What a column of an Arrow type holds; ``None`` for a type that is neither text nor ids, and for JSON, which is
    text where it is asked for."""
    if arrays.is_text(plain_kind(kind)):
        return Content.TEXT
    if not is_any_list(kind):
        return None
    is_read = pa.types.is_integer(kind.value_type) or (is_mask and is_truth(kind.value_type))
    # Where all lists of a file are empty, their items have no type.
    return Content.IDS if is_read or pa.types.is_null(kind.value_type) else None


def is_truth(kind: pa.DataType) -> bool:
    """Whether a type is of true and false, also as bytes."""
    return pa.types.is_boolean(kind) or isinstance(kind, pa.Bool8Type)


def plain_kind(kind: pa.DataType) -> pa.DataType:
    """The type of a column's values, whether they stand in a dictionary or not."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def is_json(kind: pa.DataType) -> bool:
    """Whether a type is of text that is JSON, or of lists of it, as `datasets` and DuckDB write them."""
    return isinstance(kind, pa.JsonType) or (is_any_list(kind) and is_json(kind.value_type))


def contents_of(schema: pa.Schema) -> dict[str, Content | None]:
    """What each top-level column holds, by name."""
    return {field.name: content_of(field.type) for field in schema}


def is_any_list(kind: pa.DataType) -> bool:
    """Whether a type is one of lists."""
    return bool(
        arrays.is_list(kind) or pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind)
    )


def find(
    names_of: Callable[[Any], Mapping[str, Any] | None], within: Any, name: str
) -> tuple[str, ...] | None:
    """Where a name leads: to a field of that name, or, dot by dot, to one within a field.

    ``names_of``: the fields of a structure by name; None for what is none.
    """
    fields = names_of(within)
    if fields is None:
        return None
    if name in fields:
        return (name,)
    for dot, character in enumerate(name):
        if character == "." and name[:dot] in fields:
            rest = find(names_of, fields[name[:dot]], name[dot + 1 :])
            if rest is not None:
                return (name[:dot], *rest)
    return None


def _fields(kind: pa.DataType) -> dict[str, pa.DataType] | None:
    if isinstance(kind, pa.Schema):
        return {field.name: field.type for field in kind}
    if pa.types.is_struct(kind):
        return {field.name: field.type for field in kind}
    return _AnyField() if pa.types.is_null(kind) else None


class _AnyField(dict[str, Any]):
    """The fields of what is null in each row of a file, whose type is lost: any may have been there."""

    def __contains__(self, name: object) -> bool:
        return True


class ColumnPath(NamedTuple):
    """A column of a file: the names of a field, of one within it, and so on, or up to one that is null in each row; and
    its type."""

    names: tuple[str, ...]
    kind: pa.DataType

    def of(self, batch: pa.RecordBatch) -> pa.Array:
        """Its values in a record batch. Below a null there is a null. Raises ``pa.ArrowException``."""
        array = batch.column(self.names[0])
        if not self.names[1:]:
            return array
        array.validate()  # of a damaged file: a field may have fewer rows than the structure around it
        return pc.struct_field(array, list(self.names[1:]))


def column_of(schema: pa.Schema, name: str, where: str) -> ColumnPath:
    """A column by its name, or by its path: ``meta.text`` is the field ``text`` of the structure ``meta``, unless there
    is a column of just that name.

    Raises ``SourceError`` beginning with ``where`` when the column is missing, or there twice.
    """
    try:
        names = schema.names
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{where} has a column whose name is not UTF-8 ({error.object!r}); it is damaged"
        ) from None
    path = find(_fields, schema, name)
    if path is None:
        raise SourceError(f"{where} has no column {name!r}; its columns are {', '.join(names)}")
    if names.count(path[0]) > 1:
        raise SourceError(
            f"{where} has {names.count(path[0])} columns named {path[0]!r}; rename all but one"
        )
    kind = schema.field(path[0]).type
    for depth, field in enumerate(path[1:], 1):
        if pa.types.is_null(kind):
            return ColumnPath(path[:depth], kind)
        kind = kind.field(field).type
    return ColumnPath(path, kind)


def check_schema(schema: pa.Schema, name: str, where: str, rules: RowRules) -> Content | None:
    """What a column holds in a file, None where it is null in each row.

    Raises ``SourceError`` beginning with ``where`` when the column is missing, there twice, or of another type.
    """
    kind = column_of(schema, name, where).kind
    content = (
        Content.TEXT if rules.as_json or is_json(kind) else content_of(kind, is_mask=rules.is_mask)
    )
    if content is None and not pa.types.is_null(plain_kind(kind)):
        others = [field.name for field in schema if content_of(field.type) is not None]
        hint = f"; columns of such a type: {', '.join(others)}" if others else ""
        if (
            pa.types.is_binary(kind)
            or pa.types.is_large_binary(kind)
            or pa.types.is_binary_view(kind)
        ):
            hint = f"; where its bytes are UTF-8, write it as a string column{hint}"
        raise SourceError(f"{where}: column {name!r} is of type {kind}, expected {EXPECTED}{hint}")
    return content


def rows(array: pa.Array, first_row: int, where: str, *, valid: bool = False) -> Iterator[Rows]:
    """Cuts an array of a permitted type into ``Rows`` without nulls: a null becomes an empty row.

    Zero copy, except where nulls are replaced and where dictionaries, views or fixed-size lists are
    decoded. ``valid=True`` skips the check of offsets and UTF-8 for arrays that were made here.
    Raises ``SourceError`` that begins with ``where`` for an array that contradicts itself.
    """
    damaged = not valid and is_damaged(array, first_row, where)
    step = DECODE_ROWS if pa.types.is_dictionary(array.type) else max(len(array), 1)
    for start in range(0, len(array), step):
        plain, bad = decoded(array.slice(start, step), first_row + start, where, damaged=damaged)
        yield from pieces(Rows(first_row + start, without_nulls(plain), bad))


def is_damaged(array: pa.Array, first_row: int, where: str) -> bool:
    """Whether there is text in an array that is not UTF-8. Raises ``SourceError`` where it is worse than that."""
    # Files can lie: a wild offset would be read out of bounds, and invalid UTF-8 would reach tokenisers.
    try:
        array.validate(full=True)
        return False
    except pa.ArrowException as error:
        reason = str(error)
    try:
        _as_bytes(array).validate(full=True)
        return True
    except pa.ArrowException:
        pass
    for i in range(len(array)):
        try:
            array.slice(i, 1).validate(full=True)
        except pa.ArrowException:
            raise SourceError(f"{where}: row {first_row + i} is damaged: {reason}") from None
    raise SourceError(f"{where}: rows from {first_row} on are damaged: {reason}")


def _as_bytes(array: pa.Array) -> pa.Array:
    """The same array, of which no text is promised to be UTF-8."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(array.indices, _as_bytes(array.dictionary))
    for is_text, as_bytes in (
        (pa.types.is_string, pa.binary),
        (pa.types.is_large_string, pa.large_binary),
        (pa.types.is_string_view, pa.binary_view),
    ):
        if is_text(kind):
            return array.view(as_bytes())
    return array


def decoded(
    array: pa.Array, first_row: int, where: str, *, damaged: bool
) -> tuple[pa.Array, tuple[BadRow, ...]]:
    """An array of a permitted type as (large_)string or (large_)list, with nulls in place of the rows that are bad.

    ``damaged``: what ``is_damaged`` said of it, or of what it was cut from.
    """
    plain = arrays.plain(array)
    if is_text(plain):
        bad = _not_utf8(plain, first_row, where) if damaged else ()
    else:
        plain = without_nulls(plain)
        bad = _with_null_items(plain, first_row, where)
    return (blanked(plain, bad) if bad else plain), bad


def blanked(array: pa.Array, bad: Iterable[BadRow]) -> pa.Array:
    """An array of ``Rows`` with nulls in place of some rows."""
    keep = np.ones(len(array), np.bool_)
    keep[[row.position for row in bad]] = False
    return arrays.blanked(array, keep)


def _not_utf8(array: pa.Array, first_row: int, where: str) -> tuple[BadRow, ...]:
    bad_rows = []
    for i, text in enumerate(_as_bytes(array)):
        try:
            (text.as_py() or b"").decode()
        except UnicodeDecodeError as error:
            reason = f"{error.reason}: byte 0x{error.object[error.start]:02x} at {error.start}"
            bad_rows.append(
                BadRow(
                    i, f"{where}: row {first_row + i} is damaged: its text is not UTF-8 ({reason})"
                )
            )
    return tuple(bad_rows)


def _with_null_items(array: pa.Array, first_row: int, where: str) -> tuple[BadRow, ...]:
    if array.values.null_count == 0:
        return ()
    nulls = np.flatnonzero(arrays.flags(array.values.is_null()))
    offsets = arrays.offsets(array)
    rows_of_nulls = np.searchsorted(offsets, nulls, "right") - 1
    # Values before the first row of a slice, after the last, or between rows belong to no row.
    inside = (nulls >= offsets[0]) & (nulls < offsets[-1])
    return tuple(
        BadRow(i, f"{where}: row {first_row + i} has a null among its ids; expected integers only")
        for i in np.unique(rows_of_nulls[inside]).tolist()
    )


def without_nulls(array: pa.Array) -> pa.Array:
    """An array of a permitted type, but for dictionaries and views of text, with an empty row for each null."""
    is_list = is_any_list(array.type)
    if array.null_count == 0 and (not is_list or _has_offsets(array.type)):
        return array
    if not is_list:
        return arrays.filled(array)
    # Made anew from lengths and items, also for views and fixed sizes: Arrow allows anything to lie under
    # a null, and its own cast from views to lists was found to lose rows of slices (pyarrow 26).
    offsets = np.zeros(len(array) + 1, np.int64)
    np.cumsum(arrays.lengths(array), out=offsets[1:])
    return arrays.lists(offsets, array.flatten())


def _has_offsets(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


class Reach(NamedTuple):
    """So many first rows of an array, with so many bytes of text or ids."""

    rows: int
    bytes: int


def reach(array: pa.Array, size: int, sizes: npt.NDArray[np.int64] | None = None) -> Reach:
    """The first rows of an array of ``Rows``, up to the one that reaches ``size`` bytes; all where none does.
    ``sizes``: the bytes of each, where they are not its own."""
    ends = _byte_ends(array) if sizes is None else np.cumsum(sizes)
    rows = min(int(np.searchsorted(ends, size)) + 1, len(array))
    return Reach(rows, int(ends[rows - 1]) if rows else 0)


def byte_sizes(array: pa.Array) -> npt.NDArray[np.int64]:
    """[rows]: the bytes of text or ids of each row of an array of ``Rows``."""
    return np.diff(_byte_ends(array), prepend=0)


def _byte_ends(array: pa.Array) -> npt.NDArray[np.int64]:
    if pa.types.is_struct(array.type):
        array = array.field(0)  # ids, and their loss mask beside them
    offsets = arrays.offsets(array)
    item = 1 if is_text(array) else array.type.value_type.bit_width // 8
    ends: npt.NDArray[np.int64] = (offsets[1:].astype(np.int64) - offsets[0]) * item
    return ends


def joined(parts: Sequence[Rows]) -> Rows:
    """Rows that follow each other as one."""
    if len(parts) == 1:
        return parts[0]
    arrow_arrays = [part.column for part in parts]
    # Narrow offsets could be too narrow for all of them.
    if is_text(arrow_arrays[0]) or len({array.type for array in arrow_arrays}) > 1:
        wide = (
            pa.large_string()
            if is_text(arrow_arrays[0])
            else pa.large_list(arrow_arrays[0].type.value_type)
        )
        arrow_arrays = [array.cast(wide) for array in arrow_arrays]
    begin, bad, out = 0, [], np.zeros(sum(map(len, arrow_arrays)), np.bool_)
    for part in parts:
        bad += [BadRow(begin + row.position, row.reason) for row in part.bad]
        if part.filtered is not None:
            out[begin : begin + len(part.column)] = part.filtered
        begin += len(part.column)
    return Rows(
        parts[0].first_row, pa.concat_arrays(arrow_arrays), tuple(bad), out if out.any() else None
    )


def joined_texts(
    read: Iterator[Rows], end: int | None, first_bytes: int, most_bytes: int
) -> Iterator[Rows]:
    """Rows that follow each other, up to row ``end``: texts of ``first_bytes`` at first as one, then of twice as much
    each time, up to ``most_bytes``; others as they are."""
    held: list[Rows] = []
    size, most = 0, first_bytes
    try:
        for rows in read:
            rows = rows if end is None else rows.cut(0, min(end - rows.first_row, len(rows.column)))
            held.append(rows)
            size += rows.column.nbytes
            is_full = size >= most or not is_text(rows.column)
            is_last = rows.first_row + len(rows.column) == end
            # What is given is not held: it may be a whole row group, and sources many.
            del rows
            if is_full:
                yield _emptied(held)
                size, most = 0, min(max(2 * size, most), most_bytes)
            if is_last:
                break  # what comes after may be at fault, and is another's
    except TokenloomError:
        # A source fails after the rows before the fault.
        if held:
            yield _emptied(held)
        raise
    if held:
        yield _emptied(held)


def _emptied(held: list[Rows]) -> Rows:
    """What a list has, as one; the list is empty then."""
    rows = joined(held)
    held.clear()
    return rows


def let_go(views: Iterable[_T]) -> Iterator[_T]:
    """The same views, none of which is held here once it is given, nor is what all of them are views of."""
    waiting = deque(views)
    del views
    while waiting:
        yield waiting.popleft()


def is_text(array: pa.Array) -> bool:
    """Whether an array of ``Rows`` is text, not ids."""
    return bool(pa.types.is_string(array.type) or pa.types.is_large_string(array.type))


def pieces(whole: Rows) -> Iterator[Rows]:
    """Rows, cut so that each piece has at most ``PIECE_BYTES`` or ``PIECE_IDS``, and ``PIECE_ROWS``."""
    array = whole.column
    limit = PIECE_BYTES if is_text(array) else PIECE_IDS
    offsets = arrays.offsets(array)
    start, count = 0, len(array)
    while start < count:
        # searchsorted wants one type on both sides, or it converts all of the offsets.
        end = offsets.dtype.type(min(int(offsets[start]) + limit, np.iinfo(offsets.dtype).max))
        fits = int(np.searchsorted(offsets, end, "right")) - 1
        stop = min(max(fits, start + 1), start + PIECE_ROWS, count)
        yield whole.cut(start, stop)
        start = stop
