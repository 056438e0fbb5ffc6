"""Ports for servers that are started, killed and started again at the same address."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000


def free_port() -> int:
    """A port on loopback that is free now and that no outgoing connection is given.

    A port out of the ephemeral range may become the local end of anybody's connection while the server that it was
    chosen for is not up; that server then cannot start for as long as the connection lives.
    """
    first_ephemeral = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else 32_768
    candidates = range(_LOWEST, first_ephemeral)
    for port in random.SystemRandom().sample(candidates, len(candidates)):
        with socket.socket() as probe:
            # As servers bind: what a connection that was just closed leaves behind does not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"none of the ports {_LOWEST} to {first_ephemeral - 1} is free on 127.0.0.1")
