"""What a user gets wrong before training: the command refuses it in one message, and says what to do."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from conftest import Corpus, StartServer
from support.ports import free_port
from support.redis_server import RedisServer
from support.server_process import CommandLine, Finished, run_module
from support.trainer import World

ADDRESSES = ("--grpc", "127.0.0.1:0", "--rest", "127.0.0.1:0")


def assert_refused(done: Finished, name: str, *parts: str) -> None:
    """One message, led by the error's name, without a trace."""
    assert done.status == 2, done.output
    assert done.output.count("Traceback") == 0, done.output
    lines = [line for line in done.output.splitlines() if " INFO " not in line and " WARNING " not in line]
    assert lines[0].startswith(f"{name}: "), done.output
    text = " ".join(line.strip() for line in lines)
    for part in parts:
        assert part in text, f"{part!r} is not in: {text}"


class Files:
    """Writes small inputs into a folder, and a mixture of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def text(self, name: str, content: str = "one line\nand another\n") -> None:
        (self.folder / name).write_text(content, encoding="utf-8")

    def parquet(self, name: str, **columns: Any) -> Path:
        pq.write_table(pa.table(columns), self.folder / name)
        return self.folder / name

    def mixture(self, *sources: str | dict[str, Any], drop: str = "", **fields: Any) -> Path:
        children = [source if isinstance(source, dict) else {"source": source} for source in sources]
        document: dict[str, Any] = {
            "run": "bad",
            "tokenizer": "bytes",
            "sequence_length": 8,
            "mixture": {"policy": "least_consumed", "children": children},
        } | fields
        document.pop(drop, None)
        path = self.folder / "mixture.yaml"
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        return path


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def truncated_parquet(files: Files) -> None:
    path = files.parquet("a.parquet", text=["x" * 1000] * 100)
    path.write_bytes(path.read_bytes()[:-200])


Write = Callable[[Files], object]

#: What each scheme says of its files is tested with the scheme: here, that the command passes it on.
BAD_SOURCES: dict[str, tuple[Write, str, tuple[str, ...]]] = {
    "no file matches": (
        lambda files: files.text("b.txt"),
        "txt:a-*.txt:text",
        ("SourceError", "txt:a-*.txt:text", "no file", "a-*.txt"),
    ),
    "column of another type": (
        lambda files: files.parquet("a.parquet", text=[1.5], body=["x"]),
        "parquet:a.parquet:text",
        ("SourceError", "a.parquet", "'text' is of type double", "text (string), or lists of integers", "body"),
    ),
    "source without tokens": (
        lambda files: files.parquet("a.parquet", text=["", ""]),
        "parquet:a.parquet:text",
        ("SourceError", "parquet:a.parquet:text", "no token", "empty"),
    ),
    "truncated parquet": (
        truncated_parquet,
        "parquet:a.parquet:text",
        ("SourceError", "a.parquet", "not a readable Parquet file", "truncated or damaged", "again"),
    ),
    "malformed JSON": (
        lambda files: files.text("a.jsonl", '{"text": "x"}\n{"text": "y"\n'),
        "jsonl:a.jsonl:text",
        ("SourceError", "a.jsonl", "line 2", "malformed JSON", "one object per line"),
    ),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_validate_names_what_is_wrong_with_a_source(files: Files, tokenloom: CommandLine, case: str) -> None:
    write, spec, (name, *parts) = BAD_SOURCES[case]
    write(files)
    assert_refused(tokenloom("validate", files.mixture(spec)), name, *parts)


BAD_MIXTURES: dict[str, tuple[Callable[[Files], Path], tuple[str, ...]]] = {
    "unknown scheme": (
        lambda files: files.mixture("csv:a.csv:text"),
        ("mixture.children.0", "'csv'", "expected one of parquet:GLOB:COLUMN, jsonl:GLOB:COLUMN"),
    ),
    "duplicate spec": (
        lambda files: files.mixture("txt:a.txt:text", {"source": "txt:a.txt:text", "alias": "again"}),
        ("txt:a.txt:text", "mixture.children.1", "mixture.children.0", "sum of the weights"),
    ),
    "no tokeniser": (
        lambda files: files.mixture("txt:a.txt:text", drop="tokenizer"),
        ("tokenizer", "tokenizer.json", "'bytes'", "vocab_size"),
    ),
    "a vocabulary below the tokeniser's": (
        lambda files: files.mixture("txt:a.txt:text", vocab_size=100),
        ("vocab_size", "100 is smaller than the tokeniser's 258"),
    ),
}


@pytest.mark.parametrize("case", BAD_MIXTURES)
def test_validate_names_the_field_of_a_mixture_that_is_wrong(files: Files, tokenloom: CommandLine, case: str) -> None:
    files.text("a.txt")
    write, parts = BAD_MIXTURES[case]
    assert_refused(tokenloom("validate", write(files)), "ConfigError", *parts)


def test_a_file_that_is_no_mixture_is_refused(files: Files, tokenloom: CommandLine) -> None:
    absent = tokenloom("serve", files.folder / "m.yaml", *ADDRESSES)
    assert_refused(absent, "ConfigError", "m.yaml", "cannot be read", "mixture file")
    files.text("m.yaml", "run: a\nrun: b\n")
    assert_refused(tokenloom("serve", files.folder / "m.yaml", *ADDRESSES), "ConfigError", "m.yaml", "run", "twice")


def test_a_tokeniser_that_is_missing_or_not_supported_is_refused(files: Files, tokenloom: CommandLine) -> None:
    files.text("a.txt")
    (files.folder / "tokenizer.model").write_bytes(b"\x0a\x07\x00\xff\xfe")  # of SentencePiece
    files.text("t.json", '{"version": "1.0", "model": {"type": "Odd"}}')
    for tokenizer, parts in (
        ("nowhere.json", ("nowhere.json", "not", "bytes")),
        ("tokenizer.model", ("tokenizer.model", "not JSON", "tokenizer.json")),
        ("t.json", ("t.json",)),
    ):
        done = tokenloom("validate", files.mixture("txt:a.txt:text", tokenizer=tokenizer))
        assert_refused(done, "TokenizerError", *parts)


def test_ids_above_the_vocabulary_are_refused_with_file_row_and_both_numbers(
    files: Files, tokenloom: CommandLine
) -> None:
    files.parquet("a.parquet", ids=[[1, 2, 3], [4, 70000, 5]])
    mixture = files.mixture("parquet:a.parquet:ids", drop="tokenizer", vocab_size=50000, end_of_text_id=0)
    assert_refused(tokenloom("validate", mixture), "TokenizerError", "a.parquet", "row 1", "70000", "0 to 49999")


def test_a_redis_that_nobody_serves_is_refused_with_its_address(files: Files, tokenloom: CommandLine) -> None:
    files.text("a.txt")
    port = free_port()
    done = tokenloom(
        "serve", files.mixture("txt:a.txt:text"), *ADDRESSES, "--ledger", f"redis://user:secret@127.0.0.1:{port}/0"
    )
    assert_refused(done, "LedgerUnavailable", f"127.0.0.1:{port}", "cannot be reached", "Look whether it runs")
    assert "secret" not in done.output


def test_a_redis_that_can_lose_commits_is_refused_with_the_setting_to_change(
    files: Files, tokenloom: CommandLine, tmp_path: Path
) -> None:
    files.text("a.txt")
    folder = tmp_path / "redis"
    folder.mkdir()
    unsafe = RedisServer(folder, appendfsync="everysec").start()
    try:
        done = tokenloom("serve", files.mixture("txt:a.txt:text"), *ADDRESSES, "--ledger", unsafe.url())
    finally:
        unsafe.stop()
    assert_refused(done, "LedgerUnsafe", "appendfsync everysec", "--appendonly yes --appendfsync always")


def test_what_serve_cannot_use_is_refused_with_the_option_to_change(files: Files, tokenloom: CommandLine) -> None:
    files.text("a.txt")
    target = files.folder / "nowhere" / "ready.json"
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"127.0.0.1:{server.getsockname()[1]}"
        for option, value, parts in (
            ("--ledger", "mysql://127.0.0.1/x", ("unknown scheme", "sqlite:///relative.db", "redis://")),
            ("--ledger", "sqlite:///nowhere/ledger.db", ("nowhere", "does not exist", "--ledger")),
            ("--ledger", "sqlite:///a.txt", ("a.txt is not a SQLite database", "--ledger")),
            ("--grpc", taken, ("--grpc", taken, "Address already in use", "port 0")),
            ("--rest", taken, ("--rest", taken, "Address already in use", "port 0")),
            ("--grpc", "127.0.0.1:99999", ("--grpc", "'127.0.0.1:99999'", "expected host:port")),
            ("--rest", "8080", ("--rest", "'8080'", "expected host:port")),
            ("--rest", ":80", ("--rest", "':80'", "expected host:port")),
            ("--ready-file", target, ("--ready-file", str(target), "No such file or directory")),
        ):
            done = tokenloom("serve", files.mixture("txt:a.txt:text"), *ADDRESSES, option, value)
            assert_refused(done, "ConfigError", *parts)


def test_one_run_in_two_files_is_refused(files: Files, tokenloom: CommandLine) -> None:
    files.text("a.txt")
    first = files.mixture("txt:a.txt:text")
    second = files.folder / "second.yaml"
    second.write_text(first.read_text(encoding="utf-8"), encoding="utf-8")
    done = tokenloom("serve", first, second, *ADDRESSES)
    assert_refused(done, "ConfigError", "second.yaml", "run 'bad' is served already", "its own name")


def test_a_mixture_that_differs_from_the_runs_record_is_refused_with_both_values(
    files: Files, tokenloom: CommandLine, start_server: StartServer
) -> None:
    files.text("a.txt", "some lines of text\n" * 20)
    files.text("b.txt")
    ledger = f"sqlite:///{files.folder}/ledger.db"
    mixture = files.mixture("txt:a.txt:text", {"source": "txt:b.txt:text", "weight": 2})
    server = start_server(mixture)
    with World(server.url("bad"), 1, 2) as world:
        world.steps(3)
    server.terminate()
    ledger = server.ledger
    for changed, parts in (
        ({"seed": 3}, ("seed: the run began with 0, the file has 3",)),
        ({"sequence_length": 16}, ("sequence_length: the run began with 8, the file has 16",)),
        ({"tokenizer": "bytes", "add_bos": True}, ("add_bos",)),
    ):
        files.mixture("txt:a.txt:text", {"source": "txt:b.txt:text", "weight": 2}, **changed)
        done = tokenloom("serve", mixture, *ADDRESSES, "--ledger", ledger)
        assert_refused(done, "ConfigError", "differs from the run's record", *parts, "put these back", "another name")
    files.mixture("txt:a.txt:text", {"source": "txt:b.txt:text", "weight": 3})
    done = tokenloom("serve", mixture, *ADDRESSES, "--ledger", ledger)
    assert_refused(done, "ConfigError", "mixture.children.1.weight", '"2"', '"3"')

    # What the order does not depend on may change.
    files.mixture("txt:a.txt:text", {"source": "txt:b.txt:text", "weight": 2, "alias": "b"}, window_micro_steps=5)
    files.text("a.txt", "some lines of next\n" * 20)
    done = tokenloom("serve", mixture, *ADDRESSES, "--ledger", ledger)
    assert_refused(done, "SourceChanged", "a.txt")
    files.text("a.txt", "some lines of text\n" * 20)
    (files.folder / "b.txt").unlink()
    done = tokenloom("serve", mixture, *ADDRESSES, "--ledger", ledger)
    assert_refused(done, "SourceChanged", "b.txt")


def test_the_command_says_what_it_is_for(tokenloom: CommandLine) -> None:
    help_text = tokenloom("--help")
    assert help_text.status == 0
    for command in ("serve", "validate", "stats", "demo"):
        assert f" {command} " in help_text.output
    serve = tokenloom("serve", "--help")
    assert serve.status == 0
    for option in ("--grpc", "--rest", "--ledger", "--ready-file", "sqlite:///", "redis://"):
        assert option in serve.output


def test_the_command_tells_its_version_and_refuses_what_it_does_not_know(tokenloom: CommandLine) -> None:
    version = run_module("--version")
    assert (version.status, version.output.split()[0]) == (0, "tokenloom")
    for arguments in (("server",), ("serve",), ("serve", "m.yaml", "--log-level", "loud"), ("validate",)):
        refused = tokenloom(*arguments)
        assert refused.status == 2
        assert "Traceback" not in refused.output
    for option in ("--lease", "--liveness"):  # a lease for ever would outlive its server, and no thread waits so long
        refused = tokenloom("serve", "m.yaml", option, "inf")
        assert refused.status == 2
        assert "3600" in refused.output
    for arguments in (("serve", "m.yaml", "--lease", "nan"), ("serve", "m.yaml", "--rank-timeout", "0")):
        refused = tokenloom(*arguments)
        assert refused.status == 2
        assert "Traceback" not in refused.output


def test_validate_shows_sources_shares_engine_and_vocabulary(corpus: Corpus, tokenloom: CommandLine) -> None:
    done = tokenloom("validate", corpus.mixture("shown"))
    assert done.status == 0, done.output
    for part in ("code", "prose", "docs", "arrow:wiki", "50.00%", "25.00%", "10.71%", "gigatoken", "uint16", "valid"):
        assert part in done.output, part
    assert not (corpus.folder / "tokenloom.db").exists(), "it left a ledger"


def test_validate_warns_where_the_data_do_not_fill_one_sample(files: Files, tokenloom: CommandLine) -> None:
    files.text("a.txt", "short\n")
    done = tokenloom("validate", files.mixture("txt:a.txt:text", sequence_length=64))
    assert done.status == 0
    assert "too short for one sample" in " ".join(done.output.split())


def test_stats_of_no_server_and_of_another_are_refused(tokenloom: CommandLine) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    assert_refused(tokenloom("stats", nobody), "ServerUnreachable", nobody, "no answer", "REST address")
    assert_refused(tokenloom("stats", "ftp://x"), "ConfigError", "ftp://x", "http://127.0.0.1:8080")
