"""Lists of ids that are read past Arrow's own reader of lists: the same rows, or Arrow's word."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.sources import opened, rows_of
from tokenloom_server.errors import SourceError
from tokenloom_server.sources import columns, parquet_lists, parquet_pages
from tokenloom_server.sources.catalog import SourceCatalog
from tokenloom_server.sources.wrapped import TimedSource
from tokenloom_server.storage.io_stats import IoStats

SPEC = "parquet:a.parquet:ids"
Messages = Callable[[], list[str]]
ROWS = st.lists(
    st.one_of(st.none(), st.lists(st.integers(0, 100), max_size=40)), min_size=1, max_size=60
)
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "pages of version 2": {"data_page_version": "2.0"},
    "small pages": {"data_page_size": 1, "write_batch_size": 7},
    "small pages of version 2": {
        "data_page_version": "2.0",
        "data_page_size": 1,
        "write_batch_size": 7,
    },
    "plain": {"use_dictionary": False, "compression": "none"},
    "a dictionary that is given up": {"dictionary_pagesize_limit": 8, "write_batch_size": 16},
    "delta": {
        "use_dictionary": False,
        "column_encoding": {"ids.list.element": "DELTA_BINARY_PACKED"},
    },
    "split": {
        "use_dictionary": False,
        "column_encoding": {"ids.list.element": "BYTE_STREAM_SPLIT"},
    },
    "zstd": {"compression": "zstd"},
    "gzip": {"compression": "gzip"},
    "brotli": {"compression": "brotli"},
    "checksums": {"write_page_checksum": True},
    "not compressed": {"compression": "none"},
}


@pytest.fixture(autouse=True)
def _small_is_enough(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(parquet_lists, "MIN_VALUES", 1)
    caplog.set_level(logging.DEBUG)


@pytest.fixture
def left_to_arrow(caplog: pytest.LogCaptureFixture) -> Messages:
    """Why row groups were left to Arrow since the last call."""

    def messages() -> list[str]:
        found = [message for message in caplog.messages if "left to Arrow" in message]
        caplog.clear()
        return found

    return messages


def read(folder: Path, row: int = 0) -> list[Any]:
    return rows_of(opened(folder, SPEC), row)


def schema(
    item: pa.DataType, nullable: bool, items_nullable: bool, of: Any = pa.list_
) -> pa.Schema:
    return pa.schema(
        [
            pa.field("before", pa.list_(pa.int64())),
            pa.field(
                "ids", of(pa.field("element", item, nullable=items_nullable)), nullable=nullable
            ),
            pa.field("after", pa.string()),
        ]
    )


PLAIN = schema(pa.int32(), True, True)


def write(folder: Path, rows: list[Any], kind: pa.Schema, **options: Any) -> None:
    table = pa.table(
        [
            pa.array([[i] * (i % 3) for i in range(len(rows))], kind.field(0).type),
            pa.array(rows, kind.field(1).type),
            pa.array([str(i) for i in range(len(rows))]),
        ],
        schema=kind,
    )
    pq.write_table(table, folder / "a.parquet", **({"row_group_size": 25} | options))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_rows_come_back_however_their_pages_were_written(
    tmp_path: Path,
    options: dict[str, Any],
    left_to_arrow: Messages,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parquet_lists, "UNIT_VALUES", 50)

    @settings(
        max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    @given(ROWS, st.booleans(), st.booleans(), st.data())
    def come_back(
        rows: list[Any], nullable: bool, items_nullable: bool, data: st.DataObject
    ) -> None:
        item = data.draw(
            st.sampled_from(
                [pa.int8(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()]
            )
        )
        of = data.draw(st.sampled_from([pa.list_, pa.large_list]))
        rows = rows if nullable else [row or [] for row in rows]
        write(tmp_path, rows, schema(item, nullable, items_nullable, of), **options)
        expected = [row or [] for row in rows]
        if not any(expected):
            rows[0] = expected[0] = [1]
            write(tmp_path, rows, schema(item, nullable, items_nullable, of), **options)
        assert read(tmp_path) == expected
        start = data.draw(st.integers(0, len(rows)))
        assert read(tmp_path, start) == expected[start:]
        for piece in opened(tmp_path, SPEC).read(0, 0):
            assert piece.column.type.value_type == item
        assert left_to_arrow() == []

    come_back()


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_a_row_may_reach_over_many_pages(
    tmp_path: Path,
    version: str,
    left_to_arrow: Messages,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parquet_lists, "UNIT_VALUES", 10)
    rows = [[1], list(range(5000)), [], [2, 3], list(range(3000, 0, -1)), [4]]
    options = {"data_page_size": 64, "write_batch_size": 50, "data_page_version": version}
    write(tmp_path, rows, PLAIN, **options)
    for row in range(len(rows) + 1):
        assert read(tmp_path, row) == rows[row:]
    assert left_to_arrow() == []


def test_a_large_row_group_is_read_a_few_pages_at_a_time(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 32_000, 1000, dtype=np.int32) for _ in range(2000)]
    write(tmp_path, rows, PLAIN, row_group_size=10_000)
    source = opened(tmp_path, SPEC)
    before = pa.total_allocated_bytes()
    most, read_rows = 0, 0
    for piece in source.read(0, 0):
        assert len(piece.column.values) * 4 <= columns.PIECE_BYTES + 2 * (1 << 20) + 4000
        assert np.array_equal(piece.column[0].values, rows[read_rows])
        read_rows += len(piece.column)
        most = max(most, pa.total_allocated_bytes() - before)
    assert read_rows == 2000
    assert most < 5 << 20, "of 8 MB"


def test_a_row_group_that_was_given_is_not_held_by_its_reader(tmp_path: Path) -> None:
    rows = [np.arange(1000, dtype=np.int32) for _ in range(200)]
    write(tmp_path, rows, PLAIN, row_group_size=100)
    reader = TimedSource(opened(tmp_path, SPEC), IoStats(), SourceCatalog().spec(SPEC)).read(0, 0)
    before = pa.total_allocated_bytes()
    for _ in range(2):
        piece = next(reader)
        assert len(piece.column) == 100
        assert pa.total_allocated_bytes() - before > 390_000
        del piece
        assert pa.total_allocated_bytes() - before < 10_000
    reader.close()  # type: ignore[attr-defined]


def test_a_small_row_group_is_left_to_arrow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_to_arrow: Messages
) -> None:
    monkeypatch.setattr(parquet_lists, "MIN_VALUES", 30)
    rows = [[i] * (i // 25) for i in range(75)]
    write(tmp_path, rows, PLAIN)
    assert read(tmp_path, 20) == rows[20:]
    messages = left_to_arrow()
    assert len(messages) == 2
    for group, message in enumerate(messages):
        assert f"row group {group} is left to Arrow from row 0 on: a small row group" in message


def test_what_is_not_understood_is_left_to_arrow(tmp_path: Path, left_to_arrow: Messages) -> None:
    rows = [[1, 2], [], [3]]
    write(tmp_path, rows, PLAIN, compression="lz4")
    assert read(tmp_path) == rows
    assert "the codec 7" in left_to_arrow()[0]


def test_a_null_after_good_pages_is_found_by_arrow_in_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_to_arrow: Messages
) -> None:
    monkeypatch.setattr(parquet_lists, "UNIT_VALUES", 10)
    rows = [[i] * 10 for i in range(50)]
    rows[40] = [1, None, 2]  # type: ignore[list-item]
    options = {"data_page_size": 1, "write_batch_size": 5, "row_group_size": 50}
    write(tmp_path, rows, PLAIN, **options)
    source = opened(tmp_path, SPEC)
    got: list[Any] = []
    with pytest.raises(SourceError, match=r"'a\.parquet': row 40 has a null among its ids"):
        for piece in source.read(0, 3):
            got += piece.column.to_pylist()
    assert got == rows[3 : 3 + len(got)]
    (message,) = left_to_arrow()
    assert "a null among the ids" in message
    assert "from row 0 on" not in message


def test_two_columns_whose_names_run_together_are_not_mixed_up(tmp_path: Path) -> None:
    ids = pa.array([[1, 2], [3]], pa.list_(pa.int32()))
    other = pa.array([[7], [8, 9]], pa.list_(pa.int32()))
    for names in (["ids", "ids.more"], ["ids.list", "ids"]):
        table = pa.table([ids, other] if names[0] == "ids" else [other, ids], names=names)
        pq.write_table(table, tmp_path / "a.parquet")
        assert read(tmp_path) == [[1, 2], [3]]


@pytest.mark.parametrize(
    "options", [{}, {"data_page_version": "2.0"}, {"compression": "zstd"}], ids=str
)
def test_damaged_bytes_give_rows_or_an_error_and_never_other_rows_than_arrow_gives(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [list(range(i % 7)) for i in range(40)]
    write(tmp_path, rows, PLAIN, row_group_size=20, **options)
    path = tmp_path / "a.parquet"
    whole = path.read_bytes()
    errors = 0
    for position in range(4, len(whole), 23):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x55]) + whole[position + 1 :])
        found: list[Any] = []
        for least in (1, 1 << 60):
            monkeypatch.setattr(parquet_lists, "MIN_VALUES", least)
            try:
                found.append(read(tmp_path))
            except SourceError as error:
                assert "'a.parquet'" in str(error)
                found.append(None)
        errors += None in found
        assert None in found or found[0] == found[1]
    assert errors > 5


def test_fields_that_are_not_asked_for_are_passed_over() -> None:
    field = {
        "integer": b"\x15\x02", "true": b"\x11", "byte": b"\x13\x07", "double": b"\x17" + b"\0" * 8,
        "binary": b"\x18\x03abc", "list": b"\x19\x25\x02\x04", "long list": b"\x19\xf5\x10" + b"\x02" * 16,
        "booleans": b"\x19\x21\x01\x02", "struct": b"\x1c\x15\x06\x1c\x15\x08\x00\x00", "far": b"\x05\xa0\x01\x02",
    }  # fmt: skip
    data = b"".join(field.values()) + b"\x00"
    fields, at = parquet_pages.read_struct(data, 0)
    assert at == len(data)
    assert fields == {1: 1, 2: True, 9: {1: 3}, 80: 1}
    assert parquet_pages.skip(data, 0, parquet_pages.STRUCT) == len(data)
