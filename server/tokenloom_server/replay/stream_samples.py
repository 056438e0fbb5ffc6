"""The first samples of a stream beside training, made once as far as anybody asked, and kept in memory."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenloom_server.core.state import State
from tokenloom_server.errors import ServerStopping, TokenloomError
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.replay import Replay
from tokenloom_server.order.steps import StepGroup
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
        require_room: Callable[[int], None],
        add_bytes: Callable[[int], None],
    ) -> None:
        """``require_room`` raises ``LimitExceeded`` where so many bytes more have no room; ``add_bytes`` counts those
        that were made."""
        self.name = name
        self.factory = factory
        self._pool = pool
        self._require_room = require_room
        self._add_bytes = add_bytes
        self._changed = threading.Condition()
        self._samples: list[Sample] = []
        self._wanted = 0
        self._working = False
        self._ended = False
        self._stopping = False
        self._error: TokenloomError | None = None
        #: How often making samples failed: who waited meanwhile gets the error.
        self._failures = 0
        # Of the thread that makes them, and after the samples that are there.
        self.timeline = Timeline(factory)
        self._state = factory.initial()
        self._replay = Replay(self.timeline, self._state)
        #: Such states, now and then: to look at a sample again.
        self._states: list[State] = [self._state]

    def wait_for(self, count: int, timeout_s: float, interrupted: Callable[[], bool]) -> bool:
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
                group = self._make(left)
            except TokenloomError as error:
                self._fail(error)
                return
            except Exception as error:
                _log.exception("stream %s of run %s cannot be made", self.name, self.factory.name)
                self._fail(TokenloomError(f"stream {self.name!r} cannot be made: {error}; see the server's log"))
                return
            with self._changed:
                self._samples += _samples_of(group)
                self._ended = self._replay.ended is not None
                self._state = self._replay.state()
                if self._state.sample_index >= self._states[-1].sample_index + _STATE_EVERY_SAMPLES:
                    self._states.append(self._state)
                self._changed.notify_all()
            if self._ended:
                self._replay.rest()

    def _make(self, most: int) -> StepGroup:
        """The next samples."""
        count = max(1, min(most, TURN_TOKENS // self.factory.config.sequence_length))
        self._require_room(count * self.factory.form.sample_bytes)
        group = self._replay.samples(1, count)
        self._add_bytes(len(group.marks) * self.factory.form.sample_bytes)
        return group

    def _fail(self, error: TokenloomError) -> None:
        with self._changed:
            # Who asks again tries again: a file may be back.
            self._error, self._failures, self._working = error, self._failures + 1, False
            self._replay = Replay(self.timeline, self._state)
            self._changed.notify_all()


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
        Sample(bytes(ids), source, own.copy(), mark.digest, group.real_tokens(step), group.run_real_tokens(step))
        for step, (ids, source, own, mark) in enumerate(
            zip(group.ids(0, 0, made), picks, apart, group.marks, strict=True)
        )
    ]
