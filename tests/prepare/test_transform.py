"""Users' own functions in ``prepare``: what they make of rows, their limits, and that changed code is refused."""

from __future__ import annotations

import json
from collections import deque
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from support.catalog import CATALOG
from support.corpora import flat, text_rows, write_jsonl
from support.prepared import job_of, nothing, shards_of
from support.server_process import MAIN, CommandLine, server_forks
from support.waiting import wait_for
from tokenloom_server.config import mixture_file as config
from tokenloom_server.errors import ConfigError, SourceError
from tokenloom_server.order import builder
from tokenloom_server.sources import lines
from tokenloom_server.workers import transforms
from tokenloom_server.workers.transforms import Transform
from tokenloom_tools.prepare.preparer import Done, prepare

CLEANING = """
import os, signal, subprocess, time
import pyarrow as pa
from helper import shouted

def words(batch):
    print("nothing of this is an answer")
    return pa.array([shouted(word) for text in batch["text"].to_pylist() for word in text.split() if word != "7"])

def same(batch):
    return batch

def none(batch):
    return batch.slice(0, 0)["text"]

def numbers(batch):
    return pa.array([1, 2])

def careful(batch):
    for text in batch["text"].to_pylist():
        if "row 70" in text:
            raise ValueError("no such row")
    return batch

def slow(batch):
    signal.alarm(0)
    time.sleep(60)

def large(batch):
    return pa.array([bytes(10**9).decode()])

def forks(batch):
    subprocess.run(["cat"], check=True)
    os.fork()
    return batch

def forks_and_waits(batch):
    os.fork()
    time.sleep(60)

def dies(batch):
    os.abort()
"""
HELPER = "def shouted(word):\n    return word.upper()\n"
LIMITS = {"seconds": 60.0, "memory_mb": 2_000}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows in several blocks of two files, and code beside them."""
    monkeypatch.setattr(lines, "STRIDE_BYTES", 512)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cleaning.py").write_text(CLEANING)
    (tmp_path / "helper.py").write_text(HELPER)
    for number, count in enumerate((100, 40)):
        write_jsonl(
            tmp_path / f"data/{number}.jsonl",
            [f"{text} row {i}" for i, text in enumerate(text_rows(count, number, 60))],
        )
    return tmp_path


def mixture(**options: Any) -> dict[str, Any]:
    return flat(["jsonl:data/*.jsonl:text"], tokenizer="bytes", **options)


def run(
    folder: Path, out: str, name: str, *, limits: dict[str, Any] = LIMITS, **options: Any
) -> Done:
    document, of_job = mixture(), {"threads": 1, "shard_bytes": 2000}
    for field, value in options.items():
        if field in ("threads", "shuffled", "shard_bytes"):
            of_job[field] = value
        else:
            document["mixture"]["children"][0][field] = value
    with closing(Transform(name, **limits)) as transform:
        job = job_of(folder, document, transform, **of_job)
        return prepare(job, folder / out, on_done=nothing, on_kept=nothing)


def texts_of(out: Path) -> list[str]:
    """The documents of all shards, in their order; ids are bytes, and each ends with an end-of-text id."""
    tables = [pa.ipc.open_file(path).read_all() for path in sorted(out.glob("sources/*/*"))]
    return [bytes(ids[:-1]).decode() for table in tables for ids in table["ids"].to_pylist()]


def test_rows_become_none_or_many_the_same_by_any_number_of_threads(folder: Path) -> None:
    done = run(folder, "out", "cleaning:words")
    lines_of = [(folder / f"data/{number}.jsonl").read_text().splitlines() for number in (0, 1)]
    rows = [json.loads(line) for some in lines_of for line in some]
    expected = [word.upper() for row in rows for word in row["text"].split() if word != "7"]
    assert texts_of(folder / "out") == expected
    assert done.rows == len(expected) > 5 * len(rows)
    run(folder, "again", "cleaning:words", threads=2)
    assert shards_of(folder / "again") == shards_of(folder / "out")
    manifest = json.loads((folder / "out/manifest.json").read_text())
    assert manifest["transform"]["name"] == "cleaning:words"
    assert manifest["transform"]["digest"].startswith("sha256:")
    served = builder.create(config.load(done.mixture, CATALOG), done.mixture.parent, None)
    pipeline = served.pipeline(served.initial())
    while pipeline.ended is None:
        pipeline.advance(500)
    assert done.rows - 10 < pipeline.state().sources[0].rows <= done.rows


def test_processes_that_a_function_starts_take_no_batch_and_give_no_answer(folder: Path) -> None:
    run(folder, "expected", "cleaning:same")
    run(folder, "out", "cleaning:forks")
    assert shards_of(folder / "out") == shards_of(folder / "expected")


def test_rows_that_are_filtered_or_bad_do_not_reach_the_function(folder: Path) -> None:
    scored = [
        {"text": f"{i} text", "score": i % 3} if i % 10 else {"text": i, "score": 2}
        for i in range(60)
    ]
    (folder / "data/1.jsonl").write_text("\n".join(map(json.dumps, scored)))
    (folder / "data/0.jsonl").unlink()
    done = run(folder, "out", "cleaning:words", filter="score >= 2", on_bad_row="skip")
    assert (done.bad_rows, done.filtered_rows) == (6, 36)
    kept = [
        row["text"].split() for row in scored if row["score"] >= 2 and isinstance(row["text"], str)
    ]
    assert [text for text in texts_of(folder / "out") if text] == [
        word.upper() for words in kept for word in words
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "careful",
            r"data/0\.jsonl: row 70: transform cleaning:careful failed: ValueError: no such row; mend",
        ),
        (
            "numbers",
            r"row 0: .*TypeError: it gave Int64Array, expected texts, or a record batch with these as",
        ),
        (
            "dies",
            r"data/\d\.jsonl: rows \d+ to \d+: transform cleaning:dies failed: its process ended with -6",
        ),
        (
            "slow",
            r"data/\d\.jsonl: rows \d+ to \d+: transform cleaning:slow failed: it took too long",
        ),
        (
            "forks_and_waits",
            r"rows \d+ to \d+: transform cleaning:forks_and_waits failed: it took too long",
        ),
        ("large", r"data/\d\.jsonl: row \d+: transform cleaning:large failed: MemoryError"),
        ("none", "no row of it has a token"),
    ],
)
def test_what_goes_wrong_names_file_and_row(folder: Path, name: str, message: str) -> None:
    limits = (
        {"seconds": 0.5, "memory_mb": 800}
        if name in ("slow", "large", "forks_and_waits")
        else LIMITS
    )
    with pytest.raises(SourceError, match=message):
        run(folder, "out", f"cleaning:{name}", limits=limits)
    assert not (folder / "out/mixture.yaml").exists()


def test_other_code_is_refused_where_something_was_prepared(folder: Path) -> None:
    run(folder, "out", "cleaning:words")
    with pytest.raises(
        ConfigError, match=r'transform\.name: it was "cleaning:words", it is "cleaning:same"'
    ):
        run(folder, "out", "cleaning:same")
    (folder / "helper.py").write_text(HELPER + "# changed")
    with pytest.raises(ConfigError, match=r"transform\.digest: it was"):
        run(folder, "out", "cleaning:words")
    (folder / "helper.py").write_text(HELPER)
    assert run(folder, "out", "cleaning:words").kept > 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cleaning", "expected MODULE:FUNCTION .* .AttributeError"),
        (
            "no_such:words",
            "expected MODULE:FUNCTION that can be imported from the current folder.*.ModuleNotFoundError",
        ),
        ("cleaning:no_such", "module .cleaning. has no attribute"),
    ],
)
def test_what_is_no_function_is_refused(folder: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Transform(name, **LIMITS)


def test_rows_in_a_drawn_order_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--transform cannot go with --shuffle"):
        run(folder, "out", "cleaning:same", shuffled=True)


def test_a_killed_command_goes_on_to_the_same_bytes(folder: Path, tokenloom: CommandLine) -> None:
    write_jsonl(folder / "data/2.jsonl", text_rows(400, 2, 60))
    (folder / "cleaning.py").write_text(
        CLEANING.replace("def words(batch):", "def words(batch):\n    time.sleep(0.2)")
    )
    (folder / "mixture.yaml").write_text(yaml.safe_dump(mixture()))
    arguments = (
        "prepare",
        "mixture.yaml",
        "--transform",
        "cleaning:words",
        "--out",
        "out",
        "--threads",
        "1",
    )
    process = server_forks().fork(MAIN, arguments, output=folder / "log", folder=folder)
    journal = folder / "out/journal.jsonl"
    wait_for(lambda: journal.exists() and journal.stat().st_size > 100, "a shard")
    process.kill()
    process.wait(240)
    ended = tokenloom(*arguments, folder=folder)
    assert ended.status == 0, ended.output
    assert "were there already" in ended.output
    run(folder, "whole", "cleaning:words", shard_bytes=128_000_000)
    assert shards_of(folder / "out") == shards_of(folder / "whole")


def test_what_a_function_prints_is_limited_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    printed = BytesIO(
        b"x" * 2 * transforms.LOGGED_LINE_BYTES + b"\n" + b"line\n" * 3 * transforms.LOGGED_LINES
    )
    last: deque[bytes] = deque(maxlen=2)
    transforms._log_printed("a:b", printed, last)

    assert len(caplog.messages) == transforms.LOGGED_LINES + 1
    assert caplog.messages[0] == f"a:b prints: {'x' * transforms.LOGGED_LINE_BYTES}"
    assert caplog.messages[-1].startswith("a:b prints more, which is not shown")
    assert list(last) == [b"line\n"] * 2
    assert printed.closed
