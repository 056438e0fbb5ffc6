"""Calls beside the stream: questions that need no Join, and the losses that a rank reports."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import grpc
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.dataloader_pb2_grpc import DataLoaderStub
from tokenloom_proto.threads import Loop

from tokenloom.connection.channel import (
    Channels,
    Retry,
    failure,
    open_channel,
    retryable,
    summary,
)
from tokenloom.connection.join import Request
from tokenloom.errors import TokenloomError

log = logging.getLogger("tokenloom")


def plan(request: Request, until_tokens: int) -> dict[str, Any]:
    """The run's plan from its beginning; 0: as far as its data go."""
    message = wire.PlanRequest(run=request.address.run, until_tokens=until_tokens)
    return _ask(request, lambda stub, **options: stub.Plan(message, **options).plan_json)


def stats(request: Request) -> dict[str, Any]:
    """The run's figures."""
    message = wire.StatsRequest(run=request.address.run)
    return _ask(request, lambda stub, **options: stub.Stats(message, **options).stats_json)


def _ask(request: Request, call: Callable[..., str]) -> dict[str, Any]:
    """The document that a call answers with, as soon as a server does; the log says what is waited for.

    Raises what the server refuses with, and ``ServerUnavailable`` after ``connect_timeout_s``.
    """
    address = request.address
    retry = Retry(request.options.connect_timeout_s, len(address.targets))
    targets = cycle(address.targets)
    while True:
        with open_channel(address, next(targets), request.credentials) as channel:
            timeout_s = max(retry.remaining_s(), 0.001)
            try:
                text = call(
                    DataLoaderStub(channel),
                    timeout=timeout_s,
                    metadata=request.credentials.metadata,
                )
                document: dict[str, Any] = json.loads(text)
                return document
            except grpc.RpcError as error:
                delay_s = retry.next_delay_s()
                if delay_s is None or not retryable(error, address):
                    raise failure(error, address) from None
                if retry.warns():
                    log.warning(
                        "cannot ask %s yet, trying for %.0f s more: %s",
                        address, retry.remaining_s(), summary(error),
                    )  # fmt: skip
        time.sleep(delay_s)


# Reports of losses to the server: sent in the background, for monitoring only.
#
# Training neither waits for them nor fails by them: what finds no place in the queue pushes out the oldest, and what
# cannot be sent is dropped, with one warning until the next one goes through.

#: Reports that wait to be sent: a server that is away for longer misses what came first.
QUEUED = 64
#: How long one try may take, and how long after a failed one the next waits, seconds.
CALL_S, PAUSE_S = 5.0, 2.0


class Reporter:
    """Sends the reports of a slot that was joined. Thread-safe."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._wakes = threading.Condition()
        self._waiting: deque[wire.ReportRequest] = deque(maxlen=QUEUED)
        self._closing = False
        self._warned = False
        self._give_up_at = math.inf
        self._thread = Loop("reports", self._run, "tokenloom")
        self._thread.start()

    def put(self, report: wire.ReportRequest) -> None:
        """Takes a report; returns at once."""
        with self._wakes:
            if len(self._waiting) == QUEUED:
                self._warn(f"{QUEUED} reports wait to be sent; the oldest is dropped")
            self._waiting.append(report)
            self._wakes.notify()

    def finish(self, timeout_s: float) -> None:
        """What waits is sent for so long yet; returns at once."""
        with self._wakes:
            self._closing = True
            self._give_up_at = time.monotonic() + timeout_s
            self._wakes.notify()

    def join(self) -> None:
        """Waits until all is sent, as long as ``finish`` said."""
        self._thread.join(max(0.0, self._give_up_at - time.monotonic()))

    def _run(self) -> None:
        channels = Channels(self._request.address, self._request.credentials)
        try:
            for report in self._reports():
                try:
                    metadata = self._request.credentials.metadata
                    DataLoaderStub(channels.current()).Report(
                        report, timeout=CALL_S, metadata=metadata
                    )
                    with self._wakes:
                        self._warned = False
                        self._drop(report)
                except (grpc.RpcError, TokenloomError) as error:
                    # A channel that failed notices late that the server is back, and another server may lead by now.
                    channels.close()
                    self._failed(error, report)
        finally:
            channels.close()

    def _reports(self) -> Iterator[wire.ReportRequest]:
        """The oldest that waits, as long as it does; ends when all is sent after ``finish``."""
        while True:
            with self._wakes:
                while not self._waiting and not self._closing:
                    self._wakes.wait()
                if not self._waiting or time.monotonic() >= self._give_up_at:
                    return
                report = self._waiting[0]
            yield report

    def _failed(self, error: grpc.RpcError | TokenloomError, report: wire.ReportRequest) -> None:
        later = False
        reason = error
        if isinstance(error, grpc.RpcError):
            later = (
                retryable(error, self._request.address)
                or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            )
            reason = failure(error, self._request.address)
        with self._wakes:
            self._warn(f"{type(reason).__name__}: {reason}")
            if later:
                # It waits on: the server may be back soon. The thread that closes wakes this one.
                self._wakes.wait_for(lambda: self._closing, PAUSE_S)
                if self._closing:
                    self._wakes.wait(0.1)
            else:
                self._drop(report)  # refused, and would be again

    def _drop(self, report: wire.ReportRequest) -> None:
        """Takes a report out of the queue, if it was not pushed out. The caller holds the lock."""
        if self._waiting and self._waiting[0] is report:
            self._waiting.popleft()

    def _warn(self, reason: str) -> None:
        """The caller holds the lock."""
        if not self._warned:
            self._warned = True
            log.warning(
                "%s: losses cannot be reported to the server; training goes on, and this is said once until a report "
                "goes through again: %s",
                self._request.address, reason,
            )  # fmt: skip
