"""REST: figures, snapshots and restore of the runs of this server, health, metrics and the page.

A request passes, in this order:

1. ``_Guard``    before any route: which host was asked and from where, content type, size, strict JSON
2. the route     FastAPI: path and body against the models, in an order and shape that OpenAPI documents
3. the service   ``stats.RunService``; it may block, so routes that call it run in worker threads
4. ``_problem``  every error leaves as ``{"error": name, "message": …}`` with its status, never as a trace
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import math
import socket
import threading
from collections.abc import Collection, Iterable
from typing import Annotated, Any
from urllib.parse import urlsplit

import uvicorn
from fastapi import Body, FastAPI, Path
from fastapi.exceptions import RequestValidationError
from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tokenloom_proto.seal import unseal

from tokenloom_server.errors import ConfigError, TokenloomError
from tokenloom_server.metrics import create_registry
from tokenloom_server.page import page_routes
from tokenloom_server.state import MAX_COUNTER
from tokenloom_server.stats import ResumePoint, RunService, RunStats, SnapshotInfo

logger = logging.getLogger(__name__)

#: A snapshot is at most 64 KB; escaped inside JSON it stays far below this.
MAX_BODY_BYTES = 2**20
#: A body that takes longer than this to arrive is given up.
BODY_TIMEOUT_S = 10.0
#: What is read and thrown away of a refused body, so that the sender gets to read the answer.
LINGER_BYTES = 2**26
LINGER_S = 2.0
#: Connections at once; above it uvicorn answers 503. Times MAX_BODY_BYTES, it bounds the memory for bodies.
MAX_CONNECTIONS = 128
#: From the thread's start to the first accepted connection; far above what it takes.
START_TIMEOUT_S = 10.0

SECURITY_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}

#: The names of errors that belong to HTTP and not to ``errors``.
HTTP_ERRORS = {
    400: "BadRequest",
    403: "OriginRefused",
    404: "NotFound",
    405: "MethodNotAllowed",
    408: "RequestTimeout",
    413: "BodyTooLarge",
    415: "ContentTypeRequired",
    421: "HostRefused",
    422: "InvalidRequest",
    500: "InternalError",
    503: "NotReady",
}


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class ErrorBody(_Model):
    """Every error's body."""

    error: str = Field(examples=["NotFound"])
    """The error's stable name."""
    message: str = Field(examples=["run 'wiki' is not served here; expected one of wiki-and-code"])
    """What was found, what was expected, and what to do."""


class Alive(_Model):
    status: str = Field(examples=["alive"])
    version: str = Field(examples=["0.1.0"])


class Ready(_Model):
    status: str = Field(examples=["ready"])


class RunList(_Model):
    runs: list[str] = Field(examples=[["wiki-and-code"]])
    """Names, as in the mixture files."""
    version: str = Field(examples=["0.1.0"])
    """The server's version."""
    grpc_address: str | None = Field(examples=["127.0.0.1:50051"])
    """Where trainers connect; null where the server was not told."""


SampleIndex = Annotated[int, Field(ge=0, le=MAX_COUNTER, examples=[4096])]


class SnapshotRequest(_Model):
    sample_index: SampleIndex | None = None
    """From the oldest journalled state up to the horizon; null or absent for the committed one."""


class SnapshotSaved(_Model):
    id: str
    sample_index: int
    digest: str
    """Rolling digest of all samples before ``sample_index``."""
    total_tokens: int
    """Tokens of all samples before ``sample_index``."""


class RestoreRequest(_Model):
    """Exactly one of the three."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": [k]} for k in ("snapshot_id", "sample_index", "snapshot")]}
    )

    snapshot_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """A snapshot that was saved in the ledger."""
    sample_index: SampleIndex | None = None
    """Any sample index from the oldest journalled state up to the horizon."""
    snapshot: Annotated[str, Field(min_length=1)] | None = None
    """A sealed snapshot as a string: what a trainer's ``state_dict()["tokenloom"]`` holds."""

    @model_validator(mode="after")
    def _exactly_one(self) -> RestoreRequest:
        given = sorted(self.model_dump(exclude_none=True))
        if len(given) != 1:
            raise ValueError(
                f"exactly one of snapshot_id, sample_index and snapshot, but {' and '.join(given) or 'none'} was given"
            )
        return self


