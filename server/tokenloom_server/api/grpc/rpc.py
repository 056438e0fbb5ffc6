"""What a method of the data loader asks of its callers, and what it knows of a call: not what carries it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from tokenloom_server.api.auth import Scope
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

_Method = TypeVar("_Method", bound=Callable[..., Any])


class Internal(TokenloomError):
    """A fault of the program."""


@dataclass(eq=False)
class Call:
    """A call, as a method knows it."""

    authorization: str | None
    #: Where it comes from.
    address: str
    #: Whether somebody waits for what comes of it.
    active: bool = True
    is_cancelled: bool = False
    on_cancel: Callable[[], object] = lambda: None
    #: What is left to do when it is over.
    until_end: ExitStack = field(default_factory=ExitStack)

    def is_active(self) -> bool:
        return self.active

    def cancel(self) -> None:
        """Ends it, though its client reads nothing. Any thread may."""
        self.is_cancelled = True
        self.on_cancel()


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

    def parse(self, data: bytes) -> Any:
        """Reads a request. A larger one than allowed is not parsed. Raises ``LimitExceeded``, ``ConfigError``."""
        if len(data) > self.max_bytes:
            name = self.request.DESCRIPTOR.name
            raise LimitExceeded(
                f"a {name} has {len(data)} bytes; expected at most {self.max_bytes}: send less"
            )
        return read(self.request.FromString, data)


def rpc(
    scope: Scope,
    request: Any,
    *,
    max_bytes: int = SMALL_REQUEST_BYTES,
    trains: bool = False,
    streams: bool = False,
) -> Callable[[_Method], _Method]:
    """Decorates a method of a servicer, which takes a request (of a stream: its first) and the ``Call``."""

    def declare(method: _Method) -> _Method:
        method.rpc = Rpc(scope, trains, request, max_bytes, streams)  # type: ignore[attr-defined]
        return method

    return declare


def read(parse: Any, data: bytes) -> Any:
    """A message. Raises ``ConfigError`` where the bytes are none."""
    try:
        return parse(data)
    except DecodeError as error:
        raise ConfigError(
            f"the call's message of {len(data)} bytes is not what its method takes: {error}"
        ) from None


def shown(error: Exception) -> TokenloomError:
    """What a client hears of an error: itself, or of a fault of the program, which is logged, that there is one."""
    if isinstance(error, TokenloomError):
        return error
    _log.error("a call failed", exc_info=error)
    return Internal(f"the server failed: {type(error).__name__}: {error}; see its log")


def details_of(error: TokenloomError) -> str:
    """Its message, as UTF-8 has it: an error of the system may name a file that has no such name."""
    return escaped(str(error), lines=True)[:_MAX_DETAILS]


def metadata_of(error: TokenloomError) -> tuple[tuple[str, str], ...]:
    """What else a client may know of an error, beside its status and message."""
    retry = (
        ()
        if error.retry_for_s is None
        else (("tokenloom-retry-for-s", f"{error.retry_for_s:.1f}"),)
    )
    launch = (("tokenloom-of-launch", "1"),) if error.of_launch else ()
    return ("tokenloom-error", error.name), *retry, *launch
