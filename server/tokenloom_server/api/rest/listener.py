"""The socket that REST listens on: it bounds connections when they are accepted."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from tokenloom_server.errors import ConfigError, reason

#: Connections that may wait to be accepted: a place among them is lost to a flood for a second, until TCP asks again.
_BACKLOG = 128
#: Connections at a time. Times MAX_BODY_BYTES, it bounds the memory for bodies.
MAX_CONNECTIONS = 128
#: The same of the listener for health alone.
MAX_HEALTH_CONNECTIONS = 32


class BoundedListener(socket.socket):
    """A listening socket with at most ``max_connections`` open at a time, also of those that have not sent a byte."""

    def __init__(self, listener: socket.socket, max_connections: int) -> None:
        """Takes over what ``listener`` holds."""
        super().__init__(fileno=listener.detach())
        self._max_connections = max_connections
        self._accepted: list[socket.socket] = []
        #: Closes connections that ask for nothing; whether there are some.
        self.make_room: Callable[[], bool] = lambda: False

    def accept(self) -> tuple[socket.socket, Any]:
        """Where no place is free, who waits gets that of a connection which asks for nothing; else it is closed. Raises
        ``BlockingIOError`` then, and where nobody waits."""
        self._accepted = [each for each in self._accepted if each.fileno() != -1]
        is_full = len(self._accepted) >= self._max_connections
        if is_full and self.make_room():
            raise BlockingIOError  # the event loop asks again at once, when the place is free
        connection, address = super().accept()
        if is_full:
            connection.close()
            raise BlockingIOError
        self._accepted.append(connection)
        return connection, address


def listen(option: str, host: str, port: int, max_connections: int) -> BoundedListener:
    """At ``host:port``, as an option of the command line asks. Raises ``ConfigError`` with the reason where it cannot
    be had."""
    try:
        if not 0 <= port < 2**16:
            # Further down, getaddrinfo would take its lower 16 bits.
            raise OSError(0, f"a port is 0 to {2**16 - 1}")
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # Where a name has both, IPv4 first: it is what people type and what the line at start shows.
        family, _, _, _, address = min(addresses, key=lambda entry: entry[0] != socket.AF_INET)
        listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"{option} {host}:{port}: this address cannot be had ({reason(error)}): stop what listens there, or choose "
            f"another with {option} HOST:PORT (port 0 picks a free one)"
        ) from None
    # Connections inherit it. asyncio sets it only where it made the socket, and without it every answer, written
    # as head and body, waits 40 ms for the peer's delayed acknowledgement of the head.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return BoundedListener(listener, max_connections)
