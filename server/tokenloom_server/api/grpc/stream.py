"""The Stream RPC: what ranks, peeks and evaluations get, while their progress is read."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import grpc
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.delivered import Delivered
from tokenloom_proto.threads import Background

from tokenloom_server.api.grpc import rank_streams
from tokenloom_server.api.grpc.detached_call import GoesOn
from tokenloom_server.api.grpc.join import call_of
from tokenloom_server.api.grpc.messages import encode_slice, response_of
from tokenloom_server.api.grpc.rank_streams import BREAK_S, FINISH_S, HEARTBEAT_S
from tokenloom_server.api.grpc.rpc import readable
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.errors import JoinRefused, TokenloomError
from tokenloom_server.replay.evaluation import EvaluationCall, Slice
from tokenloom_server.run.coordinator import RunCoordinator
from tokenloom_server.run.delivery import Delivery, EndOfData, Waiting
from tokenloom_server.run.sessions import Session

_log = logging.getLogger(__name__)

#: A stream whose first message does not come within this time is ended, seconds: it has a thread.
OPEN_TIMEOUT_S = 30.0

_Requests = Iterator[wire.StreamRequest]
#: What a stream gives: a message, or its bytes, or, to a client in this process, micro-steps without one.
Item: TypeAlias = wire.StreamResponse | bytes | Delivered
_Responses = Generator[Item, None, None]


def opening(requests: _Requests, context: grpc.ServicerContext) -> wire.StreamOpen:
    """The first message of a stream. Raises ``JoinRefused`` where it opens nothing."""
    with _time_limit(OPEN_TIMEOUT_S, context):
        first = readable(next(requests, None))
    if first is None or first.WhichOneof("kind") != "open":
        raise JoinRefused("a stream begins with StreamOpen")
    opened: wire.StreamOpen = first.open
    return opened


def training(
    served: ServedRun,
    opened: wire.StreamOpen,
    requests: _Requests,
    context: grpc.ServicerContext,
    deliver: Callable[..., bytes | Delivered],
    recheck: Callable[[], None],
    streams: rank_streams.RankStreams | None,
) -> Generator[Item | GoesOn, None, None]:
    """A rank's part of the run, by ``encode_delivery`` or ``hand_over``; with ``streams`` and many ranks, it goes on
    there, where ``recheck`` raises what ends it."""
    coordinator = served.coordinator
    session = coordinator.sessions.attach(
        opened.run_uid,
        opened.generation,
        opened.rank,
        opened.nonce,
        opened.received_through,
        opened.committed_through,
        opened.received_digest,
        opened.server_epoch,
        opened.attempt,
        opened.process,
        opened.number,
    )
    many = len(session.active.generation.slots) >= rank_streams.FEWEST_RANKS
    if many and streams is not None:
        yield partial(streams.add, session, opened, recheck)
        return
    try:
        yield from _responses(
            coordinator, _RankStream(coordinator, session), opened, requests, context, deliver
        )
    finally:
        coordinator.sessions.detach(session)


def peek(
    served: ServedRun,
    opened: wire.StreamOpen,
    requests: _Requests,
    context: grpc.ServicerContext,
    deliver: Callable[..., bytes | Delivered],
) -> _Responses:
    """Samples for a reader that takes no part in the run."""
    index, digest = opened.received_through, opened.received_digest
    with served.peeks.open(opened.run_uid, index, opened.batch_size, digest) as source:
        yield from _responses(served.coordinator, source, opened, requests, context, deliver)


def evaluation(
    served: ServedRun,
    opened: wire.StreamOpen,
    requests: _Requests,
    context: grpc.ServicerContext,
    deliver: Callable[..., bytes | Delivered],
) -> _Responses:
    """Samples of a stream beside training."""
    call = call_of(EvaluationCall, opened)
    source = served.evaluations.open(
        opened.run_uid, call, opened.received_through, opened.received_digest
    )
    yield from _responses(served.coordinator, source, opened, requests, context, deliver)


class StreamSource(Protocol):
    """What a stream sends: a rank's part of the run, a peek at it, or an evaluation."""

    @property
    def rank(self) -> int: ...

    @property
    def name(self) -> str: ...

    def next(
        self, timeout_s: float, interrupted: Callable[[], bool]
    ) -> Delivery | Slice | EndOfData | Waiting: ...

    def progress(
        self, consumed_through: int, credit_micro_steps: int, digest: str, waited_s: float
    ) -> None: ...

    def wake(self) -> None: ...

    def finish(self, said_goodbye: bool) -> None:
        """The client's side is closed; ``said_goodbye``: by the client."""


