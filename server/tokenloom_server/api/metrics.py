"""The metrics of the server for Prometheus, read from the runs at each scrape; nothing is kept here.

A new one is a line in the table of what it is about. Names that end in ``_total`` are counters, those in
``_duration_seconds`` histograms, all others gauges. A value that is not known (None) is left out.

What is committed of runs, sources and ranks is counted with the label ``generation``: a restore rewinds it. Prometheus
would take that for a reset to zero, and ``rate()`` would show a spike; a new series for each generation avoids both.
Only the present generation is exposed, so ``sum without (generation) (…)`` is today's value.

What a server measures itself (``core.measures``) begins at zero with it, as Prometheus expects, without that label.
``process_*`` are prometheus_client's own metrics of the server process (memory, CPU, open files).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
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

from tokenloom_server.api.auth import OPEN_TO_ALL, Access
from tokenloom_server.api.run_folder import RunFolder
from tokenloom_server.api.service import Runs
from tokenloom_server.core.measures import Counter, Histogram, WaitReason
from tokenloom_server.errors import TokenloomError
from tokenloom_server.reports.stats import RunStats, SourceStats
from tokenloom_server.storage.cache import BlockCache, block_cache


class RowMetric(NamedTuple):
    """One metric of a row: of the server, a run, a source or a rank."""

    name: str
    field: str
    """Of the row, such as ``ledger.available``; empty where the row is the value itself, and with ``labels`` alone."""
    help: str
    labels: Mapping[str, str] = MappingProxyType({})
    """Labels besides those of every metric in the table, each with its field: to be joined to other metrics in a
    query. A metric that has some is always 1."""
    is_flag: bool = False
    """1 where the field has a text, 0 where it has none."""

    @property
    def is_counter(self) -> bool:
        return self.name.endswith("_total")

    @property
    def is_histogram(self) -> bool:
        return self.name.endswith("_duration_seconds")

    def value(self, row: object) -> Any:
        """A number, a ``Histogram``, or None where it is not known."""
        if self.labels:
            return 1
        value: Any = value_of(row, self.field) if self.field else row
        if isinstance(value, Counter):
            return value.value
        return bool(value) if self.is_flag else value

    def label_values(self, row: object) -> tuple[str, ...]:
        return tuple(str(value_of(row, field)) for field in self.labels.values())


def value_of(row: object, field: str) -> object:
    """None where a record that the field lies in is not there."""
    value = row
    for name in field.split("."):
        value = None if value is None else getattr(value, name)
    return value


class ServerRow(NamedTuple):
    """The server itself."""

    version: str
    access: Access
    folder: RunFolder | None
    ready: bool
    cache: BlockCache | None


class ReadRow(NamedTuple):
    """Whether a run's stats could be read for this scrape, and whether its mixture could not be taken."""

    readable: bool
    broken: bool


SERVER_METRICS = (
    RowMetric(
        "tokenloom_server_info", "", "Always 1; the server's version.", {"version": "version"}
    ),
    RowMetric("tokenloom_ready", "ready", "1 while requests can be served."),
    RowMetric(
        "tokenloom_tokens_stale",
        "access.named.is_stale",
        "1 while the file of --tokens cannot be loaded.",
    ),
    RowMetric(
        "tokenloom_certificates_stale",
        "access.tls.is_stale",
        "1 while the TLS files cannot be loaded.",
    ),
    RowMetric(
        "tokenloom_runs_dir_stale",
        "folder.is_stale",
        "1 while the folder of --runs-dir cannot be followed.",
    ),
    RowMetric(
        "tokenloom_cache_read_bytes_total",
        "cache.cached_bytes",
        "Bytes read of the cache; absent without one.",
    ),
    RowMetric(
        "tokenloom_cache_missed_bytes_total",
        "cache.fetched_bytes",
        "Bytes fetched that the cache lacked.",
    ),
)

THREAD_METRICS = (
    RowMetric(
        "tokenloom_thread_faults_total",
        "",
        "Unexpected errors in threads of a kind, which continue.",
    ),
)

RPC_METRICS = (
    RowMetric("tokenloom_rpc_errors_total", "", "Calls of gRPC that ended with an error."),
)

