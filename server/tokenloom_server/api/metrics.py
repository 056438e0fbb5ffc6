"""The metrics of the server for Prometheus, read from the runs' stats at each scrape; nothing is kept here.

The tables below are the list of all metrics: a new one is a line in the table of what it is about. Names that end in
``_total`` are counters, all others gauges. A value that is not known (None) is left out.

Counters of runs, sources and ranks carry the label ``generation``: a restore rewinds them. Prometheus would take that
for a reset to zero, and ``rate()`` would show a spike; a new series for each generation avoids both. Only the present
generation is exposed, so ``sum without (generation) (…)`` is today's value.

``tokenloom_process_*`` are prometheus_client's own metrics of the server process (memory, CPU, open files).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenloom_server.api.service import Runs
from tokenloom_server.core.wait_reason import WaitReason
from tokenloom_server.errors import TokenloomError
from tokenloom_server.reports.stats import RunStats
from tokenloom_server.storage.cache import BlockCache, block_cache


class RowMetric(NamedTuple):
    """One metric of a row: of the server, a run, a source or a rank."""

    name: str
    field: str
    """Of the row, such as ``ledger.available``; empty for a metric that is always 1."""
    help: str
    labels: Mapping[str, str] = MappingProxyType({})
    """Labels besides those of every metric in the table, each with its field: to be joined to other metrics in a
    query."""
    is_flag: bool = False
    """1 where the field has a text, 0 where it has none."""

    @property
    def is_counter(self) -> bool:
        return self.name.endswith("_total")

    def value(self, row: object) -> float | None:
        if not self.field:
            return 1
        value: Any = value_of(row, self.field)
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
    ready: bool
    cache: BlockCache | None


class ReadRow(NamedTuple):
    """A run, and whether its stats could be read for this scrape."""

    run: str
    readable: bool


class WaitingRow(NamedTuple):
    """A run, and whether it waits for a reason."""

    waits: bool


SERVER_METRICS = (
    RowMetric("tokenloom_server_info", "", "Always 1; the server's version.", {"version": "version"}),
    RowMetric("tokenloom_ready", "ready", "1 while requests can be served."),
    RowMetric("tokenloom_cache_read_bytes_total", "cache.cached_bytes", "Bytes read of the cache; absent without one."),
    RowMetric("tokenloom_cache_missed_bytes_total", "cache.fetched_bytes", "Bytes fetched that the cache lacked."),
)

READ_METRICS = (
    RowMetric("tokenloom_run_readable", "readable", "1 if the run's figures could be read for this scrape."),
)

RUN_METRICS = (
    RowMetric("tokenloom_committed_tokens_total", "total_tokens", "Tokens committed."),
    RowMetric("tokenloom_committed_samples_total", "sample_index", "Samples committed."),
    RowMetric("tokenloom_sample_index", "sample_index", "Committed sample index."),
    RowMetric("tokenloom_produced_index", "produced_index", "Sample index up to which samples are produced."),
    RowMetric("tokenloom_tokens_per_second", "tokens_per_s", "Committed tokens/s over the last seconds."),
    RowMetric("tokenloom_generation", "generation", "Number of the present launch; 0 before the first."),
    RowMetric("tokenloom_leads", "leads", "1 while this server has the lease on the run."),
    RowMetric("tokenloom_server_epoch", "server_epoch", "This server's number among those that led."),
    RowMetric("tokenloom_world_size", "world_size", "Ranks of the present generation."),
    RowMetric("tokenloom_batch_size", "batch_size", "Samples per rank and micro-step."),
    RowMetric("tokenloom_sequence_length", "sequence_length", "Tokens per sample."),
    RowMetric("tokenloom_revision", "revision", "Number of the mixture's revision in force; 0: as it began."),
    RowMetric("tokenloom_loss", "reported.loss", "Mean loss over all sources, last reported; absent where none was."),
    RowMetric("tokenloom_learning_rate", "reported.learning_rate", "Learning rate, last reported; absent before."),
    RowMetric("tokenloom_window_fill", "window_fill", "Produced and not committed; fraction of the window."),
    RowMetric("tokenloom_opening", "opening", "1 while a launch is being opened."),
    RowMetric("tokenloom_ended", "ended", "1 once the data has ended.", is_flag=True),
    RowMetric("tokenloom_failed", "error", "1 once an error has stopped the run.", is_flag=True),
    RowMetric("tokenloom_ledger_available", "ledger.available", "1 while the ledger can be reached."),
    RowMetric("tokenloom_last_commit_index", "ledger.last_commit_index", "Sample index of the last commit."),
    RowMetric("tokenloom_last_commit_age_seconds", "ledger.last_commit_age_s", "Seconds since the last commit."),
    RowMetric(
        "tokenloom_run_info",
        "",
        "Always 1; what the run is.",
        {"run_uid": "run_uid", "tokenizer": "tokenizer", "ledger": "ledger.backend"},
    ),
)

SOURCE_METRICS = (
    RowMetric("tokenloom_source_tokens_total", "tokens", "Tokens committed from the source."),
    RowMetric("tokenloom_source_samples_total", "samples", "Samples committed from the source."),
    RowMetric("tokenloom_source_rows_total", "rows", "Rows of the source taken to their end."),
    RowMetric("tokenloom_source_bad_rows_total", "bad_rows", "Rows that did not decode."),
    RowMetric("tokenloom_source_filtered_rows_total", "filtered_rows", "Rows that did not pass the filter."),
    RowMetric("tokenloom_source_padding_tokens_total", "padding_tokens", "Tokens that no document fills."),
    RowMetric("tokenloom_source_cut_documents_total", "cut_documents", "Documents that the packing cut."),
    RowMetric("tokenloom_source_lost_tokens_total", "lost_tokens", "Tokens (or rows) cut off."),
    RowMetric("tokenloom_source_fill_rate", "fill_rate", "Part of the source's tokens that documents fill (0 to 1)."),
    RowMetric(
        "tokenloom_source_cut_rate", "cut_rate", "Documents cut for each row (0 to 1); absent with packing: concat."
    ),
    RowMetric(
        "tokenloom_source_dropped_tokens_total", "dropped_tokens", "Tail that filled no sample; known at the end."
    ),
    RowMetric("tokenloom_source_excluded_rows", "excluded_rows", "Rows of an epoch that revisions leave out."),
    RowMetric("tokenloom_source_skipped_tokens_total", "skipped_tokens", "Tokens of the source that were passed over."),
    RowMetric("tokenloom_source_target_share", "target_share", "Share that the weights in force ask for (0 to 1)."),
    RowMetric("tokenloom_source_expected_share", "expected_share", "Share that they asked for so far (0 to 1)."),
    RowMetric("tokenloom_source_actual_share", "actual_share", "Share of the tokens so far (0 to 1)."),
    RowMetric(
        "tokenloom_source_window_share", "window_share", "Share of the last 30 s (0 to 1); absent without commits."
    ),
    RowMetric("tokenloom_source_loss", "loss", "Mean loss of the source, smoothed; absent where none was reported."),
    RowMetric("tokenloom_source_epoch", "epoch", "Passes over the source so far."),
    RowMetric("tokenloom_source_epochs_allowed", "epochs", "Passes that are allowed; absent for no limit."),
    RowMetric("tokenloom_source_exhausted", "exhausted", "1 once the source has no more samples."),
    RowMetric(
        "tokenloom_source_remaining_samples",
        "remaining_samples",
        "Estimate of the samples left; absent where not known.",
    ),
    RowMetric("tokenloom_source_info", "", "Always 1; what the source is.", {"source_id": "id", "spec": "spec"}),
)

WAITING_METRICS = (
    RowMetric("tokenloom_waiting", "waits", "1 while the run waits for it; ranks is health: samples are ready."),
)

RANK_METRICS = (
    RowMetric("tokenloom_rank_connected", "connected", "1 while the rank is connected."),
    RowMetric(
        "tokenloom_rank_info",
        "",
        "Always 1; whether the rank is connected, finished (it said goodbye) or away.",
        {"state": "state"},
    ),
    RowMetric("tokenloom_rank_position", "position", "Sample index up to which the rank has consumed."),
    RowMetric("tokenloom_rank_lag_samples", "lag", "Samples that the fastest rank is ahead."),
    RowMetric("tokenloom_rank_last_heard_seconds", "last_heard_s", "Seconds since the last message."),
    RowMetric("tokenloom_rank_wait_seconds_total", "waited_s", "Seconds that it has waited for data since it joined."),
)

#: What the metrics of runs, of sources and of ranks are labelled with.
RUN_LABELS = ("run", "stream")
SOURCE_LABELS = (*RUN_LABELS, "source")
WAITING_LABELS = (*RUN_LABELS, "reason")
RANK_LABELS = (*RUN_LABELS, "rank")


def create_registry(runs: Runs, *, version: str) -> CollectorRegistry:
    """A registry of its own (never the global one) with a server's runs and its process."""
    registry = CollectorRegistry()
    registry.register(RunCollector(runs, version=version))
    ProcessCollector(namespace="tokenloom", registry=registry)
    return registry


