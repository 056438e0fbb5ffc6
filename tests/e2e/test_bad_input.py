"""What a user gets wrong before training: the command refuses it in one message, and says what to do."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Corpus, StartServer
from support.ports import free_port
from support.server_process import CommandLine, Finished, run_module
from tokenloom import ConnectionOptions, LaunchOptions, LocalDataset, RemoteDataset
from tokenloom.errors import ServerUnavailable
from tokenloom_server.errors import SourceError

ADDRESSES = ("--grpc", "127.0.0.1:0", "--rest", "127.0.0.1:0")


#: A mixture that has a source twice, and where.
TWICE = {
    "policy": "weighted",
    "children": [{"source": "txt:a.txt:text", "alias": alias} for alias in ("one", "two")],
}
NAMES = ("txt:a.txt:text", "mixture.children.1", "mixture.children.0")


def assert_refused(done: Finished, name: str, *parts: str) -> None:
    """One message, led by the error's name, without a trace."""
    assert done.status == 2, done.output
    assert done.output.count("Traceback") == 0, done.output
    lines = [
        line
        for line in done.output.splitlines()
        if " INFO " not in line and " WARNING " not in line
    ]
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

    def mixture(self, source: str, **fields: Any) -> Path:
        document: dict[str, Any] = {
            "run": "bad",
            "tokenizer": "bytes",
            "sequence_length": 8,
            "mixture": {"policy": "least_consumed", "children": [{"source": source}]},
        }
        path = self.folder / "mixture.yaml"
        path.write_text(yaml.safe_dump(document | fields), encoding="utf-8")
        return path


#: The second has samples that a short file fills.
PHASES = [{"until_tokens": 64}, {"sequence_length": 6}]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    made = Files(tmp_path)
    made.text("a.txt")
    made.text("empty.txt", "\n\n")
    made.text("a.jsonl", '{"text": "x"}\n{"text": "y"\n')
    return made


def test_validate_names_what_is_wrong_with_a_mixture(files: Files, tokenloom: CommandLine) -> None:
    # What is said of each source, field and tokeniser is tested with it: here, that the command passes it on.
    for source, fields, parts in (
        ("txt:b-*.txt:text", {}, ("SourceError", "txt:b-*.txt:text", "no file", "b-*.txt")),
        (
            "jsonl:a.jsonl:text",
            {},
            ("SourceError", "a.jsonl", "line 2", "malformed JSON", "one object per line"),
        ),
        ("txt:empty.txt:text", {}, ("SourceError", "txt:empty.txt:text", "no token", "empty")),
        ("txt:a.txt:text", {"mixture": TWICE}, ("ConfigError", *NAMES, "sum of the weights")),
        (
            "txt:a.txt:text",
            {"tokenizer": "nowhere.json"},
            ("TokenizerError", "nowhere.json", "not", "bytes"),
        ),
    ):
        assert_refused(tokenloom("validate", files.mixture(source, **fields)), *parts)


def test_data_outside_of_the_data_roots_is_refused(files: Files, tokenloom: CommandLine) -> None:
    roots = files.folder / "elsewhere", files.folder
    roots[0].mkdir()
    mixture = files.mixture("txt:a.txt:text")
    for command in (("validate", mixture), ("serve", mixture, *ADDRESSES)):
        done = tokenloom(*command, "--data-root", roots[0])
        assert_refused(
            done, "ConfigError", "mixture.children.0.source: ", "lies below no data root"
        )
    assert (
        tokenloom("validate", mixture, "--data-root", roots[0], "--data-root", roots[1]).status == 0
    )


def test_a_file_that_is_no_mixture_is_refused(files: Files, tokenloom: CommandLine) -> None:
    absent = tokenloom("serve", files.folder / "m.yaml", *ADDRESSES)
    assert_refused(absent, "ConfigError", "m.yaml", "cannot be read", "mixture file")
    files.text("m.yaml", "run: a\nrun: b\n")
    assert_refused(
        tokenloom("serve", files.folder / "m.yaml", *ADDRESSES),
        "ConfigError",
        "m.yaml",
        "run",
        "twice",
    )


def test_what_serve_cannot_use_is_refused_with_the_option_to_change(
    files: Files, tokenloom: CommandLine
) -> None:
    target = files.folder / "nowhere" / "ready.json"
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"127.0.0.1:{server.getsockname()[1]}"
        for option, value, parts in (
            (
                "--ledger",
                "mysql://127.0.0.1/x",
                ("unknown scheme", "sqlite:///relative.db", "redis://"),
            ),
            ("--grpc", taken, ("--grpc", taken, "Address already in use", "port 0")),
            ("--rest", taken, ("--rest", taken, "Address already in use", "port 0")),
            ("--rest", ":80", ("--rest", "':80'", "expected host:port")),
            ("--ready-file", target, ("--ready-file", str(target), "No such file or directory")),
        ):
            done = tokenloom("serve", files.mixture("txt:a.txt:text"), *ADDRESSES, option, value)
            assert_refused(done, "ConfigError", *parts)


