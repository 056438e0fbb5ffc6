"""The losses that trainers report by source: what came last, and a curve of bounded size.

They are in this server's memory only, and nothing of the order or the counters knows them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenloom_server.core.state import MAX_COUNTER
from tokenloom_server.errors import ConfigError
from tokenloom_server.reports.stats import ReportStats, RunLosses, SourceLosses
from tokenloom_server.run.coordinator import RunCoordinator

#: A curve has at most so many points, and with many sources fewer: so many numbers in all, but never less than these.
MAX_POINTS, MAX_CELLS, MIN_POINTS = 512, 2**17, 32
#: A loss or learning rate beyond this is a fault of whoever measured it.
MAX_VALUE = 1e9
#: What a report counts in the smoothed loss beside the next one.
SMOOTHING = 0.9
#: In place of a source id.
_ALL = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a trainer measured over the micro-steps since its last report, over all its ranks."""

    sample_index: int
    total_tokens: int
    step: int
    #: By source id: the mean loss, and the tokens that it is of.
    sources: Mapping[int, tuple[float, int]]
    loss: float | None = None
    learning_rate: float | None = None

    @property
    def tokens(self) -> int:
        """That any loss is of."""
        return sum(tokens for _, tokens in self.sources.values())

    def check(self, sources: int) -> None:
        """Raises ``ConfigError`` naming the field that a run of so many sources cannot have reported."""
        for name in ("sample_index", "total_tokens", "step"):
            _check_count(name, getattr(self, name), 0)
        for name, least in (("loss", -MAX_VALUE), ("learning_rate", 0.0)):
            value = getattr(self, name)
            if value is not None:
                _check_value(name, value, least)
        for source, (loss, tokens) in self.sources.items():
            if not 0 <= source < sources:
                raise ConfigError(
                    f"sources: source_id {source} is reported; the run has the sources 0 to {sources - 1}, as Join "
                    "names them"
                )
            _check_value(f"sources[{source}].loss", loss, -MAX_VALUE)
            _check_count(f"sources[{source}].tokens", tokens, 1)


class Losses:
    """What was reported of one run since this server took it up. Thread-safe."""

    def __init__(self, coordinator: RunCoordinator) -> None:
        self._coordinator = coordinator
        self._lock = threading.Lock()
        self._since = coordinator.wall_clock()
        self._curve = Curve()
        self._last: Report | None = None
        self._generation = 0
        self._reported_at = 0.0
        # By source id, and of all: the newest loss, and the smoothed one's sum and weight.
        self._newest: dict[int, tuple[float, float, float]] = {}

    def add(self, uid: str, generation: int, attempt: str, report: Report) -> None:
        """Takes a report of the present generation. Raises ``ConfigError`` for what cannot be, ``Fenced`` and what else
        ``Sessions.require_generation`` raises."""
        report.check(len(self._coordinator.timeline.segments[-1].config.sources))
        self._coordinator.sessions.require_generation(uid, generation, attempt)
        with self._lock:
            last = self._last
            if last is not None and report.sample_index <= last.sample_index:
                if report.sample_index == last.sample_index and generation == self._generation:
                    return
                self._curve.rewind(report.sample_index)
                self._newest.clear()
            self._curve.add(report)
            self._last, self._generation, self._reported_at = (
                report,
                generation,
                self._coordinator.clock(),
            )
            of_all = {} if report.loss is None else {_ALL: (report.loss, report.tokens or 1)}
            for source, (loss, tokens) in (of_all | {**report.sources}).items():
                _, total, weight = self._newest.get(source, (0.0, 0.0, 0.0))
                self._newest[source] = (
                    loss,
                    SMOOTHING * total + loss * tokens,
                    SMOOTHING * weight + tokens,
                )

    def newest(self) -> tuple[ReportStats | None, dict[int, tuple[float, float]]]:
        """The last report, and by source id the smoothed loss and the last one."""
        with self._lock:
            last, newest = self._last, dict(self._newest)
            age_s = self._coordinator.clock() - self._reported_at
        by_source = {
            source: (total / weight, loss) for source, (loss, total, weight) in newest.items()
        }
        if last is None:
            return None, by_source
        smoothed, _ = by_source.pop(_ALL, (None, None))
        own: dict[str, Any] = {"age_s": max(0.0, round(age_s, 3)), "smoothed_loss": smoothed}
        same = {name: getattr(last, name) for name in ReportStats.model_fields if name not in own}
        return ReportStats(**same, **own), by_source

    def read(self) -> RunLosses:
        """The curve."""
        config = self._coordinator.timeline.segments[-1].config
        with self._lock:
            curve = self._curve.read(len(config.sources))
        losses, tokens = curve.pop("source_losses"), curve.pop("source_tokens")
        return RunLosses(
            run=self._coordinator.name,
            stream=self._coordinator.stream,
            since=self._since,
            **curve,
            sources=[
                SourceLosses(
                    id=source.id, spec=source.source, alias=source.name, losses=loss, tokens=count
                )
                for source, loss, count in zip(config.sources, losses, tokens, strict=True)
                if any(count)
            ],
        )


