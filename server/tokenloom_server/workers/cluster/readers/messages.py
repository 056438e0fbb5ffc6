"""Between a server and the process beside it that speaks to Ray: JSON on a socket, and rows in shared memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import pyarrow as pa

#: Bytes of a stream at most, beside its batches.
SCHEMA_BYTES = 1 << 16


def send(to: Connection, **message: Any) -> None:
    """For one thread at a time. Raises ``OSError`` where nobody is at the other end."""
    to.send_bytes(json.dumps(message).encode())


def receive(of: Connection) -> dict[str, Any] | None:
    """The next message; None where the other end is gone."""
    try:
        message: dict[str, Any] = json.loads(of.recv_bytes())
    except (EOFError, OSError):
        return None
    return message


def write(memory: Any, batches: Sequence[pa.RecordBatch]) -> int:
    """Puts them at the beginning of some memory, of ``size_of`` bytes at least; how many it took."""
    sink = pa.FixedSizeBufferWriter(pa.py_buffer(memory))
    with pa.ipc.new_stream(sink, batches[0].schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    return int(sink.tell())


def size_of(batches: Sequence[pa.RecordBatch]) -> int:
    """Bytes that ``write`` takes at most."""
    return SCHEMA_BYTES + sum(int(pa.ipc.get_record_batch_size(batch)) for batch in batches)
