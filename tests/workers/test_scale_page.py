"""Every command of docs/scale.md as it stands there, on a Ray cluster of this machine's own."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ray_cluster import ray_folder

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
#: What cannot run here, and what of the page says why.
NOT_RUN = {
    "pip install 'tokenloom[server,ray]'": "In a new environment",
    "tokenloom serve mixture.yaml --readers auto": "# on a machine that is a node of a Ray cluster",
}
DEADLINE_S = 400.0


def commands() -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    found = [line.partition(" # ")[0].strip() for block in blocks for line in block.splitlines()]
    assert all(why in PAGE for why in NOT_RUN.values())
    assert set(NOT_RUN) < set(found)
    return [command for command in found if command not in NOT_RUN]


@pytest.fixture
def folder() -> Iterator[Path]:
    with ray_folder() as path:
        yield path


def run(folder: Path, command: list[str]) -> subprocess.Popen[str]:
    """A command that finds this environment's programs; a server of it takes free ports and says which."""
    options = {"GRPC": "127.0.0.1:0", "REST": "127.0.0.1:0", "READY_FILE": str(folder / "ready")}
    environment = {
        **os.environ,
        **{f"TOKENLOOM_SERVE_{name}": value for name, value in options.items()},
    }
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    # As on a laptop, where Ray asks for a token.
    del environment["RAY_AUTH_MODE"]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_the_commands_of_the_page_prepare_and_serve(folder: Path) -> None:
    first, *others, serve = [
        shlex.split(command.replace("> zen.txt", "")) for command in commands()
    ]
    (folder / "zen.txt").write_text(
        run(folder, first).communicate(timeout=DEADLINE_S)[0], encoding="utf-8"
    )
    printed = [run(folder, command).communicate(timeout=DEADLINE_S)[0] for command in others]
    shown = "2 rows, 856 tokens, 0.0 MB in 1 shards"
    assert shown in printed[-1]
    assert shown in PAGE
    server = run(folder, serve)
    try:
        while not (folder / "ready").exists():
            assert server.poll() is None
            time.sleep(0.05)
        (script,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
        script = script.replace(
            "127.0.0.1:50051", json.loads((folder / "ready").read_text())["grpc"]
        )
        lines = (
            run(folder, [sys.executable, "-c", script])
            .communicate(timeout=DEADLINE_S)[0]
            .splitlines()
        )
        assert lines[0] == "4 (4, 32)"
        assert len(lines) == 856 // 32 // 4
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=DEADLINE_S)
