"""What never changes of a live run, the one lock around what does, and who sleeps on it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from tokenloom_server.config.stream import TRAIN
from tokenloom_server.core.measures import Measures
from tokenloom_server.ledger.base import Ledger
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.run import sizing
from tokenloom_server.run.timeouts import Timeouts


class Bell(threading.Condition):
    """A condition on which nobody sleeps: whoever serves many streams hears of it."""

    def __init__(self, lock: threading.Lock, ring: Callable[[], None]) -> None:
        super().__init__(lock)
        self._ring = ring

    def notify(self, n: int = 1) -> None:
        self._ring()


class Wakes:
    """One condition for each kind of sleeper, so that a thread is woken only where it would act: waking it costs more
    than what most events bring it. Used by the parts of the run alone, which hold its lock."""

    def __init__(self) -> None:
        #: The run's lock.
        self.lock = threading.Lock()
        self.producer = threading.Condition(self.lock)
        self.committer = threading.Condition(self.lock)
        self.lease = threading.Condition(self.lock)
        #: Joins that wait for rank 0, and streams that wait for their last commit.
        self.changed = threading.Condition(self.lock)
        #: The present generation's streams, by rank.
        self.ranks: list[threading.Condition] = []

    def set_ranks(self, world_size: int) -> None:
        """A generation of so many ranks is the present one from now on; 0: none is."""
        self.ranks = [threading.Condition(self.lock) for _ in range(world_size)]

    def everyone(self) -> None:
        """Everyone but the lease's thread looks again."""
        for condition in (self.producer, self.committer, self.changed, *self.ranks):
            condition.notify_all()


@dataclass(eq=False)
class RunContext:
    """See the module. Each part of a run has it."""

    #: What the run's record gives.
    order: PipelineFactory
    ledger: Ledger
    timeouts: Timeouts
    clock: Callable[[], float] = time.monotonic
    #: Gives the dates that people read.
    wall_clock: Callable[[], float] = time.time
    #: Gives times that a server leaves to the next one; it may be set, so the wall's may be far from it.
    lease_clock: Callable[[], float] = time.time
    #: Who sleeps on the lock.
    wakes: Wakes = field(default_factory=Wakes)
    message_steps: Callable[[int, int], int] = sizing.message_steps
    group_micro_steps: Callable[[int, int, int, int], int] = sizing.group_micro_steps
    #: Openings, revisions and forks: one at a time, since each builds on what the one before made.
    one_change: AbstractContextManager[object] = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.name, self.stream, self.lock = self.order.name, TRAIN, self.wakes.lock
        io_stats = self.order.resources.io_stats
        io_stats.wait_at_most(self.timeouts.storage_timeout_s)
        self.measures = Measures(threading.Lock(), io_stats.measures)
