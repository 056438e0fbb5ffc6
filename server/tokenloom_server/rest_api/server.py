"""A socket, and uvicorn on it in a thread of this process."""

from __future__ import annotations

import logging
import socket
import threading

import uvicorn
from fastapi import FastAPI

from tokenloom_server.errors import ConfigError

logger = logging.getLogger(__name__)

#: Connections at once; above it uvicorn answers 503. Times MAX_BODY_BYTES, it bounds the memory for bodies.
MAX_CONNECTIONS = 128
#: From the thread's start to the first accepted connection; far above what it takes.
START_TIMEOUT_S = 10.0


class RestServer:
    """A running REST server: uvicorn in a thread of this process."""

    def __init__(self, app: FastAPI, listener: socket.socket) -> None:
        host, port = listener.getsockname()[:2]
        self.address: str = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        """Where it listens, as ``host:port``, with the port that was picked for 0."""
        self._listener = listener
        self._started = threading.Event()
        self._server = _Uvicorn(
            uvicorn.Config(
                app,
                loop="asyncio",
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=MAX_CONNECTIONS,
            ),
            self._started,
        )
        # A daemon, so that a request that never ends cannot keep the process.
        self._thread = threading.Thread(target=self._run, name="tokenloom-rest", daemon=True)

    def start(self) -> None:
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S) or not self._server.started:
            raise RuntimeError(f"the REST server did not start at {self.address}; the log has the reason")

    def stop(self, timeout: float = 5.0) -> bool:
        """Refuses new connections, lets requests end, and drops them after ``timeout`` seconds.

        Returns whether every request had ended by itself. Further calls do nothing.
        """
        # uvicorn takes whole seconds by its type and any number in fact; it needs some of the time to close.
        self._server.config.timeout_graceful_shutdown = timeout * 0.7  # type: ignore[assignment]
        self._server.should_exit = True
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._server.force_exit = True
            self._listener.close()
        elif self._server.dropped == 0:
            return True
        logger.warning("REST: a request was still running %g s after the stop; it was dropped", timeout)
        return False

    def _run(self) -> None:
        try:
            # No signal handlers: uvicorn installs them in the main thread only.
            self._server.run(sockets=[self._listener])
        except Exception:
            logger.exception("REST: the server at %s ended", self.address)
        finally:
            self._listener.close()
            self._started.set()


class _Uvicorn(uvicorn.Server):
    """Says when it accepts connections, and how many requests it dropped at its end."""

    def __init__(self, config: uvicorn.Config, ready: threading.Event) -> None:
        super().__init__(config)
        self._ready = ready
        self.dropped = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        # Those that are left were cancelled because the time was up.
        self.dropped = len(self.server_state.tasks)


def serve_rest(app: FastAPI, host: str, port: int) -> RestServer:
    """Listens at ``host:port`` (port 0 picks a free one) and serves ``app`` from a thread.

    Raises ``ConfigError`` when that address cannot be had.
    """
    server = RestServer(app, _listen(host, port))
    server.start()
    return server


def _listen(host: str, port: int) -> socket.socket:
    try:
        if not 0 <= port < 2**16:
            # Further down, getaddrinfo would take its lower 16 bits.
            raise OSError(0, f"a port is 0 to {2**16 - 1}")
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # Where a name has both, IPv4 first: it is what people type and what the line at start shows.
        family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        listener = socket.create_server(address[:2], family=family, backlog=MAX_CONNECTIONS)
    except OSError as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"the REST address {host}:{port} cannot be had ({reason}): stop what listens there, or choose another "
            "with --rest HOST:PORT (port 0 picks a free one)"
        ) from None
    # Connections inherit it. asyncio sets it only where it made the socket, and without it every answer, written
    # as head and body, waits 40 ms for the peer's delayed acknowledgement of the head.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
