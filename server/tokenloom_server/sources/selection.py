"""What ``RowRules`` make of the columns of one file: which rows pass its filter, and the text of its template.

Evaluated by Arrow over whole batches; no Python for each row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tokenloom_server.config.row_rules import Comparison, RowRules, Template
from tokenloom_server.errors import SourceError
from tokenloom_server.sources import arrays, columns
from tokenloom_server.sources.base import BadRow, Content, Rows
from tokenloom_server.sources.columns import ColumnPath

#: Rows that are filtered and formatted together: their results are in memory beside them.
STEP_ROWS = columns.DECODE_ROWS

_FUNCTIONS = {
    "==": "equal",
    "!=": "not_equal",
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
}


class _Test(NamedTuple):
    """A comparison as it is made of a column: in which type, with which constants of that type."""

    comparison: Comparison
    kind: pa.DataType
    constants: Any


class Selection:
    """The rules of a source, as they apply to files of one schema."""

    def __init__(
        self,
        rules: RowRules,
        column: str,
        by_name: Mapping[str, ColumnPath],
        where: str,
        content: Content | None = None,
        of_folders: Mapping[str, str | None] = MappingProxyType({}),
    ) -> None:
        """``by_name``: where each column that is read lies, by its name in the rules; ``column`` is the source's own,
        which has that ``content`` in other files, where all of it is null in these. ``of_folders``: what is compared
        beside them, which is the same in all rows.

        Raises ``SourceError``, beginning with ``where``, for a column that cannot be compared so, or is no text.
        """
        self.rules = rules
        self.column = column
        self.columns = by_name
        self._content = content
        self._tests = [
            _test(each, by_name[each.column].kind, where)
            for each in rules.filter
            if each.column in by_name
        ]
        #: Whether a file's rows pass what is compared with its folders.
        self._may_pass = all(
            _folder_passes(each, of_folders[each.column], where)
            for each in rules.filter
            if each.column not in by_name
        )
        #: Those whose values become JSON, but for text.
        self._json = {
            name for name in (column, *rules.text_columns) if columns.is_json(by_name[name].kind)
        }
        self._json |= {*rules.text_columns} if rules.as_json else set()
        for name in rules.text_columns:
            kind = columns.plain_kind(by_name[name].kind)
            other = (rules.as_json and columns.is_any_list(kind)) or (
                (rules.quoted or not rules.as_json) and pa.types.is_integer(kind)
            )
            if not (
                arrays.is_text(kind) or columns.is_json(kind) or pa.types.is_null(kind) or other
            ):
                expected = "lists (or their JSON as text)" if rules.as_json else "text or integers"
                raise SourceError(
                    f"{where}: template: column {name!r} is of type {kind}, expected {expected}"
                )

    @property
    def paths(self) -> list[str]:
        """All that is read, as Parquet names it: the fields' names, joined by dots."""
        return [".".join(column.names) for column in self.columns.values()]

    @property
    def fields(self) -> list[str]:
        """The top-level fields that are read, each once."""
        return list(dict.fromkeys(column.names[0] for column in self.columns.values()))

    def rows(
        self,
        batch: pa.RecordBatch,
        first_row: int,
        where: str,
        *,
        valid: bool = False,
        bad: Sequence[BadRow] = (),
    ) -> Iterator[Rows]:
        """``Rows`` of a record batch, as ``columns.rows`` makes them of one column.

        Text that is not UTF-8 becomes bad rows. ``bad`` are known to be; the source's own column is null there.
        """
        try:
            by_name = {
                name: self._values(name, column.of(batch)) for name, column in self.columns.items()
            }
        except pa.ArrowException as error:
            raise SourceError(f"{where}: rows from {first_row} on are damaged: {error}") from None
        if self.rules.plain and bad:
            yield from columns.pieces(
                Rows(first_row, columns.without_nulls(by_name[self.column]), tuple(bad))
            )
            return
        if self.rules.plain and not columns.is_json(by_name[self.column].type):
            yield from columns.rows(by_name[self.column], first_row, where, valid=valid)
            return
        damaged = {
            name: not valid and columns.is_damaged(array, first_row, where)
            for name, array in by_name.items()
        }
        for start in range(0, len(by_name[self.column]), STEP_ROWS):
            part = {name: array.slice(start, STEP_ROWS) for name, array in by_name.items()}
            known = (
                Rows(first_row, by_name[self.column], tuple(bad)).cut(start, start + STEP_ROWS).bad
            )
            yield from columns.pieces(self._rows(part, first_row + start, where, damaged, known))

    def rows_from(
        self, row: int, batch: pa.RecordBatch, first_row: int, where: str
    ) -> Iterator[Rows]:
        """``rows`` of what a batch has from ``row`` on; its own first is ``first_row``."""
        skipped = max(row - first_row, 0)
        if skipped < len(batch):
            yield from self.rows(batch.slice(skipped), first_row + skipped, where)

    def _values(self, name: str, array: pa.Array) -> pa.Array:
        """A column as what it stands for, where its type says that text is JSON, or no more than that all is null."""
        kind = array.type
        if isinstance(kind, pa.JsonType):
            return array.storage
        if pa.types.is_null(columns.plain_kind(kind)):
            is_ids = name == self.column and self._content is Content.IDS
            return pa.nulls(len(array), pa.list_(pa.int64()) if is_ids else pa.large_string())
        item = kind.value_type if columns.is_any_list(kind) else None
        if item is not None and (
            pa.types.is_null(item) or (self.rules.is_mask and columns.is_truth(item))
        ):
            array.validate(full=True)
            items = array.flatten()
            if isinstance(item, pa.Bool8Type):
                items = items.storage.cast(pa.bool_())
            ends = np.cumsum(arrays.lengths(array))
            return arrays.lists(np.append(np.int64(0), ends), items.cast(pa.uint8()))
        return array

    def _rows(
        self,
        by_name: Mapping[str, Any],
        first_row: int,
        where: str,
        damaged: Mapping[str, bool],
        known: Sequence[BadRow],
    ) -> Rows:
        plain: dict[str, Any] = {}
        faults: dict[str, Sequence[BadRow]] = {}
        for name, array in by_name.items():
            plain[name], faults[name] = _decoded(array, first_row, where, damaged[name])
            # Text in a column whose type says that it is JSON is some, whatever else is quoted.
            quoted = self.rules.quoted and not columns.is_json(self.columns[name].kind)
            if name in self._json and (quoted or not columns.is_text(plain[name])):
                plain[name], no_json = _as_json(plain[name], name, first_row, where, quoted=quoted)
                faults[name] = [*faults[name], *no_json]
        faults[self.column] = [*known, *faults[self.column]]
        passing = self.passing(plain)
        bad: dict[int, BadRow] = {}
        for name in by_name:
            # Whether a row passes depends on its filter columns, not on its text.
            counts = name in self.rules.filter_columns
            for row in faults[name]:
                if counts or passing is None or passing[row.position]:
                    bad.setdefault(row.position, row)
        column = self.text(plain)
        filtered = None
        if passing is not None:
            passing[list(bad)] = True
            if not passing.all():
                filtered = ~passing
                column = arrays.blanked(column, passing)
        if bad:
            column = columns.blanked(column, bad.values())
        return Rows(
            first_row,
            columns.without_nulls(column),
            tuple(bad[position] for position in sorted(bad)),
            filtered,
        )

    def passing(self, by_name: Mapping[str, Any]) -> npt.NDArray[np.bool_] | None:
        """Which rows pass the filter, by their columns' values; None where there is none."""
        if not self._may_pass:
            return np.zeros(len(by_name[self.column]), np.bool_)
        passes = [_passes(test, by_name[test.comparison.column]) for test in self._tests]
        return np.logical_and.reduce(passes) if passes else None

    def text(self, by_name: Mapping[str, Any]) -> pa.Array:
        """The template's text, by the columns' values; without a template, the source's own. Null where that one is."""
        template, own = self.rules.template, by_name[self.column]
        if template is None:
            return own
        values = [_as_text(by_name[name]) for name in template.columns]
        joined = _joined(template, values, "null" if self.rules.quoted else "")
        return arrays.blanked(joined, arrays.flags(own.is_valid())) if own.null_count else joined


