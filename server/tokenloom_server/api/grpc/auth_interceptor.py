"""The way in: the token of a call, looked at before anything of it is read, and the threads that the call may take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from tokenloom_server.api.auth import RPCS, TRAINING, Access, Scope
from tokenloom_server.errors import TokenloomError

if TYPE_CHECKING:
    _Handler = grpc.RpcMethodHandler[Any, Any]

#: A Join and a Restore may carry a snapshot (``snapshot.MAX_BYTES``). gRPC refuses what is larger before it has it in
#: memory; what the other methods take is much less.
MAX_REQUEST_BYTES = 17 * 2**20
#: Threads for those who do not train. They take none of the trainers', strangers none of those who look, and no more
#: requests than this are in memory at a time, each of MAX_REQUEST_BYTES at most.
REFUSAL_THREADS, OPEN_THREADS, FIGURE_THREADS, PEEK_THREADS = 2, 8, 16, 32
#: Details travel in an HTTP/2 header: they are kept well below its limit.
_MAX_DETAILS = 6000

_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class Entry(grpc.ServerInterceptor):
    """Lets a call in that has the token which its method asks for. gRPC asks once per call, before it reads a message
    or gives the call a thread."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._refusals = ThreadPoolExecutor(REFUSAL_THREADS, thread_name_prefix="grpc-refusal")
        self._open = ThreadPoolExecutor(OPEN_THREADS, thread_name_prefix="grpc-open")
        self._figures = ThreadPoolExecutor(FIGURE_THREADS, thread_name_prefix="grpc-figures")
        self._peeks = ThreadPoolExecutor(PEEK_THREADS, thread_name_prefix="grpc-peeks")

    def close(self) -> None:
        """Ends the threads. To be called when the server takes no call any more."""
        for pool in (self._refusals, self._open, self._figures, self._peeks):
            pool.shutdown(wait=False)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], _Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        method = handler_call_details.method
        # A method that is not in the table is not there either; only who may do everything is told so.
        needed = RPCS.get(method, Scope.CONTROL)
        try:
            held = self._access.check(authorization_of(handler_call_details.invocation_metadata), needed)
        except TokenloomError as error:
            return self._refusal(error)
        handler = continuation(handler_call_details)
        if handler is None or (method in TRAINING and held is Scope.CONTROL):
            return handler
        if method in TRAINING:
            return _in_pool(handler, self._peeks)
        return _in_pool(handler, self._open if needed is Scope.OPEN else self._figures)

    def _refusal(self, error: TokenloomError) -> _Handler:
        def refuse(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            abort(context, error.grpc_status, error.name, str(error))

        # Whatever the method is: of a stream of requests nothing is read that is not asked for.
        return _in_pool(grpc.stream_stream_rpc_method_handler(refuse), self._refusals)


def _in_pool(handler: _Handler, pool: ThreadPoolExecutor) -> _Handler:
    """The handler, with threads that are not the server's. gRPC calls that experimental: a release that knows nothing
    of it takes the server's own."""
    kind = next(kind for kind in _KINDS if getattr(handler, kind) is not None)
    behavior = getattr(handler, kind)
    if hasattr(behavior, "experimental_non_blocking"):
        return handler  # it holds no thread
    apart = partial(behavior)
    apart.experimental_thread_pool = pool  # type: ignore[attr-defined]
    return handler._replace(**{kind: apart})  # type: ignore[attr-defined,no-any-return]


def authorization_of(metadata: Iterable[Any]) -> str | None:
    """The call's ``authorization``, where it has exactly one."""
    found = [value for key, value in metadata if key == "authorization"]
    return found[0] if len(found) == 1 and isinstance(found[0], str) else None


def abort(
    context: grpc.ServicerContext, status: str, name: str, message: str, retry_for_s: float | None = None
) -> NoReturn:
    """Ends a call with an error: the name in the metadata, the message in the details. ``retry_for_s``: for how long
    trying again makes sense, where the server knows."""
    retry = () if retry_for_s is None else (("tokenloom-retry-for-s", f"{retry_for_s:.1f}"),)
    context.set_trailing_metadata((("tokenloom-error", name), *retry))
    context.abort(getattr(grpc.StatusCode, status), message[:_MAX_DETAILS])
    raise AssertionError("unreachable: abort raises")
