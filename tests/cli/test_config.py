"""Where the options of a server come from, and how its log looks."""

from __future__ import annotations

import ast
import json
import logging
import sys
from datetime import datetime
from pathlib import Path

import pytest
import tokenloom_server
import yaml
from support.server_process import run_module
from tokenloom_tools.cli.app import app
from tokenloom_tools.cli.output import RUN_LOGS, JsonFormatter
from typer.testing import CliRunner

SERVER = Path(tokenloom_server.__file__).parent


def settings(
    *arguments: object, environment: dict[str, str] | None = None
) -> dict[str, tuple[object, str]]:
    done = CliRunner().invoke(app, ["serve", "--settings", *map(str, arguments)], env=environment)
    assert done.exit_code == 0, done.output
    assert "secret" not in done.output
    origins = [line.rpartition("  # ")[2] for line in done.output.splitlines()]
    values: dict[str, object] = yaml.safe_load(done.output)
    return {
        name: (value, origin) for (name, value), origin in zip(values.items(), origins, strict=True)
    }


def test_the_command_line_goes_before_the_environment_before_the_file_before_the_default(
    tmp_path: Path,
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(
        "mixtures: [a.yaml]\ngrpc: file:1\nrest: file:2\nhealth: file:3\nlease: 7\nstandby: true\ndata-root: /a\n"
        "cache: /file\nledger: redis://file\nreaders-late: 9\n"
    )
    environment = {
        "TOKENLOOM_CONFIG": str(file),
        "TOKENLOOM_SERVE_GRPC": "environment:1",
        "TOKENLOOM_SERVE_REST": "environment:2",
        "TOKENLOOM_LEDGER": "redis://:secret@secret@environment/0?ssl_password=secret",
        "TOKENLOOM_CACHE": "/environment",
        "TOKENLOOM_SERVE_READERS_CPUS": "2",
        "TOKENLOOM_TOKEN": "secret" * 4,
    }
    shown = settings("--grpc", "line:1", environment=environment)
    expected = {
        "mixtures": (["a.yaml"], str(file)),
        "grpc": ("line:1", "commandline"),
        "rest": ("environment:2", "TOKENLOOM_SERVE_REST"),
        "health": ("file:3", str(file)),
        "lease": (7.0, str(file)),
        "readers-late": (9.0, str(file)),
        "readers-cpus": (2.0, "TOKENLOOM_SERVE_READERS_CPUS"),
        "liveness": (15.0, "default"),
        "standby": (True, str(file)),
        "data-root": (["/a"], str(file)),
        "cache": ("/environment", "TOKENLOOM_CACHE"),
        "ledger": ("redis://:…@environment/0?ssl_password=…", "TOKENLOOM_LEDGER"),
        "token-file": ("(hidden)", "TOKENLOOM_TOKEN"),
        "config": (str(file), "TOKENLOOM_CONFIG"),
    }
    assert {name: shown[name] for name in expected} == expected


def test_what_is_set_rarely_is_no_option_of_the_command_line() -> None:
    done = CliRunner().invoke(app, ["serve", "--readers-late", "9"], env={"COLUMNS": "400"})
    assert (done.exit_code, "No such option: --readers-late" in done.output) == (2, True)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("grcp: 1", "did you mean grpc"),
        ("ledger: redis://:secret@host", "holds a password"),
        ("ledger: rediss://host/0?ssl_password=secret", "holds a password"),
        ("grpc: {host: a}", "grpc: found"),
        ("- grpc", "found list"),
        ("grpc: [", "cannot be read"),
        ("lease: long", "lease"),
    ],
)
def test_what_is_no_option_is_refused_by_name(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(text)
    done = CliRunner().invoke(app, ["serve", "--config", str(file)], env={"COLUMNS": "400"})
    assert done.exit_code == 2
    assert says in done.output
    assert "secret" not in done.output


def record(
    message: str,
    *values: object,
    logger: str = "tokenloom_server.run.join",
    thread: str = "MainThread",
) -> dict:
    made = logging.LogRecord(logger, logging.WARNING, "", 0, message, values, None)
    made.threadName = thread
    document: dict = json.loads(JsonFormatter().format(made))
    return document


def test_a_line_of_json_has_the_run_and_the_rank_where_they_are_known() -> None:
    line = record("%s: ranks\nwait", "wiki")
    assert datetime.fromisoformat(line["time"]).utcoffset() is not None
    assert (line["level"], line["run"], line["message"]) == ("warning", "wiki", "wiki: ranks\nwait")
    assert "run" not in record(
        "%s: cannot be read", "a.parquet", logger="tokenloom_server.storage.cache"
    )
    assert (
        record("slow", logger="tokenloom_server.storage.io_stats", thread="a-b-ahead_3")["run"]
        == "a-b"
    )
    of_rank = record(
        "%s: ended", "a-rank-3-progress", logger="tokenloom_server.api", thread="a-rank-3-progress"
    )
    assert (of_rank["run"], of_rank["rank"]) == ("a", 3)
    try:
        raise ValueError("no")
    except ValueError:
        failed = logging.LogRecord("x", logging.ERROR, "", 0, "failed", (), sys.exc_info())
    assert "ValueError: no" in json.loads(JsonFormatter().format(failed))["exception"]


def test_what_the_log_takes_for_a_run_is_one() -> None:
    """Messages of these loggers that begin with ``%s: `` have a run's name there."""
    for path in SERVER.rglob("*.py"):
        module = ".".join(path.relative_to(SERVER).with_suffix("").parts)
        for call in ast.walk(ast.parse(path.read_text())) if module.startswith(RUN_LOGS) else ():
            if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("_log."):
                values = call.args[1:] if ast.unparse(call.func) == "_log.log" else call.args
                if len(values) > 1 and ast.unparse(values[0]).startswith("'%s: "):
                    assert ast.unparse(values[1]).endswith((".name", ".run", "name")), (
                        f"{path}: {ast.unparse(call)}"
                    )


def test_a_server_that_does_not_start_says_so_in_json(tmp_path: Path) -> None:
    done = run_module(
        "serve",
        tmp_path / "none.yaml",
        "--log-format",
        "json",
        "--grpc",
        "127.0.0.1:0",
        "--rest",
        "127.0.0.1:0",
    )
    assert done.status == 2
    lines = [json.loads(line) for line in done.output.splitlines()]
    assert lines[-1]["level"] == "error" and "ConfigError" in lines[-1]["message"]
