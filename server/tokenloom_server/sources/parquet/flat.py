"""Encoded Parquet values, decoded by Arrow without the levels of lists.

Arrow decodes a column of plain integers in a third of the time that it needs where they are in lists:
there it goes through the levels value by value, several times. So the values of pages are put into a
file of plain columns, in memory, and the levels beside them: those are encoded integers, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tokenloom_server.sources.parquet.pages import (
    DATA_PAGE,
    DICTIONARY_PAGE,
    INT32,
    MAGIC,
    PLAIN,
    RLE,
    RLE_DICTIONARY,
    Dictionary,
)
from tokenloom_server.sources.parquet.thrift import integer

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