READ_METRICS = (
    RowMetric(
        "tokenloom_run_readable",
        "readable",
        "1 if the run's figures could be read for this scrape.",
    ),
    RowMetric(
        "tokenloom_run_broken",
        "broken",
        "1 if its mixture file could not be loaded (see tokenloom runs).",
    ),
)

RUN_METRICS = (
    RowMetric("tokenloom_committed_tokens_total", "total_tokens", "Tokens committed."),
    RowMetric("tokenloom_committed_samples_total", "sample_index", "Samples committed."),
    RowMetric("tokenloom_sample_index", "sample_index", "Committed sample index."),
    RowMetric(
        "tokenloom_produced_index",
        "produced_index",
        "Sample index up to which samples are produced.",
    ),
    RowMetric(
        "tokenloom_tokens_per_second", "tokens_per_s", "Committed tokens/s over the last seconds."
    ),
    RowMetric(
        "tokenloom_generation", "generation", "Number of the present launch; 0 before the first."
    ),
    RowMetric("tokenloom_leads", "leads", "1 while this server has the lease on the run."),
    RowMetric(
        "tokenloom_server_epoch", "server_epoch", "This server's number among those that led."
    ),
    RowMetric("tokenloom_world_size", "world_size", "Ranks of the present generation."),
    RowMetric("tokenloom_batch_size", "batch_size", "Samples per rank and micro-step."),
    RowMetric("tokenloom_sequence_length", "sequence_length", "Tokens per sample."),
    RowMetric(
        "tokenloom_revision",
        "revision",
        "Number of the mixture's revision in force; 0: as it began.",
    ),
    RowMetric(
        "tokenloom_loss",
        "reported.loss",
        "Mean loss over all sources, last reported; absent before.",
    ),
    RowMetric(
        "tokenloom_learning_rate",
        "reported.learning_rate",
        "Learning rate, last reported; absent before.",
    ),
    RowMetric(
        "tokenloom_window_fill",
        "window_fill",
        "Produced and not committed; fraction of the window.",
    ),
    RowMetric(
        "tokenloom_straggler_wait_share",
        "straggler.waited_share",
        "Part of their time that ranks wait for a slow one; absent where they do not.",
    ),
    RowMetric("tokenloom_opening", "opening", "1 while a launch is being opened."),
    RowMetric(
        "tokenloom_ended",
        "ended",
        "1 once the data has ended and all of it is committed.",
        is_flag=True,
    ),
    RowMetric("tokenloom_failed", "error", "1 once an error has stopped the run.", is_flag=True),
    RowMetric(
        "tokenloom_ledger_available", "ledger.available", "1 while the ledger can be reached."
    ),
    RowMetric(
        "tokenloom_last_commit_index",
        "ledger.last_commit_index",
        "Sample index of the last commit.",
    ),
    RowMetric(
        "tokenloom_last_commit_age_seconds",
        "ledger.last_commit_age_s",
        "Seconds since the last commit.",
    ),
    RowMetric(
        "tokenloom_run_info",
        "",
        "Always 1; what the run is.",
        {"run_uid": "run_uid", "tokenizer": "tokenizer", "ledger": "ledger.backend"},
    ),
)

