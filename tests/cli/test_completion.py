"""A shell completes commands, options, and what the server at the address of the line has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.memory_service import MemoryService, run_stats
from tokenloom_server.api.rest.server import RestServer
from tokenloom_server.cli import app
from tokenloom_server.cli.completion import join_words
from typer.testing import CliRunner


def completed(line: str) -> list[str]:
    """What bash is told of a line that ends with what is being typed."""
    # bash takes a colon for a word of its own.
    words = [word for part in line.split(" ") for word in (re.split("(:)", part) if ":" in part else [part])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("_TOKENLOOM_COMPLETE", "complete_bash")
        patch.setenv("COMP_WORDS", "\n".join(words))
        patch.setenv("COMP_CWORD", str(len(words) - 1))
        join_words()
        return CliRunner().invoke(app, [], prog_name="tokenloom").output.split()


def test_commands_and_options_are_completed() -> None:
    assert completed("tokenloom val") == ["validate"]
    assert completed("tokenloom stats --js") == ["--json"]


def test_names_come_from_the_server_of_the_line_and_none_where_it_does_not_answer() -> None:
    service, rest = MemoryService(), RestServer("127.0.0.1", 0)
    rest.start(service)
    try:
        for name in ("wiki", "web", "code"):
            service.put(run_stats(name))
        assert completed(f"tokenloom stats http://{rest.address} --run w") == ["wiki", "web"]
        assert completed(f"tokenloom restore http://{rest.address} --run c") == ["code"]
        aliases = [source.alias for source in run_stats("wiki").sources]
        assert aliases
        found = completed(f"tokenloom mixture pause --run wiki http://{rest.address} {aliases[0][0]}")
        assert found == [alias for alias in aliases if alias[0] == aliases[0][0]]
    finally:
        rest.stop()
    assert completed(f"tokenloom stats http://{rest.address} --run w") == []
    assert completed("tokenloom stats ftp://nowhere --run w") == []


@pytest.mark.parametrize("option", ["--show-completion", "--install-completion"])
def test_a_shell_gets_the_script(tmp_path: Path, option: str) -> None:
    environment = os.environ | {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = Path(sys.executable).with_name("tokenloom")
    done = subprocess.run([command, option, "bash"], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    scripts = [path.read_text() for path in tmp_path.rglob("*.sh")] or [done.stdout]
    assert "_TOKENLOOM_COMPLETE=complete_bash" in scripts[0]
