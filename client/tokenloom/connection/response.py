"""What the server streams, read without copying the ids.

protobuf would copy them twice: into its own memory, then into a Python ``bytes``. They are nearly all of a
message, so they are found in the received bytes and left there, and protobuf reads what is around them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from google.protobuf.message import DecodeError
from tokenloom_proto import dataloader_pb2 as wire

from tokenloom.errors import ProtocolError

#: Messages below this are left to protobuf: copying so few ids costs less than finding them.
SMALL_BYTES = 16 * 1024

_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
_BATCHES = wire.StreamResponse.BATCHES_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_OTHER_KINDS = (
    wire.StreamResponse.HEARTBEAT_FIELD_NUMBER << 3 | _LENGTH_DELIMITED,
    wire.StreamResponse.END_OF_DATA_FIELD_NUMBER << 3 | _LENGTH_DELIMITED,
)
_IDS = wire.Batches.IDS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED


class Response(NamedTuple):
    """A ``StreamResponse``; where it has ``batches``, these have no ``ids``, which are beside it."""

    message: wire.StreamResponse
    ids: bytes | memoryview


class _Field(NamedTuple):
    """Where a field lies in the bytes: key (and length), then content."""

    tag: int
    begin: int
    content: int
    end: int


class _Unusual(Exception):
    """An encoding that this module does not take apart. Whether it is a valid one is protobuf's to say."""


def read(data: bytes) -> Response:
    """Reads one message of the stream. Raises ``ProtocolError`` for bytes that are none."""
    try:
        if len(data) >= SMALL_BYTES:
            try:
                return _read_around_ids(data)
            except (_Unusual, IndexError):
                pass
        message = wire.StreamResponse.FromString(data)
    except DecodeError as error:
        raise ProtocolError(
            f"{len(data)} bytes came that are no StreamResponse of the wire contract ({error}): "
            "install the client of the server's version"
        ) from None
    ids = message.batches.ids
    if ids:
        message.batches.ClearField("ids")
    return Response(message, ids)


def _read_around_ids(data: bytes) -> Response:
    batches = _only(data, 0, len(data), _BATCHES, _OTHER_KINDS)
    ids = _only(data, batches.content, batches.end, _IDS)
    inner = data[batches.content : ids.begin] + data[ids.end : batches.end]
    outer = data[: batches.begin] + data[batches.end :]
    message = wire.StreamResponse.FromString(outer)
    message.batches.MergeFromString(inner)
    message.batches.SetInParent()  # also if nothing is around the ids
    return Response(message, memoryview(data)[ids.content : ids.end])


def _only(data: bytes, begin: int, end: int, tag: int, unwanted: tuple[int, ...] = ()) -> _Field:
    """The one field with a tag. Several would have to be merged, and of a ``oneof`` the last one counts."""
    found = None
    for field in _fields(data, begin, end):
        if field.tag == tag and found is None:
            found = field
        elif field.tag == tag or field.tag in unwanted:
            raise _Unusual
    if found is None:
        raise _Unusual
    return found


def _fields(data: bytes, at: int, end: int) -> Iterator[_Field]:
    """The fields of a message, in order."""
    while at < end:
        begin = at
        tag, at = _varint(data, at)
        content = at
        kind = tag & 7
        if kind == _LENGTH_DELIMITED:
            size, content = _varint(data, at)
            at = content + size
        elif kind == _VARINT:
            _, at = _varint(data, at)
        elif kind == _FIXED64:
            at += 8
        elif kind == _FIXED32:
            at += 4
        else:
            raise _Unusual
        if at > end:
            raise _Unusual
        yield _Field(tag, begin, content, at)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while True:
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    if not byte or shift > 63:  # longer than need be
        raise _Unusual
    return value, at + 1
