"""Between a server and the process beside it that speaks to Ray: JSON on a socket, and rows in shared memory."""

from __future__ import annotations

import json
import os
from multiprocessing.connection import Connection
from typing import Any

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


def write(file: int, content: Any) -> None:
    """Puts bytes at the beginning of a file in memory. To write there again is ten times cheaper than a new file."""
    view, position = memoryview(content), 0
    while position < len(view):
        position += os.pwrite(file, view[position:], position)


def read(file: int, size: int) -> pa.Buffer:
    """A copy of so many bytes from its beginning."""
    buffer, position = pa.allocate_buffer(size), 0
    while position < size:
        position += os.preadv(file, [memoryview(buffer)[position:]], position)
    return buffer
