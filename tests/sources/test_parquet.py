"""Parquet: what is read, and how damage is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.sources import opened, rows_of
from tokenloom_server.errors import SourceError
from tokenloom_server.sources.parquet import reader as parquet

SPEC = "parquet:a.parquet:text"


def test_only_the_row_groups_from_the_row_on_are_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"text": [f"row {i}" for i in range(100)]}), tmp_path / "a.parquet", row_group_size=10)
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


def test_a_large_row_group_is_decoded_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "BATCH_BYTES", 2000)
    texts = [f"{i} " + "x" * 50 for i in range(500)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", use_dictionary=False)
    source = opened(tmp_path, SPEC)
    assert max(len(rows.column) for rows in source.read(0, 0)) < 50
    for row in (0, 1, 36, 37, 499, 500):
        assert rows_of(source, row) == texts[row:]


def test_row_groups_without_rows_are_passed_over(tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b"]})
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
        for part in (table.slice(0, 0), table, table.slice(0, 0), table):
            writer.write_table(part)
    source = opened(tmp_path, SPEC)
    for row in range(5):
        assert rows_of(source, row) == ["a", "b", "a", "b"][row:]


def test_damage_within_a_row_group_is_named_with_the_group(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = [f"{i}" * 50 for i in range(1000)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=500, use_dictionary=False, write_page_checksum=True)
    data = bytearray(path.read_bytes())
    chunk = pq.read_metadata(path).row_group(1).column(0)
    middle = chunk.data_page_offset + chunk.total_compressed_size // 2
    data[middle] ^= 0xFF
    path.write_bytes(data)
    source = opened(tmp_path, SPEC)
    assert next(iter(source.read(0, 0))).column[0].as_py() == texts[0]
    with pytest.raises(SourceError, match=r"'a\.parquet' cannot be read in row group 1 .*damaged"):
        rows_of(source)
