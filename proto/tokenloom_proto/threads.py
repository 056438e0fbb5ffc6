"""Threads of client and server. Each has a name, which the kernel knows, too, and a last line of defence."""

from __future__ import annotations

import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from tokenloom_proto.errors import TokenloomError

log = logging.getLogger("tokenloom")

#: So long after a turn that failed comes the next one, seconds: a fault that stays takes no core.
PAUSE_S = 1.0


@functools.cache
def faults() -> Counter[str]:
    """How often threads of this process met what nobody expects, by their kind; 0 of a kind without faults."""
    return Counter()


class Background(threading.Thread):
    """A daemon thread. What its work raises is logged, where it is new, and counted, unless it is an error of ours."""

    _goes_on = False

    def __init__(
        self, kind: str, work: Callable[[], object], of: str = "", *, after_s: float = 0.0
    ) -> None:
        """``kind``: what it does, ``of``: for whom, such as a run. ``after_s``: it begins so late, seconds."""
        super().__init__(name=f"{of}-{kind}" if of else kind, daemon=True)
        self._kind, self._work, self._of, self._after_s = kind, work, of, after_s
        #: Set by who wants no more of it: until ``after_s`` it does not begin then, and its work may look.
        self.ending = threading.Event()
        #: What the last turn failed with; empty where it did not.
        self.fault = ""
        faults().setdefault(kind, 0)

    def end(self, timeout_s: float) -> None:
        """Wants no more of it, and waits for its end at most so long."""
        self.ending.set()
        if self.ident is not None:
            self.join(timeout_s)

    def run(self) -> None:
        """See the class."""
        name_for_kernel(self._kind, self._of)
        goes_on = not (self._after_s and self.ending.wait(self._after_s))
        while goes_on:
            try:
                goes_on = bool(self._work()) and self._goes_on
                self.fault = ""
            except BaseException as error:  # a library's panic among them
                fault, is_named = (
                    f"{type(error).__name__}: {error}",
                    isinstance(error, TokenloomError),
                )
                faults()[self._kind] += not is_named
                if fault != self.fault:
                    log.error(
                        "thread %s: %s", self.name, fault, exc_info=None if is_named else error
                    )
                self.fault = fault
                goes_on = self._goes_on and not self.ending.wait(PAUSE_S)


class Loop(Background):
    """One that works in turns, until one returns false; one that fails is followed by the next."""

    _goes_on = True


def pool(threads: int, kind: str, of: str = "") -> ThreadPoolExecutor:
    """So many threads of a kind; what their work raises is for who waits for it."""
    return ThreadPoolExecutor(threads, f"{of}-{kind}" if of else kind, name_for_kernel, (kind, of))


def name_for_kernel(kind: str, of: str = "") -> None:
    """Gives this thread the name that ``top -H`` shows, of which the kernel keeps 15 bytes. Not all systems can."""
    with suppress(OSError):
        Path("/proc/thread-self/comm").write_bytes(f"{kind} {of}".strip().encode()[:15])
