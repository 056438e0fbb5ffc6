"""The columns of a file and what they hold, of every scheme."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.catalog import SOURCES
from tokenloom_server.errors import SourceError
from tokenloom_server.sources.base import Content
from tokenloom_server.sources.open import columns_of

TABLE = pa.table(
    {
        "id": [1, 2],
        "text": ["a", None],
        "tokens": pa.array([[1], [2, 3]], pa.list_(pa.uint16())),
        "scores": pa.array([[0.5], []], pa.list_(pa.float32())),
    }
)
FOUND = {"id": None, "text": Content.TEXT, "tokens": Content.IDS, "scores": None}


def test_columns_of_parquet_and_of_both_forms_of_arrow(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "a.parquet")
    assert dict(columns_of(SOURCES.schemes["parquet"], "a.parquet", tmp_path)) == FOUND
    for name, writer in (("file", pa.ipc.new_file), ("stream", pa.ipc.new_stream)):
        path = tmp_path / f"{name}.arrow"
        with writer(path, TABLE.schema) as sink:
            sink.write_table(TABLE)
        assert dict(columns_of(SOURCES.schemes["arrow"], str(path), tmp_path)) == FOUND


def test_keys_of_json_lines_are_judged_by_their_first_value(tmp_path: Path) -> None:
    lines = [{"id": 1, "body": None, "ids": [1, 2]}, {"id": 2, "body": "a text", "late": "b"}, {"body": 3}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert dict(columns_of(SOURCES.schemes["jsonl"], str(path), tmp_path)) == {
        "id": None,
        "body": Content.TEXT,
        "ids": Content.IDS,
        "late": Content.TEXT,
    }
    assert dict(columns_of(SOURCES.schemes["txt"], str(path), tmp_path)) == {"text": Content.TEXT}


@pytest.mark.parametrize(
    ("scheme", "content"),
    [
        ("parquet", b"PAR1 no"),
        ("arrow", b"ARROW1\0\0no"),
        ("jsonl", b"[1, 2]\n"),
        ("jsonl", b"{\n"),
        ("jsonl", b"\xff\n"),
    ],
)
def test_a_file_that_is_none_of_its_scheme_is_named(scheme: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=f"broken' cannot be read as {scheme}"):
        columns_of(SOURCES.schemes[scheme], str(path), tmp_path)
