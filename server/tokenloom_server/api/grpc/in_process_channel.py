"""The service without a socket: a channel whose calls are made in this process, while a thread waits for them.

Requests and responses are serialised as on any other way, so that what a client does with them is the same; but
micro-steps are handed over as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn

import grpc
from tokenloom_proto.delivered import Delivered
from tokenloom_proto.threads import pool

from tokenloom_server.api.auth import Access
from tokenloom_server.api.grpc.servicer import DataLoader
from tokenloom_server.api.service import Runs

_Serializer = Callable[[Any], bytes]
_Deserializer = Callable[[bytes], Any]


class InProcessChannel(grpc.Channel):
    """To the runs of this process; whoever has it may do everything. Closing it ends nothing."""

    def __init__(self, runs: Runs) -> None:
        self._handlers = DataLoader(runs, Access(), hands_over=True).handlers()

    def unary_unary(  # type: ignore[override]  # generated stubs give both
        self,
        method: str,
        request_serializer: _Serializer,
        response_deserializer: _Deserializer,
        **_: Any,
    ) -> Any:
        """A method of one request and one response. Deadlines are not kept: nobody here waits for another rank."""
        handler = self._handler(method)

        def call(request: Any, **_: object) -> Any:
            parsed, context = handler.request_deserializer(request_serializer(request)), _Context()
            # On a thread of its own: what a handler of signals raises, on the main one, is no failure of the server's.
            with pool(1, "call") as thread:
                work = thread.submit(handler.unary_unary, parsed, context)
                try:
                    return response_deserializer(handler.response_serializer(work.result()))
                finally:
                    context.cancel()

        return call

    def stream_stream(  # type: ignore[override]  # the first is always given
        self,
        method: str,
        request_serializer: _Serializer,
        response_deserializer: _Deserializer | None = None,
        **_: Any,
    ) -> Any:
        """A method of many requests and many responses; these as bytes without a deserializer, or as ``Delivered``."""
        handler = self._handler(method)

        def call(requests: Iterable[Any], **_: object) -> InProcessCall:
            parsed = (
                handler.request_deserializer(request_serializer(request)) for request in requests
            )
            return InProcessCall(handler, parsed, response_deserializer)

        return call

    def _handler(self, method: str) -> Any:
        details: Any = _Details(method)
        handler: Any = self._handlers.service(details)
        if handler is None:
            raise NotImplementedError(f"{method} is no method of the service")
        return handler

    def unary_stream(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("the service has no method of this kind")

    def stream_unary(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("the service has no method of this kind")

    def subscribe(
        self, callback: Callable[[grpc.ChannelConnectivity], None], try_to_connect: bool = False
    ) -> None:
        callback(grpc.ChannelConnectivity.READY)

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """The channel is always ready, so there is nothing to report."""

    def close(self) -> None:
        """Nothing is open."""

    def __enter__(self) -> InProcessChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class InProcessCall:
    """A call that responds as long as it is iterated."""

    def __init__(
        self, handler: Any, requests: Iterator[Any], deserializer: _Deserializer | None
    ) -> None:
        self._context = _Context()
        self._responses = handler.stream_stream(requests, self._context)
        self._serializer: _Serializer = handler.response_serializer
        self._deserializer = deserializer
        self._at_work = threading.Lock()

    def __iter__(self) -> InProcessCall:
        return self

    def __next__(self) -> Any:
        with self._at_work:
            response = next(self._responses)
            if isinstance(response, Delivered):
                return response
            data = self._serializer(response)
        return self._deserializer(data) if self._deserializer else data

    def cancel(self) -> bool:
        """Ends the call: now, or, where it is at work, as soon as it looks whether somebody is still there."""
        self._context.cancel()
        if self._at_work.acquire(blocking=False):
            try:
                self._responses.close()
            finally:
                self._at_work.release()
        return True


class CallFailed(grpc.RpcError):
    """How a call ended: what the client asks of any error of gRPC."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: tuple[_Entry, ...]) -> None:
        super().__init__(details)
        self._code, self._details, self._trailing = code, details, trailing

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._trailing


class _Details(NamedTuple):
    method: str
    invocation_metadata: tuple[()] = ()


class _Entry(NamedTuple):
    key: str
    value: str


class _Context:
    """The part of ``grpc.ServicerContext`` that the servicer uses."""

    def __init__(self) -> None:
        self._active = True
        self._trailing: tuple[_Entry, ...] = ()

    def is_active(self) -> bool:
        return self._active

    def cancel(self) -> None:
        self._active = False

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "this process"

    def set_trailing_metadata(self, entries: Iterable[tuple[str, str]]) -> None:
        self._trailing = tuple(_Entry(key, value) for key, value in entries)

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        self._active = False
        raise CallFailed(code, details, self._trailing)
