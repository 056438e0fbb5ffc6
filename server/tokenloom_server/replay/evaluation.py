"""Samples to evaluate on: the first of a stream beside training, the same ones each time, cut over any ranks.

An evaluation opens nothing, claims nothing, counts nothing and writes nothing: it is ranks that are handed slices of a
list. The list is made once, by one thread, as far as anybody asked, and then lies in memory: ranks do not repeat each
other's work, and the second evaluation costs next to nothing, although it may have taken a thousand rows to find one
that was held out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenloom_proto.threads import pool

from tokenloom_server.core import caller
from tokenloom_server.core.state import State, digest_hex
from tokenloom_server.errors import (
    ConfigError,
    JoinRefused,
    LimitExceeded,
    NotFound,
    OrderMismatch,
    ServerStopping,
    TokenloomError,
)
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.replay import Replay
from tokenloom_server.order.steps import PADDING, StepGroup
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.run.coordinator import RunCoordinator
from tokenloom_server.run.evaluation_streams import EvaluationStreams
from tokenloom_server.run.generation import EndOfData, Waiting

_log = logging.getLogger(__name__)

#: Samples are made so many tokens at a time.
TURN_TOKENS = 2**18
#: A state to go forward from is kept after at least so many samples.
_STATE_EVERY_SAMPLES = 32


class Sample(NamedTuple):
    """One sample: ``ids`` as they travel, the ``starts`` of documents in it (uint32), the rolling digest after it, and
    its real tokens and labels (see ``RealTokens``)."""

    ids: bytes
    source_id: int
    starts: npt.NDArray[np.uint32]
    digest: int
    real: tuple[int, int]
    run_real_tokens: int
    """Real tokens of the stream up to its end."""


class StreamSamples:
    """The first samples of one stream. Thread-safe."""

    def __init__(
        self,
        name: str,
        factory: PipelineFactory,
        pool: ThreadPoolExecutor,
        take_room: Callable[[int], None],
    ) -> None:
        """``take_room`` raises ``LimitExceeded`` where so many bytes more have no room, and counts them; fewer than
        none are given back."""
        self.name = name
        self.factory = factory
        self._pool = pool
        self._take_room = take_room
        self._changed = threading.Condition()
        self._samples: list[Sample] = []
        #: What a rank gets where there is no sample for it.
        self.padding = Sample(
            bytes(factory.form.sample_bytes), PADDING, np.empty(0, np.uint32), 0, (0, 0), 0
        )
        #: The newest turn: who waits for it gets its error.
        self._turn: Future[None] | None = None
        self._ended = False
        self._stopping = False
        # Of the thread that makes them, and after the samples that are there.
        self.timeline = Timeline(factory)
        self._state = factory.initial()
        self._replay = Replay(self.timeline, self._state)
        #: Such states, now and then: to look at a sample again.
        self._states: list[State] = [self._state]

    def wait_for(self, count: int, timeout_s: float, interrupted: Callable[[], bool]) -> bool:
        """Has so many made, turn by turn, and waits for it; whether they are there, or all that there are.

        Raises ``ServerStopping``, ``LimitExceeded``, and what making samples raises.
        """
        deadline = time.monotonic() + timeout_s
        turn: Future[None] | None = None
        with self._changed:
            while True:
                if self._stopping:
                    raise ServerStopping("the server is stopping; evaluate again when it is back")
                if turn is not None and turn.done():
                    turn.result()
                if self._ended or len(self._samples) >= count:
                    return True
                if self._turn is None or self._turn.done():
                    # After an error, too: who asks again tries again, a file may be back. It needs the lock, so it is
                    # not done before this thread waits.
                    self._turn = self._pool.submit(self._make, count)
                    self._turn.add_done_callback(lambda _: self.wake())
                turn = self._turn
                left = deadline - time.monotonic()
                if left <= 0 or interrupted():
                    return False
                self._changed.wait(left)

    def available(self, samples: int) -> int:
        """How many there are of the first ``samples`` (0: of all), once these were waited for."""
        with self._changed:
            return min(samples, len(self._samples)) if samples else len(self._samples)

    def made(self) -> int:
        """How many are there by now."""
        return self.available(0)

    def sample(self, index: int) -> Sample:
        """One that is there."""
        return self._samples[index]

    def state_before(self, index: int) -> State:
        """The nearest state at or before a sample that is there."""
        with self._changed:
            return [state for state in self._states if state.sample_index <= index][-1]

    def real(self, begin: int, end: int) -> tuple[int, int]:
        """Real tokens and labels of samples that are there."""
        counts = [sample.real for sample in self._samples[begin:end]]
        return sum(tokens for tokens, _ in counts), sum(labels for _, labels in counts)

    def wake(self) -> None:
        """Makes whoever waits look at what interrupts it."""
        with self._changed:
            self._changed.notify_all()

    def stop(self) -> None:
        """Ends the work, and whoever waits for it with ``ServerStopping``."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def _make(self, wanted: int) -> None:
        """One turn, on the thread that makes samples: the next of so many."""
        factory, samples = self.factory, list[Sample]()
        count = max(1, min(wanted - self.made(), TURN_TOKENS // factory.config.sequence_length))
        self._take_room(count * factory.form.sample_bytes)
        try:
            samples = _samples_of(self._replay.samples(1, count))
        except Exception as error:
            self._replay = Replay(self.timeline, self._state)
            if isinstance(error, TokenloomError):
                raise
            _log.exception("stream %s of run %s cannot be made", self.name, factory.name)
            raise TokenloomError(
                f"stream {self.name!r} cannot be made: {error}; see the server's log"
            ) from error
        finally:
            self._take_room((len(samples) - count) * factory.form.sample_bytes)
        self._state = self._replay.state()
        with self._changed:
            self._samples += samples
            self._ended = self._replay.ended is not None
            if self._state.sample_index >= self._states[-1].sample_index + _STATE_EVERY_SAMPLES:
                self._states.append(self._state)
        if self._ended:
            self._replay.rest()


def _samples_of(group: StepGroup) -> list[Sample]:
    """The samples of a group of one rank, one a micro-step."""
    made = len(group.marks)
    if not made:
        return []
    counts, starts = group.document_starts(0, 0, made)
    apart = np.split(starts, np.cumsum(counts)[:-1])
    picks = group.source_ids[0, :made, 0].tolist()
    return [
        # Copies: a view would keep all of the block that it is of.
        Sample(
            bytes(ids),
            source,
            own.copy(),
            mark.digest,
            group.real_tokens(step),
            group.run_real_tokens(step),
        )
        for step, (ids, source, own, mark) in enumerate(
            zip(group.ids(0, 0, made), picks, apart, group.marks, strict=True)
        )
    ]


#: Of all streams of a run together, the bytes of samples that are kept.
MAX_KEPT_BYTES = 2**28
#: The largest micro-step of a rank, bytes.
MAX_STEP_BYTES = 16 * 2**20
#: How often who waits in a Join looks whether its client does, too, seconds.
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationCall:
    """Who asks for which slice of what. ``samples``: how many of the stream; 0 for all of them."""

    stream: str
    rank: int
    world_size: int
    batch_size: int
    samples: int


class Slice(NamedTuple):
    """Micro-steps of a rank: samples [begin + rank × batch_size, …) of each. Where there are none, padding stands."""

    #: The sample index before the first micro-step, and after each.
    begin: int
    ends: Sequence[int]
    #: By step: the stream's tokens up to its end, those of them that are real, and the rolling digest there.
    tokens: Sequence[int]
    real_tokens: Sequence[int]
    digests: Sequence[str]
    #: By micro-step, over all ranks: real tokens and labels.
    real: Sequence[tuple[int, int]]
    rank: int
    #: By micro-step and place in the batch.
    samples: Sequence[Sample]

    @property
    def ids(self) -> bytes:
        """All samples', one after the other."""
        return b"".join(sample.ids for sample in self.samples)

    @property
    def source_ids(self) -> list[int]:
        """By micro-step and place in the batch."""
        return [sample.source_id for sample in self.samples]

    @property
    def starts(self) -> tuple[list[int], list[int]]:
        """How many documents begin in each sample, and their places there."""
        starts = [sample.starts.tolist() for sample in self.samples]
        return list(map(len, starts)), [start for own in starts for start in own]


class Evaluations:
    """All evaluations of one run. Thread-safe."""

    def __init__(self, coordinator: RunCoordinator, streams: EvaluationStreams) -> None:
        self._coordinator = coordinator
        self.streams = streams
        self._lock = threading.Lock()
        # One thread, which starts with the first evaluation: all of them together take one core from training at most.
        self._pool = pool(1, "evaluations", coordinator.name)
        self._samples: dict[str, StreamSamples] = {}
        self._bytes = 0
        self._stopping = False

    def join(self, call: EvaluationCall) -> tuple[StreamSamples, int]:
        """The stream, and how many samples this evaluation has, all of which are made now.

        Raises ``JoinRefused``, ``NotFound``, ``LimitExceeded``, ``ServerStopping``, and what making samples raises.
        """
        stream = self._find(call)
        count = call.samples or _more_than_fit(stream)
        try:
            while not stream.wait_for(count, _LOOK_S, caller.has_gone):
                if caller.has_gone():
                    raise ServerStopping("nobody waits any more for this evaluation; ask again")
        except LimitExceeded:
            self._forget(stream)
            raise
        available = stream.available(call.samples)
        if not available:
            raise NotFound(
                f"stream {call.stream!r} of run {self._coordinator.name!r} has no sample: all of its documents "
                f"together fill none of {stream.factory.config.sequence_length} tokens; hold more out, or give the "
                "stream a mixture"
            )
        return stream, available

    def open(self, uid: str, call: EvaluationCall, index: int, digest: str) -> Evaluation:
        """A rank's stream from sample ``index`` on; ``digest`` is what the client has of the samples before.

        Raises what ``join`` raises.
        """
        if uid != self._coordinator.uid:
            raise NotFound(
                f"run {self._coordinator.name!r} has uid {self._coordinator.uid}, but this evaluation began with "
                f"{uid}: its ledger is another one now; evaluate again"
            )
        if index < 0:
            raise JoinRefused(f"an evaluation goes on at sample {index}; expected one from 0 on")
        return Evaluation(self._coordinator, self._find(call), call, index, digest)

    def samples(self, stream: str) -> StreamSamples | None:
        """What there is of a stream; None where nobody evaluated on it yet."""
        with self._lock:
            return self._samples.get(stream)

    def stop(self) -> None:
        """Ends all of them with ``ServerStopping``."""
        with self._lock:
            self._stopping = True
            streams = list(self._samples.values())
        for stream in streams:
            stream.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _find(self, call: EvaluationCall) -> StreamSamples:
        self._coordinator.require_lead()
        if not 0 <= call.rank < call.world_size:
            raise JoinRefused(
                f"rank {call.rank} is not below world_size {call.world_size}: ranks count from 0"
            )
        if call.samples < 0:
            raise JoinRefused(
                f"samples is {call.samples}; expected a number from 1 on, or 0 for the whole stream"
            )
        with self._lock:
            if self._stopping:
                raise ServerStopping("the server is stopping; evaluate again when it is back")
            stream = self._samples.get(call.stream)
            if stream is None:
                try:
                    factory = self.streams.factory(call.stream)
                except ConfigError as error:
                    raise JoinRefused(f"stream {call.stream!r} cannot be opened: {error}") from None
                stream = self._samples[call.stream] = StreamSamples(
                    call.stream, factory, self._pool, self._take_room
                )
        step_bytes = call.batch_size * stream.factory.form.sample_bytes
        if call.batch_size < 1 or step_bytes > MAX_STEP_BYTES:
            raise JoinRefused(
                f"a micro-step of {call.batch_size} samples of a rank has {step_bytes} bytes; expected 1 sample to "
                f"{MAX_STEP_BYTES} bytes: take another batch size"
            )
        return stream

    def _take_room(self, size: int) -> None:
        with self._lock:
            if size <= 0 or self._bytes + size <= MAX_KEPT_BYTES:
                self._bytes += size
                return
        raise LimitExceeded(
            f"the samples that run {self._coordinator.name!r} is evaluated on would have more than {MAX_KEPT_BYTES} "
            "bytes, and the server keeps them in memory: ask for fewer (samples=)"
        )

    def _forget(self, stream: StreamSamples) -> None:
        """Makes room: who asked for too much gets nothing of it."""
        with self._lock:
            if self._samples.get(stream.name) is stream:
                del self._samples[stream.name]
                self._bytes -= stream.made() * stream.factory.form.sample_bytes


class Evaluation:
    """A rank's stream: what ``next`` gives is cut from the samples that are made, as far as the credits allow.

    ``next`` is for one thread; ``progress`` and ``wake`` may come from others.
    """

    def __init__(
        self,
        coordinator: RunCoordinator,
        stream: StreamSamples,
        call: EvaluationCall,
        index: int,
        digest: str,
    ) -> None:
        self.rank = call.rank
        self._stream = stream
        self._call = call
        self._index = index
        self._digest = digest
        self._wanted = call.samples or _more_than_fit(stream)
        self._message_steps = coordinator.message_steps(call.batch_size)
        self._credit = 0
        self._over = False
        self._news = threading.Condition()

    def progress(
        self,
        consumed_through: int,
        credit_micro_steps: int,
        digest: str = "",
        waited_s: float = 0.0,
    ) -> None:
        """The client consumed up to a sample index, and takes so many micro-steps beyond it."""
        if consumed_through > self._index:
            raise JoinRefused(
                f"an evaluation reports sample {consumed_through} as consumed, but it was sent nothing beyond "
                f"{self._index}"
            )
        with self._news:
            step = self._call.world_size * self._call.batch_size
            self._credit = max(self._credit, consumed_through + max(1, credit_micro_steps) * step)
            self._news.notify_all()

    def next(
        self, timeout_s: float, interrupted: Callable[[], bool]
    ) -> Slice | EndOfData | Waiting:
        """What comes next; waits for it at most ``timeout_s``, or until ``interrupted`` (see ``wake``).

        Raises ``ServerStopping``, ``OrderMismatch``, and what making samples raises.
        """
        stream, deadline = self._stream, time.monotonic() + timeout_s
        if not stream.wait_for(self._wanted, timeout_s, interrupted):
            wanted = f" of {self._call.samples}" if self._call.samples else ""
            return Waiting(f"{stream.made()}{wanted} samples of stream {stream.name!r} are made")
        total = stream.available(self._call.samples)
        self._check_digest(total)
        with self._news:
            while not self._over:
                if self._index >= total:
                    self._over = True
                    return EndOfData(
                        self._index, f"stream {stream.name!r} has {total} samples to evaluate on", 0
                    )
                if self._index < self._credit:
                    return self._slice(total)
                left = deadline - time.monotonic()
                if left <= 0 or interrupted():
                    return Waiting("")
                self._news.wait(left)
            self._news.wait_for(interrupted, max(0.0, deadline - time.monotonic()))
            return Waiting("")

    def wake(self) -> None:
        """Makes a waiting ``next`` look at what interrupts it."""
        self._stream.wake()
        with self._news:
            self._news.notify_all()

    def _slice(self, total: int) -> Slice:
        call, stream, begin = self._call, self._stream, self._index
        step = call.world_size * call.batch_size
        end = min(total, begin + self._message_steps * step, max(self._credit, begin + step))
        begins = range(begin, end, step)
        ends = [min(first + step, total) for first in begins]
        places = [
            first + call.rank * call.batch_size + place
            for first in begins
            for place in range(call.batch_size)
        ]
        self._index = ends[-1]
        return Slice(
            begin=begin,
            ends=ends,
            tokens=[end * stream.factory.config.sequence_length for end in ends],
            real_tokens=[stream.sample(end - 1).run_real_tokens for end in ends],
            digests=[digest_hex(stream.sample(end - 1).digest) for end in ends],
            real=[stream.real(first, end) for first, end in zip(begins, ends, strict=True)],
            rank=call.rank,
            samples=[stream.sample(i) if i < total else stream.padding for i in places],
        )

    def _check_digest(self, total: int) -> None:
        expected, self._digest = self._digest, ""
        if not expected:
            return
        known = 0 < self._index <= total
        actual = digest_hex(self._stream.sample(self._index - 1).digest) if known else digest_hex(0)
        if self._index > total or actual != expected:
            raise OrderMismatch(
                f"sample {self._index} of stream {self._stream.name!r} has digest {actual} here, but this evaluation "
                f"came there with {expected}: the data, the tokeniser or the software changed; evaluate again"
            )


def _more_than_fit(stream: StreamSamples) -> int:
    """More samples than may be kept: whoever asks for a whole stream gets that, or an error."""
    return MAX_KEPT_BYTES // stream.factory.form.sample_bytes + 1