class RunCollector(Collector):
    """Reads every run at each scrape. A run that cannot be read costs its own metrics, not the scrape."""

    def __init__(self, runs: Runs, *, version: str) -> None:
        self._runs = runs
        self._version = version

    def collect(self) -> Iterator[Metric]:
        server = ServerRow(self._version, self._runs.not_ready() is None, block_cache())
        runs: list[RunStats] = []
        reads: list[ReadRow] = []
        for name in self._runs.names():
            try:
                runs.append(self._runs.get(name).stats.read())
                reads.append(ReadRow(name, True))
            except TokenloomError:
                reads.append(ReadRow(name, False))
        yield from _families(SERVER_METRICS, (), [_Series((), 0, server)])
        yield from _families(READ_METRICS, ("run",), [_Series((read.run,), 0, read) for read in reads])
        yield from _families(RUN_METRICS, RUN_LABELS, [_series(run, run) for run in runs])
        sources = [_series(run, source, source.alias) for run in runs for source in run.sources]
        yield from _families(SOURCE_METRICS, SOURCE_LABELS, sources)
        waits = [
            _series(run, WaitingRow(run.waiting_reason == reason), reason)
            for run in runs
            for reason in get_args(WaitReason)
        ]
        yield from _families(WAITING_METRICS, WAITING_LABELS, waits)
        ranks = [_series(run, rank, str(rank.rank)) for run in runs for rank in run.ranks]
        yield from _families(RANK_METRICS, RANK_LABELS, ranks)


class _Series(NamedTuple):
    """A row, the values of its table's labels, and the generation of its run."""

    labels: tuple[str, ...]
    generation: int
    row: object


def _series(run: RunStats, row: object, *own: str) -> _Series:
    return _Series((run.run, run.stream, *own), run.generation, row)


def _families(metrics: Sequence[RowMetric], labels: tuple[str, ...], series: Sequence[_Series]) -> Iterator[Metric]:
    """One family per metric, with a value for each row that has one."""
    for metric in metrics:
        kind = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
        own_labels = ("generation",) if metric.is_counter else tuple(metric.labels)
        family = kind(metric.name, metric.help, labels=(*labels, *own_labels))
        for values, generation, row in series:
            value = metric.value(row)
            if value is not None:
                own_values = (str(generation),) if metric.is_counter else metric.label_values(row)
                family.add_metric((*values, *own_values), float(value))
        yield family
