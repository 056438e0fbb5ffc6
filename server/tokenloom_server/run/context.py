"""What never changes of a live run, and the one lock around what does."""

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
from tokenloom_server.run.wakes import Wakes


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