MEASURE_METRICS = (
    RowMetric(
        "tokenloom_commit_duration_seconds", "commits", "How long the ledger took for a commit."
    ),
    RowMetric(
        "tokenloom_production_duration_seconds",
        "productions",
        "How long some micro-steps took to be produced.",
    ),
    RowMetric(
        "tokenloom_opening_duration_seconds",
        "openings",
        "How long a launch was being opened by its rank 0.",
    ),
    RowMetric(
        "tokenloom_join_duration_seconds",
        "joins",
        "How long a rank's Join took, the wait for rank 0 included.",
    ),
    RowMetric(
        "tokenloom_snapshot_duration_seconds", "snapshots", "How long a snapshot took to be made."
    ),
    RowMetric(
        "tokenloom_storage_read_duration_seconds",
        "storage.reads",
        "How long remote storage took to answer.",
    ),
    RowMetric(
        "tokenloom_storage_retries_total",
        "storage.retries",
        "Requests to storage repeated after an error.",
    ),
    RowMetric(
        "tokenloom_storage_hedges_total",
        "storage.hedges",
        "Requests to storage repeated for lack of an answer.",
    ),
    RowMetric(
        "tokenloom_reconnects_total",
        "reconnects",
        "Streams of ranks that came back after the first one.",
    ),
    RowMetric(
        "tokenloom_fences_total",
        "fences",
        "Streams and calls refused because newer ones replaced them.",
    ),
    RowMetric(
        "tokenloom_lease_losses_total",
        "lease_losses",
        "Times that this server had to stop leading.",
    ),
    RowMetric(
        "tokenloom_ledger_failures_total",
        "ledger_failures",
        "Commits that the ledger did not take and that were retried.",
    ),
    RowMetric(
        "tokenloom_history_write_failures_total",
        "history_failures",
        "How often its history could not be written.",
    ),
    RowMetric(
        "tokenloom_mixture_changes_total",
        "revisions",
        "Revisions that this server wrote or took back.",
    ),
)

SOURCE_METRICS = (
    RowMetric("tokenloom_source_tokens_total", "tokens", "Tokens committed from the source."),
    RowMetric("tokenloom_source_samples_total", "samples", "Samples committed from the source."),
    RowMetric("tokenloom_source_rows_total", "rows", "Rows of the source that were used up."),
    RowMetric("tokenloom_source_bad_rows_total", "bad_rows", "Rows that did not decode."),
    RowMetric(
        "tokenloom_source_filtered_rows_total",
        "filtered_rows",
        "Rows that did not pass the filter.",
    ),
    RowMetric(
        "tokenloom_source_padding_tokens_total", "padding_tokens", "Tokens that no document fills."
    ),
    RowMetric(
        "tokenloom_source_cut_documents_total", "cut_documents", "Documents that the packing cut."
    ),
    RowMetric("tokenloom_source_lost_tokens_total", "lost_tokens", "Tokens (or rows) cut off."),
    RowMetric(
        "tokenloom_source_fill_rate",
        "fill_rate",
        "Part of the source's tokens that documents fill (0 to 1).",
    ),
    RowMetric(
        "tokenloom_source_cut_rate",
        "cut_rate",
        "Documents cut for each row (0 to 1); absent with packing: concat.",
    ),
    RowMetric(
        "tokenloom_source_dropped_tokens_total",
        "dropped_tokens",
        "Tail that filled no sample; known at the end.",
    ),
    RowMetric(
        "tokenloom_source_excluded_rows",
        "excluded_rows",
        "Rows of an epoch that revisions leave out.",
    ),
    RowMetric(
        "tokenloom_source_skipped_tokens_total",
        "skipped_tokens",
        "Tokens of the source that were passed over.",
    ),
    RowMetric(
        "tokenloom_source_target_share",
        "target_share",
        "Share that the weights in force ask for (0 to 1).",
    ),
    RowMetric(
        "tokenloom_source_expected_share",
        "expected_share",
        "Share that they asked for so far (0 to 1).",
    ),
    RowMetric(
        "tokenloom_source_actual_share", "actual_share", "Share of the tokens so far (0 to 1)."
    ),
    RowMetric(
        "tokenloom_source_window_share",
        "window_share",
        "Share of the last 30 s (0 to 1); absent without commits.",
    ),
    RowMetric(
        "tokenloom_source_loss",
        "loss",
        "Mean loss of the source, smoothed; absent before a report.",
    ),
    RowMetric("tokenloom_source_epoch", "epoch", "Passes over the source so far."),
    RowMetric(
        "tokenloom_source_epochs_allowed", "epochs", "Passes that are allowed; absent for no limit."
    ),
    RowMetric("tokenloom_source_exhausted", "exhausted", "1 once the source has no more samples."),
    RowMetric(
        "tokenloom_source_remaining_samples",
        "remaining_samples",
        "Estimate of the samples left; absent where not known.",
    ),
    RowMetric(
        "tokenloom_source_info",
        "",
        "Always 1; what the source is.",
        {"source_id": "id", "spec": "spec"},
    ),
)

