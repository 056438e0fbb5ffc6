"""What is said where rights are missing: the place in the path, whose it is, who asks, and what gives the right."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenloom_proto.files import reason

#: Runs command lines in a process that has no right to overrule modes, and prints what each says.
_RUN = """
import json, sys
from typer.testing import CliRunner
from tokenloom_tools.cli.app import app
said = {}
for name, arguments in json.loads(sys.argv[1]).items():
    result = CliRunner().invoke(app, arguments)
    said[name] = [result.exit_code, repr(result.exception), " ".join(result.output.split())]
print(json.dumps(said))
"""
_MIXTURE = """
run: denied
tokenizer: {tokenizer}
sequence_length: 16
mixture: {{policy: sequential, children: [{{source: "{source}", alias: a}}]}}
"""


@pytest.fixture
def without_rights() -> list[str]:
    """What begins the command line of a process that has rights by modes alone, also root's."""
    if os.geteuid() != 0:
        return []
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip(
            "root may read everything, and there is no setpriv (of util-linux) to give that up"
        )
    return [setpriv, "--bounding-set=-dac_override,-dac_read_search"]


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A folder that nobody may enter, with a mixture's files in it."""
    folder = tmp_path / "closed"
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "a.jsonl").write_text('{"text": "a"}\n')
    folder.chmod(0)
    yield folder
    folder.chmod(0o700)


def test_every_path_of_a_command_that_may_not_be_entered_is_one_line_with_folder_user_and_chmod(
    tmp_path: Path, closed: Path, without_rights: list[str]
) -> None:
    def mixture(name: str, source: str = "jsonl:a.jsonl:text", tokenizer: str = "bytes") -> str:
        (tmp_path / name).write_text(_MIXTURE.format(source=source, tokenizer=tokenizer))
        return str(tmp_path / name)

    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    good = mixture("good.yaml")
    serve = ["serve", good, "--grpc=127.0.0.1:0", "--rest=127.0.0.1:0", f"--index-dir={tmp_path}"]
    data, link = (
        mixture("data.yaml", "jsonl:closed/*.jsonl:text"),
        mixture("link.yaml", "jsonl:link/a.jsonl:text"),
    )
    (tmp_path / "link").symlink_to(closed)
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "lost+found").mkdir(0)
    commands = {
        "data": ["validate", data],
        "data below a root": ["validate", data, f"--data-root={tmp_path}"],
        "through a link": ["validate", link],
        "one of the folders of a pattern": [
            "validate",
            mixture("folders.yaml", "jsonl:*/a.jsonl:text"),
        ],
        "folder of arrow files": ["validate", mixture("arrow.yaml", "arrow:closed/arrow:text")],
        "megatron": ["validate", mixture("megatron.yaml", "megatron:closed/prefix")],
        "tokeniser": ["validate", mixture("tokenizer.yaml", tokenizer="closed/tokenizer")],
        "mixture": ["validate", f"{closed}/mixture.yaml"],
        "data root": ["validate", good, f"--data-root={closed}/tokenizer"],
        "init of data": ["init", str(closed), f"--output={tmp_path}/made.yaml"],
        "init into a folder": ["init", str(tmp_path), f"--output={closed}/made.yaml"],
        "prepare": ["prepare", good, f"--out={closed}/out"],
        "runs": [*serve, f"--runs-dir={closed}/tokenizer"],
        "token": [*serve, f"--token-file={closed}/token"],
        "named tokens": [*serve, f"--tokens={closed}/tokens"],
        "certificate": [*serve, f"--tls-cert={closed}/cert", f"--tls-key={closed}/key"],
        "ready file": [*serve, f"--ready-file={closed}/ready"],
        "ledger": [*serve, f"--ledger=sqlite:///{closed}/ledger.db"],
        "made token": [*serve, "--make-token", f"--index-dir={closed}"],
        "own token": ["token", f"--index-dir={closed}"],
        "named tokens made": [
            "token",
            "create",
            f"--tokens={closed}/tokens",
            "--name=a",
            "--scope=read",
        ],
    }
    run = [*without_rights, sys.executable, "-c", _RUN, json.dumps(commands)]
    said = json.loads(subprocess.run(run, capture_output=True, text=True, check=True).stdout)

    whose = f"{closed}, which is user {os.geteuid()}'s, mode 0000: chmod a+rX {closed}"
    unclear = {name: each for name, each in said.items() if each[0] != 2 or whose not in each[2]}
    assert unclear == {}
    assert {each[1] for each in said.values()} == {"SystemExit(2)"}


@pytest.mark.parametrize(
    ("mode", "private", "remedy"), [(0o640, False, "chmod a+rX"), (0o600, True, "chown 0")]
)
def test_another_users_file_gets_a_right_to_read_unless_it_is_for_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, private: bool, remedy: str
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    file = tmp_path / "secret"
    file.touch(mode)
    os.chown(file, 10001, 10001)
    monkeypatch.setattr(os, "access", lambda path, right: path != file)

    said = reason(PermissionError(13, "Permission denied", file), private=private)

    assert (
        f"user 0 may not read {file}, which is user 10001's, mode {mode:04o}: {remedy} {file}"
        in said
    )


def test_what_is_no_matter_of_rights_is_as_the_system_says_it(tmp_path: Path) -> None:
    assert (
        reason(FileNotFoundError(2, "No such file or directory", "a"))
        == "No such file or directory"
    )
    assert (
        reason(PermissionError(1, "Operation not permitted", str(tmp_path)))
        == "Operation not permitted"
    )
    assert reason(ValueError("no JSON")) == "no JSON"
