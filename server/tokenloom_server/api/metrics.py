"""A run's figures for Prometheus, read from ``RunService.stats`` at each scrape; nothing is kept here.

The tables below are the list of all metrics: name, meaning, where it comes from. Names that end in
``_total`` are counters, all others gauges. Every figure carries the labels ``run`` and ``stream``, a source's
``source`` (its alias) besides, a rank's ``rank``. A figure that is not known is left out.

Counters carry ``generation``, too: a restore rewinds them, and where one series would look like a reset to
zero and give ``rate()`` a spike, a new series does not. Only the present generation is exposed, so
``sum without (generation) (…)`` is today's figure.

``tokenloom_process_*`` are prometheus_client's own figures of the server process (memory, CPU, open files).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenloom_server.errors import TokenloomError
from tokenloom_server.reports.stats import RankStats, RunService, RunStats, SourceStats

_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class Figure(Generic[_Row]):
    """One metric, and how to read it from a run, a source or a rank; ``None`` leaves it out."""

    name: str
    meaning: str
    read: Callable[[_Row], float | None]

    @property
    def is_counter(self) -> bool:
        return self.name.endswith("_total")


@dataclass(frozen=True, slots=True)
class Info(Generic[_Row]):
    """A metric that is always 1 and tells texts in its labels, to be joined to the figures in a query."""

    name: str
    meaning: str
    labels: dict[str, Callable[[_Row], str]]


RUN_FIGURES: tuple[Figure[RunStats], ...] = (
    Figure("tokenloom_committed_tokens_total", "Tokens committed.", lambda run: run.total_tokens),
    Figure("tokenloom_committed_samples_total", "Samples committed.", lambda run: run.sample_index),
    Figure("tokenloom_sample_index", "Committed sample index.", lambda run: run.sample_index),
    Figure("tokenloom_produced_index", "Sample index up to which is produced.", lambda run: run.produced_index),
    Figure("tokenloom_tokens_per_second", "Committed tokens/s over the last seconds.", lambda run: run.tokens_per_s),
    Figure("tokenloom_generation", "Fencing number; 0 before the first trainer.", lambda run: run.generation),
    Figure("tokenloom_leads", "1 while this server has the lease on the run.", lambda run: run.leads),
    Figure("tokenloom_server_epoch", "This server's number among those that led.", lambda run: run.server_epoch),
    Figure("tokenloom_world_size", "Ranks of the present generation.", lambda run: run.world_size),
    Figure("tokenloom_batch_size", "Samples per rank and step.", lambda run: run.batch_size),
    Figure("tokenloom_sequence_length", "Tokens per sample.", lambda run: run.sequence_length),
    Figure(
        "tokenloom_revision",
        "Number of the mixture's revision in force; 0 for the one that the run began with.",
        lambda run: run.revision,
    ),
    Figure(
        "tokenloom_loss",
        "Mean loss over all sources, as a trainer reported it last; absent where none was.",
        lambda run: run.reported.loss if run.reported else None,
    ),
    Figure(
        "tokenloom_learning_rate",
        "Learning rate, as a trainer reported it last; absent where none was.",
        lambda run: run.reported.learning_rate if run.reported else None,
    ),
    Figure("tokenloom_window_fill", "Produced and not committed; fraction of the window.", lambda run: run.window_fill),
    Figure("tokenloom_waiting", "1 while production waits for something.", lambda run: bool(run.waiting_for)),
    Figure("tokenloom_ended", "1 once the data has ended.", lambda run: run.ended is not None),
    Figure("tokenloom_failed", "1 once an error has stopped the run.", lambda run: run.error is not None),
    Figure("tokenloom_ledger_available", "1 while the ledger can be reached.", lambda run: run.ledger.available),
    Figure("tokenloom_last_commit_index", "Sample index of the last commit.", lambda run: run.ledger.last_commit_index),
    Figure(
        "tokenloom_last_commit_age_seconds", "Seconds since the last commit.", lambda run: run.ledger.last_commit_age_s
    ),
)

SOURCE_FIGURES: tuple[Figure[SourceStats], ...] = (
    Figure("tokenloom_source_tokens_total", "Tokens committed from the source.", lambda source: source.tokens),
    Figure("tokenloom_source_samples_total", "Samples committed from the source.", lambda source: source.samples),
    Figure("tokenloom_source_rows_total", "Rows of the source taken to their end.", lambda source: source.rows),
    Figure("tokenloom_source_bad_rows_total", "Rows that did not decode.", lambda source: source.bad_rows),
    Figure(
        "tokenloom_source_filtered_rows_total",
        "Rows that did not pass the source's filter.",
        lambda source: source.filtered_rows,
    ),
    Figure(
        "tokenloom_source_padding_tokens_total",
        "Of the source's tokens, those that no document fills.",
        lambda source: source.padding_tokens,
    ),
    Figure(
        "tokenloom_source_cut_documents_total",
        "Documents that do not lie in one sample as a whole, though the packing would have had them so.",
        lambda source: source.cut_documents,
    ),
    Figure(
        "tokenloom_source_lost_tokens_total",
        "Tokens of documents that were cut off; with batching, rows that filled no batch of an epoch that ended.",
        lambda source: source.lost_tokens,
    ),
    Figure(
        "tokenloom_source_fill_rate",
        "Part of the source's tokens that documents fill (0 to 1).",
        lambda source: source.fill_rate,
    ),
    Figure(
        "tokenloom_source_cut_rate",
        "Documents that were cut, for each row (0 to 1); absent where the packing joins and cuts all.",
        lambda source: source.cut_rate,
    ),
    Figure(
        "tokenloom_source_dropped_tokens_total",
        "Tail that filled no sample; known once the source is exhausted.",
        lambda source: source.dropped_tokens,
    ),
    Figure(
        "tokenloom_source_excluded_rows",
        "Rows of an epoch that the revision in force leaves out.",
        lambda source: source.excluded_rows,
    ),
    Figure(
        "tokenloom_source_skipped_tokens_total",
        "Tokens of the source that restores jumped over.",
        lambda source: source.skipped_tokens,
    ),
    Figure(
        "tokenloom_source_target_share",
        "Share of the tokens that the weights ask for (0 to 1).",
        lambda source: source.target_share,
    ),
    Figure("tokenloom_source_actual_share", "Share of the tokens so far (0 to 1).", lambda source: source.actual_share),
    Figure(
        "tokenloom_source_window_share",
        "Share of the tokens in the last window of samples (0 to 1).",
        lambda source: source.window_share,
    ),
    Figure(
        "tokenloom_source_loss",
        "Mean loss of the source as trainers report it, smoothed; absent where none was.",
        lambda source: source.loss,
    ),
    Figure("tokenloom_source_epoch", "Passes over the source so far.", lambda source: source.epoch),
    Figure(
        "tokenloom_source_epochs_allowed", "Passes that are allowed; absent for no limit.", lambda source: source.epochs
    ),
    Figure("tokenloom_source_exhausted", "1 once the source has no more samples.", lambda source: source.exhausted),
    Figure(
        "tokenloom_source_remaining_samples",
        "Estimate of the samples left; absent where not known.",
        lambda source: source.remaining_samples,
    ),
)

RANK_FIGURES: tuple[Figure[RankStats], ...] = (
    Figure("tokenloom_rank_connected", "1 while the rank is connected.", lambda rank: rank.connected),
    Figure("tokenloom_rank_position", "Sample index up to which the rank has consumed.", lambda rank: rank.position),
    Figure("tokenloom_rank_lag_samples", "Samples behind the fastest rank.", lambda rank: rank.lag),
    Figure("tokenloom_rank_last_heard_seconds", "Seconds since the last message.", lambda rank: rank.last_heard_s),
)

RUN_INFO: Info[RunStats] = Info(
    "tokenloom_run_info",
    "Always 1; what the run is.",
    {
        "run_uid": lambda run: run.run_uid,
        "tokenizer": lambda run: run.tokenizer,
        "ledger": lambda run: run.ledger.backend,
    },
)

SOURCE_INFO: Info[SourceStats] = Info(
    "tokenloom_source_info",
    "Always 1; what the source is.",
    {"source_id": lambda source: str(source.id), "spec": lambda source: source.spec},
)

SERVER_METRICS = {
    "tokenloom_server_info": "Always 1; the server's version.",
    "tokenloom_ready": "1 while requests can be served.",
    "tokenloom_run_readable": "1 if the run's figures could be read for this scrape.",
}


def create_registry(service: RunService, *, version: str) -> CollectorRegistry:
    """A registry of its own (never the global one) with a server's runs and its process."""
    registry = CollectorRegistry()
    registry.register(RunCollector(service, version=version))
    ProcessCollector(namespace="tokenloom", registry=registry)
    return registry


