"""Lists of ids from Parquet, in half of the time that Arrow's own reader takes.

Arrow's own reader stays the judge: whatever is out of the ordinary (a null among the ids, an unknown
encoding, damage) raises ``Unusual`` here, and Arrow is to read the row group again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from tokenloom_server.sources import arrays, parquet_pages
from tokenloom_server.sources.parquet_pages import (
    DATA_PAGE,
    DICTIONARY_PAGE,
    FAULTS,
    INT32,
    MAGIC,
    PHYSICAL_TYPES,
    PLAIN,
    RLE,
    RLE_DICTIONARY,
    Chunk,
    Chunks,
    Dictionary,
    Page,
    Unusual,
    integer,
)
from tokenloom_server.storage.file import File

# Encoded Parquet values, decoded by Arrow without the levels of lists.
#
# Arrow decodes a column of plain integers in a third of the time that it needs where they are in lists:
# there it goes through the levels value by value, several times. So the values of pages are put into a
# file of plain columns, in memory, and the levels beside them: those are encoded integers, too.


# Fields of a structure, in Thrift's compact protocol: how many numbers further, and the type.
_I32, _I64, _BINARY, _LIST, _STRUCT, _STOP = 0x05, 0x06, 0x08, 0x09, 0x0C, b"\0"


class FlatPage(NamedTuple):
    """Values without nulls; ``parts`` are their bytes, to be joined."""

    length: int
    encoding: int
    parts: tuple[Any, ...]


class FlatColumn(NamedTuple):
    physical_type: int
    dictionary: Dictionary | None
    pages: Sequence[FlatPage]

    def __len__(self) -> int:
        return sum(page.length for page in self.pages)


def levels(runs: Sequence[tuple[int, Any]], greatest: int) -> FlatColumn:
    """Levels of 0 to ``greatest``, given as their number and their run-length encoding, as a column of int32."""
    width = greatest.bit_length()
    known = np.arange(1 << width, dtype="<i4").tobytes()
    pages = [FlatPage(length, RLE_DICTIONARY, (bytes([width]), run)) for length, run in runs]
    return FlatColumn(INT32, Dictionary(1 << width, memoryview(known)), pages)


def decode(columns: Sequence[FlatColumn]) -> list[Any]:
    """An Arrow array for each column; all have the same length. Raises ``pa.ArrowException``."""
    parts: list[Any] = [MAGIC]
    described = []
    size = len(MAGIC)
    for number, column in enumerate(columns):
        start = first_page = size
        if column.dictionary is not None:
            size += _add_page(
                parts, DICTIONARY_PAGE, column.dictionary.length, PLAIN, (column.dictionary.values,)
            )
            first_page = size
        for page in column.pages:
            size += _add_page(parts, DATA_PAGE, page.length, page.encoding, page.parts)
        described.append(_column_chunk(column, number, start, first_page, size))
    footer = _footer(columns, described, size)
    parts += (footer, len(footer).to_bytes(4, "little"), MAGIC)
    # A buffer is parsed where it lies; without pre_buffer, Arrow starts no thread for it.
    table = pq.ParquetFile(pa.BufferReader(b"".join(parts)), pre_buffer=False).read(
        use_threads=False
    )
    return [
        column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        for column in table.columns
    ]


# The structures of parquet.thrift, with what its reader needs. Fields follow in ascending order; each
# names its distance from the one before.


def _add_page(
    parts: list[Any], kind: int, length: int, encoding: int, body: tuple[Any, ...]
) -> int:
    """Appends a page and its PageHeader; returns their bytes."""
    size = sum(map(len, body))
    head = _number(1, _I32, kind) + _number(1, _I32, size) + _number(1, _I32, size)
    if kind == DICTIONARY_PAGE:  # field 7
        head += _head(4, _STRUCT) + _number(1, _I32, length) + _number(1, _I32, encoding)
    else:  # field 5, with the encodings of definition and repetition levels, of which there are none
        head += _head(2, _STRUCT) + _number(1, _I32, length) + _number(1, _I32, encoding)
        head += _number(1, _I32, RLE) + _number(1, _I32, RLE)
    head += _STOP + _STOP
    parts += (head, *body)
    return len(head) + size


def _column_chunk(column: FlatColumn, number: int, start: int, first_page: int, end: int) -> bytes:
    meta = _number(1, _I32, column.physical_type)
    meta += _list(1, _I32, [integer(page.encoding) for page in column.pages[:1]])
    meta += _list(1, _BINARY, [_name(number)])
    meta += _number(1, _I32, 0)  # not compressed
    meta += _number(1, _I64, len(column))
    meta += _number(1, _I64, end - start) + _number(1, _I64, end - start)
    meta += _number(2, _I64, first_page)
    if column.dictionary is not None:
        meta += _number(2, _I64, start)
    return _number(2, _I64, start) + _head(1, _STRUCT) + meta + _STOP + _STOP


def _footer(columns: Sequence[FlatColumn], described: list[bytes], size: int) -> bytes:
    rows = len(columns[0])
    root = _head(4, _BINARY) + _name(0) + _number(1, _I32, len(columns)) + _STOP
    leaves = [
        _number(1, _I32, column.physical_type)
        + _number(2, _I32, 0)
        + _head(1, _BINARY)
        + _name(number)
        + _STOP
        for number, column in enumerate(columns)  # 0: required
    ]
    group = _list(1, _STRUCT, described) + _number(1, _I64, size) + _number(1, _I64, rows) + _STOP
    schema = _list(1, _STRUCT, [root, *leaves])
    return (
        _number(1, _I32, 1) + schema + _number(1, _I64, rows) + _list(1, _STRUCT, [group]) + _STOP
    )


def _head(step: int, kind: int) -> bytes:
    return bytes((step << 4 | kind,))


def _number(step: int, kind: int, value: int) -> bytes:
    return bytes((step << 4 | kind,)) + integer(value)


def _list(step: int, kind: int, items: list[bytes]) -> bytes:
    assert len(items) < 15, "longer lists have another header"
    return bytes((step << 4 | _LIST, len(items) << 4 | kind)) + b"".join(items)


def _name(number: int) -> bytes:
    return b"\x01" + str(number).encode()


#: Pages are decoded together until they have this many values: each call has a fixed cost.
UNIT_VALUES = 1 << 18

#: Row groups with fewer values are left to Arrow: the fixed cost would outweigh what is saved.
MIN_VALUES = 1 << 16

#: Two repetition levels that begin no row, as one integer.
_TWO_ONES = 1 << 32 | 1


class ListColumn(NamedTuple):
    """A column of lists: which of the file's leaves holds the items, and what their levels mean.

    An item that is there has the definition level ``item_level``; an empty or null list at most ``empty_level``.
    """

    leaf: int
    physical_type: int
    item_level: int
    empty_level: int
    item_type: Any


def list_column(file: Any, name: str) -> ListColumn | None:
    """How the lists of a ``ParquetFile`` are to be read; ``None`` where they are not of the plain three-level kind."""
    field = file.schema_arrow.field(name)
    leaves = [file.schema.column(i) for i in range(len(file.schema))]
    leaf_numbers = [i for i, leaf in enumerate(leaves) if leaf.path.startswith(f"{name}.")]
    if len(leaf_numbers) != 1 or not pa.types.is_integer(
        getattr(field.type, "value_type", None) or pa.null()
    ):
        return None
    leaf = leaves[leaf_numbers[0]]
    empty_level = int(field.nullable)
    item_level = empty_level + 1 + int(field.type.value_field.nullable)
    physical_type = PHYSICAL_TYPES.get(leaf.physical_type)
    if physical_type is None or (leaf.max_repetition_level, leaf.max_definition_level) != (
        1,
        item_level,
    ):
        return None
    return ListColumn(
        leaf_numbers[0], physical_type, item_level, empty_level, field.type.value_type
    )


def read_lists(file: File, column: ListColumn, chunks: Chunks, group: int) -> Iterator[pa.Array]:
    """The rows of a row group as Arrow lists without nulls, a few pages at a time; ``chunks`` are the column's.

    Raises ``Unusual``; what was yielded before it stands.
    """
    try:
        chunk = next(chunks.from_group(file, group), None)
        if chunk is None or chunk.physical_type != column.physical_type:
            raise Unusual("a footer that contradicts itself")
        if chunk.levels < MIN_VALUES:
            raise Unusual("a small row group")
        yield from _units(file, chunk, column)
    except FAULTS as error:
        raise Unusual(str(error)) from error


def _units(file: File, chunk: Chunk, column: ListColumn) -> Iterator[pa.Array]:
    held: list[Page] = []
    for page in parquet_pages.pages(file, chunk):
        # A row may reach into the next page.
        if sum(p.length for p in held) >= UNIT_VALUES and _first(page.repetition) == 0:
            yield _decoded(held, column)
        held.append(page)
        del page
    yield _decoded(held, column)


def _first(levels: memoryview) -> int:
    """The first of run-length encoded levels of 0 and 1."""
    head, position = parquet_pages.unsigned(levels, 0)
    return levels[position] & 1 if head & 1 else levels[position]


def _all_are(levels: memoryview, value: int, count: int) -> bool:
    """Whether levels are a single run of a value: as they are where each row has items, and no null."""
    head, position = parquet_pages.unsigned(levels, 0)
    return not head & 1 and head >> 1 >= count and levels[position] == value


def _decoded(held: list[Page], column: ListColumn) -> Any:
    """The rows of consecutive pages. Empties the list: what is decoded is not held."""
    repetition = levels([(page.length, page.repetition) for page in held], 1)
    if all(_all_are(page.definition, column.item_level, page.length) for page in held):
        values = _values(held, [page.length for page in held], column.physical_type)
        items, begins = decode([values, repetition])
        offsets = _starts(arrays.numbers(begins))
    else:
        definition = levels([(page.length, page.definition) for page in held], column.item_level)
        begins, present = map(arrays.numbers, decode([repetition, definition]))
        absent = _absent(begins, present, column)
        starts = _starts(begins)
        offsets = starts - np.searchsorted(absent, starts)
        ends = np.cumsum([page.length for page in held])
        counts = np.diff(ends - np.searchsorted(absent, ends), prepend=0).tolist()
        decoded = decode([_values(held, counts, column.physical_type)]) if sum(counts) else []
        items = decoded[0] if decoded else pa.nulls(0, column.item_type)
    if len(items) != offsets[-1]:
        raise Unusual(f"{len(items)} values, where {offsets[-1]} were expected")
    held.clear()
    return arrays.lists(offsets.astype(np.int32), _typed(items, column.item_type))


def _values(held: list[Page], counts: list[int], physical_type: int) -> FlatColumn:
    pages = [
        FlatPage(count, page.encoding, (page.values,))
        for page, count in zip(held, counts, strict=True)
        if count
    ]
    return FlatColumn(physical_type, held[0].dictionary, pages)


def _starts(begins: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Where rows begin among the levels, and where the last one ends."""
    # Most levels are 1: looked at in pairs, only those that hold a 0 are looked at one by one.
    paired = len(begins) & ~1
    pairs = np.flatnonzero(begins[:paired].view(np.int64) != _TWO_ONES) * 2
    near = np.append(np.stack((pairs, pairs + 1), axis=1), np.arange(paired, len(begins)))
    starts = near[begins[near] == 0]
    if not len(starts) or starts[0] != 0:
        raise Unusual("a row group that begins within a row")
    return np.append(starts, len(begins))


def _absent(
    begins: npt.NDArray[np.int32], present: npt.NDArray[np.int32], column: ListColumn
) -> npt.NDArray[np.int64]:
    """The levels that mark an empty list, or a null instead of a list, and so no item."""
    absent = np.flatnonzero(present != column.item_level)
    after = absent[absent + 1 < len(begins)] + 1
    if bool(
        (present[absent] > column.empty_level).any() or begins[absent].any() or begins[after].any()
    ):
        raise Unusual("a null among the ids, or levels that contradict each other")
    return absent


def _typed(items: pa.Array, kind: pa.DataType) -> pa.Array:
    """The file's integers of 32 or 64 bits, in the type that its schema names."""
    if items.type == kind:
        return items
    # As Arrow does it: the bits that fit.
    return arrays.from_numbers(arrays.numbers(items).astype(kind.to_pandas_dtype()))
