"""The metrics of the server for Prometheus, read from the runs at each scrape; nothing is kept here.

What is committed of runs, sources and ranks is counted with the label ``generation``: a restore rewinds it. Prometheus
would take that for a reset to zero, and ``rate()`` would show a spike; a new series for each generation avoids both.
Only the present generation is exposed, so ``sum without (generation) (…)`` is today's value.

What a server measures itself (``core.measures``) begins at zero with it, as Prometheus expects, without that label.
``process_*`` are prometheus_client's own metrics of the server process (memory, CPU, open files).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, get_args

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from tokenloom_proto.threads import faults

from tokenloom_server.api import metric_tables as tables
from tokenloom_server.api.auth import OPEN_TO_ALL, Access
from tokenloom_server.api.run_folder import RunFolder
from tokenloom_server.api.service import Runs
from tokenloom_server.core.measures import Histogram, WaitReason
from tokenloom_server.errors import TokenloomError
from tokenloom_server.reports.stats import RunStats, SourceStats
from tokenloom_server.storage.cache import block_cache


def create_registry(
    runs: Runs, *, version: str, access: Access = OPEN_TO_ALL, folder: RunFolder | None = None
) -> CollectorRegistry:
    """A registry of its own (never the global one) with a server's runs and its process."""
    registry = CollectorRegistry()
    registry.register(RunCollector(runs, partial(tables.ServerRow, version, access, folder)))
    ProcessCollector(registry=registry)
    return registry


class RunCollector(Collector):
    """Reads every run at each scrape. A run that cannot be read costs its own metrics, not the scrape."""

    def __init__(self, runs: Runs, server_row: Callable[..., tables.ServerRow]) -> None:
        self._runs, self._server_row = runs, server_row

    def collect(self) -> Iterator[Metric]:
        server = self._server_row(self._runs.not_ready() is None, block_cache())
        runs: list[RunStats] = []
        measured: list[_Series] = []
        saved: list[_Series] = []
        reads: list[_Series] = []
        broken = {problem.run for problem in self._runs.problems()}
        for name in sorted({*self._runs.names(), *broken}):
            is_readable = False
            with suppress(TokenloomError):
                served = self._runs.get(name)
                runs.append(served.stats.read())
                measured.append(_Series((name, runs[-1].stream), None, served.measures))
                saved.append(_series(runs[-1], served.snapshots.saved_at()))
                is_readable = True
            reads.append(_Series((name,), None, tables.ReadRow(is_readable, name in broken)))
        series = (
            [_Series((), None, server)],
            [_Series((kind,), None, count) for kind, count in sorted(faults().items())],
            [_Series(of, None, calls) for of, calls in self._runs.rpc_errors.values().items()],
            reads,
            [_series(run, run) for run in runs],
            measured,
            saved,
            [_series(run, source, source.alias) for run in runs for source in run.sources],
            [
                _series(run, ends_in_s(run, source), source.alias)
                for run in runs
                for source in run.sources
            ],
            [
                _series(run, run.waiting_reason == reason, reason)
                for run in runs
                for reason in get_args(WaitReason)
            ],
            [
                _series(run, node, node.name)
                for run in runs
                if run.readers
                for node in run.readers.nodes
            ],
            [
                _series(run, source, source.alias)
                for run in runs
                if run.readers
                for source in run.readers.sources
            ],
            [_series(run, rank, str(rank.rank)) for run in runs for rank in run.ranks],
        )
        for (labels, metrics), rows in zip(tables.TABLES, series, strict=True):
            yield from _families(metrics, labels, rows)


def ends_in_s(run: RunStats, source: SourceStats) -> float | None:
    """When a source has no more samples, seconds from now, at the present rate and by the weights in force; None where
    that is not known, and where it has ended or gives nothing."""
    rate = run.tokens_per_s * source.target_share
    if source.remaining_samples is None or source.exhausted or not rate:
        return None
    return source.remaining_samples * run.sequence_length / rate


class _Series(NamedTuple):
    """A row, the values of its table's labels, and the generation of its run, where that rewinds its counters."""

    labels: tuple[str, ...]
    generation: int | None
    row: object


def _series(run: RunStats, row: object, *own: str) -> _Series:
    return _Series((run.run, run.stream, *own), run.generation, row)


def _families(
    metrics: Sequence[tables.RowMetric], labels: tuple[str, ...], series: Sequence[_Series]
) -> Iterator[Metric]:
    """One family per metric, with a value for each row that has one. Counters that a launch rewinds have the label
    ``generation``."""
    for metric in metrics:
        rewinds = metrics in tables.REWOUND and metric.is_counter
        kind = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
        own: tuple[str, ...] = ("generation",) if rewinds else tuple(metric.labels)
        family: Any = (HistogramMetricFamily if metric.is_histogram else kind)(
            metric.name, metric.help, labels=(*labels, *own)
        )
        for values, generation, row in series:
            value = metric.value(row)
            own = (str(generation),) if rewinds else metric.label_values(row)
            if value is not None:
                figures = value.read() if isinstance(value, Histogram) else (float(value),)
                family.add_metric((*values, *own), *figures)
        yield family
