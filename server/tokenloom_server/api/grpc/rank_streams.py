"""The streams of a run's ranks, served by one thread: thousands of threads would mostly wake each other."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from typing import Any

from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.threads import Loop

from tokenloom_server.api.grpc.detached_call import DetachedCall
from tokenloom_server.api.grpc.messages import encode_delivery, response_of
from tokenloom_server.api.grpc.rpc import CountError, readable, set_error, shown
from tokenloom_server.errors import JoinRefused
from tokenloom_server.run.coordinator import RunCoordinator
from tokenloom_server.run.delivery import Delivery
from tokenloom_server.run.sessions import Session

_log = logging.getLogger(__name__)

#: Worlds of so many ranks have one thread for all their streams. In smaller ones, where few threads wake each other, it
#: costs less to have two for each.
FEWEST_RANKS = 32
#: A stream that has nothing to send says so this often, seconds.
HEARTBEAT_S = 2.0
#: How long the end of a client's stream waits for its last commit, seconds.
FINISH_S = 2.0
#: How often it looks which streams are silent, or at their end, seconds.
TICK_S = 0.02
#: A call that breaks may say first that its client has closed its side, and then that it broke: what it is shows after
#: so long, seconds.
BREAK_S = 0.02
#: Streams of one rank at a time: the newest, and the one whose place it took, which hears of that. One that is older
#: still and sends is not read by its client: what it was sent would stay in memory.
STREAMS_OF_A_RANK = 2


class RankStreams:
    """Sends what the ranks get, and reads what they have used. Streams may be added from any thread."""

    def __init__(self, coordinator: RunCoordinator, count: CountError = lambda error: None) -> None:
        self._coordinator = coordinator
        self._count = count
        self._news: queue.SimpleQueue[tuple[_RankStream, Any] | None] = queue.SimpleQueue()
        self._streams: set[_RankStream] = set()
        #: By rank, oldest first.
        self._newest: dict[int, tuple[_RankStream, ...]] = {}
        self._tick_at = 0.0
        Loop("streams", self._turn, coordinator.name).start()

    def add(
        self,
        session: Session,
        opened: wire.StreamOpen,
        recheck: Callable[[], None],
        call: DetachedCall,
    ) -> None:
        """``recheck`` raises what ends a stream whose token is not good for it any more."""
        stream = _RankStream(self._coordinator, session, opened, recheck, call, self._news)
        self._coordinator.sessions.ring_for(session, stream.ring)
        self._news.put((stream, _BEGUN))

    def stop(self) -> None:
        """Ends the thread, and what is left of the calls. To be called when no more come."""
        self._news.put(None)

    def _turn(self) -> bool:
        try:
            news = self._news.get(timeout=max(0.0, self._tick_at - time.monotonic()))
        except queue.Empty:
            self._tick_at = self._tick()
            return True
        if news is None:
            for stream in self._streams:
                self._coordinator.sessions.detach(stream.session)
                stream.call.context.cancel()
            return False
        stream, event = news
        if event is _BEGUN:
            self._begin(stream)
        self._act(stream, event)
        if event is None:
            self._tick_at = min(self._tick_at, time.monotonic() + TICK_S)
        if time.monotonic() >= self._tick_at:
            self._tick_at = self._tick()
        return True

    def _begin(self, stream: _RankStream) -> None:
        self._streams.add(stream)
        rank = stream.session.rank
        older = [each for each in self._newest.get(rank, ()) if not each.over]
        for each in older[: 1 - STREAMS_OF_A_RANK]:
            each.call.context.cancel()
        self._newest[rank] = (*older[1 - STREAMS_OF_A_RANK :], stream)

    def _tick(self) -> float:
        """Looks at all streams that may have to act without news; returns when to look again."""
        for stream in list(self._streams):
            if stream.is_due(time.monotonic()):
                self._act(stream, _DUE)
        closing = any(stream.closed_at is not None for stream in self._streams)
        return time.monotonic() + (TICK_S if closing else HEARTBEAT_S / 4)

    def _act(self, stream: _RankStream, event: Any) -> None:
        try:
            is_over = stream.over or stream.act(event)
        except Exception as error:
            is_over = True
            ending = shown(error)
            self._count(ending)
            set_error(stream.call.context, ending)
        if is_over and not stream.over:
            stream.over = True
            self._coordinator.sessions.detach(stream.session)
            stream.call.end()
        if is_over:
            self._streams.discard(stream)


#: Events of a stream, beside requests.
_BEGUN, _SENT, _RUNG, _DUE = "begun", "sent", "rung", "due"


class _RankStream:
    """One rank's stream. All but ``ring`` is for the one thread."""

    def __init__(
        self,
        coordinator: RunCoordinator,
        session: Session,
        opened: wire.StreamOpen,
        recheck: Callable[[], None],
        call: DetachedCall,
        news: queue.SimpleQueue[tuple[_RankStream, Any] | None],
    ) -> None:
        self.session, self.call, self._recheck = session, call, recheck
        self._coordinator, self._opened, self._news = coordinator, opened, news
        self._sending = self._rung = self.over = False
        self._silent_since = time.monotonic()
        #: When the client closed its side, and whether it said goodbye.
        self.closed_at: float | None = None
        self._said_goodbye = False

    def ring(self) -> None:
        """There may be something to send. Any thread may ring."""
        if not self._rung:
            self._rung = True
            self._news.put((self, _RUNG))

    def is_due(self, now: float) -> bool:
        return self.closed_at is not None or (
            not self._sending and now - self._silent_since >= HEARTBEAT_S
        )

    def act(self, event: Any) -> bool:
        """Does what an event asks for; returns whether the stream is over. Raises what ends it otherwise."""
        if event is _SENT:
            self._sending = False
        elif event is _RUNG:
            self._rung = False
        elif event is _BEGUN:
            self._progress(self._opened.progress)
        elif event is not _DUE:
            self._read(event)
        if self.closed_at is not None:
            return self._finished(self.closed_at)
        if not self._sending:
            self._send_next(may_say_nothing=event is not _DUE)
        return not self.call.context.is_active()

    def _read(self, request: Any) -> None:
        if request is None:
            self.closed_at = time.monotonic()
            return
        readable(request)
        if request.WhichOneof("kind") != "progress":
            raise JoinRefused("a stream is opened once; after StreamOpen it carries Progress")
        self._progress(request.progress)

    def _progress(self, progress: wire.Progress) -> None:
        self._coordinator.sessions.progress(
            self.session,
            progress.consumed_through,
            progress.credit_micro_steps,
            progress.digest,
            progress.waited_s,
        )
        self.call.receive(lambda request: self._news.put((self, request)))

    def _finished(self, closed_at: float) -> bool:
        """After the client closed its side: whether its last commit is there, or waited for long enough."""
        now = time.monotonic()
        if now < closed_at + BREAK_S:
            return False
        self._said_goodbye = self._said_goodbye or self.call.context.is_active()
        if not self._coordinator.sessions.finish(self.session, 0.0) and now < closed_at + FINISH_S:
            return False
        if self._said_goodbye:
            self._coordinator.sessions.leave(self.session)
        return True

    def _send_next(self, *, may_say_nothing: bool) -> None:
        coordinator = self._coordinator
        item = coordinator.sessions.next_now(self.session)
        if item is None and may_say_nothing:
            return
        self._recheck()
        committed, epoch = coordinator.committed_through, coordinator.lease.epoch
        if isinstance(item, Delivery):
            starts = self._opened.document_starts
            data = encode_delivery(
                self.session.rank, item, committed, epoch, document_starts=starts
            )
        else:
            data = response_of(
                item or coordinator.sessions.waiting(self.session), committed, epoch
            ).SerializeToString()
        self._silent_since = time.monotonic()
        self._sending = self.call.send(data, lambda: self._news.put((self, _SENT)))
