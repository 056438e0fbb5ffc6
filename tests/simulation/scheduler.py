"""Time and the order of events: one heap, one generator of chance, no thread.

What would block a thread (a call to the ledger, reading a source) lets the rest of the world go on inside it, by
``breathe``: the processes that may run meanwhile do, and those that the real locks would hold up do not.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from itertools import count
from typing import Any

#: Calls that are under way at once, one inside the other.
MOST_NESTED = 4
#: A world that needs more is going round in circles.
MOST_EVENTS = 200_000


class Killed(BaseException):
    """The process in whose code this is raised was killed."""


class Violation(BaseException):
    """A promise was broken. No ``Exception``: the product's own handlers must not take it for a fault of theirs."""


class OneAtATime:
    """A lock of a world's one thread: whoever would wait for it would wait for ever."""

    def __init__(self) -> None:
        self._is_held = False

    def locked(self) -> bool:
        return self._is_held

    def __enter__(self) -> None:
        if self._is_held:
            raise Violation("the one thread waits for a lock that it holds, for ever")
        self._is_held = True

    def __exit__(self, *_: object) -> None:
        self._is_held = False


class Process:
    """Something that is killed, and stopped and continued, as a whole."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.paused = False
        #: What came while the process was held up, in order.
        self.backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def held_up(self) -> bool:
        """Whether none of its code can run now."""
        return self.paused


class Scheduler:
    """See the module."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        #: (time, who, what, details): what happened, for people and for the proof that a seed replays.
        self.log: list[tuple[float, str, str, tuple[Any, ...]]] = []
        self._events: list[
            tuple[float, int, Process | None, Callable[..., None], tuple[Any, ...]]
        ] = []
        self._numbers = count()
        self._nested = 0
        self.done = 0

    def note(self, who: str, what: str, *details: Any) -> None:
        self.log.append((self.now, who, what, details))

    def at(
        self, delay_s: float, process: Process | None, work: Callable[..., None], *args: Any
    ) -> None:
        """Does work of a process later; never, where it is dead by then."""
        self.at_time(self.now + delay_s, process, work, *args)

    def at_time(
        self, time: float, process: Process | None, work: Callable[..., None], *args: Any
    ) -> None:
        """Does work at a time; what is for the same time in the order in which it was asked for."""
        heapq.heappush(self._events, (time, next(self._numbers), process, work, args))

    def soon(
        self, longest_s: float, process: Process | None, work: Callable[..., None], *args: Any
    ) -> None:
        """Does work within a while."""
        self.at(self.rng.random() * longest_s, process, work, *args)

    def run_one(self) -> bool:
        """The next event; False where there is none."""
        if not self._events:
            return False
        time, _, process, work, args = heapq.heappop(self._events)
        self.done += 1
        if self.done > MOST_EVENTS:
            raise Violation(f"{MOST_EVENTS} events, and no end: the world goes round in circles")
        self.now = max(self.now, time)
        if process is None:
            work(*args)
        elif process.alive:
            if process.backlog or process.held_up():
                process.backlog.append((work, args))
                self._catch_up(process)
            else:
                try:
                    work(*args)
                except Killed:
                    assert not process.alive
                except Exception as error:
                    raise Violation(f"{process.name} met what nobody expects: {error!r}") from error
                self._catch_up(process)
        return True

    def run_until(self, time: float) -> None:
        while self._events and self._events[0][0] <= time:
            self.run_one()
        self.now = max(self.now, time)

    def breathe(self, process: Process, longest_s: float) -> None:
        """Time passes for the code of a process that is at work. Raises ``Killed`` where it does not survive that."""
        if self._nested < MOST_NESTED:
            self._nested += 1
            try:
                self.run_until(self.now + self.rng.random() * longest_s)
                while process.paused and process.alive and self.run_one():
                    pass
            finally:
                self._nested -= 1
        if not process.alive:
            raise Killed(process.name)

    def resume(self, process: Process) -> None:
        """Continues a process that was stopped."""
        process.paused = False
        self._catch_up(process)

    def _catch_up(self, process: Process) -> None:
        if process.backlog and process.alive and not process.held_up():
            for work, args in process.backlog:
                self.at(0.0, process, work, *args)
            process.backlog.clear()
