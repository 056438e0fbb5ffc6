"""Thrift's compact protocol, as far as the headers of Parquet files need it.

Nothing is read outside of the bytes that were given: what is damaged raises ``ValueError`` or ``IndexError``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET = range(1, 11)
STRUCT = 12

#: An integer has at most 64 bits, seven in a byte.
_MAX_SHIFT = 63

#: A structure's fields by number, as far as they are read; enumerations are integers.
Fields = dict[int, Any]


def unsigned(data: Sequence[int], at: int) -> tuple[int, int]:
    """A variable-length integer, and the position after it."""
    value = shift = 0
    while (byte := data[at]) > 0x7F:
        value |= (byte & 0x7F) << shift
        at += 1
        shift += 7
        if shift > _MAX_SHIFT:
            raise ValueError(f"the integer before byte {at} has more than 64 bits")
    return value | byte << shift, at + 1


def read_struct(data: Sequence[int], at: int, depth: int = 2) -> tuple[Fields, int]:
    """A structure's integers, booleans and, to a depth, structures; and the position after it."""
    fields: Fields = {}
    number = 0
    while head := data[at]:
        at += 1
        kind = head & 15
        if head > 15:
            number += head >> 4
        else:
            number, at = _signed(data, at)
        if I16 <= kind <= I64:
            fields[number], at = _signed(data, at)
        elif kind <= FALSE:
            fields[number] = kind == TRUE
        elif kind == STRUCT and depth > 1:
            fields[number], at = read_struct(data, at, depth - 1)
        else:
            at = skip(data, at, kind)
    return fields, at + 1


def _signed(data: Sequence[int], at: int) -> tuple[int, int]:
    value, at = unsigned(data, at)
    return (value >> 1) ^ -(value & 1), at


def list_header(data: Sequence[int], at: int) -> tuple[int, int, int]:
    """How many items a list has, of which kind, and where the first one begins."""
    length, kind = data[at] >> 4, data[at] & 15
    if length < 15:
        return length, kind, at + 1
    length, at = unsigned(data, at + 1)
    return length, kind, at


def skip(data: Sequence[int], at: int, kind: int) -> int:
    """The position after a value; of a structure, ``at`` may be any of its fields."""
    if I16 <= kind <= I64:
        while data[at] > 0x7F:
            at += 1
        return at + 1
    if kind == STRUCT:
        while head := data[at]:
            at += 1
            if head < 16:
                at = skip(data, at, I16)
            if head & 15 > FALSE:  # a field's boolean is its type
                at = skip(data, at, head & 15)
        return at + 1
    if kind == BINARY:
        length, at = unsigned(data, at)
        return at + length
    if kind in (LIST, SET):
        length, kind, at = list_header(data, at)
        for _ in range(length):
            at = skip(data, at, kind)
        return at
    if kind in (TRUE, FALSE, BYTE):
        return at + 1
    if kind == DOUBLE:
        return at + 8
    raise ValueError(f"the value at byte {at} has the unknown type {kind}")


def integer(value: int) -> bytes:
    """An integer that is not negative, as a field has it."""
    value <<= 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