class _RankStream(NamedTuple):
    """A rank's part of the run."""

    coordinator: RunCoordinator
    session: Session

    @property
    def rank(self) -> int:
        return self.session.rank

    @property
    def name(self) -> str:
        return f"{self.coordinator.name}-rank-{self.session.rank}"

    def next(
        self, timeout_s: float, interrupted: Callable[[], bool]
    ) -> Delivery | EndOfData | Waiting:
        return self.coordinator.sessions.next_for(self.session, timeout_s, interrupted)

    def progress(
        self, consumed_through: int, credit_micro_steps: int, digest: str, waited_s: float
    ) -> None:
        self.coordinator.sessions.progress(
            self.session, consumed_through, credit_micro_steps, digest, waited_s
        )

    def wake(self) -> None:
        self.coordinator.sessions.wake(self.session)

    def finish(self, said_goodbye: bool) -> None:
        self.coordinator.sessions.finish(self.session, FINISH_S)
        if said_goodbye:
            self.coordinator.sessions.leave(self.session)


def _responses(
    coordinator: RunCoordinator,
    source: StreamSource,
    opened: wire.StreamOpen,
    requests: _Requests,
    context: grpc.ServicerContext,
    deliver: Callable[..., bytes | Delivered],
) -> _Responses:
    """What a source gives, until the data end, the client closes its side, or the generation is over."""
    progress, document_starts = opened.progress, opened.document_starts
    source.progress(
        progress.consumed_through, progress.credit_micro_steps, progress.digest, progress.waited_s
    )
    reader = _Reader(source, requests, context)
    reader.start()
    try:
        while context.is_active():
            if reader.error is not None:
                raise reader.error
            if reader.closed:
                source.finish(reader.said_goodbye)
                return
            item = source.next(HEARTBEAT_S, lambda: reader.closed or reader.error is not None)
            committed, epoch = coordinator.committed_through, coordinator.lease.epoch
            if isinstance(item, Delivery):
                yield deliver(source.rank, item, committed, epoch, document_starts=document_starts)
            elif isinstance(item, Slice):
                yield encode_slice(item, committed, epoch, document_starts=document_starts)
            else:
                yield response_of(item, committed, epoch)
    finally:
        # The reader ends with the call; until then it reports to nobody.
        reader.stopped = True


class _Reader(Background):
    """Reads a client's progress while the stream's own thread sends."""

    def __init__(
        self,
        source: StreamSource,
        requests: Iterator[wire.StreamRequest],
        context: grpc.ServicerContext,
    ) -> None:
        super().__init__("progress", self._read, source.name)
        self._source = source
        self._requests = requests
        self._context = context
        self.closed = False
        self.stopped = False
        self.said_goodbye = False
        self.error: TokenloomError | None = None

    def _read(self) -> None:
        try:
            for request in self._requests:
                if self.stopped:
                    return
                readable(request)
                if request.WhichOneof("kind") != "progress":
                    raise JoinRefused(
                        "a stream is opened once; after StreamOpen it carries Progress"
                    )
                progress = request.progress
                self._source.progress(
                    progress.consumed_through,
                    progress.credit_micro_steps,
                    progress.digest,
                    progress.waited_s,
                )
            time.sleep(BREAK_S)
            self.said_goodbye = not self.stopped and self._context.is_active()
        except TokenloomError as error:
            self.error = error
        except grpc.RpcError as error:  # the call is over
            _log.debug("%s: the request stream ended: %s", self.name, error)
        finally:
            self.closed = True
            self._source.wake()


@contextlib.contextmanager
def _time_limit(seconds: float, context: grpc.ServicerContext) -> Iterator[None]:
    """Cancels the call where what is done here takes longer."""
    timer = Background("time-limit", context.cancel, after_s=seconds)
    timer.start()
    try:
        yield
    finally:
        timer.ending.set()
