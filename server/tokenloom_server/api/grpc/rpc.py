"""How a method becomes an RPC: beside it stand its scope, its messages and their bound; its errors become statuses."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NoReturn, TypeVar
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError

from tokenloom_server.api.auth import Scope
from tokenloom_server.core import caller
from tokenloom_server.core.control_characters import escaped
from tokenloom_server.errors import ConfigError, LimitExceeded, TokenloomError

_log = logging.getLogger(__name__)

#: A Join and a Restore may carry a snapshot (``snapshot.MAX_BYTES``). gRPC refuses what is larger before it has it in
#: memory; what the other methods take is much less.
MAX_REQUEST_BYTES = 17 * 2**20
#: What a request without a snapshot may have: it is names and numbers.
SMALL_REQUEST_BYTES = 2**16
#: A report has some twenty bytes for each source.
MAX_REPORT_BYTES = 2**20
#: Details travel in an HTTP/2 header: they are kept well below its limit.
_MAX_DETAILS = 6000

#: Is called for each error that ends a call.
CountError = Callable[[TokenloomError], None]
_Method = TypeVar("_Method", bound=Callable[..., Any])


class Internal(TokenloomError):
    """A fault of the program."""


@dataclass(frozen=True, slots=True)
class Rpc:
    """What a call of a method needs. Where a request asks for more than ``scope`` allows, the method checks it."""

    scope: Scope
    trains: bool = False
    """Of a trainer, which has one open all the time."""
    request: Any = None
    """The class of its message."""
    max_bytes: int = SMALL_REQUEST_BYTES
    """Of a request."""
    streams: bool = False


def rpc(
    scope: Scope, request: Any, *, max_bytes: int = SMALL_REQUEST_BYTES, trains: bool = False
) -> Callable[[_Method], _Method]:
    """Decorates a method of a servicer, which takes a request (of a stream: an iterator) and the call's context. The
    servicer's ``count_error`` is called with the method's name, who calls and what ``CountError`` takes."""

    def declare(method: _Method) -> _Method:
        streams = inspect.isgeneratorfunction(method)

        def respond(self: Any, message: Any, context: grpc.ServicerContext) -> Any:
            count = partial(self.count_error, method.__name__, unquote(context.peer()))
            with (
                errors_as_statuses(context, count),
                caller.serving(self.caller_of(context), context.is_active),
            ):
                return method(self, readable(message), context)

        def stream(
            self: Any, messages: Iterator[Any], context: grpc.ServicerContext
        ) -> Iterator[Any]:
            count = partial(self.count_error, method.__name__, unquote(context.peer()))
            with errors_as_statuses(context, count):
                yield from method(self, messages, context)

        call: Any = wraps(method)(stream if streams else respond)
        call.rpc = Rpc(scope, trains, request, max_bytes, streams)
        declared: _Method = call
        return declared

    return declare


def rpcs_of(servicer: type) -> dict[str, Rpc]:
    """Its RPCs by name."""
    return {name: method.rpc for name, method in vars(servicer).items() if hasattr(method, "rpc")}


def handlers_of(servicer: object, service_name: str) -> grpc.GenericRpcHandler:
    """The service as gRPC takes it."""
    methods: dict[str, Any] = {}
    for name, rpc in rpcs_of(type(servicer)).items():
        make = (
            grpc.stream_stream_rpc_method_handler
            if rpc.streams
            else grpc.unary_unary_rpc_method_handler
        )
        methods[name] = make(getattr(servicer, name), _parser(rpc), _serialised)
    return grpc.method_handlers_generic_handler(service_name, methods)


def readable(message: Any) -> Any:
    """A message, or the error that came in its place, raised."""
    if isinstance(message, TokenloomError):
        raise message
    return message


def abort(context: grpc.ServicerContext, error: TokenloomError) -> NoReturn:
    """Ends a call with an error: its name and what else a client may know of it in the metadata, the message in the
    details."""
    context.set_trailing_metadata(_metadata_of(error))
    context.abort(getattr(grpc.StatusCode, error.grpc_status), _details_of(error))
    raise AssertionError("unreachable: abort raises")


def set_error(context: grpc.ServicerContext, error: TokenloomError) -> None:
    """As ``abort``, where the call's status is sent afterwards."""
    context.set_trailing_metadata(_metadata_of(error))
    context.set_code(getattr(grpc.StatusCode, error.grpc_status))
    context.set_details(_details_of(error))


def shown(error: Exception) -> TokenloomError:
    """What a client hears of an error: itself, or of a fault of the program, which is logged, that there is one."""
    if isinstance(error, TokenloomError):
        return error
    _log.error("a call failed", exc_info=error)
    return Internal(f"the server failed: {type(error).__name__}: {error}; see its log")


def _details_of(error: TokenloomError) -> str:
    """Its message, as UTF-8 has it: an error of the system may name a file that has no such name."""
    return escaped(str(error), lines=True)[:_MAX_DETAILS]


def _metadata_of(error: TokenloomError) -> tuple[tuple[str, str], ...]:
    retry = (
        ()
        if error.retry_for_s is None
        else (("tokenloom-retry-for-s", f"{error.retry_for_s:.1f}"),)
    )
    launch = (("tokenloom-of-launch", "1"),) if error.of_launch else ()
    return ("tokenloom-error", error.name), *retry, *launch


@contextlib.contextmanager
def errors_as_statuses(
    context: grpc.ServicerContext, count: CountError = lambda error: None
) -> Iterator[None]:
    """Ends a call with what is raised, under its name and status."""
    try:
        yield
    except grpc.RpcError:
        raise
    except Exception as error:
        if isinstance(error, TokenloomError) or context.is_active():
            ending = shown(error)
            count(ending)
            abort(context, ending)


def _parser(rpc: Rpc) -> Callable[[bytes], Any]:
    """Reads a request. A larger one than allowed is not parsed, and an error comes in its place: what is raised here,
    gRPC passes on without a name."""

    def parse(data: bytes) -> Any:
        if len(data) > rpc.max_bytes:
            name = rpc.request.DESCRIPTOR.name
            return LimitExceeded(
                f"a {name} has {len(data)} bytes; expected at most {rpc.max_bytes}: send less"
            )
        return read(rpc.request.FromString, data)

    return parse


def read(parse: Any, data: bytes) -> Any:
    """A message, or the error that comes in its place where the bytes are none."""
    try:
        return parse(data)
    except DecodeError as error:
        return ConfigError(
            f"the call's message of {len(data)} bytes is not what its method takes: {error}"
        )


def _serialised(response: Any) -> bytes:
    """Deliveries come as bytes already, the rest as messages."""
    data: bytes = response if isinstance(response, bytes) else response.SerializeToString()
    return data
