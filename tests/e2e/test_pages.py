"""Pages whose example is a corpus and a mixture file: it is made, served and read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path

import pytest
import yaml
from conftest import StartServer
from support.hub import hub_environment
from support.s3_server import s3_environment
from tokenloom import RemoteDataset

DOCS = Path(__file__).resolve().parents[2] / "docs"
#: The page about plugins has a package for its example, which `test_plugins.py` serves.
PAGES = sorted(
    {*DOCS.glob("sources/*.md"), DOCS / "buckets.md", DOCS / "rows.md"}
    - {DOCS / "sources" / "plugins.md"}
)
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_example_of_a_page_runs(page: Path, tmp_path: Path, start_server: StartServer) -> None:
    text = page.read_text(encoding="utf-8")
    mixture = tmp_path / "mixture.yaml"
    mixture.write_text(block(text, "yaml"), encoding="utf-8")
    with SURROUNDINGS.get(page.stem, nullcontext({})) as environment:
        made = subprocess.run(
            [sys.executable, "-c", block(text, "python")],
            cwd=tmp_path,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert made.returncode == 0, made.stderr
        server = start_server(mixture, environment=environment)
        found = yaml.safe_load(mixture.read_text())
        size = found.get("global_batch_size", 2)
        with RemoteDataset(server.url(found["run"]), batch_size=size) as dataset:
            for batch in islice(dataset, 2):
                assert len(batch["sample_ids"]) == size