def _decoded(
    array: pa.Array, first_row: int, where: str, damaged: bool
) -> tuple[pa.Array, Sequence[BadRow]]:
    if columns.content_of(array.type) is None:
        return arrays.plain(array), ()
    return columns.decoded(array, first_row, where, damaged=damaged)


def _joined(template: Template, values: Sequence[Any], null: str) -> pa.Array:
    parts: list[Any] = []
    literals = arrays.strings(list(template.texts))
    for i, array in enumerate(values):
        parts += [literals[i], array]
    parts += [literals[len(values)], arrays.strings([""])[0]]
    options = pc.JoinOptions(null_handling="replace", null_replacement=null)
    return pc.call_function("binary_join_element_wise", parts, options)


def _as_text(array: pa.Array) -> pa.Array:
    return array if pa.types.is_large_string(array.type) else array.cast(pa.large_string())


def _as_json(
    array: pa.Array, name: str, first_row: int, where: str, *, quoted: bool
) -> tuple[pa.Array, list[BadRow]]:
    """Values as JSON, and those that are none, for there is text in them that should be some."""
    values, bad, read = array.to_pylist(), [], _json_reader(array.type)
    texts = [""] * len(values)
    for i, value in enumerate(values):
        try:
            text = json_text(read(value), quoted=quoted)
            text.encode()  # no half of a surrogate pair
            texts[i] = text
        except (ValueError, RecursionError) as error:
            bad.append(
                BadRow(i, f"{where}: row {first_row + i}: the JSON in {name!r} is damaged: {error}")
            )
    return arrays.blanked(arrays.strings(texts), arrays.flags(array.is_valid())), bad


