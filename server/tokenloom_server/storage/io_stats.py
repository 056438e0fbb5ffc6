"""What is read of remote storage now, and how long it took lately."""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import ClassVar, Literal, NamedTuple

from tokenloom_proto.threads import Loop

from tokenloom_server.core.measures import StorageMeasures

_log = logging.getLogger(__name__)

WaitedFor = Literal["storage", "readers"]


class RetryPolicy(NamedTuple):
    """How long is waited for storage, seconds."""

    #: A second attempt at a read is made after so long at least, and where it takes ``hedge_factor`` times as long as
    #: nearly all of its size did lately.
    hedge_s: float = 1.0
    hedge_factor: float = 3.0
    #: And a further one after so long without an answer.
    attempt_s: float = 30.0
    #: After an error: the first pause; each further one is twice as long, up to the longest.
    pause_s: float = 0.25
    longest_pause_s: float = 15.0
    #: Seconds without an answer after which a read is an error.
    total_s: float = 300.0


#: Seconds after which a command gives up that somebody waits for, who can correct what it names.
COMMAND_S = 10.0
#: Bytes that all readers of a run together prefetch and hold.
AHEAD_BYTES = 256 << 20
#: A wait for storage or readers of so long is named, seconds.
NAMED_AFTER_S = 2.0
#: Between two lines that say which storage is waited for, seconds.
SAID_EVERY_S = 5.0
#: So many reads of a size are remembered, and so many are needed to say what is usual.
_REMEMBERED, _TELLING = 64, 8


@dataclass(slots=True)
class Wait:
    """Somebody waits for storage, or for readers to answer."""

    name: str
    since: float
    attempts: int = 1
    #: Whether this is for whatever answers a source's rows, and nobody asks a second time: a read of a mount.
    at_once: bool = False
    #: What the last attempt that failed was answered with; of readers, why they have not answered.
    trouble: str = ""
    reason: WaitedFor = "storage"

    def text(self) -> str:
        """What is waited for and for how long, for people."""
        tries = f", attempt {self.attempts}" if self.attempts > 1 else ""
        last = "the last one failed: " if self.reason == "storage" else ""
        trouble = f"; {last}{self.trouble}" if self.trouble else ""
        return f"{self.reason}: {self.name} (for {monotonic() - self.since:.0f} s{tries}{trouble})"


@functools.cache
def waits() -> dict[int, Wait]:
    """All of this process, by their identity."""
    return {}


class IoStats:
    """Shared by all readers of a run. Thread-safe."""

    #: How long storage is waited for where nothing else is said.
    default_policy: ClassVar[RetryPolicy] = RetryPolicy()

    def __init__(self, retry_policy: RetryPolicy | None = None) -> None:
        self.retry_policy = retry_policy or self.default_policy
        self.stopped = False
        #: Whether as little as possible is read of remote files, and nothing kept: they are only looked at.
        self.sparing = False
        #: When local files were last written, by path, as far as they were opened: what changes later is noticed.
        self.modified: dict[str, int] = {}
        #: What is to be looked at in the run's files, for people; or nothing.
        self.warning = ""
        self.measures = StorageMeasures(threading.Lock())
        self._lock = threading.Lock()
        self._waits: dict[int, Wait] = {}
        # By the power of two that a read's length lies below.
        self._took: dict[int, deque[float]] = {}
        self._ahead = 0

    def warn_of(self, path: str) -> None:
        """A file was written since the run began, and nothing that was recorded of it differs."""
        self.warning = (
            f"{path!r} was written or copied since the run began; what was recorded of it is as it was, all else may "
            "differ: tokenloom validate --full compares every byte"
        )
        _log.warning(self.warning)

    def stop(self) -> None:
        """Nobody waits any more: the server ends."""
        self.stopped = True

    def wait_at_most(self, seconds: float) -> None:
        """When a wait is an error."""
        self.retry_policy = self.retry_policy._replace(total_s=seconds)

    @contextmanager
    def waiting(
        self, name: str, *, at_once: bool = False, reason: WaitedFor = "storage"
    ) -> Iterator[Wait]:
        """For as long as somebody waits for a file; ``name`` is how people know it."""
        wait = Wait(name, monotonic(), at_once=at_once, reason=reason)
        with self._lock:
            self._waits[id(wait)] = waits()[id(wait)] = wait
        try:
            yield wait
        finally:
            with self._lock:
                del self._waits[id(wait)], waits()[id(wait)]

    def longest_wait(self, least_s: float = NAMED_AFTER_S) -> Wait | None:
        """What has been waited for longest, and at least so long."""
        wait = self._longest()
        return wait if wait is not None and monotonic() - wait.since >= least_s else None

    def _longest(self) -> Wait | None:
        with self._lock:
            # Within a wait for the rows of a source lies the one for what answers them, which knows more.
            return min(
                self._waits.values(), key=lambda wait: (wait.at_once, wait.since), default=None
            )

    def overdue(self) -> str:
        """What to say of a read that nobody gives up and that lasts longer than others are waited for, if there is
        one."""
        wait, most = self._longest(), self.retry_policy.total_s
        if wait is None or not wait.at_once or monotonic() - wait.since < most:
            return ""
        return (
            f"{wait.name} could not be read for {most:.0f} s, and the operating system does not come back from it; "
            "look at the disk or mount, then start the trainers again from their last checkpoint"
        )

    def took(self, length: int, seconds: float) -> None:
        """A read was answered."""
        self.measures.reads.observe(seconds)
        with self._lock:
            self._took.setdefault(length.bit_length(), deque(maxlen=_REMEMBERED)).append(seconds)

    def hedge_after_s(self, length: int) -> float:
        """When a read of so many bytes is late: a second one is started then, and the first answer counts. A listing,
        which has none, takes as long as it takes."""
        if not length:
            return self.retry_policy.attempt_s
        with self._lock:
            known = self._took.get(length.bit_length())
            usual = (
                sorted(known)[len(known) * 95 // 100]
                if known is not None and len(known) >= _TELLING
                else 0.0
            )
        return min(
            max(self.retry_policy.hedge_s, self.retry_policy.hedge_factor * usual),
            self.retry_policy.attempt_s,
        )

    def reserve(self, length: int) -> bool:
        """Room for bytes that are read ahead; whether there is any. ``release`` gives it back."""
        with self._lock:
            if self._ahead + length > AHEAD_BYTES:
                return False
            self._ahead += length
            return True

    def release(self, length: int) -> None:
        with self._lock:
            self._ahead -= length


@contextmanager
def waits_said(run: str = "") -> Iterator[None]:
    """Meanwhile the log says every few seconds what this process has waited for longest, if it waits for storage."""

    def say() -> bool:
        if watcher.ending.wait(SAID_EVERY_S):
            return False
        wait = min([*waits().values()], key=lambda wait: wait.since, default=None)
        if wait is not None:
            _log.warning("%swaiting for %s", run and f"{run}: ", wait.text())
        return True

    watcher = Loop("waits", say, run)
    watcher.start()
    try:
        yield
    finally:
        watcher.end(timeout_s=1)


@contextmanager
def given_up_soon() -> Iterator[None]:
    """Meanwhile this process waits for storage for ``COMMAND_S``, unless a policy says something else."""
    before, IoStats.default_policy = IoStats.default_policy, RetryPolicy(total_s=COMMAND_S)
    try:
        yield
    finally:
        IoStats.default_policy = before