class _Point(NamedTuple):
    """What some reports in a row say together."""

    #: The three counters where the last of these reports was made.
    sample_index: int
    total_tokens: int
    step: int
    #: (loss × tokens, tokens) over all sources, and by source after that: shape (1 + sources, 2).
    sums: npt.NDArray[np.float64]
    learning_rate: float | None

    def joined(self, later: _Point) -> _Point:
        rate = self.learning_rate if later.learning_rate is None else later.learning_rate
        return later._replace(sums=self.sums + later.sums, learning_rate=rate)


class Curve:
    """Points over a run, each of ``stride`` reports. Where they fill the room, two become one, and the stride doubles:
    so a curve is as long as its run, however many reports that had."""

    def __init__(self, most: int = MAX_POINTS) -> None:
        self._most = most
        self._stride = 1
        self._points: list[_Point] = []
        # Reports in the last point.
        self._filled = 0
        # How many sources each point has room for.
        self._sources = 0

    def add(self, report: Report) -> None:
        """Adds a report that comes after all others."""
        self._make_room(max(report.sources, default=-1) + 1)
        sums = np.zeros((1 + self._sources, 2))
        for source, (loss, tokens) in report.sources.items():
            sums[1 + source] = loss * tokens, tokens
        if report.loss is not None:
            weight = report.tokens or 1
            sums[0] = report.loss * weight, weight
        point = _Point(
            report.sample_index, report.total_tokens, report.step, sums, report.learning_rate
        )
        if self._points and self._filled < self._stride:
            self._points[-1] = self._points[-1].joined(point)
        else:
            if len(self._points) == self._most:
                self._halve()
            self._points.append(point)
            self._filled = 0
        self._filled += 1

    def rewind(self, sample_index: int) -> None:
        """Takes back every point that ends at a sample index or after it."""
        self._points = [point for point in self._points if point.sample_index < sample_index]
        self._filled = self._stride

    def read(self, sources: int) -> dict[str, Any]:
        """The points as lists: of all, and for each of so many sources; None where nothing was reported."""
        self._make_room(sources)
        points = self._points
        sums = np.array([point.sums for point in points]).reshape(len(points), 1 + self._sources, 2)
        tokens = sums[..., 1]
        losses = sums[..., 0] / np.where(tokens, tokens, np.nan)
        # A revision that brought a source may have been taken back.
        of_sources = slice(1, 1 + sources)
        return {
            "stride": self._stride,
            "sample_index": [point.sample_index for point in points],
            "total_tokens": [point.total_tokens for point in points],
            "step": [point.step for point in points],
            "loss": _numbers(losses[:, 0]),
            "learning_rate": [point.learning_rate for point in points],
            "source_losses": [_numbers(column) for column in losses.T[of_sources]],
            "source_tokens": tokens.T[of_sources].astype(np.int64).tolist(),
        }

    def _make_room(self, sources: int) -> None:
        if sources <= self._sources:
            return
        more = ((0, sources - self._sources), (0, 0))
        self._sources = sources
        self._points = [point._replace(sums=np.pad(point.sums, more)) for point in self._points]
        while sources * self._most > MAX_CELLS and self._most > MIN_POINTS:
            if len(self._points) > self._most // 2:
                self._halve()
            self._most //= 2

    def _halve(self) -> None:
        """Joins every two points; a last one without another stays as it is."""
        before, after = self._points[::2], self._points[1::2]
        self._points = [
            one.joined(other) for one, other in zip(before, after, strict=False)
        ] + before[len(after) :]
        self._filled += self._stride * (len(before) == len(after))
        self._stride *= 2


def _numbers(values: npt.NDArray[np.float64]) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]


def _check_count(name: str, value: int, least: int) -> None:
    if not least <= value <= MAX_COUNTER:
        raise ConfigError(f"{name} is {value}; expected a number from {least} to 2^53 - 1")


def _check_value(name: str, value: float, least: float) -> None:
    if not least <= value <= MAX_VALUE:  # which no NaN is
        raise ConfigError(
            f"{name} is {value}; expected a finite number from {least:g} to {MAX_VALUE:g}: leave a loss out that was "
            "not measured"
        )
