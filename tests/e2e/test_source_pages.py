"""The pages about sources: what each shows as an example is made, served and read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import yaml
from support.hub import hub_environment
from support.s3_server import s3_environment
from support.server_process import ServerProcess
from tokenloom import RemoteDataset

PAGES = Path(__file__).resolve().parents[2] / "docs" / "sources"
#: What a page's example needs beside files in its folder, by the page's name: environment variables.
SURROUNDINGS: dict[str, AbstractContextManager[Mapping[str, str]]] = {
    "hf": hub_environment(),
    "object-stores": s3_environment(),
}


def block(text: str, language: str) -> str:
    """A page's first block of a language."""
    found = re.search(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert found is not None, f"no block of {language}"
    return found[1]


@contextmanager
def nothing() -> Iterator[Mapping[str, str]]:
    yield {}


#: Its example is a package, which is served in ``test_plugins.py``.
PLUGINS = "plugins"


@pytest.mark.parametrize("page", sorted(path.stem for path in PAGES.glob("*.md") if path.stem != PLUGINS))
def test_the_example_of_a_page_runs(page: str, tmp_path: Path) -> None:
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    mixture = tmp_path / "mixture.yaml"
    mixture.write_text(block(text, "yaml"), encoding="utf-8")
    with SURROUNDINGS.get(page, nothing()) as environment:
        made = subprocess.run(
            [sys.executable, "-c", block(text, "python")],
            cwd=tmp_path,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert made.returncode == 0, made.stderr
        server = ServerProcess(tmp_path / "server", mixture, environment=environment).start()
        try:
            with RemoteDataset(server.url(yaml.safe_load(mixture.read_text())["run"]), batch_size=2) as dataset:
                batches = iter(dataset)
                for _ in range(2):
                    assert next(batches)["input_ids"].shape[0] == 2
        finally:
            server.kill()