def test_the_command_tells_its_version_and_refuses_what_it_does_not_know(
    tokenloom: CommandLine,
) -> None:
    version = run_module("--version")
    assert (version.status, version.output.split()[0]) == (0, "tokenloom")
    for *arguments, said in (
        ("server", "No such command"),
        ("serve", "--log-level", "loud", "--log-level"),
        ("serve", "m.yaml", "--lease", "inf", "3600"),  # a lease for ever would outlive its server
        ("serve", "m.yaml", "--liveness", "inf", "3600"),
        ("serve", "m.yaml", "--lease", "nan", "--lease"),
        ("serve", "m.yaml", "--rank-timeout", "0", "--rank-timeout"),
    ):
        refused = tokenloom(*arguments)
        assert refused.status == 2
        assert said in refused.output and "Traceback" not in refused.output


def test_validate_shows_sources_shares_engine_and_vocabulary(
    corpus: Corpus, tokenloom: CommandLine
) -> None:
    done = tokenloom("validate", corpus.mixture("shown"))
    assert done.status == 0, done.output
    for part in (
        "code",
        "prose",
        "docs",
        "arrow:wiki",
        "50.00%",
        "25.00%",
        "10.71%",
        "gigatoken",
        "uint16",
        "valid",
    ):
        assert part in done.output, part
    assert not (corpus.folder / "tokenloom.db").exists(), "it left a ledger"


def _read_often(mixture: dict[str, Any]) -> dict[str, Any]:
    return mixture | {"children": [child | {"epochs": 11} for child in mixture["children"]]}


def test_a_source_that_could_never_fill_a_sample_is_refused(
    files: Files, tokenloom: CommandLine
) -> None:
    files.text("a.txt", "short\n")
    files.text("b.txt", "long enough for one sample of 64 tokens, at a byte each, and a bit\n" * 2)
    both = {
        "policy": "least_consumed",
        "children": [{"source": f"txt:{name}.txt:text"} for name in "ab"],
    }
    mixture = files.mixture("txt:a.txt:text", sequence_length=64, mixture=both)
    parts = (
        "SourceError",
        "txt:a.txt:text",
        "has 6 tokens and is read 1 times",
        "takes 64",
        "epochs to 11",
    )
    assert_refused(tokenloom("validate", mixture), *parts)
    with LocalDataset(mixture, 1) as begun, pytest.raises(SourceError, match=parts[2]):
        next(iter(begun))
    # What goes on from a state keeps its sources: its order would be another without one of them.
    with LocalDataset(files.mixture("txt:b.txt:text", sequence_length=64, run="other"), 1) as other:
        iter(other)
        state = other.state_dict()
    with LocalDataset(
        files.mixture("txt:a.txt:text", sequence_length=64, mixture=both),
        1,
        launch=LaunchOptions(fork_from=state),
    ) as fork:
        next(iter(fork))
    # The shortest sample of the run counts, and an epoch that is whole together with the next.
    changes: tuple[dict[str, Any], ...] = (
        {"packing": "best_fit"},
        {"tail": "pad"},
        {"sequence_length": 6},
        {"phases": PHASES, "last_micro_step": "pad"},
        {"phases": [{"until_tokens": 64, "mixture": _read_often(both)}, {}]},
    )
    for change in changes:
        fields = {"sequence_length": 64, "mixture": both, **change}
        done = tokenloom("validate", files.mixture("txt:a.txt:text", **fields))
        assert done.status == 0, done.output
    both["children"][0] |= {"epochs": 11}
    assert (
        tokenloom(
            "validate", files.mixture("txt:a.txt:text", sequence_length=64, mixture=both)
        ).status
        == 0
    )


def test_one_run_in_two_files_and_ports_that_are_mixed_up_are_named(
    files: Files, start_server: StartServer, tokenloom: CommandLine
) -> None:
    first = files.mixture("txt:a.txt:text")
    second = files.folder / "second.yaml"
    second.write_text(first.read_text(encoding="utf-8"), encoding="utf-8")
    server = start_server(first, second)
    listed = server.get("/v1/runs")
    assert listed["runs"] == ["bad"]
    (broken,) = listed["broken"]
    assert (broken["origin"], broken["error"]) == (str(second), "ConfigError")
    assert (
        "run 'bad' is served already" in broken["message"] and "its own name" in broken["message"]
    )
    mixed_up = RemoteDataset(f"grpc://{server.rest}/bad", 1)
    with (
        mixed_up,
        pytest.raises(
            ServerUnavailable, match="does not speak gRPC, such as the REST port of a server"
        ),
    ):
        next(iter(mixed_up))
    words = "does not speak HTTP/1, such as the gRPC port of a server", "is this the REST address"
    assert_refused(
        tokenloom("stats", f"http://{server.grpc}"), "ServerUnreachable", server.grpc, *words
    )


def test_a_trainer_asks_whether_the_server_runs_and_counts_down(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = ConnectionOptions(connect_timeout_s=0.5)
    missing = RemoteDataset(f"grpc://127.0.0.1:{free_port()}/bad", 1, connection=options)
    with missing, pytest.raises(ServerUnavailable), caplog.at_level("WARNING", "tokenloom"):
        next(iter(missing))
    assert "trying for 0 s more: nothing answers there: is the server running? (" in caplog.text
