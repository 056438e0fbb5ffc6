"""Rules for rows in a real server: the example of the docs, and a file that is damaged beside one that is not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
from conftest import StartServer
from support.server_process import ServerProcess
from support.trainer import World

DOCS = Path(__file__).resolve().parents[2] / "docs/rows.md"


def block(language: str) -> str:
    """The first of a language in the docs."""
    found = re.search(rf"```{language}\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.S)
    assert found is not None
    return found[1]


def get(server: ServerProcess, path: str) -> Any:
    return httpx.get(f"{server.rest_url}{path}", trust_env=False, timeout=60).raise_for_status().json()


def test_the_example_of_the_docs_runs_and_its_rows_are_told(tmp_path: Path, start_server: StartServer) -> None:
    subprocess.run([sys.executable, "-c", block("python")], cwd=tmp_path, check=True)
    (tmp_path / "mixture.yaml").write_text(block("yaml"), encoding="utf-8")
    server = start_server(tmp_path / "mixture.yaml")
    with World(server.url("rows"), 1, 4) as world:
        samples = world.run().receipt.sequence()
        stats = get(server, "/v1/runs/rows/stats")["sources"][0]
        traced = [get(server, f"/v1/runs/rows/samples/{index}?text=true") for index in range(0, len(samples), 7)]
    # 151 rows are looked at; the last one, which is behind the last sample, is not counted.
    rows = [json.loads(line) for line in (tmp_path / "data/web.jsonl").read_text("utf-8").splitlines()[:-1]]
    out = [not (row["meta"]["score"] >= 0.25 and row["meta"]["lang"] == "en") for row in rows]
    assert stats["filtered_rows"] in range(sum(out) - 2, sum(out) + 1)
    assert stats["rows"] - stats["filtered_rows"] in range(70, 76)
    ways, whole = set(), 0
    for sample, told in zip(samples[::7], traced, strict=True):
        assert list(sample.ids) == told["ids"]
        for document in told["documents"]:
            ways.add(document["fim"])
            row = rows[document["row"]]
            assert not out[document["row"]]
            text = f"{row['title'] or ''}\n\n{row['text']}"
            length = len(text.encode()) + 1 + 3 * (document["fim"] is not None)
            assert document["row_tokens"] == length
            if document["fim"] is None and document["end"] - document["begin"] == length:
                whole += 1
                assert document["text"].startswith(text)
    assert ways == {None, "psm", "spm"}
    metrics = httpx.get(f"{server.rest_url}/metrics", trust_env=False).text
    assert re.search(r"tokenloom_source_filtered_rows_total\{[^}]*\} [1-9]", metrics)
