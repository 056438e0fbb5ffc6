"""Parquet: what is read, and how damage is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.sources import opened, rows_of
from tokenloom_server.sources import parquet

SPEC = "parquet:a.parquet:text"


def test_only_the_row_groups_from_the_row_on_are_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(
        pa.table({"text": [f"row {i}" for i in range(100)]}),
        tmp_path / "a.parquet",
        row_group_size=10,
    )
    source = opened(tmp_path, SPEC)
    groups: list[int] = []
    read_group = parquet.ParquetSource._read_group

    def spy(self: Any, file: Any, group: int, *rest: Any) -> Any:
        groups.append(group)
        return read_group(self, file, group, *rest)

    monkeypatch.setattr(parquet.ParquetSource, "_read_group", spy)
    assert source.row_count(0) == 100
    assert groups == []
    assert next(iter(source.read(0, 75))).column.to_pylist() == [f"row {i}" for i in range(75, 80)]
    assert groups == [7]
    assert rows_of(source, 100) == []


def test_row_groups_without_rows_are_passed_over(tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b"]})
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
        for part in (table.slice(0, 0), table, table.slice(0, 0), table):
            writer.write_table(part)
    source = opened(tmp_path, SPEC)
    for row in range(5):
        assert rows_of(source, row) == ["a", "b", "a", "b"][row:]
