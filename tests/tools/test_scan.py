"""``tokenloom validate --scan``: every row read once, and the bad ones listed."""

from __future__ import annotations

import gzip
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from support.catalog import CATALOG
from support.s3_server import BUCKET, s3_storage
from support.server_process import CommandLine
from tokenloom_server.config import mixture_file as config
from tokenloom_server.errors import SourceError
from tokenloom_server.order import builder
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.packing.documents import Documents
from tokenloom_server.storage import remote
from tokenloom_tools.prepare.job import reading_once
from tokenloom_tools.scan import LISTED_ROWS, look, scan

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
    path.write_text(
        yaml.safe_dump(document | {"mixture": {"policy": "weighted", "children": children}})
    )
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
    assert sum(size for _, _, size in done) == sum(
        path.stat().st_size for path in tmp_path.glob("*.jsonl")
    )


def test_the_command_lists_bad_rows_and_its_status_says_that_there_are_some(
    tmp_path: Path, tokenloom: CommandLine
) -> None:
    done = tokenloom("validate", mixture(tmp_path), "--scan")
    assert done.status == 1
    assert (
        "bad row: source 'jsonl:[ab].jsonl:text': 'a.jsonl': line 102 is malformed JSON"
        in done.output
    )
    assert (
        "bad row: source 'jsonl:[ab].jsonl:text': 'a.jsonl': line 104: 'text' is a number"
        in done.output
    )
    assert "bad row: 30 more of that file" in done.output
    assert "177 rows: 53 bad, 2 filtered or blank" in done.output
    path = mixture(tmp_path)
    for name in ("a", "many", "ids"):
        (tmp_path / f"{name}.jsonl").write_text('\n\n{"text": "some text", "ids": [1]}\n' * 9)
    done = tokenloom("validate", path, "--scan")
    assert done.status == 0, done.output
    assert "82 rows: 0 bad, 54 filtered or blank" in done.output
    assert "valid" in done.output.splitlines()


def looking_at(folder: Path, source: str, **fields: Any) -> PipelineFactory:
    children = [{"source": source}, {"source": "jsonl:small.jsonl:text"}]
    document = {"run": "look", "tokenizer": "bytes", "sequence_length": 8, **fields}
    document["mixture"] = {"policy": "weighted", "children": children}
    (folder / "small.jsonl").write_text(GOOD + "\n")
    order = builder.create(config.parse(document, where="m", catalog=CATALOG), folder, None)
    return order.with_record(replace(order.record, config=reading_once(order.config)))


#: More than is read of a file's beginning.
LONG = (json.dumps({"text": "x" * 200}) + "\n") * 9000


def test_valid_is_said_only_of_what_was_read(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"{number}.jsonl").write_text(LONG)
    order = looking_at(tmp_path, "jsonl:?.jsonl:text")
    assert look(order, 600, 1 << 30) == ("valid", [])
    rest = "--scan reads all"
    assert look(order, 600, 2_500_000) == (
        f"valid as far as read: 3 of 7 files, 1 of them whole; {rest}",
        [],
    )
    assert (
        look(order, 600, 9_000_000)[0]
        == f"valid as far as read: 7 of 7 files, 2 of them whole; {rest}"
    )
    assert (
        look(order, 0, 1 << 30)[0] == f"valid as far as read: 0 of 7 files, 0 of them whole; {rest}"
    )


