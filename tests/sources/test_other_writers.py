"""Files as other programs write them, in the releases that people have: each row arrives as it was written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import datasets
import duckdb
import fastparquet
import pandas as pd
import polars as pl
import pytest
from support.sources import opened, rows_of
from tokenloom_server.errors import SourceError

TEXTS = ["hello", "", "wörld 😀", "x" * 300, *(f"row {i}" for i in range(3000))]
IDS = [[1, 2, 3], [], [70_000], *([i, i + 1] for i in range(3000))]


def _polars_arrow(path: Path) -> None:
    # Several record batches, between which this format may have anything.
    halves = [pl.DataFrame({"text": TEXTS[:1000]}), pl.DataFrame({"text": TEXTS[1000:]})]
    pl.concat(halves, rechunk=False).write_ipc(path)


def _polars_arrow_packed(path: Path) -> None:
    pl.DataFrame({"text": TEXTS}).write_ipc(path, compression="zstd")


def _polars_stream(path: Path) -> None:
    pl.DataFrame({"text": TEXTS}).write_ipc_stream(path)


def _polars_parquet(path: Path) -> None:
    pl.DataFrame({"text": TEXTS}).write_parquet(path, row_group_size=700)


def _duckdb_parquet(path: Path) -> None:
    frame = pl.DataFrame({"text": TEXTS}).to_arrow()
    with duckdb.connect() as connection:
        connection.register("frame", frame)
        connection.execute(
            f"COPY frame TO '{path}' (FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE 2048)"
        )


def _duckdb_jsonl(path: Path) -> None:
    frame = pl.DataFrame({"text": TEXTS}).to_arrow()
    with duckdb.connect() as connection:
        connection.register("frame", frame)
        connection.execute(f"COPY frame TO '{path}' (FORMAT json)")


def _fastparquet(path: Path) -> None:
    fastparquet.write(path, pd.DataFrame({"text": TEXTS}), row_group_offsets=900)


def _datasets_parquet(path: Path) -> None:
    datasets.Dataset.from_dict({"text": TEXTS}).to_parquet(path)


def _datasets_jsonl(path: Path) -> None:
    datasets.Dataset.from_dict({"text": TEXTS}).to_json(path)


@pytest.mark.parametrize(
    ("write", "spec"),
    [
        (_polars_arrow, "arrow:d:text"),
        (_polars_arrow_packed, "arrow:d:text"),
        (_polars_stream, "arrow:d:text"),
        (_polars_parquet, "parquet:d/*:text"),
        (_duckdb_parquet, "parquet:d/*:text"),
        (_duckdb_jsonl, "jsonl:d/*:text"),
        (_fastparquet, "parquet:d/*:text"),
        (_datasets_parquet, "parquet:d/*:text"),
        (_datasets_jsonl, "jsonl:d/*:text"),
    ],
)
def test_texts_of_other_programs_arrive_from_any_row(
    write: Callable[[Path], None], spec: str, tmp_path: Path
) -> None:
    (tmp_path / "d").mkdir()
    write(tmp_path / "d" / "a.arrow")
    source = opened(tmp_path, spec)

    for row in (0, 1, 699, 1000, len(TEXTS) - 1):
        assert rows_of(source, row) == TEXTS[row:]


def test_ids_of_polars_arrive_in_arrow_and_parquet(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    frame = pl.DataFrame({"ids": IDS}, schema={"ids": pl.List(pl.UInt32)})
    frame.write_ipc(tmp_path / "d" / "a.arrow")
    frame.write_parquet(tmp_path / "a.parquet")

    for spec in ("arrow:d:ids", "parquet:a.parquet:ids"):
        assert rows_of(opened(tmp_path, spec), 2) == IDS[2:]


def test_json_of_duckdb_is_the_text_that_it_is(tmp_path: Path) -> None:
    with duckdb.connect() as connection:
        rows = """SELECT '{"a": 1}'::JSON AS one, ['"b"'::JSON, NULL] AS several UNION ALL SELECT NULL, NULL"""
        connection.execute(f"COPY ({rows}) TO '{tmp_path / 'a.parquet'}' (FORMAT parquet)")

    assert rows_of(opened(tmp_path, "parquet:a.parquet:one")) == ['{"a": 1}', ""]
    assert rows_of(opened(tmp_path, "parquet:a.parquet:several")) == ['["b", null]', ""]


def test_an_encrypted_file_is_named_as_what_it_is(tmp_path: Path) -> None:
    with duckdb.connect() as connection:
        connection.execute(
            "SET force_mbedtls_unsafe = 'true'"
        )  # without its extension for the network
        connection.execute("PRAGMA add_parquet_key('key', '0123456789abcdef')")
        options = "FORMAT parquet, ENCRYPTION_CONFIG {footer_key: 'key'}"
        connection.execute(f"COPY (SELECT 'a' AS text) TO '{tmp_path / 'a.parquet'}' ({options})")

    with pytest.raises(
        SourceError,
        match=r"a\.parquet' is not .*\); it is encrypted, .* write it without encryption",
    ):
        opened(tmp_path, "parquet:a.parquet:text")
