"""The quick start as it stands, command by command; and the trainer of README.md."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.ports import free_port
from support.server_process import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "quick-start.md").read_text(encoding="utf-8")
#: Longer than any command takes, or a few hundred small steps with the imports, on two cores at a load of ten.
DEADLINE_S = 400.0
#: `.ci/installs.py` runs it, in an environment of its own.
NOT_RUN = "pip install 'tokenloom[server,torch]'"


@contextmanager
def running(
    command: str, folder: Path, **environment: str
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A command with the file of its output; killed at the end with all that it has started."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    output = folder / f"output-{len([*folder.glob('output-*')])}"
    with output.open("wb") as file:
        streams: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": file,
            "stderr": subprocess.STDOUT,
        }
        environment = {**os.environ, "PATH": path, **environment}
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=folder, env=environment, **streams
        )
    try:
        yield process, output
    finally:
        end(process, signal.SIGKILL)


def end(process: subprocess.Popen[bytes], by: signal.Signals) -> None:
    """Sends a signal to a process and all below it (torchrun's ranks are in no group of its), and waits for its end."""
    with suppress(psutil.NoSuchProcess):
        whole = psutil.Process(process.pid)
        for each in (whole, *whole.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                each.send_signal(by)
    process.wait(DEADLINE_S)


def ended(command: str, folder: Path) -> str:
    """Runs a command to its end, and returns its output."""
    with running(command, folder) as (process, output):
        assert process.wait(DEADLINE_S) == 0, f"{command}:\n{output.read_text()}"
        return output.read_text()


def trained(
    command: str, folder: Path, lines: int, by: signal.Signals = signal.SIGKILL
) -> list[int]:
    """Runs a trainer until it has printed so many lines, ends it by a signal, and returns their sample indices."""
    with running(command, folder) as (process, output):
        deadline = time.monotonic() + DEADLINE_S
        while (
            len(indices := re.findall(r"^samples? (\d+) ", output.read_text(), re.MULTILINE))
            < lines
        ):
            assert process.poll() is None and time.monotonic() < deadline, (
                f"{command}:\n{output.read_text()}"
            )
            time.sleep(0.05)
        end(process, by)
    return [int(index) for index in indices]


def saved_index(checkpoint: Path, name: str = "dataset") -> int:
    (text,) = torch.load(checkpoint, weights_only=True)[name].values()
    return int(json.loads(text)["sample_index"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_command_of_the_page_runs_as_it_stands_but_for_the_ports(tmp_path: Path) -> None:
    for name, text in re.findall(
        r"`(\w+\.py)`[^`]*?:\n\n^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE
    ):
        (tmp_path / name).write_text(text)
    grpc, rest = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    shell = re.sub(r"^```.*?^```$", "", PAGE, flags=re.DOTALL | re.MULTILINE)
    shell = shell.replace("127.0.0.1:50051", grpc).replace("127.0.0.1:8080", rest)
    typed = re.findall(r"^    (\S.*)$", shell, re.MULTILINE)
    serve = typed.index("tokenloom serve mixture.yaml")
    (install, *prepare, alone), (by_server, again, copy, two, three, *look) = (
        typed[:serve],
        typed[serve + 1 :],
    )

    assert install == NOT_RUN
    for command in prepare:
        ended(command, tmp_path)
        if "init" in command:  # as the page asks for
            mixture = tmp_path / "mixture.yaml"
            mixture.write_text(mixture.read_text().replace("epochs: 1 ", "epochs: 20 "))
    assert trained(alone, tmp_path, 2, signal.SIGINT)[0] == 400

    ports = {
        "TOKENLOOM_SERVE_GRPC": grpc,
        "TOKENLOOM_SERVE_REST": rest,
        "TOKENLOOM_SERVE_READY_FILE": "ready.json",
    }
    with running(typed[serve], tmp_path, **ports) as (server, log):
        deadline = time.monotonic() + DEADLINE_S
        while not (tmp_path / "ready.json").exists():
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        for command in (by_server, again):
            begin = saved_index(tmp_path / "checkpoint.pt")
            assert trained(command, tmp_path, 1)[0] == begin + 400, (
                "100 batches of 4 samples after its checkpoint"
            )
        ended(copy, tmp_path)
        assert trained(two, tmp_path, 12)[0] == 8, "two ranks begin again"
        begin = saved_index(tmp_path / "ddp" / "last.pt")
        assert trained(three, tmp_path, 1)[0] == begin + 12, "three ranks go on"
        assert all(ended(command, tmp_path) for command in look)


def test_the_trainer_of_the_readme_trains_saves_and_resumes(tmp_path: Path) -> None:
    block = re.search(
        r"^```python\n(.*?)^```",
        (ROOT / "README.md").read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
    assert block is not None
    shutil.copytree(ROOT / "examples" / "compose", tmp_path / "mixture")
    server = ServerProcess(
        tmp_path / "server", tmp_path / "mixture" / "mixture.yaml", flags=("--liveness", 1)
    ).start()
    script = block[1].replace("grpc://127.0.0.1:50051/sample", server.url("sample"))
    (tmp_path / "train.py").write_text(
        script.replace("batch_size=4", 'batch_size=4, resume="fresh"')
    )
    try:
        assert trained("python train.py", tmp_path, 1)[0] == 100
        begin = saved_index(tmp_path / "checkpoint.pt", "data")
        assert trained("python train.py", tmp_path, 1)[0] == begin + 100, (
            "25 batches after its checkpoint"
        )
    finally:
        server.kill()
