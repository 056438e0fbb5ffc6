"""The gRPC channel: its options, what its failures mean, and how long to try again."""

from __future__ import annotations

import logging
import os
import random
import ssl
import time
from functools import cache
from itertools import cycle
from textwrap import shorten

import grpc
from tokenloom_proto.address import Address
from tokenloom_proto.credentials import Credentials, refuse_expired
from tokenloom_proto.versions import unknown_service

from tokenloom.errors import ServerUnavailable, TokenloomError, named

log = logging.getLogger("tokenloom")

FIRST_DELAY_S = 0.1
#: High enough to spare a server that starts, low enough that training goes on soon after it has.
MAX_DELAY_S = 5.0
#: While a server is away, the log says so at most this often.
WARN_EVERY_S = 10.0
#: How long a server may take to show its certificate, where that did not pass.
_LOOK_S = 5.0

#: Characters of what a rank says that rank 0 says in full.
SHORT = 120

_OPTIONS: list[tuple[str, int]] = [
    # A proxy meant for the web would sit between the trainer and its data.
    ("grpc.enable_http_proxy", 0),
    # A message is one group of steps; its size is the server's choice.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Each frame costs both ends a system call or two; by default a message comes in frames of 16 KiB.
    ("grpc.http2.max_frame_size", 1024 * 1024),
    # Two datasets of one process must not share one TCP connection.
    ("grpc.use_local_subchannel_pool", 1),
    # The retries are ours: gRPC's own pause between connection attempts must not outlast them.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # For a Join that waits on other ranks; streams are watched by their heartbeats.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
]


def open_channel(address: Address, target: str, credentials: Credentials) -> grpc.Channel:
    """A channel to a server, one of the address; it connects with the first call."""
    if address.connect is not None:
        channel: grpc.Channel = address.connect()
        return channel
    _note_fork(os.getpid())
    # Read when the first channel is made. gRPC would tell each fork of the trainer's that it skips its handlers, which
    # is right: a connection is the business of one process.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    if not credentials.tls:
        return grpc.insecure_channel(target, options=_OPTIONS)
    tls = grpc.ssl_channel_credentials(credentials.ca, credentials.key, credentials.certificate)
    return grpc.secure_channel(target, tls, options=_OPTIONS)


@cache  # said once
def _note_fork(process: int) -> None:
    if process != _first_process():
        log.warning(
            "gRPC was used in the process that this one was forked from, so it may wait here for ever: "
            'use multiprocessing_context="spawn" or "forkserver", or ask a dataset nothing before the fork'
        )


@cache
def _first_process() -> int:
    """The one that opened a channel first: this one, or one that it was forked from."""
    return os.getpid()


