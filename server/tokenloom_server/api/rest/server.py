"""A socket, and a thread of this process that answers on it."""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tokenloom_proto.threads import Background, Loop

from tokenloom_server.api.auth import OPEN_TO_ALL, Access
from tokenloom_server.api.rest.listener import MAX_CONNECTIONS, MAX_HEALTH_CONNECTIONS, listen

if TYPE_CHECKING:
    from tokenloom_server.api.rest.routes import Routes
    from tokenloom_server.api.rest.uvicorn_server import Http
    from tokenloom_server.api.run_folder import RunFolder
    from tokenloom_server.api.service import Runs

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
        from tokenloom_server.order.snapshot_document import ResumeStateDocument, SnapshotDocument

        for document in (SnapshotDocument, ResumeStateDocument):
            document.model_rebuild()  # which the first restore would otherwise wait for
        app = create_app(
            Backend(runs, version("tokenloom"), grpc_address, self._access, folder),
            self._routes(),
            self._only_health,
        )
        http = self._http = Http(app, self._tls)
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
