"""The pages of source schemes are a test: what their first blocks make is served by their mixture file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tokenloom_server import config
from tokenloom_server.order import Order

PAGES = Path(__file__).parents[2] / "docs" / "sources"


@pytest.mark.parametrize("page", ["megatron", "npy"])
def test_the_example_of_a_page_makes_a_corpus_that_is_served(page: str, tmp_path: Path) -> None:
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    script, mixture = (text.split(f"```{kind}\n")[1].split("```")[0] for kind in ("python", "yaml"))
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=60)
    order = Order.create(config.parse(yaml.safe_load(mixture), where=page), tmp_path, None)
    documents = [[5 + i % 90, 7, 1] * (1 + i % 40) + [0] for i in range(2_000)]
    tokens = [i for piece in order.documents(0).read(order.initial().sources[0].cursor) for i in piece.ids.tolist()]
    assert tokens == [i for document in documents for i in document]
    pipeline = order.pipeline(order.initial())
    pipeline.advance(len(tokens) // 128)
    assert pipeline.ended is None
