"""Checks the token of a call before anything of it is read, and says which threads the call may take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import grpc
from tokenloom_proto.protocol import VERSION, version_of
from tokenloom_proto.threads import pool

from tokenloom_server.api.auth import Access, Scope
from tokenloom_server.api.grpc.detached_call import detachable
from tokenloom_server.api.grpc.rpc import Rpc, abort, errors_as_statuses, read, readable
from tokenloom_server.errors import ProtocolError, TokenloomError

if TYPE_CHECKING:
    _Handler = grpc.RpcMethodHandler[Any, Any]

#: Threads for those who do not train. They take none of the trainers', strangers none of those who look, and no more
#: requests than this are in memory at a time, each of MAX_REQUEST_BYTES at most.
REFUSAL_THREADS, OPEN_THREADS, READ_THREADS, PEEK_THREADS = 2, 8, 16, 32
#: The RPCs of gRPC's own services.
OTHER_RPCS: Mapping[str, Rpc] = {
    "/grpc.health.v1.Health/Check": Rpc(Scope.OPEN),
    # It stays open for as long as the caller likes; a stranger could take every place with it.
    "/grpc.health.v1.Health/Watch": Rpc(Scope.READ),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Rpc(Scope.READ),
}

_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class AuthInterceptor(grpc.ServerInterceptor):
    """Lets a call pass that brings the token which its method asks for. gRPC asks once per call, before it reads a
    message or gives the call a thread."""

    def __init__(self, access: Access) -> None:
        self._access = access
        #: By path. Those of the data loader are added before the server takes its first call.
        self.rpcs: Mapping[str, Rpc] = OTHER_RPCS
        #: Is called with the method, status and name of each refusal, whose method a stranger has made up perhaps.
        self.count_error: Callable[[str, str, str], None] = lambda method, status, name: None
        self._refusals = pool(REFUSAL_THREADS, "grpc-refusal")
        self._open = pool(OPEN_THREADS, "grpc-open")
        self._reads = pool(READ_THREADS, "grpc-reads")
        self._peeks = pool(PEEK_THREADS, "grpc-peeks")

    def close(self) -> None:
        """Ends the threads. To be called when the server takes no call any more."""
        for threads in (self._refusals, self._open, self._reads, self._peeks):
            threads.shutdown(wait=False)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], _Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        method = handler_call_details.method
        version = version_of(method) or VERSION
        # Whether a method exists at all is only for those who may do everything.
        rpc = self.rpcs.get(method, Rpc(Scope.ADMIN)) if version == VERSION else Rpc(Scope.READ)
        try:
            held = self._access.check(
                authorization_of(handler_call_details.invocation_metadata), rpc.scope
            )
            if version != VERSION:
                raise ProtocolError(
                    f"this client speaks version {version} of Tokenloom's wire protocol, and this server version "
                    f"{VERSION}: install the same release of tokenloom on both sides"
                )
        except TokenloomError as error:
            name = method.rpartition("/")[2] if method in self.rpcs else "other"
            self.count_error(name, error.grpc_status, error.name)
            return self._refusal(method, error)
        handler = continuation(handler_call_details)
        if handler is not None and method in OTHER_RPCS:
            handler = _refusing_malformed(
                handler, partial(self._access.hold, token=held, needed=rpc.scope)
            )
        if handler is None or (rpc.trains and held.scope >= Scope.TRAIN):
            return detachable(handler) if handler is not None and rpc.streams else handler
        if rpc.trains:
            return _in_pool(handler, self._peeks)
        return _in_pool(handler, self._open if rpc.scope is Scope.OPEN else self._reads)

    def _refusal(self, method: str, error: TokenloomError) -> _Handler:
        def refuse(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            self._access.refusals.note(method, unquote(context.peer()), str(error))
            abort(context, error)

        # Whatever the method is: of a stream of requests nothing is read that is not asked for.
        return _in_pool(grpc.stream_stream_rpc_method_handler(refuse), self._refusals)


def _refusing_malformed(
    handler: _Handler, hold: Callable[[grpc.ServicerContext], object]
) -> _Handler:
    """A handler of gRPC's own services, whose messages are read as ours are: gRPC itself logs a trace for a malformed
    one. ``hold`` is called as a call begins."""
    kind = next(kind for kind in _KINDS if getattr(handler, kind) is not None)
    behavior = getattr(handler, kind)

    @wraps(behavior)
    def call(messages: Any, context: grpc.ServicerContext, *rest: Any) -> Any:
        hold(context)

        def checked(message: Any) -> Any:
            with errors_as_statuses(context):
                return readable(message)

        return behavior(
            map(checked, messages) if kind.startswith("stream") else checked(messages),
            context,
            *rest,
        )

    parse = partial(read, handler.request_deserializer)
    return handler._replace(request_deserializer=parse, **{kind: call})  # type: ignore[attr-defined,no-any-return]


def _in_pool(handler: _Handler, threads: ThreadPoolExecutor) -> _Handler:
    """The handler, with threads that are not the server's. gRPC calls that experimental: a release that knows nothing
    of it takes the server's own."""
    kind = next(kind for kind in _KINDS if getattr(handler, kind) is not None)
    behavior = getattr(handler, kind)
    if hasattr(behavior, "experimental_non_blocking"):
        return handler  # it holds no thread
    apart = partial(behavior)
    apart.experimental_thread_pool = threads  # type: ignore[attr-defined]
    return handler._replace(**{kind: apart})  # type: ignore[attr-defined,no-any-return]


def authorization_of(metadata: Iterable[Any]) -> str | None:
    """The call's ``authorization``, where it has exactly one."""
    values = [value for key, value in metadata if key == "authorization"]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else None
