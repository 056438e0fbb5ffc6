"""Between a server and the process beside it that speaks to Ray: JSON on a socket, and rows in shared memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import IO, Any

import pyarrow as pa


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


def write(file: IO[bytes], batches: Sequence[pa.RecordBatch]) -> None:
    """Puts them into a file."""
    with pa.ipc.new_stream(file, batches[0].schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
