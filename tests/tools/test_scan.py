"""``tokenloom validate --scan``: every row read once, and the bad ones listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from support.catalog import CATALOG
from support.server_process import CommandLine
from tokenloom_server.config import mixture_file as config
from tokenloom_server.order import builder
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.prepare.job import reading_once
from tokenloom_server.tools.scan import LISTED_ROWS, scan

GOOD = '{"text": "some text of a row"}'


def mixture(folder: Path) -> Path:
    rows = [GOOD] * 100 + ["", "{cut", GOOD, '{"text": 7}', " "] + [GOOD] * 9
    (folder / "a.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "b.jsonl").write_text(GOOD + "\n")
    (folder / "many.jsonl").write_text((GOOD + "\n") * 10 + "[]\n" * 50)
    (folder / "ids.jsonl").write_text('{"ids": [1, 2]}\n{"ids": [1, 900]}\n')
    children: list[dict[str, Any]] = [
        {"source": "jsonl:[ab].jsonl:text", "alias": "mine", "shuffle": "rows", "lanes": 2},
        {"source": "jsonl:many.jsonl:text", "on_bad_row": "skip"},
        {"source": "jsonl:ids.jsonl:ids", "on_bad_row": "skip", "max_bad_rows": 1},
    ]
    document = {"run": "scan", "tokenizer": "bytes", "sequence_length": 8}
    path = folder / "mixture.yaml"
    path.write_text(yaml.safe_dump(document | {"mixture": {"policy": "weighted", "children": children}}))
    return path


def order_of(folder: Path) -> PipelineFactory:
    parsed = config.load(mixture(folder), CATALOG)
    return builder.create(reading_once(parsed, on_bad_row="skip", max_bad_rows=None), folder, None)


def test_each_file_is_read_once_and_its_bad_rows_are_kept_up_to_a_bound(tmp_path: Path) -> None:
    done: list[tuple[int, int, int]] = []
    a, b, many, ids = scan(order_of(tmp_path), lambda *counts: done.append(counts))
    assert (a.rows, a.bad, a.filtered) == (114, 2, 2)
    assert [reason.split("'a.jsonl': ")[1][:7] for reason in a.reasons] == ["line 10"] * 2
    assert b == (1, 0, 0, [])
    assert (many.rows, many.bad, len(many.reasons)) == (60, 50, LISTED_ROWS)
    assert (ids.rows, ids.bad) == (2, 1)
    assert sum(rows for rows, _, _ in done) == 114 + 1 + 60 + 2
    assert sum(size for _, _, size in done) == sum(path.stat().st_size for path in tmp_path.glob("*.jsonl"))


def test_the_command_lists_bad_rows_and_its_status_says_that_there_are_some(
    tmp_path: Path, tokenloom: CommandLine
) -> None:
    done = tokenloom("validate", mixture(tmp_path), "--scan")
    assert done.status == 1
    assert "bad row: source 'jsonl:[ab].jsonl:text': 'a.jsonl': line 102 is malformed JSON" in done.output
    assert "bad row: source 'jsonl:[ab].jsonl:text': 'a.jsonl': line 104: 'text' is a number" in done.output
    assert "bad row: 30 more of that file" in done.output
    assert "177 rows: 53 bad, 2 filtered or blank" in done.output
    path = mixture(tmp_path)
    for name in ("a", "many", "ids"):
        (tmp_path / f"{name}.jsonl").write_text('\n\n{"text": "some text", "ids": [1]}\n' * 9)
    done = tokenloom("validate", path, "--scan")
    assert done.status == 0, done.output
    assert "82 rows: 0 bad, 54 filtered or blank" in done.output
    assert "valid" in done.output.splitlines()


def test_tensors_have_no_rows_to_scan(tmp_path: Path, tokenloom: CommandLine) -> None:
    document = {
        "run": "scan", "global_batch_size": 2, "batching": {"bucket_by": "length(ids)"},
        "mixture": {"policy": "weighted", "children": [{"source": "parquet:a.parquet:*"}]},
    }  # fmt: skip
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(document))
    done = tokenloom("validate", tmp_path / "mixture.yaml", "--scan")
    assert done.status == 2
    assert "--scan reads documents, but with batching rows are tensors" in done.output
