"""The trainers of README.md and docs/quick-start.md, as they stand there, against the sample that both serve."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.server_process import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
#: Longer than a hundred small steps take, with the imports, on two busy cores.
SCRIPT_DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address that stands in for the one on the pages."""
    folder = tmp_path_factory.mktemp("quick-start")
    shutil.copytree(ROOT / "examples" / "compose", folder / "mixture")
    server = ServerProcess(folder / "server", folder / "mixture" / "mixture.yaml", flags=("--liveness", 1)).start()
    yield server.url("sample")
    server.kill()


def trainer(page: str, url: str) -> str:
    """A page's trainer, which reads from ``url``."""
    found = re.search(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert found is not None
    assert '"grpc://127.0.0.1:50051/sample"' in found[1]
    return found[1].replace("grpc://127.0.0.1:50051/sample", url)


def run_until_saved(script: str, folder: Path) -> str:
    """Runs a script until it prints a line, which it does when it has saved; kills it, and returns the line."""
    with (folder / "output").open("w") as output, (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", script], cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=log
        )
        deadline = time.monotonic() + SCRIPT_DEADLINE_S
        try:
            while process.poll() is None and time.monotonic() < deadline:
                if "\n" in (folder / "output").read_text(encoding="utf-8"):
                    break
                time.sleep(0.02)
            assert process.poll() is None, (folder / "log").read_text(encoding="utf-8")
        finally:
            process.kill()
            process.wait()
    return (folder / "output").read_text(encoding="utf-8")


def test_the_trainer_of_the_quick_start_goes_on_after_a_kill(served: str, tmp_path: Path) -> None:
    script = trainer("docs/quick-start.md", served)
    first = run_until_saved(script, tmp_path)
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    (text,) = saved["dataset"].values()
    begin = json.loads(text)["sample_index"]
    second = run_until_saved(script, tmp_path)
    assert first.startswith("sample 400 ")
    assert begin % 400 == 0
    assert second.startswith(f"sample {begin + 400} "), "100 batches of 4 samples after its checkpoint"


def test_the_trainer_of_the_readme_trains_saves_and_resumes(served: str, tmp_path: Path) -> None:
    script = trainer("README.md", served).replace("batch_size=4", 'batch_size=4, resume="fresh"')
    assert run_until_saved(script, tmp_path).startswith("sample 100  loss ")
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert set(saved) == {"model", "data"}
    begin = json.loads(saved["data"].popitem()[1])["sample_index"]
    assert run_until_saved(script, tmp_path).startswith(f"sample {begin + 100}  loss "), (
        "25 batches after its checkpoint"
    )
