"""The first samples of a stream beside training, made once as far as anybody asked, and kept in memory."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenloom_server.core.state import State
from tokenloom_server.errors import ServerStopping, TokenloomError
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.replay import Replay
from tokenloom_server.order.steps import PADDING, StepGroup
from tokenloom_server.order.timeline import Timeline

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
