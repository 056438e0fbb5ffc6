"""A client's stream, whatever carries it: what it reads, what comes next, and how it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.delivered import Delivered

from tokenloom_server.api.auth import Scope
from tokenloom_server.api.grpc.messages import encode_slice, response_of
from tokenloom_server.api.grpc.rpc import Call, Rpc
from tokenloom_server.errors import JoinRefused
from tokenloom_server.replay.evaluation import Slice
from tokenloom_server.run.coordinator import RunCoordinator
from tokenloom_server.run.generation import Delivery, EndOfData, Waiting
from tokenloom_server.run.sessions import Session, Sessions

#: A stream that has nothing to send says so this often, seconds.
HEARTBEAT_S = 2.0
#: A call that breaks may say first that its client has closed its side, and then that it broke: what it is shows after
#: so long, seconds.
BREAK_S = 0.02
#: How long the end of a client's stream waits for its last commit, seconds.
FINISH_S = 2.0

NO_OPENING = "a stream begins with StreamOpen"
_RPC = Rpc(Scope.READ, request=wire.StreamRequest)
#: What a stream gives: the bytes of a message, or, to a client in this process, micro-steps without one.
Item: TypeAlias = bytes | Delivered


class StreamSource(Protocol):
    """What a stream sends: a rank's part of the run, a peek at it, or an evaluation."""

    @property
    def rank(self) -> int: ...

    def next(
        self, timeout_s: float, interrupted: Callable[[], bool]
    ) -> Delivery | Slice | EndOfData | Waiting: ...

    def progress(
        self, consumed_through: int, credit_micro_steps: int, digest: str, waited_s: float
    ) -> None: ...

    def wake(self) -> None: ...


class RankSource(NamedTuple):
    """A rank's part of the run."""

    sessions: Sessions
    session: Session

    @property
    def rank(self) -> int:
        return self.session.rank

    def next(
        self, timeout_s: float, interrupted: Callable[[], bool]
    ) -> Delivery | EndOfData | Waiting:
        return self.sessions.next_for(self.session, timeout_s, interrupted)

    def progress(
        self, consumed_through: int, credit_micro_steps: int, digest: str, waited_s: float
    ) -> None:
        self.sessions.progress(self.session, consumed_through, credit_micro_steps, digest, waited_s)

    def wake(self) -> None:
        self.sessions.wake(self.session)


class ClientStream:
    """One client's stream. Its shell reads for it and sends for it, at the same time if it likes."""

    def __init__(
        self,
        coordinator: RunCoordinator,
        source: StreamSource,
        opened: wire.StreamOpen,
        deliver: Callable[..., Item],
        recheck: Callable[[], None],
        call: Call,
    ) -> None:
        """``deliver``: ``encode_delivery`` or ``hand_over``. ``recheck`` raises what ends a stream whose token is not
        good for it any more."""
        self.coordinator, self._source, self._deliver, self._recheck = (
            coordinator,
            source,
            deliver,
            recheck,
        )
        self._call, self._document_starts = call, opened.document_starts
        #: Of a rank's stream.
        self.session = source.session if isinstance(source, RankSource) else None
        #: Whether the client has closed its side.
        self.closed = False
        self._error: Exception | None = None
        self._said_at = time.monotonic()
        self._wake = source.wake
        self._progress(opened.progress)

    @property
    def is_held(self) -> bool:
        """Whether whoever asks the run for something waits for the ledger now."""
        return self.session is not None and self.coordinator.attempts.writes

    def ring_by(self, ring: Callable[[], None]) -> None:
        """Of a rank's stream: ``ring`` is called, by any thread, where ``now`` may have something."""
        assert self.session is not None
        self._wake = ring
        self.coordinator.sessions.ring_for(self.session, ring)

    def read(self, data: bytes | None) -> None:
        """A further message came; None: the client has closed its side. What is wrong with one ends the stream."""
        try:
            if data is None:
                self.closed = True
            else:
                request = _RPC.parse(data)
                if request.WhichOneof("kind") != "progress":
                    raise JoinRefused(
                        "a stream is opened once; after StreamOpen it carries Progress"
                    )
                self._progress(request.progress)
        except Exception as error:
            self._error = error
        if self.is_over():
            self.wake()

    def wake(self) -> None:
        """Whoever waits for what comes next looks whether it is over."""
        self._wake()

    def is_over(self) -> bool:
        return self.closed or self._error is not None or not self._call.active

    def is_due(self, now: float) -> bool:
        """Whether it was silent for long."""
        return now - self._said_at >= HEARTBEAT_S

    def now(self) -> Item | None:
        """What a rank gets now: samples, or, after a while without, what it waits for. Raises what ends it."""
        assert self.session is not None
        sessions = self.coordinator.sessions
        if self._error is not None:
            raise self._error
        item: Delivery | EndOfData | Waiting | None = sessions.next_now(self.session)
        if item is None and self.is_due(time.monotonic()):
            item = sessions.waiting(self.session)
        return None if item is None else self._said(item)

    def next(self) -> Item | None:
        """What comes next, or after a while what is waited for; None where the client wants no more. Raises what ends
        it."""
        item = self._source.next(HEARTBEAT_S, self.is_over)
        if self._error is not None:
            raise self._error
        return None if self.is_over() else self._said(item)

    def has_committed(self, timeout_s: float) -> bool:
        """Waits, bounded, until all that the client acknowledged is committed, or cannot be; returns whether."""
        return self.session is None or self.coordinator.sessions.finish(self.session, timeout_s)

    def leave(self) -> None:
        """The client said goodbye."""
        if self.session is not None:
            self.coordinator.sessions.leave(self.session)

    def _said(self, item: Delivery | Slice | EndOfData | Waiting) -> Item:
        self._recheck()
        committed, epoch = self.coordinator.committed_through, self.coordinator.lease.epoch
        self._said_at = time.monotonic()
        if isinstance(item, Delivery):
            return self._deliver(
                self._source.rank, item, committed, epoch, document_starts=self._document_starts
            )
        if isinstance(item, Slice):
            return encode_slice(
                item, committed, epoch, document_starts=self._document_starts
            ).SerializeToString()
        return response_of(item, committed, epoch).SerializeToString()

    def _progress(self, progress: wire.Progress) -> None:
        self._source.progress(
            progress.consumed_through,
            progress.credit_micro_steps,
            progress.digest,
            progress.waited_s,
        )
