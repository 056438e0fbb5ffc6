"""A shell completes commands and options."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tokenloom_tools.cli.app import app
from typer.testing import CliRunner


def completed(line: str) -> list[str]:
    """What bash is told of a line that ends with what is being typed."""
    words = line.split(" ")
    environment = {
        "_TOKENLOOM_COMPLETE": "complete_bash",
        "COMP_WORDS": "\n".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    return CliRunner().invoke(app, [], prog_name="tokenloom", env=environment).output.split()


def test_commands_and_options_are_completed() -> None:
    assert completed("tokenloom val") == ["validate"]
    assert completed("tokenloom stats --js") == ["--json"]
    assert completed("tokenloom mixture ap") == ["apply"]


def test_a_shell_gets_the_script(tmp_path: Path) -> None:
    environment = os.environ | {
        "HOME": str(tmp_path),
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
    }
    command = Path(sys.executable).with_name("tokenloom")
    done = subprocess.run(
        [command, "--install-completion", "bash"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    (script,) = tmp_path.rglob("*.sh")
    assert "_TOKENLOOM_COMPLETE=complete_bash" in script.read_text()
