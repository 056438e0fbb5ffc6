"""The metrics of the server for Prometheus, read from the runs' stats at each scrape; nothing is kept here.

The tables below are the list of all metrics: a new one is a line in the table of what it is about. Names that end in
``_total`` are counters, all others gauges. A value that is not known (None) is left out.

Counters of runs, sources and ranks carry the label ``generation``: a restore rewinds them. Prometheus would take that
for a reset to zero, and ``rate()`` would show a spike; a new series for each generation avoids both. Only the present
generation is exposed, so ``sum without (generation) (…)`` is today's value.

``tokenloom_process_*`` are prometheus_client's own metrics of the server process (memory, CPU, open files).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenloom_server.api.service import Runs
from tokenloom_server.errors import TokenloomError
from tokenloom_server.reports.stats import RankStats, RunStats, SourceStats

_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class RowMetric(Generic[_Row]):
    """One metric of a row: of the server, a run, a source or a rank."""

    name: str
    help: str
    value: Callable[[_Row], float | None]
    texts: Mapping[str, Callable[[_Row], str]] = field(default_factory=dict)
    """Labels besides those of every metric in the table, to be joined to other metrics in a query."""

    @property
    def is_counter(self) -> bool:
        return self.name.endswith("_total")


class ServerRow(NamedTuple):
    """The server itself."""

    version: str
    ready: bool


class ReadRow(NamedTuple):
    """A run, and whether its stats could be read for this scrape."""

    run: str
    readable: bool


SERVER_METRICS: tuple[RowMetric[ServerRow], ...] = (
    RowMetric(
        "tokenloom_server_info",
        "Always 1; the server's version.",
        lambda server: 1,
        {"version": lambda server: server.version},
    ),
    RowMetric("tokenloom_ready", "1 while requests can be served.", lambda server: server.ready),
)

READ_METRICS: tuple[RowMetric[ReadRow], ...] = (
    RowMetric(
        "tokenloom_run_readable", "1 if the run's figures could be read for this scrape.", lambda row: row.readable
    ),
)

RUN_METRICS: tuple[RowMetric[RunStats], ...] = (
    RowMetric("tokenloom_committed_tokens_total", "Tokens committed.", lambda run: run.total_tokens),
    RowMetric("tokenloom_committed_samples_total", "Samples committed.", lambda run: run.sample_index),
    RowMetric("tokenloom_sample_index", "Committed sample index.", lambda run: run.sample_index),
    RowMetric("tokenloom_produced_index", "Sample index up to which is produced.", lambda run: run.produced_index),
    RowMetric("tokenloom_tokens_per_second", "Committed tokens/s over the last seconds.", lambda run: run.tokens_per_s),
    RowMetric("tokenloom_generation", "Fencing number; 0 before the first trainer.", lambda run: run.generation),
    RowMetric("tokenloom_leads", "1 while this server has the lease on the run.", lambda run: run.leads),
    RowMetric("tokenloom_server_epoch", "This server's number among those that led.", lambda run: run.server_epoch),
    RowMetric("tokenloom_world_size", "Ranks of the present generation.", lambda run: run.world_size),
    RowMetric("tokenloom_batch_size", "Samples per rank and micro-step.", lambda run: run.batch_size),
    RowMetric("tokenloom_sequence_length", "Tokens per sample.", lambda run: run.sequence_length),
    RowMetric(
        "tokenloom_revision",
        "Number of the mixture's revision in force; 0 for the one that the run began with.",
        lambda run: run.revision,
    ),
    RowMetric(
        "tokenloom_loss",
        "Mean loss over all sources, as a trainer reported it last; absent where none was.",
        lambda run: run.reported.loss if run.reported else None,
    ),
    RowMetric(
        "tokenloom_learning_rate",
        "Learning rate, as a trainer reported it last; absent where none was.",
        lambda run: run.reported.learning_rate if run.reported else None,
    ),
    RowMetric(
        "tokenloom_window_fill", "Produced and not committed; fraction of the window.", lambda run: run.window_fill
    ),
    RowMetric("tokenloom_waiting", "1 while production waits for something.", lambda run: bool(run.waiting_for)),
    RowMetric("tokenloom_ended", "1 once the data has ended.", lambda run: run.ended is not None),
    RowMetric("tokenloom_failed", "1 once an error has stopped the run.", lambda run: run.error is not None),
    RowMetric("tokenloom_ledger_available", "1 while the ledger can be reached.", lambda run: run.ledger.available),
    RowMetric(
        "tokenloom_last_commit_index", "Sample index of the last commit.", lambda run: run.ledger.last_commit_index
    ),
    RowMetric(
        "tokenloom_last_commit_age_seconds", "Seconds since the last commit.", lambda run: run.ledger.last_commit_age_s
    ),
    RowMetric(
        "tokenloom_run_info",
        "Always 1; what the run is.",
        lambda run: 1,
        {
            "run_uid": lambda run: run.run_uid,
            "tokenizer": lambda run: run.tokenizer,
            "ledger": lambda run: run.ledger.backend,
        },
    ),
)

SOURCE_METRICS: tuple[RowMetric[SourceStats], ...] = (
    RowMetric("tokenloom_source_tokens_total", "Tokens committed from the source.", lambda source: source.tokens),
    RowMetric("tokenloom_source_samples_total", "Samples committed from the source.", lambda source: source.samples),
    RowMetric("tokenloom_source_rows_total", "Rows of the source taken to their end.", lambda source: source.rows),
    RowMetric("tokenloom_source_bad_rows_total", "Rows that did not decode.", lambda source: source.bad_rows),
    RowMetric(
        "tokenloom_source_filtered_rows_total",
        "Rows that did not pass the source's filter.",
        lambda source: source.filtered_rows,
    ),
    RowMetric(
        "tokenloom_source_padding_tokens_total",
        "Of the source's tokens, those that no document fills.",
        lambda source: source.padding_tokens,
    ),
    RowMetric(
        "tokenloom_source_cut_documents_total",
        "Documents that do not lie in one sample as a whole, though the packing would have had them so.",
        lambda source: source.cut_documents,
    ),
    RowMetric(
        "tokenloom_source_lost_tokens_total",
        "Tokens of documents that were cut off; with batching, rows that filled no batch of an epoch that ended.",
        lambda source: source.lost_tokens,
    ),
    RowMetric(
        "tokenloom_source_fill_rate",
        "Part of the source's tokens that documents fill (0 to 1).",
        lambda source: source.fill_rate,
    ),
    RowMetric(
        "tokenloom_source_cut_rate",
        "Documents that were cut, for each row (0 to 1); absent where the packing joins and cuts all.",
        lambda source: source.cut_rate,
    ),
    RowMetric(
        "tokenloom_source_dropped_tokens_total",
        "Tail that filled no sample; known once the source is exhausted.",
        lambda source: source.dropped_tokens,
    ),
    RowMetric(
        "tokenloom_source_excluded_rows",
        "Rows of an epoch that the revision in force leaves out.",
        lambda source: source.excluded_rows,
    ),
    RowMetric(
        "tokenloom_source_skipped_tokens_total",
        "Tokens of the source that restores jumped over.",
        lambda source: source.skipped_tokens,
    ),
    RowMetric(
        "tokenloom_source_target_share",
        "Share of the tokens that the weights ask for (0 to 1).",
        lambda source: source.target_share,
    ),
    RowMetric(
        "tokenloom_source_actual_share", "Share of the tokens so far (0 to 1).", lambda source: source.actual_share
    ),
    RowMetric(
        "tokenloom_source_window_share",
        "Share of the tokens in the last window of samples (0 to 1).",
        lambda source: source.window_share,
    ),
    RowMetric(
        "tokenloom_source_loss",
        "Mean loss of the source as trainers report it, smoothed; absent where none was.",
        lambda source: source.loss,
    ),
    RowMetric("tokenloom_source_epoch", "Passes over the source so far.", lambda source: source.epoch),
    RowMetric(
        "tokenloom_source_epochs_allowed", "Passes that are allowed; absent for no limit.", lambda source: source.epochs
    ),
    RowMetric("tokenloom_source_exhausted", "1 once the source has no more samples.", lambda source: source.exhausted),
    RowMetric(
        "tokenloom_source_remaining_samples",
        "Estimate of the samples left; absent where not known.",
        lambda source: source.remaining_samples,
    ),
    RowMetric(
        "tokenloom_source_info",
        "Always 1; what the source is.",
        lambda source: 1,
        {"source_id": lambda source: str(source.id), "spec": lambda source: source.spec},
    ),
)

RANK_METRICS: tuple[RowMetric[RankStats], ...] = (
    RowMetric("tokenloom_rank_connected", "1 while the rank is connected.", lambda rank: rank.connected),
    RowMetric("tokenloom_rank_position", "Sample index up to which the rank has consumed.", lambda rank: rank.position),
    RowMetric("tokenloom_rank_lag_samples", "Samples that the fastest rank is ahead.", lambda rank: rank.lag),
    RowMetric("tokenloom_rank_last_heard_seconds", "Seconds since the last message.", lambda rank: rank.last_heard_s),
)

#: What the metrics of runs, of sources and of ranks are labelled with.
RUN_LABELS = ("run", "stream")
SOURCE_LABELS = (*RUN_LABELS, "source")
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
        server = ServerRow(self._version, self._runs.not_ready() is None)
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
        ranks = [_series(run, rank, str(rank.rank)) for run in runs for rank in run.ranks]
        yield from _families(RANK_METRICS, RANK_LABELS, ranks)


class _Series(NamedTuple, Generic[_Row]):
    """A row, the values of its table's labels, and the generation of its run."""

    labels: tuple[str, ...]
    generation: int
    row: _Row


def _series(run: RunStats, row: _Row, *own: str) -> _Series[_Row]:
    return _Series((run.run, run.stream, *own), run.generation, row)


def _families(
    metrics: Sequence[RowMetric[_Row]], labels: tuple[str, ...], series: Sequence[_Series[_Row]]
) -> Iterator[Metric]:
    """One family per metric, with a value for each row that has one."""
    for metric in metrics:
        family: CounterMetricFamily | GaugeMetricFamily
        if metric.is_counter:
            family = CounterMetricFamily(metric.name, metric.help, labels=(*labels, "generation"))
        else:
            family = GaugeMetricFamily(metric.name, metric.help, labels=(*labels, *metric.texts))
        for values, generation, row in series:
            value = metric.value(row)
            if value is not None:
                texts = (str(generation),) if metric.is_counter else tuple(read(row) for read in metric.texts.values())
                family.add_metric((*values, *texts), float(value))
        yield family
