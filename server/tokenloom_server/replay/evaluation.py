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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenloom_server.core.state import State, digest_hex
from tokenloom_server.errors import (
    ConfigError,
    JoinRefused,
    LimitExceeded,
    NotFound,
    OrderMismatch,
    ServerStopping,
    SourceError,
    TokenizerError,
    TokenloomError,
)
from tokenloom_server.order.pipeline import PADDING, BatchPlan, Pipeline
from tokenloom_server.order.record import Order
from tokenloom_server.run.coordinator import RunCoordinator
from tokenloom_server.run.delivery import EndOfData, Waiting
from tokenloom_server.run.streams import Streams

_log = logging.getLogger(__name__)

#: Of all streams of a run together, the bytes of samples that are kept.
MAX_KEPT_BYTES = 2**28
#: The largest step of a rank, bytes.
MAX_STEP_BYTES = 16 * 2**20
#: Samples are made so many tokens at a time.
_TURN_TOKENS = 2**18
#: How often who waits in a Join looks whether its client does, too, seconds.
_LOOK_S = 0.5


class Sample(NamedTuple):
    """One that is kept: ``ids`` as they travel, the ``starts`` of documents in it (uint32), the rolling digest behind
    it, and its real tokens and labels (see ``pipeline.RealTokens``)."""

    ids: bytes
    source_id: int
    starts: npt.NDArray[np.uint32]
    digest: int
    real: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationCall:
    """Who asks for which slice of what. ``samples``: how many of the stream; 0 for all of them."""

    stream: str
    rank: int
    world_size: int
    batch_size: int
    samples: int


class Slice(NamedTuple):
    """Steps of a rank: samples [begin + rank × batch_size, …) of each. Where there are none, padding stands."""

    #: The sample index before the first step, and behind each.
    begin: int
    ends: Sequence[int]
    #: By step: the stream's tokens up to its end, and the rolling digest there.
    tokens: Sequence[int]
    digests: Sequence[str]
    #: By step, over all ranks: real tokens and labels.
    real: Sequence[tuple[int, int]]
    rank: int
    #: By step and place in the batch; None for padding.
    samples: Sequence[Sample | None]
    #: What stands for padding.
    padding: bytes

    @property
    def ids(self) -> bytes:
        """All samples', one after the other."""
        return b"".join(self.padding if sample is None else sample.ids for sample in self.samples)

    @property
    def source_ids(self) -> list[int]:
        """By step and place in the batch."""
        return [PADDING if sample is None else sample.source_id for sample in self.samples]

    @property
    def starts(self) -> tuple[list[int], list[int]]:
        """How many documents begin in each sample, and their places there."""
        found = [[] if sample is None else sample.starts.tolist() for sample in self.samples]
        return list(map(len, found)), [start for starts in found for start in starts]


