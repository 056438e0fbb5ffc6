"""What a server measures while it serves: how long things take and how often they happen, for ``/metrics``; and its
words for what a rank does and a run waits for, the same in stats, in metrics, on the page and on the command line.

Nothing is measured for each token or sample. An observation takes a third of a microsecond. Who makes one of these
hands in the lock that it is changed under."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from typing import Literal, TypeAlias

#: Upper bounds of the buckets, seconds: of what is over in milliseconds, of what asks storage, and of what goes forward
#: in the data.
FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
READ_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SLOW_S = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

_Lock = AbstractContextManager[object]
#: ``finished``: the rank said goodbye. ``away``: it never came, its connection broke, or another server knew it.
RankState: TypeAlias = Literal["connected", "finished", "away"]
#: ``ranks``: samples are ready, and training sets the pace. ``rows``: they are being read and tokenised, and a rank has
#: nothing left. ``readers``: those of ``serve --readers``.
WaitReason = Literal["ranks", "storage", "readers", "ledger", "lease", "rows"]


class Counter:
    """A number that only rises, from 0 where the server takes the run up. Thread-safe."""

    def __init__(self, lock: _Lock) -> None:
        self._lock = lock
        self.value = 0

    def add(self, amount: int = 1) -> None:
        with self._lock:
            self.value += amount


class LabelledCounter:
    """A counter for each combination of labels that was met. Thread-safe."""

    def __init__(self, lock: _Lock) -> None:
        self._lock = lock
        self._values: dict[tuple[str, ...], int] = {}

    def add(self, *labels: str) -> None:
        with self._lock:
            self._values[labels] = self._values.get(labels, 0) + 1

    def values(self) -> dict[tuple[str, ...], int]:
        with self._lock:
            return dict(self._values)


class Histogram:
    """How often something took how long, seconds. Thread-safe."""

    def __init__(self, lock: _Lock, bounds: Sequence[float]) -> None:
        """``bounds``: ascending upper bounds of the buckets, beside the one without a bound."""
        self._lock = lock
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        bucket = bisect_left(self._bounds, seconds)
        with self._lock:
            self._counts[bucket] += 1
            self._sum += seconds

    @contextmanager
    def timing(self, clock: Callable[[], float]) -> Iterator[None]:
        """Observes how long its block took by a clock, unless that raises."""
        began = clock()
        yield
        self.observe(clock() - began)

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """(how many took at most so long, by upper bound as Prometheus writes it; the sum of all, seconds)."""
        with self._lock:
            counts, total = [*self._counts], self._sum
        return [
            *zip([*map(str, self._bounds), "+Inf"], map(float, accumulate(counts)), strict=True)
        ], total


class StorageMeasures:
    """What the readers of a run's remote storage met."""

    def __init__(self, lock: _Lock) -> None:
        self.reads = Histogram(lock, READ_S)
        self.retries = Counter(lock)
        self.hedges = Counter(lock)


class Measures:
    """What a server met of one run since it took it up. What a launch rewinds is none of it."""

    def __init__(self, lock: _Lock, storage: StorageMeasures) -> None:
        self.storage = storage
        self.commits = Histogram(lock, FAST_S)
        self.productions = Histogram(lock, FAST_S)
        self.openings = Histogram(lock, SLOW_S)
        self.joins = Histogram(lock, SLOW_S)
        self.snapshots = Histogram(lock, SLOW_S)
        self.reconnects = Counter(lock)
        self.fences = Counter(lock)
        self.lease_losses = Counter(lock)
        self.ledger_failures = Counter(lock)
        self.history_failures = Counter(lock)
        self.revisions = Counter(lock)