def test_files_are_looked_at_evenly_and_a_file_of_each_source_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        (tmp_path / f"{number}.jsonl").write_text(LONG)
    order, read = looking_at(tmp_path, "jsonl:?.jsonl:text"), list[str]()
    read_part = Documents.read_part

    def noted(documents: Documents, part: int, row: int, rows: int) -> Any:
        read.append(documents.path(part))
        return read_part(documents, part, row, rows)

    monkeypatch.setattr(Documents, "read_part", noted)
    look(order, 600, 4 << 20)
    assert list(dict.fromkeys(read)) == ["0.jsonl", "small.jsonl", "4.jsonl", "2.jsonl"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (
            "a.jsonl",
            (LONG + '{"text": "cut').encode(),
            r"'a\.jsonl': a line near the end is malformed JSON",
        ),
        ("a.jsonl", (LONG + '{"text": 7}\n' + LONG).encode(), r"line 9001: 'text' is a number"),
        (
            "a.jsonl.gz",
            gzip.compress(LONG.encode())[:-9],
            r"'a\.jsonl\.gz' cannot be decompressed somewhere after byte",
        ),
        (
            "a.jsonl",
            (LONG + '{"text": "\\ud800"}\n').encode(),
            r"a line near the end: 'text' has half of a surrogate",
        ),
    ],
)
def test_what_a_run_would_meet_is_met(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=says):
        look(looking_at(tmp_path, f"jsonl:{name}:text"), 600, 1 << 30)
    # And where bad rows are skipped, they are listed.
    if not name.endswith(".gz"):
        verdict, notes = look(
            looking_at(tmp_path, f"jsonl:{name}:text", on_bad_row="skip"), 600, 1 << 30
        )
        assert verdict == "valid"
        assert re.search(f"bad row: .*{says}", "\n".join(notes))


def test_the_ends_of_files_that_say_how_many_rows_they_have_are_looked_at(tmp_path: Path) -> None:
    rows = pa.array([b"x" * 300] * 9000 + [b"\xff"], pa.binary()).view(pa.string())
    pq.write_table(
        pa.table({"text": rows}), tmp_path / "a.parquet", row_group_size=500, compression="none"
    )
    with pytest.raises(SourceError, match=r"row 9000 .*UTF-8"):
        look(looking_at(tmp_path, "parquet:a.parquet:text"), 600, 3 << 20)


def test_a_compressed_file_that_was_not_decoded_whole_is_listed(tmp_path: Path) -> None:
    text = "".join(
        json.dumps({"text": random.Random(row).randbytes(400).hex()}) + "\n" for row in range(6000)
    )
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode())[:-9])
    verdict, notes = look(looking_at(tmp_path, "jsonl:a.jsonl.gz:text"), 600, 2 << 20)
    assert verdict.startswith("valid as far as read: 2 of 2 files, 1 of them whole")
    assert notes == ["1 compressed files were not decoded whole: a.jsonl.gz"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[{"text":"a"}]\n', "line 1 is a list, expected a JSON object"),
        ('{"text": 3}\n' * 3, "line 1: 'text' is a number"),
        ('{"content":"x"}\n' * 3, "line 1 has no key 'text'; its keys are content"),
        ('{"text": null}\n{"text": 1.5}\n', "line 2: 'text' is a number"),
        ('{"text": null}\n' * 3, "'text' is null in every row"),
    ],
)
def test_where_every_row_is_bad_the_reason_is_the_true_one(
    tmp_path: Path, text: str, says: str
) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(SourceError, match=says):
        looking_at(tmp_path, "jsonl:a.jsonl:text", on_bad_row="skip")


def test_little_is_read_of_remote_files_that_are_looked_at_and_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_storage() as store:
        store.put_object("a.jsonl", LONG.encode())
        order = looking_at(tmp_path, f"jsonl:s3://{BUCKET}/a.jsonl:text")
        store.requests.clear()
        monkeypatch.setattr(remote, "block_cache", lambda: pytest.fail("the cache was asked"))
        assert look(order, 600, 2 << 20)[0].startswith(
            "valid as far as read: 2 of 2 files, 1 of them whole"
        )
    ranges = [re.findall(r"\d+", request.range) for request in store.reads()]
    assert ranges
    assert all(int(last) - int(first) < 64 << 10 for first, last in ranges)


def test_tensors_have_no_rows_to_scan(tmp_path: Path, tokenloom: CommandLine) -> None:
    document = {
        "run": "scan", "global_batch_size": 2, "batching": {"bucket_by": "length(ids)"},
        "mixture": {"policy": "weighted", "children": [{"source": "parquet:a.parquet:*"}]},
    }  # fmt: skip
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(document))
    done = tokenloom("validate", tmp_path / "mixture.yaml", "--scan")
    assert done.status == 2
    assert "--scan reads documents, but with batching rows are tensors" in done.output
