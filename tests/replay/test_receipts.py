"""What a report counts: unique tokens, held against a recount; whose samples a run's are; and how a card is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.corpora import CODE, ROWS, WIKI, flat, order_of
from support.memory_service import run_report, run_stats, source_stats
from support.served import Trainer, revise, serving
from tokenloom_server.core.state import FileCursor, State
from tokenloom_server.ledger.records import Opening
from tokenloom_server.reports.stats import RevisionInfo, SourceStats
from tokenloom_server.run.past import with_samples
from tokenloom_tools.receipts import Receipts, unique_tokens
from tokenloom_tools.reports.documents import (
    BatchSizeFrom,
    ExclusionReport,
    GenerationReport,
    Range,
)
from tokenloom_tools.reports.model_card import markdown

LENGTH = 8
#: Tokens of one epoch: each row that has any is ended by one more.
EPOCH = sum(len(row) + 1 for rows in ROWS[CODE] for row in rows if row)
SHARD_ROWS = [len(rows) for rows in ROWS[CODE]]


def figure_of(state: State, epochs: float) -> SourceStats:
    """As ``StatsReader`` has it, by rows."""
    source = state.sources[0]
    cursor = source.cursor if isinstance(source.cursor, FileCursor) else FileCursor(0, 0, 0)
    rows = sum(SHARD_ROWS[: cursor.shard]) + cursor.row
    epoch = epochs if source.exhausted else cursor.epoch + rows / sum(SHARD_ROWS)
    return source_stats(
        0,
        tokens=source.tokens,
        rows=source.rows,
        samples=source.samples,
        epoch=epoch,
        epochs=epochs,
        exhausted=source.exhausted,
        dropped_tokens=source.dropped_tokens,
    )


@pytest.mark.parametrize("epochs", [0.5, 1, 2.5])
def test_unique_tokens_are_what_a_recount_finds_at_every_sample(
    folder: Path, epochs: float
) -> None:
    document = flat([CODE])
    document["mixture"]["children"][0]["epochs"] = epochs
    order = order_of(folder, document)
    pipeline = order.pipeline(order.initial())
    exact = []
    while pipeline.ended is None:
        state = pipeline.state()
        _check(state, epochs)
        exact.append(unique_tokens(figure_of(state, epochs), state.sources[0]).exact)
        pipeline.advance(1)
    state = pipeline.state()
    assert state.sources[0].exhausted
    found = _check(state, epochs)
    assert found.exact is (float(epochs).is_integer() or epochs < 1)
    assert exact.count(True) >= min(EPOCH // LENGTH, len(exact)) - 1, (
        "within the first epoch nothing is estimated"
    )
    if epochs > 1:
        assert not all(exact)


def _check(state: State, epochs: float) -> Any:
    found = unique_tokens(figure_of(state, epochs), state.sources[0])
    truth = min(state.sources[0].tokens, EPOCH)
    if found.exact:
        assert found.tokens == truth
    else:
        assert found.tokens == pytest.approx(truth, rel=0.2), (
            "by rows, which are of similar length in the mean"
        )
        assert found.tokens <= state.sources[0].tokens
    return found


def test_a_source_that_ended_by_its_tokens_is_reported_where_it_stands(
    folder: Path, tmp_path: Path
) -> None:
    document = flat([CODE])
    document["mixture"]["children"][0] |= {"epochs": 3, "max_tokens": 800}
    with serving(folder, tmp_path, document) as served:
        Trainer(served, 1, 1).train_to(10**6)
        report = served.companion(Receipts).report()
    assert report.total_tokens == 800 > EPOCH
    assert report.ended is not None
    assert "max_tokens" in report.ended
    (source,) = report.sources
    assert source.epochs == pytest.approx(800 / EPOCH, rel=0.1)
    assert (source.unique_tokens, source.unique_is_exact) == (pytest.approx(EPOCH, rel=0.1), False)


def test_revisions_are_in_the_receipts_after_them_and_in_the_report(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenloom_server.run.sizing.MESSAGE_STEPS", 4)
    rows = tmp_path / "takedown.csv"
    rows.write_text(
        "spec,shard,row\n" + "".join(f"{CODE},data/code-0.parquet,{row}\n" for row in range(9, 13))
    )
    with serving(folder, tmp_path, flat([CODE, WIKI], window_micro_steps=4)) as served:
        trainer = Trainer(served, 1, 1).train_to(4)
        index = revise(
            served, reason="taken down", author="ada", exclude={"file": str(rows)}
        ).sample_index
        trainer.train_to(index + 10)
        for sample in (index - 1, index, index + 1, index + 10):
            receipt = served.companion(Receipts).receipt(sample)
            assert len(receipt.revisions) == (sample > index)
            assert receipt.digest == json.loads(trainer.state(sample))["digest"]
        report = served.companion(Receipts).report()
    assert [(each.sample_index, each.author, each.reason) for each in report.revisions] == [
        (index, "ada", "taken down")
    ]
    assert [each.rows for each in report.exclusions] == [4]
    assert [source.excluded_rows for source in report.sources] == [4, 0]


def test_what_was_skipped_is_in_the_receipts_and_counted_apart_in_the_report(
    folder: Path, tmp_path: Path
) -> None:
    with serving(folder, tmp_path, flat([CODE, WIKI])) as served:
        Trainer(served, 2, 4).train(4)
        served.restores.restore(sample_index=20, skip_samples=9)
        Trainer(served, 1, 5).train(4)
        for index, revisions in ((20, 0), (21, 1), (40, 1)):
            receipt = served.companion(Receipts).receipt(index)
            assert len(receipt.revisions) == revisions
        report = served.companion(Receipts).report()
    assert report.sample_index == 40
    assert report.total_tokens == report.consumed_tokens == 40 * LENGTH
    assert sum(source.skipped_tokens for source in report.sources) == 9 * LENGTH
    (revision,) = report.revisions
    assert revision.changes == ["at sample 20, 9 samples of the order are passed over"]
    kept = [(launch.kept.first, launch.kept.end) for launch in report.generations]
    assert kept == [(0, 20), (20, 40)]


def opening(generation: int, parent: int, start: int) -> Opening:
    return Opening(
        generation=generation,
        parent=parent,
        attempt=f"a{generation}",
        world_size=2,
        batch_size=4,
        group_micro_steps=1,
        start_index=start,
        start_state="{}",
        opened_at=1.8e9,
    )


@pytest.mark.parametrize(
    ("openings", "lineage"),
    [
        ([], []),
        ([(1, 0, 0)], [1]),
        ([(1, 0, 0), (2, 1, 40), (3, 2, 60)], [1, 2, 3]),
        ([(1, 0, 0), (2, 1, 40), (3, 1, 20)], [1, 3]),
        ([(1, 0, 0), (2, 1, 40), (3, 2, 40)], [1, 3]),
        ([(1, 0, 0), (2, 1, 40), (3, 0, 0), (4, 3, 8)], [3, 4]),
        ([(1, 0, 500), (2, 1, 700)], [1, 2]),
    ],
)
def test_a_runs_samples_are_of_the_launches_that_were_not_replaced(
    openings: list[tuple[int, int, int]], lineage: list[int]
) -> None:
    found = with_samples([opening(*each) for each in openings])
    assert [each.generation for each in found] == lineage


def test_a_card_says_all_of_a_report_and_its_names_do_not_break_its_tables() -> None:
    odd = source_stats(1, alias="a|b `c`", spec="jsonl:x|y.jsonl:text")
    stats = run_stats(sources=[source_stats(0, alias="code"), odd])
    report = run_report(stats)
    launch = GenerationReport(
        generation=2,
        parent=1,
        attempt="a",
        world_size=8,
        batch_size=4,
        batch_sizes=[BatchSizeFrom(sample_index=2048, batch_size=8)],
        accumulate=2,
        opened_at=1.8e9,
        start_index=64,
        kept=Range(first=64, end=4096),
    )
    gone = launch.model_copy(
        update={"generation": 1, "parent": 0, "start_index": 0, "kept": None, "batch_sizes": []}
    )
    sources = [source.model_copy(update={"unique_is_exact": False}) for source in report.sources]
    sources[0] = sources[0].model_copy(update={"excluded_rows": 7})
    revision = RevisionInfo(
        number=1,
        sample_index=640,
        total_tokens=5120,
        made_at=1.8e9,
        author="ada",
        reason="take|down",
        changes=["code: weight 2 → 3", "code: 7 rows left out of each epoch"],
        in_force=True,
    )
    changes = {
        "generations": [gone, launch],
        "sources": sources,
        "revisions": [revision],
        "exclusions": [ExclusionReport(path="takedown|2.csv", sha256="12" * 32, rows=7)],
        "unique_is_exact": False,
        "parent_run": {
            "run": "base",
            "uid": "u`1",
            "generation": 2,
            "sample_index": 40,
            "total_tokens": 640,
            "left_samples": 3,
            "left_tokens": 48,
        },
        "ended": "all sources are exhausted",
    }
    text = markdown(report.model_copy(update=changes))
    assert (
        "| 1 | 2027-01-15 08:00 | 8 × 4 | 0 | the beginning | none: a later launch began at or before it |"
        in text
    )
    assert "| 2 | 2027-01-15 08:00 | 8 × 4, 8 from 2,048 on | 64 | launch 1 | 64 to 4,095 |" in text
    assert (
        "The first 40 samples (640 tokens) are those of `base`, which this run was forked from. 3 of them"
        in text
    )
    assert "| forked from | run uid `` u`1 ``, generation 2 |" in text
    assert "| skipped tokens, given to no trainer | " in text
    assert (
        "2,097,152 tokens in 4,093 samples (of 512 tokens by now; phases before had others), where"
        in text
    )
    assert "2,097,152 tokens in 4,096 samples of 512. 2,097,152 of them unique" in markdown(report)
    assert "where the data end: all sources are exhausted" in text
    assert (
        "| 640 | 5,120 | ada | take\\|down | code: weight 2 → 3; code: 7 rows left out of each epoch |"
        in text
    )
    assert f"| `takedown\\|2.csv` | 7 | `{'12' * 32}` |" in text
    assert "- `code`: 7 rows of each epoch" in text
    assert "about 1,048,576 (estimated)" in text
    for value in (
        report.digest,
        report.config_digest,
        report.manifest_digest,
        report.tokenizer.digest,
        "0.10.0",
    ):
        assert value in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    (row,) = [line for line in tables if "`` a" in line]
    assert row.startswith("| ``` a\\|b `c` ``` | ")
    assert row.replace("\\|", "").count("|") == tables[0].count("|")