def _json_reader(kind: pa.DataType) -> Callable[[Any], Any]:
    """Makes of a value of a type, in which text may be JSON, what that says."""
    if isinstance(kind, pa.JsonType):
        return lambda value: value if value is None else json.loads(value)
    if columns.is_any_list(kind) and (of_item := _json_reader(kind.value_type)) is not _same:
        return lambda values: values and [of_item(value) for value in values]
    fields = kind if pa.types.is_struct(kind) else ()
    readers = {
        field.name: read for field in fields if (read := _json_reader(field.type)) is not _same
    }
    if not readers:
        return _same
    return lambda values: (
        values and values | {name: read(values[name]) for name, read in readers.items()}
    )


def _same(value: Any) -> Any:
    return value


def json_text(value: Any, *, quoted: bool) -> str:
    """A value as its JSON; a text is taken to be some, unless ``quoted``. What JSON does not know, such as a date,
    becomes text."""
    if isinstance(value, str) and not quoted:
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _folder_passes(comparison: Comparison, value: str | None, where: str) -> bool:
    """Whether a folder's value compares so. Raises ``SourceError`` where it is no number, or not true or false."""
    kind = pa.type_for_alias(_KINDS[comparison.kind])
    try:
        array = pa.array([value], pa.string()).cast(kind)
    except pa.ArrowInvalid:
        name = f"{comparison.column}={value}"
        raise SourceError(
            f"{where}: filter {str(comparison)!r}: the folder {name!r} has no value that is compared with "
            f"{_NAMES[comparison.kind]}"
        ) from None
    return bool(_passes(_test(comparison, kind, where), array)[0])


