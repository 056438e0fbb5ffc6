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


def sentencepiece_model(files: Files) -> None:
    files.text("a.txt")
    (files.folder / "tokenizer.model").write_bytes(b"\x0a\x07\x00\xff\xfe")


Write = Callable[[Files], object]

BAD_SOURCES: dict[str, tuple[Write, str, tuple[str, ...]]] = {
    "no file matches": (
        lambda files: files.text("b.txt"),
        "txt:a-*.txt:text",
        ("SourceError", "txt:a-*.txt:text", "no file", "a-*.txt"),
    ),
    "missing column": (
        lambda files: files.parquet("a.parquet", id=[1], body=["x"]),
        "parquet:a.parquet:text",
        ("SourceError", "a.parquet", "no column 'text'", "id, body"),
    ),
    "missing key": (
        lambda files: files.text("a.jsonl", '{"id": 1, "body": "x"}\n'),
        "jsonl:a.jsonl:text",
        ("SourceError", "a.jsonl", "line 1", "no key 'text'", "id, body"),
    ),
    "column of another type": (
        lambda files: files.parquet("a.parquet", text=[1.5], body=["x"]),
        "parquet:a.parquet:text",
        ("SourceError", "a.parquet", "'text' is of type double", "text (string), or lists of integers", "body"),
    ),
    "empty file": (
        lambda files: files.text("a.parquet", ""),
        "parquet:a.parquet:text",
        ("SourceError", "a.parquet", "empty", "0 bytes"),
    ),
    "empty text file": (
        lambda files: files.text("a.txt", ""),
        "txt:a.txt:text",
        ("SourceError", "a.txt", "empty"),
    ),
    "source without rows": (
        lambda files: files.parquet("a.parquet", text=pa.array([], pa.string())),
        "parquet:a.parquet:text",
        ("SourceError", "a.parquet", "no rows", "take it out of the mixture"),
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
    "invalid UTF-8": (
        lambda files: (files.folder / "a.txt").write_bytes(b"b\xe4d\nfine\n"),
        "txt:a.txt:text",
        ("SourceError", "a.txt", "line 1", "UTF-8"),
    ),
    "malformed JSON": (
        lambda files: files.text("a.jsonl", '{"text": "x"}\n{"text": "y"\n'),
        "jsonl:a.jsonl:text",
        ("SourceError", "a.jsonl", "line 2", "malformed JSON", "one object per line"),
    ),
    "a folder that is no dataset": (
        lambda files: (files.folder / "wiki").mkdir(),
        "arrow:wiki:input_ids",
        ("SourceError", "arrow:wiki:input_ids", "no Arrow file", "expected state.json with data-*.arrow"),
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
    "spec without a column": (
        lambda files: files.mixture("jsonl:a.jsonl"),
        ("mixture.children.0", "expected jsonl:GLOB:COLUMN"),
    ),
    "sequence length": (
        lambda files: files.mixture("txt:a.txt:text", sequence_length=1),
        ("sequence_length", "found 1", "2"),
    ),
    "duplicate spec": (
        lambda files: files.mixture("txt:a.txt:text", {"source": "txt:a.txt:text", "alias": "again"}),
        ("txt:a.txt:text", "mixture.children.1", "mixture.children.0", "sum of the weights"),
    ),
    "duplicate alias": (
        lambda files: files.mixture(
            {"source": "txt:a.txt:text", "alias": "x"}, {"source": "txt:b.txt:text", "alias": "x"}
        ),
        ("mixture.children.1.alias", "'x' names the source at mixture.children.0 already"),
    ),
    "negative weight": (
        lambda files: files.mixture({"source": "txt:a.txt:text", "weight": -1}),
        ("mixture.children.0.weight", "found -1", "greater than 0"),
    ),
    "weight that is no number": (
        lambda files: files.mixture({"source": "txt:a.txt:text", "weight": float("nan")}),
        ("mixture.children.0.weight", "nan", "finite number"),
    ),
    "unknown key": (
        lambda files: files.mixture("txt:a.txt:text", sequence_lenght=8),
        ("sequence_lenght",),
    ),
    "unknown policy": (
        lambda files: files.mixture(mixture={"policy": "fair", "children": [{"source": "txt:a.txt:text"}]}),
        ("mixture.policy", "fair", "least_consumed"),
    ),
    "no children": (lambda files: files.mixture(), ("mixture.children", "at least 1")),
    "no tokeniser": (
        lambda files: files.mixture("txt:a.txt:text", drop="tokenizer"),
        ("tokenizer", "tokenizer.json", "'bytes'", "vocab_size"),
    ),
    "a vocabulary that no type on the wire holds": (
        lambda files: files.mixture("txt:a.txt:text", drop="tokenizer", vocab_size=2**32 + 1, end_of_text_id=0),
        ("vocab_size", "4294967297", "4294967296"),
    ),
    "a vocabulary below the tokeniser's": (
        lambda files: files.mixture("txt:a.txt:text", vocab_size=100),
        ("vocab_size", "100 is smaller than the tokeniser's 258"),
    ),
}


@pytest.mark.parametrize("case", BAD_MIXTURES)
def test_validate_names_the_field_of_a_mixture_that_is_wrong(files: Files, tokenloom: CommandLine, case: str) -> None:
    files.text("a.txt")
    files.text("b.txt")
    write, parts = BAD_MIXTURES[case]
    assert_refused(tokenloom("validate", write(files)), "ConfigError", *parts)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (None, ("cannot be read", "mixture file")),
        ("", ("expected a mapping with run, mixture", "NoneType")),
        ("run: [", ("is not YAML",)),
        ("run: a\nrun: b\n", ("run", "twice")),
    ],
)
def test_a_file_that_is_no_mixture_is_refused(
    files: Files, tokenloom: CommandLine, content: str | None, parts: tuple[str, ...]
) -> None:
    if content is not None:
        files.text("m.yaml", content)
    assert_refused(tokenloom("serve", files.folder / "m.yaml", *ADDRESSES), "ConfigError", "m.yaml", *parts)


