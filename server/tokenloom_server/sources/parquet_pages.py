"""The pages of a Parquet column: found by the footer, checked, decompressed, levels and values apart.

Only what the usual writers write is understood; for everything else ``Unusual`` is raised, and Arrow's
own reader is the one to say whether the file is damaged.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import pyarrow as pa

from tokenloom_server.core.numbers import varint
from tokenloom_server.storage.arrow_input import FileStream
from tokenloom_server.storage.file import File

# Thrift's compact protocol, as far as the headers of Parquet files need it.
#
# Nothing is read outside of the bytes that were given: what is damaged raises ``ValueError`` or ``IndexError``.


TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET = range(1, 11)
STRUCT = 12

#: An integer has at most 64 bits, seven in a byte.
_MAX_SHIFT = 63

#: A structure's fields by number, as far as they are read; enumerations are integers.
Fields = dict[int, Any]


def unsigned(data: Sequence[int], position: int) -> tuple[int, int]:
    """A variable-length integer, and the position after it."""
    value = shift = 0
    while (byte := data[position]) > 0x7F:
        value |= (byte & 0x7F) << shift
        position += 1
        shift += 7
        if shift > _MAX_SHIFT:
            raise ValueError(f"the integer before byte {position} has more than 64 bits")
    return value | byte << shift, position + 1


def read_struct(data: Sequence[int], position: int, depth: int = 2) -> tuple[Fields, int]:
    """A structure's integers, booleans and, to a depth, structures; and the position after it."""
    fields: Fields = {}
    number = 0
    while head := data[position]:
        position += 1
        kind = head & 15
        if head > 15:
            number += head >> 4
        else:
            number, position = _signed(data, position)
        if I16 <= kind <= I64:
            fields[number], position = _signed(data, position)
        elif kind <= FALSE:
            fields[number] = kind == TRUE
        elif kind == STRUCT and depth > 1:
            fields[number], position = read_struct(data, position, depth - 1)
        else:
            position = skip(data, position, kind)
    return fields, position + 1


def _signed(data: Sequence[int], position: int) -> tuple[int, int]:
    value, position = unsigned(data, position)
    return (value >> 1) ^ -(value & 1), position


def list_header(data: Sequence[int], position: int) -> tuple[int, int, int]:
    """How many items a list has, of which kind, and where the first one begins."""
    length, kind = data[position] >> 4, data[position] & 15
    if length < 15:
        return length, kind, position + 1
    length, position = unsigned(data, position + 1)
    return length, kind, position


def skip(data: Sequence[int], position: int, kind: int) -> int:
    """The position after a value; of a structure, ``position`` may be that of any of its fields."""
    if I16 <= kind <= I64:
        while data[position] > 0x7F:
            position += 1
        return position + 1
    if kind == STRUCT:
        while head := data[position]:
            position += 1
            if head < 16:
                position = skip(data, position, I16)
            if head & 15 > FALSE:  # a field's boolean is its type
                position = skip(data, position, head & 15)
        return position + 1
    if kind == BINARY:
        length, position = unsigned(data, position)
        return position + length
    if kind in (LIST, SET):
        length, kind, position = list_header(data, position)
        for _ in range(length):
            position = skip(data, position, kind)
        return position
    if kind in (TRUE, FALSE, BYTE):
        return position + 1
    if kind == DOUBLE:
        return position + 8
    raise ValueError(f"the value at byte {position} has the unknown type {kind}")


def integer(value: int) -> bytes:
    """An integer that is not negative, as a field has it."""
    return varint(value << 1)


MAGIC = b"PAR1"

#: Longer footers are left to Arrow: this module goes through them in Python.
MAX_FOOTER_BYTES = 16 << 20

#: Larger pages are left to Arrow, which decodes a part of them at a time.
MAX_PAGE_BYTES = 16 << 20
MAX_PAGE_VALUES = 1 << 21

#: Larger pages are refused, unless a row may be larger: a page is in memory as a whole.
MOST_PAGE_BYTES = 1 << 28
MOST_HEADER_BYTES = 1 << 20

#: Bytes that a page's header has at most; statistics of long strings would be longer.
HEADER_BYTES = 512

#: Values of enumerations in parquet.thrift.
INT32 = 1
PHYSICAL_TYPES = {"INT32": INT32, "INT64": 2}
PLAIN, RLE, RLE_DICTIONARY = 0, 3, 8
DATA_PAGE, DICTIONARY_PAGE, DATA_PAGE_V2 = 0, 2, 3
_UNCOMPRESSED, _SNAPPY = 0, 1
_CODECS = {_UNCOMPRESSED: "", _SNAPPY: "snappy", 2: "gzip", 4: "brotli", 6: "zstd"}