def _test(comparison: Comparison, kind: pa.DataType, where: str) -> _Test:
    """Raises ``SourceError`` where a column of this type cannot be compared so."""
    compared = _compared_as(comparison, columns.plain_kind(kind))
    prefix = f"{where}: filter {str(comparison)!r}: column {comparison.column!r} is of type {kind}"
    if compared is None:
        raise SourceError(f"{prefix}, which is not compared with {_NAMES[comparison.kind]}")
    try:
        # First rounded to the column's own type: float16 is compared as float32, where 0.1 is another number.
        own = pa.float16() if pa.types.is_float16(columns.plain_kind(kind)) else compared
        return _Test(comparison, compared, _constants(comparison, own).cast(compared))
    except (pa.ArrowException, OverflowError) as error:
        raise SourceError(f"{prefix}, and the constant is none ({error})") from None


def _constants(comparison: Comparison, kind: pa.DataType) -> pa.Array:
    if comparison.kind == "text":
        texts = pa.array(comparison.values, pa.string())
        if pa.types.is_timestamp(kind) and kind.tz is not None:
            return pa.concat_arrays([_instant(texts.slice(i, 1), kind) for i in range(len(texts))])
        return texts.cast(kind)
    values = map(float, comparison.values) if pa.types.is_floating(kind) else comparison.values
    return pa.array(list(values), kind)


def _instant(text: pa.Array, kind: pa.DataType) -> pa.Array:
    """A text as a time of a type with a zone: it is of that zone, unless it names one itself."""
    try:
        plain = text.cast(pa.timestamp(kind.unit))
    except pa.ArrowInvalid:
        return text.cast(kind)
    # Known also where there is no database of zones.
    if kind.tz == "UTC":
        return plain.cast(kind)
    return pc.call_function("assume_timezone", [plain], pc.AssumeTimezoneOptions(kind.tz))


_NAMES = {"text": "text", "number": "a number", "truth": "true or false"}
#: As which type a value is compared that has none of its own.
_KINDS = {"text": "large_string", "number": "float64", "truth": "bool"}


def _compared_as(comparison: Comparison, kind: pa.DataType) -> pa.DataType | None:
    """The type in which values of a type are compared with the constants; None where they cannot be."""
    if pa.types.is_null(kind):
        return pa.type_for_alias(_KINDS[comparison.kind])
    if comparison.kind == "text":
        # A date is written as text, and compared as a date.
        temporal = pa.types.is_timestamp(kind) or pa.types.is_date(kind)
        return pa.large_string() if arrays.is_text(kind) else kind if temporal else None
    if comparison.kind == "truth":
        return kind if pa.types.is_boolean(kind) else None
    if pa.types.is_integer(kind):
        # Exactly, where the constants are of the column's type; else as floating point, which says which is greater.
        least, most = (0, 2**kind.bit_width - 1) if "u" in str(kind) else _signed(kind.bit_width)
        exact = all(
            isinstance(value, int) and least <= value <= most for value in comparison.values
        )
        return kind if exact else pa.float64()
    if pa.types.is_float16(kind):
        return pa.float32()
    if pa.types.is_floating(kind):
        return kind
    return pa.float64() if pa.types.is_decimal(kind) else None


def _signed(width: int) -> tuple[int, int]:
    return -(2 ** (width - 1)), 2 ** (width - 1) - 1


def _passes(test: _Test, array: pa.Array) -> npt.NDArray[np.bool_]:
    """Whether each value, null not being one, compares so."""
    if array.type != test.kind:
        array = array.cast(test.kind, safe=False)
    operator = test.comparison.operator
    if operator.endswith("in"):
        if pa.types.is_floating(array.type):
            # Arrow looks values up by their bits, but -0.0 equals 0, as it does for ==.
            array = pc.add(array, pa.scalar(0, array.type))
        passing = arrays.flags(
            pc.call_function("is_in", [array], pc.SetLookupOptions(test.constants))
        )
        passing = passing if operator == "in" else ~passing
    else:
        passing = arrays.flags(pc.call_function(_FUNCTIONS[operator], [array, test.constants[0]]))
    return passing & arrays.flags(array.is_valid()) if array.null_count else passing
