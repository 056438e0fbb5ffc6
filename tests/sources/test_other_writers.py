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


FRAME = pl.DataFrame({"text": TEXTS})


def _by_duckdb(options: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with duckdb.connect() as connection:
            connection.register("frame", FRAME.to_arrow())
            connection.execute(f"COPY frame TO '{path}' (FORMAT {options})")

    return write


WRITERS: dict[str, tuple[Callable[[Path], object], str]] = {
    # Several record batches, between which this format may have anything.
    "polars arrow": (
        lambda path: pl.concat([FRAME[:1000], FRAME[1000:]], rechunk=False).write_ipc(path),
        "arrow:d:text",
    ),
    "polars arrow packed": (lambda path: FRAME.write_ipc(path, compression="zstd"), "arrow:d:text"),
    "polars stream": (FRAME.write_ipc_stream, "arrow:d:text"),
    "polars parquet": (
        lambda path: FRAME.write_parquet(path, row_group_size=700),
        "parquet:d/*:text",
    ),
    "duckdb parquet": (
        _by_duckdb("parquet, COMPRESSION zstd, ROW_GROUP_SIZE 2048"),
        "parquet:d/*:text",
    ),
    "duckdb jsonl": (_by_duckdb("json"), "jsonl:d/*:text"),
    "fastparquet": (
        lambda path: fastparquet.write(path, pd.DataFrame({"text": TEXTS}), row_group_offsets=900),
        "parquet:d/*:text",
    ),
    "datasets parquet": (
        lambda path: datasets.Dataset.from_dict({"text": TEXTS}).to_parquet(path),
        "parquet:d/*:text",
    ),
    "datasets jsonl": (
        lambda path: datasets.Dataset.from_dict({"text": TEXTS}).to_json(path),
        "jsonl:d/*:text",
    ),
}


@pytest.mark.parametrize("program", WRITERS)
def test_texts_of_other_programs_arrive_from_any_row(program: str, tmp_path: Path) -> None:
    write, spec = WRITERS[program]
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
