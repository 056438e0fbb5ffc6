"""The page about sources on the Hub: its example runs, word for word."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml
from support.hub import stand_in_hub

PAGE = Path(__file__).parents[2] / "docs/sources/hf.md"


def block(language: str) -> str:
    return PAGE.read_text(encoding="utf-8").split(f"```{language}\n")[1].split("```")[0]


def test_the_example_of_the_page_makes_a_dataset_and_reads_it(tmp_path: Path) -> None:
    (tmp_path / "mixture.yaml").write_text(block("yaml"), encoding="utf-8")
    with stand_in_hub() as hub:
        hub.tokens.add("hf_writing")
        environment = os.environ | hub.environment(tmp_path / "hf", HF_TOKEN="hf_writing", COLUMNS="200")
        for arguments in (["-c", block("python")], ["-m", "tokenloom_server", "validate", "mixture.yaml"]):
            done = subprocess.run(
                [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stdout + done.stderr
    assert yaml.safe_load(block("yaml"))["mixture"]["children"][0]["source"] in done.stdout
    assert f"hf:me/rhymes:train:text is read at me/rhymes@{hub.repos['me/rhymes'].refs['main']}" in done.stdout
    assert hub.asked("/blobs/", "storage"), "it was read"