RunName = Annotated[
    str,
    Path(
        description="The run's name, as in its mixture file.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$",
        examples=["wiki-and-code"],
    ),
]
SnapshotId = Annotated[
    str,
    Path(description="The id that saving the snapshot gave.", pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}$"),
]


def create_app(
    service: RunService, *, version: str, grpc_address: str | None = None, allowed_hosts: Collection[str] = ()
) -> FastAPI:
    """The REST interface to ``service``, with its own metrics registry.

    ``grpc_address`` is shown to people who have no trainer yet. ``allowed_hosts`` are DNS names that the
    server answers to besides IP addresses, localhost and names without a dot (see ``_Guard``).
    """
    app = FastAPI(
        title="Tokenloom",
        version=version,
        summary="Figures, snapshots and restore of training runs' data.",
        description='Every error is `{"error": name, "message": text}`. POST requests must carry '
        "`Content-Type: application/json`, with or without a body.",
        docs_url=None,  # both load their scripts from elsewhere, which users behind firewalls cannot
        redoc_url=None,
        redirect_slashes=False,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
    )
    _add_run_routes(app, service, version, grpc_address)
    _add_health_routes(app, service, version)
    app.router.routes.extend(page_routes())
    app.add_exception_handler(TokenloomError, _on_tokenloom_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_fault)
    app.add_middleware(_Guard, allowed_hosts=frozenset(name.lower() for name in (*allowed_hosts, socket.gethostname())))
    return app