#: By the type of a page, the field of its header with the details of that type.
_DETAILS = {DATA_PAGE: 5, DICTIONARY_PAGE: 7, DATA_PAGE_V2: 8}


class Unusual(Exception):
    """A file that this module cannot read, or a damaged one."""


#: The errors that damaged pages and footers raise.
FAULTS = (
    *(
        Unusual,
        pa.ArrowException,
        OSError,
        EOFError,
        zlib.error,
        RecursionError,
        MemoryError,
        OverflowError,
    ),
    *(ValueError, KeyError, IndexError, TypeError),
)


class Chunk(NamedTuple):
    """A column of a row group, as the footer describes it. ``levels``: values, nulls and empty lists."""

    start: int
    size: int
    levels: int
    physical_type: int
    codec: int


class Dictionary(NamedTuple):
    length: int
    values: memoryview


class Page(NamedTuple):
    """A data page: as many levels, run-length encoded, as its length says, and the values, encoded; and its column's
    dictionary, if that has one."""

    length: int
    encoding: int
    repetition: memoryview
    definition: memoryview
    values: memoryview
    dictionary: Dictionary | None = None


def chunks(file: File, leaf: int) -> Iterator[Chunk]:
    """The ``leaf``-th column of one row group after the other."""
    # Arrow knows all this, but it ends the process when it is asked about a column of a damaged footer.
    size = file.size
    tail = _pread(file, 8, size - 8)
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != MAGIC or length > min(MAX_FOOTER_BYTES, size - 8):
        raise Unusual("no footer, an encrypted one, or a very long one")
    data = _pread(file, length, size - 8 - length)
    position = _list_at(data, 0, 4)
    groups, _, position = list_header(data, position)
    for _ in range(groups):
        columns, _, position = list_header(data, _list_at(data, position, 1))
        if leaf >= columns:
            raise Unusual("a row group without the column")
        for _ in range(leaf):
            position = skip(data, position, STRUCT)
        fields, position = read_struct(data, position)
        yield _chunk(fields)
        for _ in range(leaf + 1, columns):
            position = skip(data, position, STRUCT)
        position = skip(data, position, STRUCT)  # the rest of the row group


class Chunks:
    """The chunks of one column of a file, looked up once, however often the file is opened for a row group."""

    def __init__(self, leaf: int) -> None:
        self._leaf = leaf
        self._chunks: list[Chunk] = []
        self._more: Iterator[Chunk] | None = None

    def from_group(self, file: File, group: int) -> Iterator[Chunk]:
        """The chunk of a row group, and those after it. The footer is read once. Raises what ``chunks`` does."""
        while True:
            while len(self._chunks) <= group:
                if self._more is None:
                    self._more = chunks(file, self._leaf)
                chunk = next(self._more, None)
                if chunk is None:
                    return
                self._chunks.append(chunk)
            yield self._chunks[group]
            group += 1


def _list_at(data: bytes | memoryview, position: int, wanted: int) -> int:
    """The position of the list that is field ``wanted`` of the structure at ``position``."""
    number = 0
    while head := data[position]:
        position += 1
        number += head >> 4
        if number == wanted and head & 15 == LIST:
            return position
        if head < 16 or number >= wanted:
            break
        if head & 15 > FALSE:
            position = skip(data, position, head & 15)
    raise Unusual(f"a footer without field {wanted}")


def _chunk(fields: Fields) -> Chunk:
    meta = fields.get(3)
    if not isinstance(meta, dict) or 8 in fields:
        raise Unusual("an encrypted column")
    start, dictionary = meta[9], meta.get(11)
    return Chunk(min(start, dictionary or start), meta[7], meta[5], meta[1], meta[4])


def pages(file: File, chunk: Chunk) -> Iterator[Page]:
    """The pages of a column that has both kinds of levels, read one at a time; checksums are verified."""
    if chunk.codec not in _CODECS:
        raise Unusual(f"the codec {chunk.codec}")
    position, end, left = chunk.start, chunk.start + chunk.size, chunk.levels
    dictionary: Dictionary | None = None
    while left > 0:
        header, length = read_struct(file.read_at(position, min(HEADER_BYTES, end - position)), 0)
        kind, size, stored = header[1], header[2], header[3]
        position += length
        if (
            kind not in _DETAILS
            or not 0 <= size <= MAX_PAGE_BYTES
            or not 0 <= stored <= end - position
        ):
            raise Unusual(
                f"a page of type {kind}: {size} bytes, {stored} in the file, where {end - position} are left"
            )
        details = header[_DETAILS[kind]]
        count = details[1]
        if kind != DICTIONARY_PAGE and not 0 <= count <= min(left, MAX_PAGE_VALUES):
            raise Unusual(f"a page of {count} values, where {left} are left")
        body = memoryview(_pread(file, stored, position))
        position += stored
        if 4 in header and zlib.crc32(body) != header[4] & 0xFFFFFFFF:
            raise Unusual("a checksum that differs")
        if kind == DICTIONARY_PAGE:
            dictionary = Dictionary(count, _decompressed(chunk.codec, body, size))
            continue
        left -= count
        if count:
            page = _page if kind == DATA_PAGE else _page_v2
            yield page(details, chunk.codec, body, size)._replace(dictionary=dictionary)


