"""Reports of losses to the server: sent in the background, for monitoring only.

Training neither waits for them nor fails by them: what finds no place in the queue pushes out the oldest, and what
cannot be sent is dropped, with one warning until the next one goes through.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle

import grpc
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.dataloader_pb2_grpc import DataLoaderStub
from tokenloom_proto.errors import TokenloomError

from tokenloom.connection.channel import failure, open_channel, retryable
from tokenloom.connection.join import Opening, Request

log = logging.getLogger("tokenloom")

#: Reports that wait to be sent: a server that is away for longer misses what came first.
QUEUED = 64
#: How long one try may take, and how long after a failed one the next waits, seconds.
CALL_S, PAUSE_S = 5.0, 2.0


@dataclass(frozen=True, slots=True)
class Report:
    """Losses since the last report, over all ranks; ``sources``: by id the mean loss and its tokens."""

    sample_index: int
    total_tokens: int
    step: int
    sources: Mapping[int, tuple[float, int]]
    loss: float | None
    learning_rate: float | None


class Reporter:
    """Sends the reports of a slot that was joined. Thread-safe."""

    def __init__(self, request: Request, opening: Opening) -> None:
        self._request = request
        self._opening = opening
        self._wakes = threading.Condition()
        self._waiting: deque[Report] = deque(maxlen=QUEUED)
        self._closing = False
        self._warned = False
        self._give_up_at = math.inf
        self._thread = threading.Thread(target=self._run, name="tokenloom-reports", daemon=True)
        self._thread.start()

    def put(self, report: Report) -> None:
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
        targets = cycle(self._request.address.targets)
        channel: grpc.Channel | None = None
        try:
            for report in self._reports():
                try:
                    if channel is None:
                        channel = open_channel(self._request.address, next(targets), self._request.credentials)
                    self._send(channel, report)
                    with self._wakes:
                        self._warned = False
                        if self._waiting and self._waiting[0] is report:
                            self._waiting.popleft()
                except (grpc.RpcError, TokenloomError) as error:
                    # A channel that failed notices late that the server is back, and another server may lead by now.
                    if channel is not None:
                        channel.close()
                        channel = None
                    self._failed(error, report)
        finally:
            if channel is not None:
                channel.close()

    def _reports(self) -> Iterator[Report]:
        """The oldest that waits, as long as it does; ends when all is sent after ``finish``."""
        while True:
            with self._wakes:
                while not self._waiting and not self._closing:
                    self._wakes.wait()
                if not self._waiting or time.monotonic() >= self._give_up_at:
                    return
                report = self._waiting[0]
            yield report

    def _send(self, channel: grpc.Channel, report: Report) -> None:
        request = self._request
        message = wire.ReportRequest(
            run=request.address.run,
            stream=request.stream,
            run_uid=self._opening.run_uid,
            generation=self._opening.generation,
            attempt=request.topology.attempt,
            sample_index=report.sample_index,
            total_tokens=report.total_tokens,
            step=report.step,
            sources=[
                wire.SourceLoss(source_id=source, loss=loss, tokens=tokens)
                for source, (loss, tokens) in report.sources.items()
            ],
            loss=report.loss,
            learning_rate=report.learning_rate,
        )
        DataLoaderStub(channel).Report(message, timeout=CALL_S, metadata=request.credentials.metadata)

    def _failed(self, error: grpc.RpcError | TokenloomError, report: Report) -> None:
        later = False
        reason = error
        if isinstance(error, grpc.RpcError):
            later = retryable(error) or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            reason = failure(error, self._request.address)
        with self._wakes:
            self._warn(f"{type(reason).__name__}: {reason}")
            if later:
                # It waits on: the server may be back soon. The thread that closes wakes this one.
                self._wakes.wait_for(lambda: self._closing, PAUSE_S)
                if self._closing:
                    self._wakes.wait(0.1)
            elif self._waiting and self._waiting[0] is report:
                self._waiting.popleft()  # refused, and would be again

    def _warn(self, what: str) -> None:
        """The caller holds the lock."""
        if not self._warned:
            self._warned = True
            log.warning(
                "%s: losses cannot be reported to the server; training goes on, and this is said once until a report "
                "goes through again: %s",
                self._request.address, what,
            )  # fmt: skip
