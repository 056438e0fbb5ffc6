"""What no route should have to think of: who asks, whether they may, how much they send, and whether it is JSON."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tokenloom_proto.seal import strict_json

from tokenloom_server.api.auth import Access, Needed, Token
from tokenloom_server.api.rest.problems import HTTP_ERRORS, SECURITY_HEADERS, problem, quoted
from tokenloom_server.core import caller
from tokenloom_server.errors import TokenloomError

#: A snapshot is at most 96 KB; escaped inside JSON it stays far below this.
MAX_BODY_BYTES = 2**20
#: A body that takes longer than this to arrive is given up.
BODY_TIMEOUT_S = 10.0
#: What is read and thrown away of a refused body, so that the sender gets to read the answer.
LINGER_BYTES = 2**26
LINGER_S = 2.0

#: A thread asks the event loop whether its client is still there, and waits for the answer so long, seconds.
LOOK_S = 10.0


@dataclass(eq=False)
class _Refused(Exception):
    """A request that goes no further."""

    status: int
    message: str
    name: str = ""
    """Where it is not the status's own."""
    headers: dict[str, str] = field(default_factory=dict)
    unread: bool = False
    """A body is still on its way."""


class Guard:
    """Refuses, before any route, what no route should have to think of.

    Where there are tokens, a request must bring the one that its route asks for; that is looked at before
    its body is read. Where there are none, a browser on the same machine still reaches a loopback address: a
    page of any site could send requests here, and one whose DNS name was pointed at this address could read
    the answers. So Host must be an address or name that no stranger can own (any, where a token is asked for:
    a page of a stranger has none), Origin (sent by browsers) must be this server, and a POST must carry a
    content type that browsers do not send unasked.
    """

    def __init__(self, app: ASGIApp, access: Access, needed_by: Callable[[Scope], Needed]) -> None:
        """``needed_by`` says what the route of a request asks for."""
        self._app = app
        self._own_name = socket.gethostname().lower()
        self._access = access
        self._needed_by = needed_by

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        reason = ""

        async def send_secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                if message["status"] in (401, 403):
                    self._access.refusals.note(
                        f"{scope['method']} {scope['path']}", _address_of(scope), reason
                    )
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            headers = Headers(scope=scope)
            self._check_sender(headers)
            token = self._check_token(scope, headers)
            if scope["method"] in ("POST", "PUT", "PATCH", "DELETE"):
                receive = _replay(await _read_strict_json(headers, receive), receive)
        except _Refused as refusal:
            headers_out = refusal.headers | ({"connection": "close"} if refusal.unread else {})
            reason = refusal.message
            name = refusal.name or HTTP_ERRORS[refusal.status]
            answer = problem(refusal.status, name, refusal.message, headers_out)
            await answer(
                scope,
                receive,
                _lingering(send_secured, receive) if refusal.unread else send_secured,
            )
        except ClientDisconnect:
            pass
        else:
            caller.waits.set(_still_connected(Request(scope, receive)))
            caller.who.set(token.caller(_address_of(scope)))
            reason = f"refused to {token.name}"
            await self._app(scope, receive, send_secured)

    def _check_sender(self, headers: Headers) -> None:
        host = headers.get("host")
        if host is not None and not self._access.closed and not self._is_ours(host):
            raise _Refused(
                421,
                f"Host is {quoted(host)}, which is not a name of this server; expected its IP address, localhost, "
                f"a name without dots, or {self._own_name}: use one of these",
            )
        for origin in headers.getlist("origin"):
            # Compared as text (an origin is scheme://host[:port]), so that a malformed one is just another one.
            if host is None or origin.partition("://")[2].lower() != host.lower():
                raise _Refused(
                    403,
                    f"Origin is {quoted(origin)}, but pages of other hosts may not use this server "
                    f"(Host is {quoted(host)}); send the request from this server's own page, or without a browser",
                )

    def _check_token(self, scope: Scope, headers: Headers) -> Token:
        needed = self._needed_by(scope)
        sent = headers.getlist("authorization")
        try:
            return self._access.check(sent[0] if len(sent) == 1 else None, *needed)
        except TokenloomError as error:
            # What RFC 6750 says to a client: which kind of token, and which scope was short.
            lacks = (
                f', error="insufficient_scope", scope="{needed.scope.name.lower()}"'
                if error.http_status == 403
                else ""
            )
            raise _Refused(
                error.http_status,
                str(error),
                name=error.name,
                headers={"www-authenticate": f'Bearer realm="tokenloom"{lacks}'},
                unread=_has_body(headers),
            ) from None

    def _is_ours(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(name)
            return True
        return bool(name) and (
            "." not in name or name.endswith(".localhost") or name == self._own_name
        )


async def _read_strict_json(headers: Headers, receive: Receive) -> bytes:
    """The body, of bounded size, as JSON without NaN, infinities and repeated keys."""
    content_type = headers.get("content-type", "")
    declared = headers.get("content-length", "0")
    unread = _has_body(headers)
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise _Refused(
            415,
            f"Content-Type is {quoted(content_type)}, but a POST must carry Content-Type: application/json, also "
            "where it has no body (this keeps pages of other sites from sending it)",
            unread=unread,
        )
    too_large = f"the body is larger than {MAX_BODY_BYTES} bytes"
    if not declared.isdecimal() or int(declared) > MAX_BODY_BYTES:
        raise _Refused(413, f"{too_large}: Content-Length is {declared}", unread=True)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > MAX_BODY_BYTES:
                    raise _Refused(413, too_large, unread=more)
    except TimeoutError:
        raise _Refused(
            408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s", unread=True
        ) from None
    if body:
        try:
            strict_json(bytes(body))
        except (ValueError, RecursionError) as error:
            raise _Refused(422, f"body: not the JSON that is expected: {error}") from None
    return bytes(body)


def _still_connected(request: Request) -> Callable[[], bool]:
    """Whether the client is still there, for the thread in which its route works."""
    loop = asyncio.get_running_loop()
    return lambda: (
        not asyncio.run_coroutine_threadsafe(request.is_disconnected(), loop).result(LOOK_S)
    )


def _address_of(scope: Scope) -> str:
    host, port = scope.get("client") or ("", 0)
    return f"{host}:{port}"


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _replay(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives ``body`` once, then what the connection has to say."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def _lingering(send: Send, receive: Receive) -> Send:
    """A ``send`` that keeps the connection a little longer, throwing away what still arrives.

    A socket closed with unread data is reset, and the sender would see that instead of the answer.
    """

    async def send_and_linger(message: Message) -> None:
        if message["type"] != "http.response.body":
            await send(message)
            return
        await send({**message, "more_body": True})
        left = LINGER_BYTES
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while left > 0:
                    received = await receive()
                    left -= len(received.get("body", b""))
                    if not received.get("more_body", False):
                        break
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return send_and_linger
