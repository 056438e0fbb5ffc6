"""uvicorn as it serves here: how it is set up, how it ends."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from operator import attrgetter
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from tokenloom_server.api.tls import NewestContext, Tls
from tokenloom_server.errors import ConfigError

#: A connection without a request under way is closed after this time, seconds: since it was accepted, or since its last
#: answer. However slowly bytes come: a request is under way once its head is complete.
SILENT_S = 10.0
#: So long where the other side reads nothing of what it asked for, be it that more was asked for meanwhile, seconds.
UNREAD_S = 60.0


#: Of uvicorn's connection, which is not documented, those that do more here. Without them silent connections would live
#: for ever, or busy ones be closed.
_PARTS = ("connection_made", "on_response_complete", "pause_writing")
#: Its releases before this one were looked at.
KNOWN_BEFORE = "0.55"


class _Connection(H11Protocol):
    """A connection that knows since when its peer owes something."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self.waits_since = time.monotonic()

    def on_response_complete(self) -> None:
        self.waits_since = time.monotonic()
        super().on_response_complete()

    def pause_writing(self) -> None:
        self._unread_since = time.monotonic()
        super().pause_writing()

    @property
    def is_asked(self) -> bool:
        """Whether a request is under way."""
        return self.cycle is not None and not self.cycle.response_complete

    def drop_if_silent(self) -> None:
        """Closes it where the peer takes longer than it may."""
        since, allowed_s = self.waits_since, UNREAD_S
        if self.flow.write_paused:
            since = self._unread_since
        elif self.is_asked:
            return
        elif not self.transport.get_write_buffer_size():
            allowed_s = SILENT_S
        if time.monotonic() - since > allowed_s:
            self.transport.abort()


class Http(uvicorn.Server):
    """Answers on sockets, in the thread that calls ``run``; outside the main thread it touches no signals."""

    def __init__(self, app: ASGIApp, max_connections: int, tls: Tls | None) -> None:
        """Raises ``ConfigError`` where uvicorn is another than is known here."""
        if missing := [part for part in _PARTS if part not in vars(H11Protocol)]:
            raise ConfigError(
                f"uvicorn {uvicorn.__version__}: its connections have no {', '.join(missing)}, by which silent ones "
                f"are closed; install uvicorn<{KNOWN_BEFORE}"
            )
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http=_Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                # Of requests, whose work may outlast their connections; these are bounded when they are accepted.
                limit_concurrency=max_connections + 1,
            )
        )
        if tls is not None:
            # Checked when the server started; uvicorn would read the files now, and take weaker ciphers.
            self.config.load()
            self.config.ssl = context = NewestContext(ssl.PROTOCOL_TLS_SERVER)
            context.tls = tls
        #: Requests that had not ended in time.
        self.dropped = 0

    def end(self, timeout_s: float) -> None:
        """Refuses new connections, lets requests end, and drops those that take longer."""
        # uvicorn takes whole seconds by its type and any number in fact.
        self.config.timeout_graceful_shutdown = timeout_s  # type: ignore[assignment]
        self.should_exit = True

    def make_room(self) -> bool:
        """Closes the half of the connections without a request that is so for longer; False where there are none."""
        connections: Any = self.server_state.connections  # all are ours
        unasked = (
            each
            for each in connections
            if not (each.is_asked or each.transport.get_write_buffer_size())
        )
        silent = sorted(unasked, key=attrgetter("waits_since"))
        for each in silent[: len(silent) // 2 + 1]:
            each.transport.abort()
        return bool(silent)

    async def on_tick(self, counter: int) -> bool:
        for connection in list(self.server_state.connections):
            connection.drop_if_silent()  # type: ignore[union-attr]  # all are ours
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        # Those that are left were cancelled because the time was up.
        self.dropped = len(self.server_state.tasks)
