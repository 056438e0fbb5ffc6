"""What the server streams, read without copying the ids, as a ``Delivered``.

protobuf would copy them twice: into its own memory, then into a Python ``bytes``. They are nearly all of a
message, so they are found in the received bytes and left there, and protobuf reads what is around them.
"""

from __future__ import annotations

from typing import NamedTuple

from google.protobuf.message import DecodeError
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.delivered import Delivered, DeliveredBucket

from tokenloom.errors import ProtocolError

#: Messages below this are left to protobuf: copying so few ids costs less than finding them.
SMALL_BYTES = 16 * 1024

_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
_BATCHES = wire.StreamResponse.BATCHES_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_IDS = wire.Batches.IDS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED


class Response(NamedTuple):
    """A ``StreamResponse``, whose batches (None where it has others) are beside it, not in it."""

    message: wire.StreamResponse
    delivered: Delivered | None


class _Unusual(Exception):
    """An encoding that this module does not take apart. Whether it is a valid one is protobuf's to say."""


def read(data: bytes | Delivered) -> Response:
    """Reads one message of the stream; within a process batches come without one. Raises ``ProtocolError`` for bytes
    that are none."""
    if isinstance(data, Delivered):
        about = wire.StreamResponse(
            committed_through=data.committed_through, server_epoch=data.server_epoch
        )
        return Response(about, data)
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
    if message.WhichOneof("kind") != "batches":
        return Response(message, None)
    return Response(message, _delivered(message, message.batches, message.batches.ids))


def _read_around_ids(data: bytes) -> Response:
    begin, content, end = _find(_BATCHES, data, 0, len(data))
    ids_begin, ids, ids_end = _find(_IDS, data, content, end)
    message = wire.StreamResponse.FromString(data[:begin] + data[end:])
    if message.WhichOneof("kind") is not None:
        raise _Unusual  # of a oneof the last one counts
    batches = wire.Batches.FromString(data[content:ids_begin] + data[ids_end:end])
    return Response(message, _delivered(message, batches, memoryview(data)[ids:ids_end]))


def _delivered(
    message: wire.StreamResponse, batches: wire.Batches, ids: bytes | memoryview
) -> Delivered:
    infos = list(batches.micro_steps)  # each look into what protobuf holds makes objects anew
    return Delivered(
        begin_index=batches.begin_index,
        end_indices=[info.end_index for info in infos],
        slices=[info.slice for info in infos],
        total_tokens=[info.total_tokens for info in infos],
        real_tokens=[info.real_tokens for info in infos],
        tokens=[info.tokens for info in infos],
        label_tokens=[info.label_tokens for info in infos],
        digests=[info.digest for info in infos],
        source_ids=batches.source_ids[:],
        ids=ids,
        document_counts=batches.document_counts,
        document_starts=batches.document_starts,
        base=(batches.base.sample_index, batches.base.resume_state)
        if batches.HasField("base")
        else None,
        counts=batches.counts,
        buckets=[
            DeliveredBucket(
                bucket.name,
                bucket.source,
                [(column.name, column.dtype, column.shape) for column in bucket.columns],
                bucket.sample_bytes,
            )
            for bucket in batches.buckets
        ],
        committed_through=message.committed_through,
        server_epoch=message.server_epoch,
    )


def _find(key: int, data: bytes, offset: int, end: int) -> tuple[int, int, int]:
    """Where the one field with a key begins, where its content does, and where both end.

    Raises ``_Unusual``, or ``IndexError``, unless there is exactly one (several would have to be merged).
    """
    field_bounds = None
    while offset < end:
        begin = offset
        field, offset = (data[offset], offset + 1) if data[offset] < 0x80 else _varint(data, offset)
        kind = field & 7
        if kind == _LENGTH_DELIMITED:
            size, offset = (
                (data[offset], offset + 1) if data[offset] < 0x80 else _varint(data, offset)
            )
            if field == key:
                if field_bounds is not None:
                    raise _Unusual
                field_bounds = begin, offset, offset + size
            offset += size
        elif kind == _VARINT:
            while data[offset] >= 0x80:
                offset += 1
            offset += 1
        elif kind == _FIXED64:
            offset += 8
        elif kind == _FIXED32:
            offset += 4
        else:
            raise _Unusual
    if field_bounds is None or offset != end:
        raise _Unusual
    return field_bounds


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    """A number of several bytes, and where it ends."""
    value = shift = 0
    while data[offset] >= 0x80:
        value |= (data[offset] & 0x7F) << shift
        shift += 7
        offset += 1
    if not data[offset]:
        raise _Unusual  # longer than need be
    return value | data[offset] << shift, offset + 1
