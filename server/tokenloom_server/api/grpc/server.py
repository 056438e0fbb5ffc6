"""The gRPC endpoint."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from tokenloom_proto.threads import Background

from tokenloom_server.api.auth import OPEN_TO_ALL, Access
from tokenloom_server.api.grpc.rpc import MAX_REQUEST_BYTES
from tokenloom_server.api.tls import Tls
from tokenloom_server.errors import ConfigError, reason

if TYPE_CHECKING:
    from tokenloom_server.api.grpc.endpoint import Endpoint
    from tokenloom_server.api.service import Runs

#: A connection that is silent for so long is asked for a sign of life, and dropped where none comes within as much
#: time again, seconds.
KEEPALIVE_S = 30
#: A new connection has so long for the handshakes of TLS and HTTP/2, and one without a call is closed after so long,
#: seconds: the client connects again when it calls.
HANDSHAKE_S, IDLE_S = 10, 120
#: A call that came waits so long for its turn, seconds.
TURN_S = 600
#: Calls at a time; the next one is refused. Room for the largest world twice, since a rank that reconnects comes
#: before its old stream was seen to be broken, and for those who look on.
MAX_CALLS = 2 * 4096 + 256

_T = TypeVar("_T")


class GrpcServer:
    """The gRPC endpoint: the data loader, health and reflection. Holds its address from its constructor on."""

    def __init__(
        self, address: str, access: Access = OPEN_TO_ALL, max_connections: int = MAX_CALLS
    ) -> None:
        """Binds ``address`` (``host:port``, port 0 for a free one), for so many connections at a time: the next is
        closed at once. Raises ``ConfigError`` where that fails."""
        self._access = access
        self._endpoint: Endpoint | None = None
        host = address.rpartition(":")[0]
        try:
            # gRPC counts for each address by itself; a name such as localhost has two.
            self._max_connections = max_connections // _try_to_listen(address)
            self._server = _on_loop(_made(_options(self._max_connections)))
            if access.tls is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, _credentials(access.tls))
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"--grpc {address}: cannot listen there ({reason(error)}); stop what listens there, or give another "
                "address of this machine (port 0 picks a free one)"
            ) from None
        if not port:
            raise ConfigError(
                f"--grpc {address}: cannot listen there; expected host:port of this machine"
            )
        #: Where clients connect, ``host:port``.
        self.address = f"{host}:{port}"

    def start(self, runs: Runs, rest_address: str | None = None) -> None:
        """Serves ``runs``; ``rest_address`` is for who asks. Calls that came since the address was bound have waited,
        and are answered now."""
        # Not at the top: the address is bound, and trainers that wait connect, while this is still to be imported.
        from tokenloom_server.api.grpc.endpoint import Endpoint
        from tokenloom_server.api.grpc.servicer import DataLoader

        loader = DataLoader(runs, self._access, self._max_connections, rest_address)

        async def begin() -> None:
            self._endpoint = Endpoint(self._access, loader, runs, MAX_CALLS)
            self._server.add_generic_rpc_handlers((self._endpoint,))
            await self._endpoint.begin()
            await self._server.start()

        _on_loop(begin())

    def stop(self, grace_s: float) -> None:
        """Takes no new calls, and gives those under way ``grace_s`` seconds to end."""

        async def end() -> None:
            if self._endpoint is None:
                await self._server.start()  # one that was not gives its address back to nobody
            else:
                await self._endpoint.end()
            await self._server.stop(grace_s)

        with suppress(TimeoutError):
            _on_loop(end(), grace_s + 1.0)
        if self._endpoint is not None:
            _loop().call_soon_threadsafe(self._endpoint.close)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """gRPC's: one for all servers of a process, since gRPC's own queue of events has but one."""
    loop = asyncio.new_event_loop()
    Background("grpc-loop", loop.run_forever).start()
    return loop


def _on_loop(work: Coroutine[Any, Any, _T], timeout_s: float | None = None) -> _T:
    return asyncio.run_coroutine_threadsafe(work, _loop()).result(timeout_s)


async def _made(options: list[tuple[str, int]]) -> grpc.aio.Server:
    return grpc.aio.server(options=options)


def _options(max_connections: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
        # A client whose machine is gone, or that is stopped, would keep its stream, and what waits in it.
        ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_S * 1000),
        (
            "grpc.http2.ping_timeout_ms",
            KEEPALIVE_S * 1000,
        ),  # else a minute, whatever the line above says
        ("grpc.http2.max_pings_without_data", 0),
        # Clients ping when a call is long silent, such as a Join that waits for rank 0.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # A stranger who only connects has a file descriptor of the server, without a call or a token.
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_S * 1000),
        ("grpc.max_connection_idle_ms", IDLE_S * 1000),
        # The calls of a large world come at once, and each has its turn. gRPC would drop what waits for half a minute,
        # and some of more than a thousand.
        ("grpc.server_max_unrequested_time_in_server", TURN_S),
        ("grpc.server.max_pending_requests", MAX_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_CALLS),
        # Two servers on one port would share its connections without a word.
        ("grpc.so_reuseport", 0),
    ]


def _credentials(tls: Tls) -> grpc.ServerCredentials:
    def newest() -> grpc.ServerCertificateConfiguration:  # gRPC asks for each connection
        now = tls.content
        return grpc.ssl_server_certificate_configuration(
            [(now.key, now.certificate)], now.client_ca
        )

    return grpc.dynamic_ssl_server_credentials(newest(), newest, tls.content.client_ca is not None)


def _try_to_listen(address: str) -> int:
    """How many addresses the name has. Raises ``OSError`` with the reason; gRPC itself knows none, and writes lines of
    its own to stderr."""
    host, _, port = address.rpartition(":")
    addresses = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    for family, _, _, _, socket_address in addresses:
        socket.create_server(socket_address[:2], family=family).close()
    return len(addresses)
