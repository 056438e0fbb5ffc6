"""Who sleeps on a run's lock, and how each is woken."""

from __future__ import annotations

import threading
from collections.abc import Callable


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