class Kept:
    """The first samples of one stream, made as far as somebody asked. Thread-safe."""

    def __init__(
        self,
        name: str,
        order: Order,
        pool: ThreadPoolExecutor,
        room: Callable[[int], None],
        made: Callable[[int], None],
    ) -> None:
        """``room`` is asked for so many bytes more, and raises ``LimitExceeded`` where there are none; ``made`` is told
        how many were."""
        self.name = name
        self.order = order
        self._pool = pool
        self._room = room
        self._made = made
        self._changed = threading.Condition()
        self._samples: list[Sample] = []
        self._wanted = 0
        self._working = False
        self._ended = False
        self._stopping = False
        self._error: TokenloomError | None = None
        #: How often making samples failed: who waited meanwhile is told.
        self._failures = 0
        # Of the thread that makes them:
        self._pipeline: Pipeline | None = None
        self._state: State = order.initial()
        #: Where it went on, from time to time: to look at a sample again.
        self._passed: list[State] = [self._state]
        self._careful = False

    def await_some(self, count: int, timeout_s: float, interrupted: Callable[[], bool]) -> bool:
        """Has so many made, and waits for it; whether they are there, or all that there are.

        Raises ``ServerStopping``, ``LimitExceeded``, and what making samples raises.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            failures = self._failures
            while True:
                if self._stopping:
                    raise ServerStopping("the server is stopping; evaluate again when it is back")
                if self._failures != failures:
                    assert self._error is not None, "a failure has an error"
                    raise self._error
                if self._ended or len(self._samples) >= count:
                    return True
                self._wanted = max(self._wanted, count)
                if not self._working:
                    self._working = True
                    self._pool.submit(self._work)
                left = deadline - time.monotonic()
                if left <= 0 or interrupted():
                    return False
                self._changed.wait(left)

    def available(self, samples: int) -> int:
        """How many there are of the first ``samples`` (0: of all), once these were awaited."""
        with self._changed:
            return min(samples, len(self._samples)) if samples else len(self._samples)

    def made(self) -> int:
        """How many are there by now."""
        with self._changed:
            return len(self._samples)

    def sample(self, index: int) -> Sample:
        """One that is there."""
        return self._samples[index]

    def state_before(self, index: int) -> State:
        """The nearest state at or before a sample that is there."""
        return max(
            (state for state in self._passed if state.sample_index <= index), key=lambda state: state.sample_index
        )

    def real(self, begin: int, end: int) -> tuple[int, int]:
        """Real tokens and labels of samples that are there."""
        found = [sample.real for sample in self._samples[begin:end]]
        return sum(tokens for tokens, _ in found), sum(labels for _, labels in found)

    def wake(self) -> None:
        """Makes whoever waits look at what interrupts it."""
        with self._changed:
            self._changed.notify_all()

    def stop(self) -> None:
        """Ends the work, and whoever waits for it with ``ServerStopping``."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    # On the thread that makes samples:

    def _work(self) -> None:
        """Makes samples up to what is wanted."""
        while True:
            with self._changed:
                if self._stopping or self._ended or len(self._samples) >= self._wanted:
                    self._working = False
                    return
                left = self._wanted - len(self._samples)
            try:
                made, ended = self._make(left)
            except TokenloomError as error:
                if isinstance(error, SourceError | TokenizerError) and not self._careful:
                    # What is good before the fault comes out first, sample by sample.
                    self._careful, self._pipeline = True, None
                    continue
                self._fail(error)
                return
            except Exception as error:
                _log.exception("stream %s of run %s cannot be made", self.name, self.order.name)
                self._fail(TokenloomError(f"stream {self.name!r} cannot be made: {error}; see the server's log"))
                return
            with self._changed:
                self._samples += made
                self._ended = ended
                if not self._careful:
                    self._passed.append(self._state)
                self._changed.notify_all()

    def _make(self, most: int) -> tuple[list[Sample], bool]:
        """The next samples, and whether these are the last."""
        order = self.order
        if self._pipeline is None:
            self._pipeline = order.pipeline(self._state)
        count = 1 if self._careful else max(1, min(most, _TURN_TOKENS // order.config.sequence_length))
        self._room(count * order.sample_bytes)
        plan = BatchPlan(start_index=self._state.sample_index, world_size=1, batch_size=1, group_steps=count)
        group = self._pipeline.begin_group(plan)
        self._pipeline.fill(group, count)
        made = len(group.marks)
        ended = self._pipeline.ended is not None
        if ended:
            self._pipeline = None
        if not made:
            return [], ended
        counts, starts = group.document_starts(0, 0, made)
        apart = np.split(starts, np.cumsum(counts)[:-1])
        self._state = group.state_behind(made - 1)
        self._made(made * order.sample_bytes)
        picks = group.source_ids[0, :made, 0].tolist()
        return [
            # Copies: a view would keep all of the block that it is of.
            Sample(bytes(ids), source, own.copy(), mark.digest, group.real_tokens(step))
            for step, (ids, source, own, mark) in enumerate(
                zip(group.ids(0, 0, made), picks, apart, group.marks, strict=True)
            )
        ], ended

    def _fail(self, error: TokenloomError) -> None:
        with self._changed:
            # Who asks again tries again: a file may be back.
            self._error, self._failures, self._working = error, self._failures + 1, False
            self._pipeline, self._careful = None, False
            self._changed.notify_all()


class Evaluations:
    """All evaluations of one run. Thread-safe."""

    def __init__(self, coordinator: RunCoordinator, streams: Streams) -> None:
        self._coordinator = coordinator
        self.streams = streams
        self._lock = threading.Lock()
        # One thread, which starts with the first evaluation: all of them together take one core from training at most.
        self._pool = ThreadPoolExecutor(1, f"{coordinator.name}-evaluations")
        self._kept: dict[str, Kept] = {}
        self._bytes = 0
        self._stopping = False

    def join(self, call: EvaluationCall, interrupted: Callable[[], bool]) -> tuple[Kept, int]:
        """The stream, and how many samples this evaluation has, all of which are made now.

        Raises ``JoinRefused``, ``NotFound``, ``LimitExceeded``, ``ServerStopping``, and what making samples raises.
        """
        kept = self._find(call)
        count = call.samples or self._most(kept)
        try:
            while not kept.await_some(count, _LOOK_S, interrupted):
                if interrupted():
                    raise ServerStopping("nobody waits any more for this evaluation; ask again")
        except LimitExceeded:
            self._forget(kept)
            raise
        found = kept.available(call.samples)
        if not found:
            raise NotFound(
                f"stream {call.stream!r} of run {self._coordinator.name!r} has no sample: all of its documents "
                f"together fill "
                f"none of {kept.order.config.sequence_length} tokens; hold more out, or give the stream a mixture"
            )
        return kept, found

    def open(self, uid: str, call: EvaluationCall, index: int, digest: str) -> Evaluation:
        """A rank's stream from sample ``index`` on; ``digest`` is what the client has behind the samples before.

        Raises what ``join`` raises.
        """
        if uid != self._coordinator.uid:
            raise NotFound(
                f"run {self._coordinator.name!r} has uid {self._coordinator.uid}, but this evaluation began with "
                f"{uid}: its ledger is another one now; evaluate again"
            )
        if index < 0:
            raise JoinRefused(f"an evaluation goes on at sample {index}; expected one from 0 on")
        return Evaluation(self._coordinator, self._find(call), call, index, digest, self._most)

    def kept(self, stream: str) -> Kept | None:
        """What there is of a stream; None where nobody evaluated on it yet."""
        with self._lock:
            return self._kept.get(stream)

    def stop(self) -> None:
        """Ends all of them with ``ServerStopping``."""
        with self._lock:
            self._stopping = True
            kept = list(self._kept.values())
            self._pool.shutdown(wait=False, cancel_futures=True)
        for each in kept:
            each.stop()
            each.order.close()

    def _find(self, call: EvaluationCall) -> Kept:
        self._coordinator.require_lead()
        if not 0 <= call.rank < call.world_size:
            raise JoinRefused(f"rank {call.rank} is not below world_size {call.world_size}: ranks count from 0")
        if call.samples < 0:
            raise JoinRefused(f"samples is {call.samples}; expected a number from 1 on, or 0 for the whole stream")
        with self._lock:
            if self._stopping:
                raise ServerStopping("the server is stopping; evaluate again when it is back")
            kept = self._kept.get(call.stream)
            if kept is None:
                try:
                    order = self.streams.order(call.stream)
                except ConfigError as error:
                    raise JoinRefused(f"stream {call.stream!r} cannot be opened: {error}") from None
                kept = self._kept[call.stream] = Kept(call.stream, order, self._pool, self._room, self._made)
        step_bytes = call.batch_size * kept.order.sample_bytes
        if call.batch_size < 1 or step_bytes > MAX_STEP_BYTES:
            raise JoinRefused(
                f"a step of {call.batch_size} samples of a rank has {step_bytes} bytes; expected 1 sample to "
                f"{MAX_STEP_BYTES} bytes: take another batch size"
            )
        return kept

    def _most(self, kept: Kept) -> int:
        """More than may be kept: whoever asks for a whole stream gets that, or an error."""
        return MAX_KEPT_BYTES // kept.order.sample_bytes + 1

    def _room(self, size: int) -> None:
        with self._lock:
            if self._bytes + size <= MAX_KEPT_BYTES:
                return
        raise LimitExceeded(
            f"the samples that run {self._coordinator.name!r} is evaluated on would have more than {MAX_KEPT_BYTES} "
            "bytes, and the server keeps them in memory: ask for fewer (samples=)"
        )

    def _made(self, size: int) -> None:
        with self._lock:
            self._bytes += size

    def _forget(self, kept: Kept) -> None:
        """Makes room: who asked for too much gets nothing of it."""
        with self._lock:
            if self._kept.get(kept.name) is kept:
                del self._kept[kept.name]
                self._bytes -= kept.made() * kept.order.sample_bytes


class Evaluation:
    """A rank's stream: what ``next`` gives is cut from what is kept, as far as the credits allow.

    ``next`` is for one thread; ``progress`` and ``wake`` may come from others.
    """

    def __init__(
        self,
        coordinator: RunCoordinator,
        kept: Kept,
        call: EvaluationCall,
        index: int,
        digest: str,
        most: Callable[[Kept], int],
    ) -> None:
        self.rank = call.rank
        self.name = f"{coordinator.name}-{call.stream}-rank-{call.rank}"
        self._kept = kept
        self._call = call
        self._index = index
        self._digest = digest
        self._wanted = call.samples or most(kept)
        self._message_steps = coordinator.message_steps(call.batch_size)
        self._credit = 0
        self._over = False
        self._news = threading.Condition()

    def progress(self, consumed_through: int, credit_steps: int, digest: str = "") -> None:
        """The client consumed up to a sample index, and takes so many steps beyond it."""
        if consumed_through > self._index:
            raise JoinRefused(
                f"an evaluation reports sample {consumed_through} as consumed, but it was sent nothing beyond "
                f"{self._index}"
            )
        with self._news:
            step = self._call.world_size * self._call.batch_size
            self._credit = max(self._credit, consumed_through + max(1, credit_steps) * step)
            self._news.notify_all()

    def next(self, timeout_s: float, interrupted: Callable[[], bool]) -> Slice | EndOfData | Waiting:
        """What comes next; waits for it at most ``timeout_s``, or until ``interrupted`` (see ``wake``).

        Raises ``ServerStopping``, ``OrderMismatch``, and what making samples raises.
        """
        kept, deadline = self._kept, time.monotonic() + timeout_s
        if not kept.await_some(self._wanted, timeout_s, interrupted):
            what = f" of {self._call.samples}" if self._call.samples else ""
            return Waiting(f"{kept.made()}{what} samples of stream {kept.name!r} are made")
        total = kept.available(self._call.samples)
        self._check_digest(total)
        with self._news:
            while not self._over:
                if self._index >= total:
                    self._over = True
                    return EndOfData(self._index, f"stream {kept.name!r} has {total} samples to evaluate on", 0)
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
        self._kept.wake()
        with self._news:
            self._news.notify_all()

    def finish(self, said_goodbye: bool) -> None:
        """The client has all that it wants: nothing of an evaluation is to be committed."""

    def _slice(self, total: int) -> Slice:
        call, kept, begin = self._call, self._kept, self._index
        step = call.world_size * call.batch_size
        behind = min(total, begin + self._message_steps * step, max(self._credit, begin + step))
        begins = range(begin, behind, step)
        ends = [min(first + step, total) for first in begins]
        samples: list[Sample | None] = []
        for first in begins:
            own = range(first + call.rank * call.batch_size, first + (call.rank + 1) * call.batch_size)
            samples += [kept.sample(i) if i < total else None for i in own]
        self._index = ends[-1]
        return Slice(
            begin=begin,
            ends=ends,
            tokens=[end * kept.order.config.sequence_length for end in ends],
            digests=[digest_hex(kept.sample(end - 1).digest) for end in ends],
            real=[kept.real(first, end) for first, end in zip(begins, ends, strict=True)],
            rank=call.rank,
            samples=samples,
            padding=bytes(kept.order.sample_bytes),
        )

    def _check_digest(self, total: int) -> None:
        came, self._digest = self._digest, ""
        if not came:
            return
        known = 0 < self._index <= total
        found = digest_hex(self._kept.sample(self._index - 1).digest) if known else digest_hex(0)
        if self._index > total or found != came:
            raise OrderMismatch(
                f"sample {self._index} of stream {self._kept.name!r} has digest {found} here, but this evaluation came "
                f"there with {came}: the data, the tokeniser or the software changed; evaluate again"
            )
