"""What Prometheus scrapes is what the run's figures say."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from prometheus_client import REGISTRY
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from support.memory_service import (
    ACCESS,
    RUNS_DIR,
    MemoryService,
    rank_stats,
    readers_stats,
    report_stats,
    run_stats,
    source_stats,
)
from tokenloom_proto import threads
from tokenloom_server.api import metrics
from tokenloom_server.core.measures import WaitReason
from tokenloom_server.errors import LedgerUnavailable
from tokenloom_server.reports.stats import Straggler
from tokenloom_server.storage.cache import FOLDER, block_cache

#: labels as sorted pairs → value, by sample name.
Scrape = dict[str, dict[tuple[tuple[str, str], ...], float]]


#: The series of a histogram.
PARTS = ("bucket", "count", "sum")


def scrape(service: MemoryService) -> Scrape:
    registry = metrics.create_registry(service, version="1.2.3", access=ACCESS, folder=RUNS_DIR)
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
            readers=readers_stats(),
            sources=[source_stats(0, alias="code", loss=2.5), source_stats(1, alias="prose")],
        )
    )
    service.put(
        run_stats(
            "code",
            generation=9,
            total_tokens=2**53 - 1,
            ended="every source is exhausted",
            sources=[
                source_stats(0, alias='odd "alias"\n\\'),
                source_stats(1, epochs=None, remaining_samples=None),
            ],
            ranks=[rank_stats(0, state="finished", last_heard_s=None)],
        )
    )
    yield service
    block_cache.cache_clear()


def test_every_metric_equals_the_stats(service: MemoryService) -> None:
    found = scrape(service)
    for run in service.runs.values():
        of_run = {"run": run.run, "stream": run.stream}
        rows: list[tuple[Any, dict[str, Any], Any]] = [
            (metric, {}, run) for metric in metrics.RUN_METRICS
        ]
        rows += [
            (m, {}, service.measures[run.run]) for m in metrics.MEASURE_METRICS if m.is_counter
        ]
        rows += [
            (m, {"source": source.alias}, source)
            for m in metrics.SOURCE_METRICS
            for source in run.sources
        ]
        rows += [(m, {"rank": rank.rank}, rank) for m in metrics.RANK_METRICS for rank in run.ranks]
        for metric, own, row in rows:
            own |= {label: metrics.value_of(row, field) for label, field in metric.labels.items()}
            rewinds = metric.is_counter and metric not in metrics.MEASURE_METRICS
            generation = {"generation": run.generation} if rewinds else {}
            value = found.get(metric.name, {}).get(labels(**of_run, **own, **generation))
            assert value == metric.value(row), metric.name


def test_what_a_server_measures_is_counted_in_buckets_and_by_label(service: MemoryService) -> None:
    scrape(service)
    measures = service.measures["wiki"]
    for seconds in (0.001, 0.004, 60.0):
        measures.commits.observe(seconds)
    measures.storage.retries.add(2)
    for _ in range(3):
        service.rpc_errors.add("Stream", "FAILED_PRECONDITION", "Fenced")
    found, run = scrape(service), {"run": "wiki", "stream": "train"}
    buckets = found["tokenloom_commit_duration_seconds_bucket"]
    at_most = {
        bound: buckets[labels(**run, le=bound)]
        for bound in ("0.001", "0.0025", "0.005", "5.0", "+Inf")
    }
    assert at_most == {"0.001": 1, "0.0025": 1, "0.005": 2, "5.0": 2, "+Inf": 3}
    assert found["tokenloom_commit_duration_seconds_sum"][labels(**run)] == pytest.approx(60.005)
    assert found["tokenloom_commit_duration_seconds_count"][labels(**run)] == 3
    assert found["tokenloom_storage_retries_total"][labels(**run)] == 2
    of = labels(rpc="Stream", code="FAILED_PRECONDITION", error="Fenced")
    assert found["tokenloom_rpc_errors_total"] == {of: 3}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_has_nothing_to_say_of_the_metrics(service: MemoryService) -> None:
    scrape(service)
    service.rpc_errors.add("Join", "UNAVAILABLE", "NotLeader")
    text = generate_latest(
        metrics.create_registry(service, version="1", access=ACCESS, folder=RUNS_DIR)
    )
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_when_a_source_ends_follows_from_what_is_left_its_share_and_the_rate(
    service: MemoryService,
) -> None:
    source = source_stats(0, alias="code", remaining_samples=1000, target_share=0.25)
    others = [
        source_stats(1, target_share=0.0),
        source_stats(2, exhausted=True),
        source_stats(3, remaining_samples=None),
    ]
    service.put(
        run_stats("wiki", sources=[source, *others], tokens_per_s=512.0, sequence_length=512)
    )
    service.put(run_stats("code", tokens_per_s=0.0))
    ends = scrape(service)["tokenloom_source_ends_in_seconds"]
    assert ends == {labels(run="wiki", stream="train", source="code"): 4000}


def test_what_is_waited_for_is_a_series_for_each_reason() -> None:
    service = MemoryService()
    service.put(
        run_stats("wiki", waiting_for="storage: s3://bucket/a (for 3 s)", waiting_reason="storage")
    )
    waits = scrape(service)["tokenloom_waiting"]
    reasons = {
        reason: waits[labels(run="wiki", stream="train", reason=reason)]
        for reason in get_args(WaitReason)
    }
    assert reasons == {"ranks": 0, "storage": 1, "readers": 0, "ledger": 0, "lease": 0, "rows": 0}
    service.put(run_stats("wiki"))
    assert set(scrape(service)["tokenloom_waiting"].values()) == {0}


def test_no_metric_is_exposed_that_the_tables_do_not_list(service: MemoryService) -> None:
    service.rpc_errors.add("Join", "UNAVAILABLE", "NotLeader")
    service.snapshot("wiki", None, save=True)
    straggler = Straggler(ranks=[1], waited_share=0.66, seconds=600)
    service.put(service.runs["wiki"].model_copy(update={"straggler": straggler}))
    threads.faults().setdefault("producer", 0)  # as where one has begun
    listed = {metric.name for _, table in metrics.TABLES for metric in table}
    parts = {
        f"{name}_{part}" for name in listed if name.endswith("_duration_seconds") for part in PARTS
    }
    exposed = {name for name in scrape(service) if not name.startswith("process_")}
    assert exposed == {name for name in listed if not name.endswith("_duration_seconds")} | parts


def test_the_page_says_how_many_series_there_are(service: MemoryService) -> None:
    service.put(
        run_stats(reported=report_stats(), sources=[source_stats(loss=2.5)], ranks=[rank_stats()])
    )
    service.snapshot("wiki-and-code", None, save=True)
    levels = {"server": 0, "run": 0, "source": 0, "rank": 0}
    for name, series in scrape(service).items():
        # How many kinds of threads there were depends on what else this process did.
        for key in [] if name.startswith(("process_", "tokenloom_thread_")) else series:
            names = dict(key)
            if names.get("run") in (None, "wiki-and-code"):
                levels[
                    next((level for level in ("rank", "source", "run") if level in names), "server")
                ] += 1
    page = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    stated = re.search(r"`(\d+) \+ (\d+) R \+ (\d+) S \+ (\d+) W`", page)
    assert stated is not None
    limits = [*map(int, stated.groups())]
    levels["server"] += 6  # of the process
    assert all(
        limit / 1.5 < count <= limit for count, limit in zip(levels.values(), limits, strict=True)
    ), levels


def test_what_is_not_known_is_left_out(service: MemoryService) -> None:
    found = scrape(service)
    source = labels(run="code", stream="train", source="source-1")
    assert source in found["tokenloom_source_epoch"]
    assert source not in found["tokenloom_source_epochs_allowed"]
    assert source not in found["tokenloom_source_remaining_samples"]
    assert (
        labels(run="code", stream="train", rank=0) not in found["tokenloom_rank_last_heard_seconds"]
    )


def test_a_new_generation_is_a_new_series_so_that_a_restore_is_no_reset(
    service: MemoryService,
) -> None:
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
    assert found["process_resident_memory_bytes"][()] > 0


def test_the_global_registry_stays_untouched(service: MemoryService) -> None:
    metrics.create_registry(service, version="1", access=ACCESS, folder=RUNS_DIR)
    metrics.create_registry(service, version="1", access=ACCESS, folder=RUNS_DIR)
    assert not [
        family.name for family in REGISTRY.collect() if family.name.startswith("tokenloom_")
    ]
