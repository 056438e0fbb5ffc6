"""Messages between a server and the process beside it that speaks to Ray: a head, and bytes in shared memory."""

from __future__ import annotations

import json
import mmap
import os
import socket
from typing import Any, NamedTuple

#: Bytes of a head at most.
HEAD_BYTES = 1 << 16


class Message(NamedTuple):
    """``content``: bytes that the other process wrote, mapped; None where there are none."""

    head: dict[str, Any]
    content: mmap.mmap | None


def pair() -> tuple[socket.socket, socket.socket]:
    """The two ends; messages keep their bounds."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(to: socket.socket, head: dict[str, Any], content: Any = None) -> None:
    """Raises ``OSError`` where nobody is at the other end."""
    text = json.dumps(head).encode()
    if content is None:
        to.send(text)
        return
    file = os.memfd_create("tokenloom-rows", os.MFD_CLOEXEC)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(file, view) :]
        socket.send_fds(to, [text], [file])
    finally:
        os.close(file)


def receive(of: socket.socket) -> Message | None:
    """The next message; None where the other end is gone."""
    text, files, _, _ = socket.recv_fds(of, HEAD_BYTES, 1)
    if not text:
        return None
    if not files:
        return Message(json.loads(text), None)
    try:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return Message(json.loads(text), mmap.mmap(files[0], 0, flags=flags, prot=mmap.PROT_READ))
    finally:
        os.close(files[0])