@pytest.mark.parametrize(
    ("tokenizer", "write", "parts"),
    [
        ("nowhere.json", lambda files: None, ("nowhere.json", "not", "bytes")),
        ("tokenizer.model", sentencepiece_model, ("tokenizer.model", "not JSON", "tokenizer.json")),
        ("t.json", lambda files: files.text("t.json", '{"version": "1.0"}'), ("t.json", "no 'model'")),
        (
            "t.json",
            lambda files: files.text("t.json", '{"version": "1.0", "model": {"type": "Odd"}}'),
            ("t.json",),
        ),
    ],
)
def test_a_tokeniser_that_is_missing_or_not_supported_is_refused(
    files: Files, tokenloom: CommandLine, tokenizer: str, write: Write, parts: tuple[str, ...]
) -> None:
    files.text("a.txt")
    write(files)
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


@pytest.mark.parametrize(
    ("settings", "found"),
    [({"appendonly": "no"}, "appendonly no"), ({"appendfsync": "everysec"}, "appendfsync everysec")],
)
def test_a_redis_that_can_lose_commits_is_refused_with_the_setting_to_change(
    files: Files, tokenloom: CommandLine, tmp_path: Path, settings: dict[str, str], found: str
) -> None:
    files.text("a.txt")
    folder = tmp_path / "redis"
    folder.mkdir()
    unsafe = RedisServer(folder, **settings).start()
    try:
        done = tokenloom("serve", files.mixture("txt:a.txt:text"), *ADDRESSES, "--ledger", unsafe.url())
    finally:
        unsafe.stop()
    assert_refused(done, "LedgerUnsafe", found, "--appendonly yes --appendfsync always")


@pytest.mark.parametrize(
    ("ledger", "parts"),
    [
        ("mysql://127.0.0.1/x", ("unknown scheme", "sqlite:///relative.db", "redis://")),
        ("sqlite:///nowhere/ledger.db", ("nowhere", "does not exist", "--ledger")),
        ("sqlite:///a.txt", ("a.txt is not a SQLite database", "--ledger")),
    ],
)
def test_a_ledger_that_cannot_be_one_is_refused(
    files: Files, tokenloom: CommandLine, ledger: str, parts: tuple[str, ...]
) -> None:
    files.text("a.txt")
    done = tokenloom("serve", files.mixture("txt:a.txt:text"), *ADDRESSES, "--ledger", ledger)
    assert_refused(done, "ConfigError", *parts)


@pytest.mark.parametrize("option", ["--grpc", "--rest"])
def test_a_port_in_use_is_refused_with_the_option_to_change(files: Files, tokenloom: CommandLine, option: str) -> None:
    files.text("a.txt")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = tokenloom("serve", files.mixture("txt:a.txt:text"), *ADDRESSES, option, address)
    assert_refused(done, "ConfigError", option, address, "Address already in use", "port 0")


@pytest.mark.parametrize("address", ["8080", "127.0.0.1", "127.0.0.1:99999", "127.0.0.1:http", ":80"])
@pytest.mark.parametrize("option", ["--grpc", "--rest"])
def test_an_address_that_is_none_is_refused(files: Files, tokenloom: CommandLine, option: str, address: str) -> None:
    files.text("a.txt")
    done = tokenloom("serve", files.mixture("txt:a.txt:text"), *ADDRESSES, option, address)
    assert_refused(done, "ConfigError", option, repr(address), "expected host:port")


def test_a_ready_file_that_cannot_be_written_is_refused(files: Files, tokenloom: CommandLine) -> None:
    files.text("a.txt")
    target = files.folder / "nowhere" / "ready.json"
    done = tokenloom("serve", files.mixture("txt:a.txt:text"), *ADDRESSES, "--ready-file", target)
    assert_refused(done, "ConfigError", "--ready-file", str(target), "No such file or directory")


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
    files.mixture("txt:a.txt:text", {"source": "txt:b.txt:text", "weight": 2, "alias": "b"}, window_steps=5)
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
