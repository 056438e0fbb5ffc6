"""uvicorn as it serves here: how it is set up, how it ends."""

from __future__ import annotations

import socket

import uvicorn
from starlette.types import ASGIApp

from tokenloom_server.api.tls import Tls

#: Connections at once; above it uvicorn answers 503. Times MAX_BODY_BYTES, it bounds the memory for bodies.
MAX_CONNECTIONS = 128


class Http(uvicorn.Server):
    """Answers on sockets, in the thread that calls ``run``; outside the main thread it touches no signals."""

    def __init__(self, app: ASGIApp, tls: Tls | None = None) -> None:
        super().__init__(
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
            )
        )
        if tls is not None:
            # Checked when the server started; uvicorn would read the files now, and take weaker ciphers.
            self.config.load()
            self.config.ssl = tls.context
        #: Requests that had not ended in time.
        self.dropped = 0

    def end(self, timeout_s: float) -> None:
        """Refuses new connections, lets requests end, and drops those that take longer."""
        # uvicorn takes whole seconds by its type and any number in fact.
        self.config.timeout_graceful_shutdown = timeout_s  # type: ignore[assignment]
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        # Those that are left were cancelled because the time was up.
        self.dropped = len(self.server_state.tasks)