class RunCollector(Collector):
    """Reads every run at each scrape. A run that cannot be read costs its own figures, not the scrape."""

    def __init__(self, service: RunService, *, version: str) -> None:
        self._service = service
        self._version = version

    def collect(self) -> Iterator[Metric]:
        yield _gauge("tokenloom_server_info", {"version": self._version}, 1)
        yield _gauge("tokenloom_ready", {}, self._service.not_ready() is None)
        readable = GaugeMetricFamily(
            "tokenloom_run_readable", SERVER_METRICS["tokenloom_run_readable"], labels=("run",)
        )
        runs: list[RunStats] = []
        for name in self._service.names():
            try:
                runs.append(self._service.stats(name))
                readable.add_metric((name,), 1)
            except TokenloomError:
                readable.add_metric((name,), 0)
        yield readable
        yield from _families(RUN_FIGURES, RUN_INFO, (), [(run, (), run) for run in runs])
        sources = [(run, (source.alias,), source) for run in runs for source in run.sources]
        yield from _families(SOURCE_FIGURES, SOURCE_INFO, ("source",), sources)
        ranks = [(run, (str(rank.rank),), rank) for run in runs for rank in run.ranks]
        yield from _families(RANK_FIGURES, None, ("rank",), ranks)


def _gauge(name: str, labels: dict[str, str], value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, SERVER_METRICS[name], labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family


def _families(
    figures: tuple[Figure[_Row], ...],
    info: Info[_Row] | None,
    own_labels: tuple[str, ...],
    rows: Sequence[tuple[RunStats, tuple[str, ...], _Row]],
) -> Iterator[Metric]:
    """One family per figure, with one series per row: (its run, its own labels' values, the row)."""
    names = ("run", "stream", *own_labels)
    for figure in figures:
        family: CounterMetricFamily | GaugeMetricFamily
        if figure.is_counter:
            family = CounterMetricFamily(figure.name, figure.meaning, labels=(*names, "generation"))
        else:
            family = GaugeMetricFamily(figure.name, figure.meaning, labels=names)
        for run, own_values, row in rows:
            value = figure.read(row)
            if value is not None:
                generation = (str(run.generation),) if figure.is_counter else ()
                family.add_metric((run.run, run.stream, *own_values, *generation), float(value))
        yield family
    if info is not None:
        family = GaugeMetricFamily(info.name, info.meaning, labels=(*names, *info.labels))
        for run, own_values, row in rows:
            texts = tuple(read(row) for read in info.labels.values())
            family.add_metric((run.run, run.stream, *own_values, *texts), 1)
        yield family
