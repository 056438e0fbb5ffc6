"""A socket that bounds its connections when they are accepted, and a thread of this process that answers on it."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tokenloom_proto.threads import Background, Loop

from tokenloom_server.api.auth import OPEN_TO_ALL, Access
from tokenloom_server.errors import ConfigError, reason

if TYPE_CHECKING:
    from tokenloom_server.api.rest.routes import Routes
    from tokenloom_server.api.rest.uvicorn_server import Http
    from tokenloom_server.api.run_folder import RunFolder
    from tokenloom_server.api.service import Runs


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


logger = logging.getLogger(__name__)

#: The packages of REST take as long to import as all else that a start needs. So they are imported when
#: somebody asks, or this long after the start, seconds: a trainer that waits then has its first batch.
IMPORT_AFTER_S = 2.0
#: How often the thread looks whether it is to end before that, seconds.
_TICK_S = 0.1


class RestServer:
    """REST at an address that it holds from its constructor on. ``start`` makes it answer, ``stop`` ends it."""

    def __init__(
        self,
        host: str,
        port: int,
        access: Access = OPEN_TO_ALL,
        *,
        routes: Callable[[], Sequence[Routes]] = tuple,
        only_health: bool = False,
    ) -> None:
        """Binds ``host:port``, port 0 for a free one. Raises ``ConfigError`` when that address cannot be had.

        ``routes`` gives those of tools; it is called when the packages of REST are imported."""
        self._routes = routes
        self._access = access
        self._tls = None if only_health else access.tls  # probes have no certificates
        self._only_health = only_health
        if only_health:
            self._listener = listen("--health", host, port, MAX_HEALTH_CONNECTIONS)
        else:
            self._listener = listen("--rest", host, port, MAX_CONNECTIONS)
        host, port = self._listener.getsockname()[:2]
        #: Where it listens, ``host:port``.
        self.address: str = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        #: The page, and what every route is below of.
        self.url = f"{'http' if self._tls is None else 'https'}://{self.address}/"
        self._stopping = False
        self._thread: Background | None = None
        self._http: Http | None = None

    def start(
        self, runs: Runs, folder: RunFolder | None = None, *, grpc_address: str | None = None
    ) -> None:
        """Answers with what is asked of ``runs`` (see ``routes.Backend``), from a thread. Requests wait until the
        packages are imported."""
        # A daemon, so that a request that never ends cannot keep the process.
        work = partial(self._run, runs, folder, grpc_address)
        self._thread = Loop("health" if self._only_health else "rest", work)
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> bool:
        """Refuses new connections, lets requests end, and drops them after ``timeout`` seconds.

        Returns whether every request had ended by itself. Further calls do nothing.
        """
        self._stopping = True
        http = self._http
        if http is not None:
            http.end(timeout * 0.7)  # it needs some of the time to close
        if self._thread is not None:
            self._thread.ending.set()
            self._thread.join(timeout)
        self._listener.close()
        if self._thread is None or not (
            self._thread.is_alive() or (http is not None and http.dropped)
        ):
            return True
        if http is not None:
            http.force_exit = True
        logger.warning(
            "REST: a request was still running %g s after the stop; it was dropped", timeout
        )
        return False

    def _run(self, runs: Runs, folder: RunFolder | None, grpc_address: str | None) -> None:
        self._await_somebody()
        if self._stopping:
            return
        from importlib.metadata import version

        from tokenloom_server.api.rest.app import create_app
        from tokenloom_server.api.rest.routes import Backend
        from tokenloom_server.api.rest.uvicorn_server import Http

        app = create_app(
            Backend(runs, version("tokenloom"), grpc_address, self._access, folder),
            self._routes(),
            self._only_health,
        )
        http = self._http = Http(app, MAX_CONNECTIONS, self._tls)
        self._listener.make_room = http.make_room
        # Whoever stops sets this first and looks at ``_http`` then: one of the two sees the other.
        if not self._stopping:
            http.run(sockets=[self._listener])

    def _await_somebody(self) -> None:
        until = time.monotonic() + IMPORT_AFTER_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._stopping and time.monotonic() < until and not selector.select(_TICK_S):
                pass