# Routes


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error responses of a route for OpenAPI; those of ``_Guard`` come with every route."""
    meanings = {
        404: "No such run or snapshot.",
        409: "The run is in a state that does not allow this, such as `SourceChanged`.",
        413: f"`BodyTooLarge`: more than {MAX_BODY_BYTES} bytes.",
        415: "`ContentTypeRequired`: a POST without `Content-Type: application/json`.",
        416: "`BeyondHorizon`: that sample has not been and may not yet be produced, or its state is gone.",
        422: "A field is not what is expected, or the snapshot is refused (`InvalidRequest`, `SnapshotInvalid`).",
        500: "A source, the tokeniser or the server failed.",
        503: "The ledger cannot be reached, another server leads, or this one is starting or stopping.",
        403: "`OriginRefused`: a browser sent this for a page of another host.",
        421: "`HostRefused`: the Host header is not a name of this server.",
    }
    return {status: {"model": ErrorBody, "description": meanings[status]} for status in (403, *statuses, 421)}


def _add_run_routes(app: FastAPI, service: RunService, version: str, grpc_address: str | None) -> None:
    @app.get("/v1/runs", summary="The runs of this server", tags=["runs"], responses=_errors(503))
    def list_runs() -> RunList:
        return RunList(runs=service.names(), version=version, grpc_address=grpc_address)

    @app.get(
        "/v1/runs/{run}/stats",
        summary="A run's figures",
        description="Counters are committed ones: they move when every rank has acknowledged and the ledger holds it.",
        tags=["runs"],
        responses=_errors(404, 422, 503),
    )
    def read_stats(run: RunName) -> RunStats:
        return service.stats(run)

    @app.post(
        "/v1/runs/{run}/snapshots",
        status_code=201,
        summary="Take a snapshot and save it in the ledger",
        tags=["snapshots"],
        responses=_errors(404, 409, 413, 415, 416, 422, 500, 503),
    )
    def save_snapshot(
        run: RunName,
        request: Annotated[
            SnapshotRequest | None,
            Body(
                openapi_examples={
                    "committed": {"summary": "At the committed sample index", "value": {}},
                    "earlier": {"summary": "At an earlier sample index", "value": {"sample_index": 4096}},
                }
            ),
        ] = None,
    ) -> SnapshotSaved:
        text, snapshot_id = service.snapshot(run, request.sample_index if request else None, True)
        assert snapshot_id is not None, "a saved snapshot has an id"
        content = unseal(text)
        return SnapshotSaved(
            id=snapshot_id,
            sample_index=content["sample_index"],
            digest=content["digest"],
            total_tokens=content["total_tokens"],
        )

    @app.get(
        "/v1/runs/{run}/snapshots",
        summary="The snapshots saved in the ledger",
        tags=["snapshots"],
        responses=_errors(404, 422, 503),
    )
    def list_snapshots(run: RunName) -> list[SnapshotInfo]:
        return service.snapshots(run)

    @app.get(
        "/v1/runs/{run}/snapshots/{snapshot_id}",
        summary="A saved snapshot, byte for byte",
        description="The sealed text itself, unchanged: its checksum covers these bytes.",
        tags=["snapshots"],
        response_class=Response,
        responses={
            200: {"content": {"application/json": {"schema": {"type": "object"}}}, "description": "The sealed text."},
            **_errors(404, 422, 503),
        },
    )
    def read_snapshot(run: RunName, snapshot_id: SnapshotId) -> Response:
        return Response(service.saved_snapshot(run, snapshot_id), media_type="application/json")

    @app.post(
        "/v1/runs/{run}/restore",
        summary="Pin where the next generation starts",
        description="Nothing moves until the next trainer opens its generation; a loaded state of that trainer must "
        "agree with the pinned point.",
        tags=["snapshots"],
        responses=_errors(404, 409, 413, 415, 416, 422, 500, 503),
    )
    def restore(
        run: RunName,
        request: Annotated[
            RestoreRequest,
            Body(
                openapi_examples={
                    "saved": {"summary": "A saved snapshot", "value": {"snapshot_id": "7f3a"}},
                    "index": {"summary": "A sample index", "value": {"sample_index": 4096}},
                    "text": {
                        "summary": "A snapshot out of a checkpoint",
                        "value": {"snapshot": '{"checksum":"sha256:…","format_version":1,…}'},
                    },
                }
            ),
        ],
    ) -> ResumePoint:
        return service.restore(
            run, snapshot_id=request.snapshot_id, sample_index=request.sample_index, text=request.snapshot
        )


def _add_health_routes(app: FastAPI, service: RunService, version: str) -> None:
    registry = create_registry(service, version=version)

    @app.get("/healthz", summary="Is the process alive?", tags=["health"], responses=_errors())
    async def healthz() -> Alive:
        # On the event loop, not in a worker thread: it answers while every worker waits for the ledger.
        return Alive(status="alive", version=version)

    @app.get("/readyz", summary="Can requests be served?", tags=["health"], responses=_errors(503))
    def readyz() -> Ready:
        reason = service.not_ready()
        if reason is not None:
            raise HTTPException(503, reason)
        return Ready(status="ready")

    @app.get(
        "/metrics",
        summary="The figures for Prometheus",
        tags=["health"],
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **_errors(503)},
    )
    def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), media_type=None, headers={"content-type": content_type})


# Errors


def _problem(status: int, name: str, message: str, headers: dict[str, str] | None = None) -> Response:
    # A message may quote a lone surrogate out of a request; it leaves as JSON's own escape of it.
    text = json.dumps({"error": name, "message": message}, ensure_ascii=False)
    retry = {"retry-after": "1"} if status == 503 else {}
    return Response(
        text.encode("utf-8", "backslashreplace"),
        status_code=status,
        media_type="application/json",
        headers=retry | (headers or {}),
    )


def _on_tokenloom_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TokenloomError)
    return _problem(error.http_status, error.name, str(error))


def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 404:
        message = f"no such path: {_quoted(request.url.path)}; /openapi.json lists them"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{_quoted(request.url.path)} answers to {allowed}, but this is {request.method}"
    return _problem(
        error.status_code, HTTP_ERRORS.get(error.status_code, "BadRequest"), message, dict(error.headers or {})
    )


def _on_fault(request: Request, error: Exception) -> Response:
    # Starlette raises the fault again after this answer, and uvicorn logs it with its trace.
    message = "the server met a fault of its own; its log has the details"
    return _problem(500, HTTP_ERRORS[500], message, SECURITY_HEADERS)


def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _problem(422, HTTP_ERRORS[422], "\n".join(_fault_line(fault) for fault in error.errors()))


def _fault_line(fault: dict[str, Any]) -> str:
    """``body.sample_index: found "5"; expected a valid integer``."""
    field = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "missing":
        return f"{field}: found nothing, but it is required"
    if fault["type"] == "extra_forbidden":
        return f"{field}: found a field that is not known here; /openapi.json lists those that are"
    expected = str(fault["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    return f"{field}: found {_quoted(fault['input'])}; expected {expected[:1].lower()}{expected[1:]}"


def _quoted(value: object) -> str:
    """A value out of a request as JSON, cut to a length that fits a message."""
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:100]}… ({len(text)} characters)"


# The guard


class _Refused(Exception):
    """A request that goes no further."""

    def __init__(self, status: int, message: str, *, unread: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.unread = unread  # a body is still on its way


class _Guard:
    """Refuses, before any route, what no route should have to think of.

    There is no authentication, and a browser on the same machine reaches a loopback address: a page of
    any site could send requests here, and one whose DNS name was pointed at this address could read the
    answers. So Host must be an address or name that no stranger can own, Origin (sent by browsers) must
    be this server, and a POST must carry a content type that browsers do not send unasked.
    """

    def __init__(self, app: ASGIApp, *, allowed_hosts: frozenset[str]) -> None:
        self._app = app
        self._allowed_hosts = allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            headers = Headers(scope=scope)
            self._check_sender(headers)
            if scope["method"] in ("POST", "PUT", "PATCH", "DELETE"):
                receive = _replay(await _read_strict_json(headers, receive), receive)
        except _Refused as refusal:
            headers_out = {"connection": "close"} if refusal.unread else {}
            answer = _problem(refusal.status, HTTP_ERRORS[refusal.status], refusal.message, headers_out)
            await answer(scope, receive, _lingering(send_secured, receive) if refusal.unread else send_secured)
        except _Gone:
            pass
        else:
            await self._app(scope, receive, send_secured)

    def _check_sender(self, headers: Headers) -> None:
        host = headers.get("host")
        if host is not None and not self._is_ours(host):
            raise _Refused(
                421,
                f"Host is {_quoted(host)}, which is not a name of this server; expected its IP address, localhost, "
                f"a name without dots, or one of {', '.join(sorted(self._allowed_hosts))}: use one of these",
            )
        for origin in headers.getlist("origin"):
            # Compared as text (an origin is scheme://host[:port]), so that a malformed one is just another one.
            if host is None or origin.partition("://")[2].lower() != host.lower():
                raise _Refused(
                    403,
                    f"Origin is {_quoted(origin)}, but pages of other hosts may not use this server "
                    f"(Host is {_quoted(host)}); send the request from this server's own page, or without a browser",
                )

    def _is_ours(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(name)
            return True
        return bool(name) and ("." not in name or name.endswith(".localhost") or name in self._allowed_hosts)


class _Gone(Exception):
    """The client went away while its body was read."""


async def _read_strict_json(headers: Headers, receive: Receive) -> bytes:
    """The body, of bounded size, as JSON without NaN, infinities and repeated keys."""
    content_type = headers.get("content-type", "")
    declared = headers.get("content-length", "0")
    chunked = "transfer-encoding" in headers
    unread = chunked or declared != "0"
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise _Refused(
            415,
            f"Content-Type is {_quoted(content_type)}, but a POST must carry Content-Type: application/json, also "
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
                    raise _Gone
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > MAX_BODY_BYTES:
                    raise _Refused(413, too_large, unread=more)
    except TimeoutError:
        raise _Refused(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s", unread=True) from None
    if body:
        try:
            json.loads(body, parse_constant=_refuse_number, parse_float=_finite, object_pairs_hook=_unique_keys)
        except (ValueError, RecursionError) as error:
            raise _Refused(422, f"body: not the JSON that is expected: {error}") from None
    return bytes(body)


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


def _refuse_number(name: str) -> float:
    raise ValueError(f"{name} is not a number in JSON; numbers are finite here")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refuse_number(digits[:40])


def _unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {_quoted(key)} is there twice")
        result[key] = value
    return result


# The server


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
        """Refuses new connections, lets requests end within ``timeout`` seconds, then drops them.

        Returns whether every request had ended. Further calls do nothing.
        """
        # uvicorn has to notice and to close: it gets a part of the time for that.
        self._server.config.timeout_graceful_shutdown = timeout * 0.7  # type: ignore[assignment]
        self._server.should_exit = True
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._server.force_exit = True
            self._listener.close()
            logger.warning("REST: a request was still running %g s after the stop; it is left behind", timeout)
            return False
        return True

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
    """Says when it accepts connections."""

    def __init__(self, config: uvicorn.Config, ready: threading.Event) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready.set()


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
