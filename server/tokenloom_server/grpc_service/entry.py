"""Who may call: the token of a call, looked at before anything of the call is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import grpc

from tokenloom_server.errors import TokenloomError
from tokenloom_server.security import RPCS, Access, Scope

#: Refusals are said by threads of their own, so that strangers take none of the trainers'.
_REFUSERS = 2
#: Details travel in an HTTP/2 header: they are kept well below its limit.
_MAX_DETAILS = 6000


class Entry(grpc.ServerInterceptor):
    """Lets a call in that has the token which its method asks for. gRPC asks once per call, before it reads a message
    or gives the call a thread."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._refusers = ThreadPoolExecutor(_REFUSERS, thread_name_prefix="grpc-refusal")

    def close(self) -> None:
        """Ends the threads. To be called when the server takes no call any more."""
        self._refusers.shutdown(wait=False)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        # A method that is not in the table is not there either; only who may do everything is told so.
        needed = RPCS.get(handler_call_details.method, Scope.CONTROL)
        try:
            self._access.check(authorization_of(handler_call_details.invocation_metadata), needed)
        except TokenloomError as error:
            return self._refusal(error)
        return continuation(handler_call_details)

    def _refusal(self, error: TokenloomError) -> grpc.RpcMethodHandler[Any, Any]:
        def refuse(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            abort(context, error.grpc_status, error.name, str(error))

        # gRPC's own name for the pool that a handler runs in, without which it is the server's.
        refuse.experimental_thread_pool = self._refusers  # type: ignore[attr-defined]
        # Whatever the method is: of a stream of requests nothing is read that is not asked for.
        return grpc.stream_stream_rpc_method_handler(refuse)


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
