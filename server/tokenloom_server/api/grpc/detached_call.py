"""A call of two streams that holds no thread: what it receives, and that it has sent, comes as callbacks.

gRPC's server in Python has a thread for each call, and another for whoever reads requests meanwhile. Those of its parts
that start an operation do without. They are private, so ``is_supported`` says whether a release has them as expected.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import grpc

try:
    from grpc import _server as parts
    from grpc._cython import cygrpc  # type: ignore[attr-defined]
except ImportError:  # see is_supported
    parts = cygrpc = None  # type: ignore[assignment]

#: The functions that are called, with the number of their parameters.
_CALLED = {"_receive_message": 3, "_send_message": 2, "_is_rpc_state_active": 1}
#: What makes gRPC hand a method its way to send, in place of iterating over what it gives.
_MARK = "experimental_non_blocking"

#: What a method gives last, in place of a response, whose call goes on without its thread.
GoesOn: TypeAlias = "Callable[[DetachedCall], None]"


@cache
def is_supported() -> bool:
    """Whether the grpcio that is installed has the parts that are needed here, as they are expected."""
    try:
        return (
            all(
                len(inspect.signature(getattr(parts, name)).parameters) == n
                for name, n in _CALLED.items()
            )
            and _MARK in parts._stream_response_in_pool.__code__.co_consts
            and all(
                hasattr(cygrpc, name)
                for name in ("ReceiveMessageOperation", "SendMessageOperation")
            )
            and all(
                hasattr(parts, name) for name in ("_RECEIVE_MESSAGE_TOKEN", "_SEND_MESSAGE_TOKEN")
            )
        )
    except (AttributeError, TypeError, ValueError):
        return False


def detachable(handler: Any) -> Any:
    """A handler of streams whose method may go on without its thread; the same one where that is not supported."""
    if not is_supported():
        return handler
    behavior, parse = handler.stream_stream, handler.request_deserializer

    def call(requests: Any, context: Any, send: Callable[[Any], None]) -> None:
        with contextlib.closing(behavior(requests, context)) as responses:
            for response in responses:
                if callable(response):
                    response(DetachedCall(context, parse, send))
                    return
                send(response)
                if not context.is_active():
                    return
        send(None)

    setattr(call, _MARK, True)
    return handler._replace(stream_stream=call)


class DetachedCall:
    """Its methods return at once; callbacks come on gRPC's own thread, and must, too."""

    def __init__(
        self, context: Any, parse: Callable[[bytes], Any], end: Callable[[None], None]
    ) -> None:
        """``end`` sends the call's status, which the context has by then."""
        self.context: grpc.ServicerContext = context
        self._state, self._call = context._state, context._rpc_event.call
        self._parse, self._end = parse, end
        with contextlib.suppress(
            grpc.RpcError
        ):  # the call is over: whoever has it hears so from what it starts
            context.send_initial_metadata(())

    def receive(self, received: Callable[[Any], None]) -> bool:
        """Asks for the next request, or None where none comes any more; False where the call is over."""

        def tag(event: Any) -> Any:
            finished = inner(event)
            with self._state.condition:
                request, self._state.request = self._state.request, None
            received(request)
            return finished

        inner = parts._receive_message(self._state, self._call, self._parse)
        return self._start(cygrpc.ReceiveMessageOperation(0), tag, parts._RECEIVE_MESSAGE_TOKEN)

    def send(self, data: bytes, sent: Callable[[], None]) -> bool:
        """Sends a response. The next one may follow once this one is ``sent``; False where the call is over."""

        def tag(event: Any) -> Any:
            finished = inner(event)
            sent()
            return finished

        inner = parts._send_message(self._state, parts._SEND_MESSAGE_TOKEN)
        return self._start(cygrpc.SendMessageOperation(data, 0), tag, parts._SEND_MESSAGE_TOKEN)

    def end(self) -> None:
        """Ends the call with its context's status."""
        if self.context.is_active():
            self._end(None)

    def _start(self, operation: Any, tag: Callable[[Any], Any], token: str) -> bool:
        with self._state.condition:
            if not parts._is_rpc_state_active(self._state):
                return False
            self._call.start_server_batch((operation,), tag)
            self._state.due.add(token)
            return True
