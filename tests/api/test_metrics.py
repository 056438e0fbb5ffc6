"""What Prometheus scrapes is what the run's figures say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from prometheus_client import REGISTRY
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from support.memory_service import MemoryService, rank_stats, report_stats, run_stats, source_stats
from tokenloom_server.api import metrics
from tokenloom_server.core.wait_reason import WaitReason
from tokenloom_server.errors import LedgerUnavailable
from tokenloom_server.storage.cache import FOLDER, block_cache

#: labels as sorted pairs → value, by sample name.
Scrape = dict[str, dict[tuple[tuple[str, str], ...], float]]


def scrape(service: MemoryService) -> Scrape:
    registry = metrics.create_registry(service, version="1.2.3")
    found: Scrape = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            series = found.setdefault(sample.name, {})
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in series, f"{sample.name}{labels} is there twice"
            series[labels] = sample.value
    return found


def labels(**values: Any) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((key, str(value)) for key, value in values.items()))


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryService]:
    """Runs of a server that has a cache."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    block_cache.cache_clear()
    service = MemoryService()
    service.put(
        run_stats(
            "wiki",
            reported=report_stats(),
            sources=[source_stats(0, alias="code", loss=2.5), source_stats(1, alias="prose")],
        )
    )
    service.put(
        run_stats(
            "code",
            generation=9,
            total_tokens=2**53 - 1,
            ended="every source is exhausted",
            sources=[source_stats(0, alias='odd "alias"\n\\'), source_stats(1, epochs=None, remaining_samples=None)],
            ranks=[rank_stats(0, state="finished", last_heard_s=None)],
        )
    )
    yield service
    block_cache.cache_clear()


def test_every_metric_equals_the_stats(service: MemoryService) -> None:
    found = scrape(service)
    for run in service.runs.values():
        of_run = {"run": run.run, "stream": run.stream}
        rows: list[tuple[Any, dict[str, Any], Any]] = [(metric, {}, run) for metric in metrics.RUN_METRICS]
        rows += [(m, {"source": source.alias}, source) for m in metrics.SOURCE_METRICS for source in run.sources]
        rows += [(m, {"rank": rank.rank}, rank) for m in metrics.RANK_METRICS for rank in run.ranks]
        for metric, own, row in rows:
            own |= {label: metrics.value_of(row, field) for label, field in metric.labels.items()}
            generation = {"generation": run.generation} if metric.is_counter else {}
            value = found.get(metric.name, {}).get(labels(**of_run, **own, **generation))
            assert value == metric.value(row), metric.name


def test_metrics_come_from_the_fields_that_their_names_say(service: MemoryService) -> None:
    found = scrape(service)
    run = {"run": "wiki", "stream": "train"}
    assert found["tokenloom_committed_tokens_total"][labels(**run, generation=3)] == 2_097_152
    assert found["tokenloom_committed_samples_total"][labels(**run, generation=3)] == 4096
    assert found["tokenloom_produced_index"][labels(**run)] == 4160
    assert found["tokenloom_tokens_per_second"][labels(**run)] == 81_234.5
    assert found["tokenloom_window_fill"][labels(**run)] == 0.25
    assert found["tokenloom_last_commit_age_seconds"][labels(**run)] == 0.4
    assert found["tokenloom_ended"] == {labels(**run): 0, labels(run="code", stream="train"): 1}
    assert found["tokenloom_source_rows_total"][labels(**run, source="prose", generation=3)] == 1311
    assert found["tokenloom_source_expected_share"][labels(**run, source="prose")] == 0.5
    assert found["tokenloom_source_target_share"][labels(**run, source="prose")] == 0.5
    assert found["tokenloom_loss"] == {labels(**run): 3.25}
    assert found["tokenloom_learning_rate"] == {labels(**run): 6e-4}
    assert found["tokenloom_source_loss"] == {labels(**run, source="code"): 2.5}
    assert found["tokenloom_rank_wait_seconds_total"][labels(**run, rank=1, generation=3)] == 3.5
    assert found["tokenloom_rank_lag_samples"][labels(**run, rank=1)] == 8
    assert found["tokenloom_server_info"] == {labels(version="1.2.3"): 1}