SNAPSHOT_METRICS = (
    RowMetric(
        "tokenloom_last_snapshot_timestamp_seconds",
        "",
        "When a snapshot was last saved, Unix time.",
    ),
)

ENDING_METRICS = (
    RowMetric(
        "tokenloom_source_ends_in_seconds",
        "",
        "Estimate, by weights and rate; absent where not known.",
    ),
)

WAITING_METRICS = (
    RowMetric(
        "tokenloom_waiting",
        "",
        "1 while the run waits for it; ranks is healthy: samples are ready.",
    ),
)

READER_METRICS = (
    RowMetric(
        "tokenloom_reader_tokens_total",
        "tokens",
        "Tokens that a node of the readers answered with.",
    ),
    RowMetric(
        "tokenloom_reader_cpu_seconds_total", "cpu_s", "Seconds of its CPU that the answers took."
    ),
)
READER_SOURCE_METRICS = (
    RowMetric(
        "tokenloom_reader_rows_ahead",
        "rows_ahead",
        "Rows that readers have answered, and that wait for use.",
    ),
    RowMetric(
        "tokenloom_reader_asked_again_total",
        "asked_again",
        "Requests to readers that were repeated.",
    ),
)

RANK_METRICS = (
    RowMetric("tokenloom_rank_connected", "connected", "1 while the rank is connected."),
    RowMetric(
        "tokenloom_rank_info",
        "",
        "Always 1; whether the rank is connected, finished (it said goodbye) or away.",
        {"state": "state"},
    ),
    RowMetric(
        "tokenloom_rank_position", "position", "Sample index up to which the rank has consumed."
    ),
    RowMetric("tokenloom_rank_lag_samples", "lag", "Samples that the fastest rank is ahead."),
    RowMetric(
        "tokenloom_rank_last_heard_seconds", "last_heard_s", "Seconds since the last message."
    ),
    RowMetric(
        "tokenloom_rank_wait_seconds_total",
        "waited_s",
        "Seconds that it has waited for data since it joined.",
    ),
)

_RUN_LABELS = ("run", "stream")
_SOURCE_LABELS = (*_RUN_LABELS, "source")
#: All of them, with the labels that each of a table has.
TABLES = (
    ((), SERVER_METRICS),
    (("thread",), THREAD_METRICS),
    (("rpc", "code", "error"), RPC_METRICS),
    (("run",), READ_METRICS),
    (_RUN_LABELS, RUN_METRICS),
    (_RUN_LABELS, MEASURE_METRICS),
    (_RUN_LABELS, SNAPSHOT_METRICS),
    (_SOURCE_LABELS, SOURCE_METRICS),
    (_SOURCE_LABELS, ENDING_METRICS),
    ((*_RUN_LABELS, "reason"), WAITING_METRICS),
    ((*_RUN_LABELS, "node"), READER_METRICS),
    (_SOURCE_LABELS, READER_SOURCE_METRICS),
    ((*_RUN_LABELS, "rank"), RANK_METRICS),
)
#: Those whose counters a launch rewinds.
REWOUND = (RUN_METRICS, SOURCE_METRICS, RANK_METRICS)


def create_registry(
    runs: Runs, *, version: str, access: Access = OPEN_TO_ALL, folder: RunFolder | None = None
) -> CollectorRegistry:
    """A registry of its own (never the global one) with a server's runs and its process."""
    registry = CollectorRegistry()
    registry.register(RunCollector(runs, partial(ServerRow, version, access, folder)))
    ProcessCollector(registry=registry)
    return registry


class RunCollector(Collector):
    """Reads every run at each scrape. A run that cannot be read costs its own metrics, not the scrape."""

    def __init__(self, runs: Runs, server_row: Callable[..., ServerRow]) -> None:
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
            reads.append(_Series((name,), None, ReadRow(is_readable, name in broken)))
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
        for (labels, metrics), rows in zip(TABLES, series, strict=True):
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
    metrics: Sequence[RowMetric], labels: tuple[str, ...], series: Sequence[_Series]
) -> Iterator[Metric]:
    """One family per metric, with a value for each row that has one. Counters that a launch rewinds have the label
    ``generation``."""
    for metric in metrics:
        rewinds = metrics in REWOUND and metric.is_counter
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
