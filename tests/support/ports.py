"""Ports for servers that are started, killed and started again at the same address."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from functools import cache
from itertools import cycle
from pathlib import Path

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000


def free_port() -> int:
    """A port on loopback that is free now, that no outgoing connection is given, and that no other server of these
    tests was given of late.

    A port out of the ephemeral range may become the local end of anybody's connection while the server that it was
    chosen for is not up; that server then cannot start for as long as the connection lives. And one that was given
    to another server of these tests is free, too, until that one starts.
    """
    count, candidates = _candidates()
    for _ in range(count):
        port = next(candidates)
        with socket.socket() as probe:
            # As servers bind: what a connection that was just closed leaves behind does not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"none of {count} ports from {_LOWEST} on is free on 127.0.0.1")


@cache
def _candidates() -> tuple[int, Iterator[int]]:
    """How many ports this process may give out, and these, over and over: each worker of pytest has its own."""
    first_ephemeral = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else 32_768
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ports = range(_LOWEST + worker, first_ephemeral, workers)
    return len(ports), cycle(random.SystemRandom().sample(ports, len(ports)))