def test_what_is_waited_for_is_a_series_for_each_reason() -> None:
    service = MemoryService()
    service.put(run_stats("wiki", waiting_for="storage: s3://bucket/a (for 3 s)", waiting_reason="storage"))
    waits = scrape(service)["tokenloom_waiting"]
    reasons = {reason: waits[labels(run="wiki", stream="train", reason=reason)] for reason in get_args(WaitReason)}
    assert reasons == {"ranks": 0, "storage": 1, "ledger": 0, "lease": 0, "rows": 0}
    service.put(run_stats("wiki"))
    assert set(scrape(service)["tokenloom_waiting"].values()) == {0}


def test_counters_are_counters_and_everything_else_is_a_gauge(service: MemoryService) -> None:
    text = generate_latest(metrics.create_registry(service, version="1")).decode()
    for family in text_string_to_metric_families(text):
        assert family.name.startswith("tokenloom_")
        assert family.documentation
        expected = "counter" if family.samples[0].name.endswith("_total") else "gauge"
        assert family.type == expected, family.name


def test_no_metric_is_exposed_that_the_tables_do_not_list(service: MemoryService) -> None:
    tables = (metrics.SERVER_METRICS, metrics.READ_METRICS, metrics.RUN_METRICS, metrics.WAITING_METRICS)
    listed = {metric.name for table in (*tables, metrics.SOURCE_METRICS, metrics.RANK_METRICS) for metric in table}
    exposed = {name for name in scrape(service) if not name.startswith("tokenloom_process_")}
    assert exposed == listed


def test_what_is_not_known_is_left_out(service: MemoryService) -> None:
    found = scrape(service)
    source = labels(run="code", stream="train", source="source-1")
    assert source in found["tokenloom_source_epoch"]
    assert source not in found["tokenloom_source_epochs_allowed"]
    assert source not in found["tokenloom_source_remaining_samples"]
    assert labels(run="code", stream="train", rank=0) not in found["tokenloom_rank_last_heard_seconds"]


def test_a_counter_above_two_to_the_53_minus_2_is_exact(service: MemoryService) -> None:
    tokens = scrape(service)["tokenloom_committed_tokens_total"]
    assert tokens[labels(run="code", stream="train", generation=9)] == 2**53 - 1


def test_a_new_generation_is_a_new_series_so_that_a_restore_is_no_reset(service: MemoryService) -> None:
    service.put(run_stats("wiki", generation=4, total_tokens=512))
    tokens = scrape(service)["tokenloom_committed_tokens_total"]
    assert {key: value for key, value in tokens.items() if ("run", "wiki") in key} == {
        labels(run="wiki", stream="train", generation=4): 512
    }


def test_a_run_that_cannot_be_read_costs_its_own_figures_only(service: MemoryService) -> None:
    class HalfReadable(MemoryService):
        def stats(self, run: str) -> Any:
            if run == "code":
                raise LedgerUnavailable("the ledger cannot be reached")
            return super().stats(run)

    found = scrape(HalfReadable(runs=service.runs))
    assert found["tokenloom_run_readable"] == {labels(run="wiki"): 1, labels(run="code"): 0}
    assert labels(run="wiki", stream="train") in found["tokenloom_sample_index"]


def test_without_runs_the_server_still_answers_for_itself() -> None:
    found = scrape(MemoryService(reason="starting"))
    assert found["tokenloom_ready"] == {(): 0}
    assert found["tokenloom_process_resident_memory_bytes"][()] > 0


def test_the_global_registry_stays_untouched(service: MemoryService) -> None:
    metrics.create_registry(service, version="1")
    metrics.create_registry(service, version="1")
    assert not [family.name for family in REGISTRY.collect() if family.name.startswith("tokenloom_")]
