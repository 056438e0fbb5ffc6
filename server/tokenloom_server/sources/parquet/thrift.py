"""Thrift's compact protocol, as far as the headers of Parquet files need it.

Nothing is read outside of the bytes that were given: what is damaged raises ``ValueError`` or ``IndexError``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenloom_server.core.varint import varint

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