class Channels:
    """Channels to the servers of an address, one at a time."""

    def __init__(self, address: Address, credentials: Credentials) -> None:
        self._address = address
        self._credentials = credentials
        self._targets = cycle(address.targets)
        self._channel: grpc.Channel | None = None

    def renew(self) -> grpc.Channel:
        """A new channel, to the next of the targets. One that failed tries again by itself, but nobody polls it between
        calls, so it notices seconds later that a server was not there, and much later that it is back."""
        self.close()
        self._channel = open_channel(self._address, next(self._targets), self._credentials)
        return self._channel

    def current(self) -> grpc.Channel:
        """The one that there is, else a new one."""
        return self._channel or self.renew()

    def close(self) -> None:
        """Closes the channel."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _expired(error: grpc.RpcError, address: Address) -> str:
    """Which server of an address has an expired certificate, where that is what failed: of all of them the last, for
    otherwise another may be reached."""
    expired = ""
    for target in address.targets if "CERTIFICATE_VERIFY_FAILED" in (error.details() or "") else ():
        host, _, port = target.rpartition(":")
        try:
            refuse_expired(
                target, ssl.get_server_certificate((host.strip("[]"), int(port)), timeout=_LOOK_S)
            )
            return ""
        except OSError:
            return ""
        except ValueError as fault:
            expired = str(fault)
    return expired


def retryable(error: grpc.RpcError, address: Address) -> bool:
    """Whether the same call may succeed later: the server or the network went away."""
    code, details = error.code(), error.details() or ""
    if _is_http1(error):
        return False
    # A server that dies mid-call shows as any of these; CANCELLED is its abort when it is not ours.
    broken = code is grpc.StatusCode.INTERNAL and "RST_STREAM" in details
    # gRPC's own words where every place for a call is taken: it gets free, or the budget ends.
    full = code is grpc.StatusCode.RESOURCE_EXHAUSTED and "Concurrent RPC limit" in details
    passing = broken or full or code is grpc.StatusCode.CANCELLED
    if code is grpc.StatusCode.UNAVAILABLE:
        return not _expired(error, address)
    return not _name(error) and passing


def failure(error: grpc.RpcError, address: Address, rank: int = 0) -> TokenloomError:
    """The typed error for a failed call: by the name that the server gave, else by its status. What every rank of the
    launch gets is said in full by rank 0, and shortly by another ``rank``. To be raised ``from None``: gRPC's own
    traceback tells a user nothing."""
    code, details = error.code(), error.details() or "no details"
    if rank and _metadata(error, "tokenloom-of-launch") and len(details) > SHORT:
        details = f"{shorten(details, SHORT, placeholder=' …')} (every rank gets this; rank 0 says it in full)"
    if name := _name(error):
        return named(name, details)
    if _is_http1(error):
        return ServerUnavailable(
            f"{address}: what answers there does not speak gRPC, such as the REST port of a server: give the gRPC "
            "address that `tokenloom serve` printed"
        )
    if expired := _expired(error, address):
        return ServerUnavailable(f"{address}: {expired}, and start the server again")
    if retryable(error, address) or code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return ServerUnavailable(f"{address}: {code.name}: {details}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return unknown_service(address, details)
    return TokenloomError(f"{address}: {code.name}: {details}")


def summary(error: grpc.RpcError) -> str:
    """One line for the log."""
    details = error.details() or "no details"
    if not _name(error) and "Failed to connect to remote host" in details:
        return f"nothing answers there: is the server running? ({details.rpartition(': ')[2]})"
    return f"{_name(error) or error.code().name}: {details}"


def _is_http1(error: grpc.RpcError) -> bool:
    """Whether another server than one of gRPC answered: in gRPC's own words, without TLS and with it. A status of 5xx
    is a proxy's whose server is away."""
    details = error.details() or ""
    other = "http1.x server" in details and "HTTP status 5" not in details
    return not _name(error) and (other or "missing selected ALPN" in details)


def is_named(error: grpc.RpcError, name: str = "") -> bool:
    """Whether a Tokenloom server said what is wrong: the error of a ``name``, or any."""
    return _name(error) == name if name else bool(_name(error))


def times_out(error: grpc.RpcError) -> bool:
    """Whether the client's own deadline ended the call."""
    return not _name(error) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def retry_for_s(error: grpc.RpcError) -> float | None:
    """For how long the server says that trying again makes sense; None where it does not say."""
    seconds = _metadata(error, "tokenloom-retry-for-s")
    return float(seconds) if seconds else None


def _name(error: grpc.RpcError) -> str:
    return _metadata(error, "tokenloom-error")


def _metadata(error: grpc.RpcError, key: str) -> str:
    return next(
        (str(entry.value) for entry in error.trailing_metadata() or () if entry.key == key), ""
    )


class Retry:
    """Delays that double up to a bound, with jitter so that ranks do not return in step, within a budget.

    Of several ``servers`` each is tried once before the delay grows.
    """

    def __init__(self, budget_s: float, servers: int = 1) -> None:
        self.budget_s = budget_s
        self._servers = servers
        self._warn_at = 0.0
        self.reset()

    def reset(self) -> None:
        """Starts anew, after something went well."""
        self._delay_s = FIRST_DELAY_S
        #: How many delays were asked for since.
        self.tried = 0
        self._deadline: float | None = None

    def remaining_s(self) -> float:
        """What is left of the budget, which runs from the first call on."""
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self.budget_s
        return self._deadline - now

    def warns(self) -> bool:
        """Whether the log is to say now what is waited for: once each server was tried, and then now and again."""
        now = time.monotonic()
        if self.tried < self._servers or now < self._warn_at:
            return False
        self._warn_at = now + WARN_EVERY_S
        return True

    def next_delay_s(self) -> float | None:
        """How long to wait before the next try; None when the budget is spent."""
        remaining_s = self.remaining_s()
        if remaining_s <= 0:
            return None
        self.tried += 1
        if self.tried % self._servers:
            return min(FIRST_DELAY_S * random.uniform(0.5, 1.0), remaining_s)
        delay_s = self._delay_s * random.uniform(0.5, 1.0)
        self._delay_s = min(2 * self._delay_s, MAX_DELAY_S)
        return min(delay_s, remaining_s)