class CheckedPages(FileStream):
    """A Parquet file as Arrow reads it. The headers of pages are looked at as they pass by: Arrow asks for as much
    memory as one says, before it looks whether that much is there."""

    def __init__(self, file: File, most_bytes: int) -> None:
        super().__init__(file)
        self._most_bytes = max(MOST_PAGE_BYTES, most_bytes)
        #: Of each column chunk that is being read, where its next header begins, and where the chunk ends.
        self._headers: dict[int, int] = {}

    def expect(self, columns: Iterable[Chunks], group: int) -> None:
        """The columns' chunks in a row group are read next. One whose footer is unusual is left to Arrow."""
        self._headers = {}
        with contextlib.suppress(*FAULTS):
            for column in columns:
                for chunk in islice(column.from_group(self._file, group), 1):
                    self._headers[chunk.start] = chunk.start + chunk.size

    def read(self, length: int = -1) -> bytes | memoryview:
        """Raises ``ValueError`` and ``KeyError`` for a header of no page, or of one that is too large."""
        begin, data = self.position, super().read(length)
        for header, end in list(self._headers.items()):
            if begin <= header < self.position:
                del self._headers[header]
                self._pass(header, end, memoryview(data)[header - begin :])
        return data

    def _pass(self, position: int, end: int, data: memoryview) -> None:
        """Looks at the headers within what was read from one on."""
        after = position + len(data)
        while position < min(after, end):
            try:
                fields, length = read_struct(data[position - after :], 0)
            except IndexError:  # it reaches beyond
                fields, length = read_struct(self._file.read_at(position, MOST_HEADER_BYTES), 0)
            size, stored = fields[2], fields[3]
            if not 0 <= size <= self._most_bytes or not 0 <= stored <= end - position:
                raise ValueError(
                    f"the page at byte {position} says that it has {size} bytes, and {stored} in the file, where a "
                    f"page has at most {self._most_bytes} (or max_row_mib), and {end - position} are left of its column"
                )
            position += length + stored
        if position < end:
            self._headers[position] = end


def _page(details: dict[int, Any], codec: int, body: memoryview, size: int) -> Page:
    if details[3] != RLE or details[4] != RLE:
        raise Unusual("levels in the encoding of before 2013")
    data = _decompressed(codec, body, size)
    repetition, position = _sized(data, 0)
    definition, position = _sized(data, position)
    return Page(details[1], details[2], repetition, definition, data[position:])


def _page_v2(details: dict[int, Any], codec: int, body: memoryview, size: int) -> Page:
    # Levels are never compressed, and their encoding needs no length.
    middle, end = details[6], details[6] + details[5]
    if not 0 <= middle <= end <= len(body):
        raise Unusual("levels that are longer than their page")
    compressed = details.get(7, True)
    values = _decompressed(codec if compressed else _UNCOMPRESSED, body[end:], size - end)
    return Page(details[1], details[4], body[:middle], body[middle:end], values)


def _sized(data: memoryview, position: int) -> tuple[memoryview, int]:
    """Bytes with their length before them, and the position after both."""
    end = position + 4 + int.from_bytes(data[position : position + 4], "little")
    if end > len(data):
        raise Unusual("levels that are longer than their page")
    return data[position + 4 : end], end


def _decompressed(codec: int, body: memoryview, size: int) -> memoryview:
    if codec == _UNCOMPRESSED:
        output: Any = body
    elif not size:
        output = b""  # whatever the codec makes of nothing
    elif codec == _SNAPPY:
        # Arrow does not tell how many bytes it has written, but Snappy's data begins with it.
        length, _ = unsigned(body, 0)
        output = pa.Codec(_CODECS[codec]).decompress(body, length) if length == size else b""
    else:
        stream = pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(body)), _CODECS[codec])
        output = stream.read_buffer(size + 1)
    data = memoryview(output).cast("B")
    if len(data) != size:
        raise Unusual(f"a page that does not have the {size} bytes that its header says")
    return data


def _pread(file: File, length: int, offset: int) -> bytes | memoryview:
    data = file.read_at(offset, length)
    if len(data) < length:
        raise EOFError(f"the file ends at byte {offset + len(data)}")
    return data
