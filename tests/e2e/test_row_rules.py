"""Rules for rows in a real server: the example of the docs, and a file that is damaged beside one that is not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from conftest import StartServer
from support.server_process import ServerProcess
from support.trainer import World
from tokenloom import TokenloomError

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


def test_a_server_goes_on_serving_a_run_while_another_meets_a_malformed_file(
    tmp_path: Path, start_server: StartServer
) -> None:
    rows = [[(i * 31 + j) % 256 for j in range(i % 40)] for i in range(600)]
    for name in ("good", "bad"):
        table = pa.table({"ids": pa.array(rows, pa.list_(pa.uint16()))})
        pq.write_table(
            table, tmp_path / f"{name}.parquet", row_group_size=200, write_page_checksum=True, compression="none"
        )
        document = {
            "run": name,
            "tokenizer": "bytes",
            "sequence_length": 16,
            "on_bad_row": "skip",
            "mixture": {"policy": "sequential", "children": [{"source": f"parquet:{name}.parquet:ids"}]},
        }
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    # In the middle of its second row group, which its fingerprint sees, so before the run begins.
    column = pq.read_metadata(tmp_path / "bad.parquet").row_group(1).column(0)
    data = bytearray((tmp_path / "bad.parquet").read_bytes())
    data[column.data_page_offset + column.total_compressed_size // 2] ^= 0x10
    (tmp_path / "bad.parquet").write_bytes(data)
    server = start_server(tmp_path / "good.yaml", tmp_path / "bad.yaml")
    stream = [token for row in rows if row for token in [*row, 256]]
    with World(server.url("good"), 1, 2, prefetch_steps=2) as good, World(server.url("bad"), 1, 2) as bad:
        good.steps(3)
        with pytest.raises(TokenloomError, match=r"'bad\.parquet' cannot be read in row group 1 .*checksum"):
            bad.run()
        came = [token for sample in bad.receipt.sequence() for token in sample.ids]
        # All whole steps of the first row group came before the error, and nothing else.
        known = len([token for row in rows[:200] if row for token in [*row, 256]])
        assert came == stream[: len(came)]
        assert known - 2 * 32 < len(came) <= known
        good.run()
        found = [token for sample in good.receipt.sequence() for token in sample.ids]
    assert found == stream[: len(found)]
    assert len(stream) - len(found) < 32
    assert "bad.parquet" in get(server, "/v1/runs/bad/stats")["error"]
    assert get(server, "/v1/runs/good/stats")["error"] is None
