"""What all sources promise alike: the rows that were written, in order, from any row on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from support.catalog import spec_of
from tokenloom_server.errors import SourceChanged, SourceError
from tokenloom_server.sources import columns, lines
from tokenloom_server.sources.base import Content, Source
from tokenloom_server.sources.open import open_source
from tokenloom_server.sources.scheme import order_warning

TEXTS = ["first", "", "zwölf Boxkämpfer 🥊", "a\tb", "nul\x00inside", "x" * 300, "", "last"]
IDS = [[1, 2, 3], [], [7], list(range(200)), [0], [2**31 - 1], []]

Write = Callable[[Path, list[Any]], None]


def write_parquet(path: Path, rows: list[Any]) -> None:
    pq.write_table(pa.table({"other": [0] * len(rows), "column": rows}), path, row_group_size=3)


def write_jsonl(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps({"other": 0, "column": row}) + "\n" for row in rows))


def write_txt(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(row + "\n" for row in rows), encoding="utf-8", newline="")


def write_stream(path: Path, rows: list[Any]) -> None:
    table = pa.table({"other": [0] * len(rows), "column": rows})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def write_file(path: Path, rows: list[Any]) -> None:
    table = pa.table({"other": [0] * len(rows), "column": rows})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


KINDS: dict[str, tuple[str, str, Write, list[Any]]] = {
    "parquet text": ("parquet:data/*.parquet:column", "parquet", write_parquet, TEXTS),
    "parquet ids": ("parquet:data/*.parquet:column", "parquet", write_parquet, IDS),
    "jsonl text": ("jsonl:data/*.jsonl:column", "jsonl", write_jsonl, TEXTS),
    "jsonl ids": ("jsonl:data/*.jsonl:column", "jsonl", write_jsonl, IDS),
    "txt": ("txt:data/*.txt:text", "txt", write_txt, TEXTS),
    "arrow stream text": ("arrow:data:column", "arrow", write_stream, TEXTS),
    "arrow stream ids": ("arrow:data:column", "arrow", write_stream, IDS),
    "arrow file text": ("arrow:data:column", "arrow", write_file, TEXTS),
    "arrow file ids": ("arrow:data:column", "arrow", write_file, IDS),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[str, str, Write, list[Any]]:
    return KINDS[request.param]


def values(source: Source, shard: int, row: int) -> list[Any]:
    """All rows from a row on, after a check that the pieces follow one another and hold no null."""
    result: list[Any] = []
    for rows in source.read(shard, row):
        assert rows.first_row == row + len(result)
        assert len(rows.column) > 0
        assert rows.column.null_count == 0
        rows.column.validate(full=True)
        result += rows.column.to_pylist()
    return result


def test_rows_come_back_as_they_were_written_from_every_row_on(
    kind: tuple[str, str, Write, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", 16)
    monkeypatch.setattr(lines, "STRIDE_BYTES", 16)
    spec, suffix, write, rows = kind
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / f"b.{suffix}", rows)
    write(tmp_path / "data" / f"a.{suffix}", rows[::-1])
    source = open_source(spec_of(spec), tmp_path, None, tmp_path / "index")
    assert [shard.path for shard in source.shards] == [f"data/a.{suffix}", f"data/b.{suffix}"]
    assert source.content is (Content.TEXT if isinstance(rows[0], str) else Content.IDS)
    for shard, expected in enumerate((rows[::-1], rows)):
        for row in range(len(rows) + 1):
            assert values(source, shard, row) == expected[row:]
        assert source.row_count(shard) == len(rows)


def test_a_row_behind_the_end_is_refused(kind: tuple[str, str, Write, list[Any]], tmp_path: Path) -> None:
    spec, suffix, write, rows = kind
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / f"a.{suffix}", rows)
    source = open_source(spec_of(spec), tmp_path, None, None)
    with pytest.raises(SourceError, match=rf"a\.{suffix}' has {len(rows)} rows, but row {len(rows) + 1} was asked"):
        list(source.read(0, len(rows) + 1))


def test_pieces_are_bounded_and_a_larger_row_is_a_piece_of_its_own(
    kind: tuple[str, str, Write, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "PIECE_BYTES", 64)
    monkeypatch.setattr(columns, "PIECE_ROWS", 3)
    spec, suffix, write, rows = kind
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / f"a.{suffix}", rows * 3)
    source = open_source(spec_of(spec), tmp_path, None, None)
    for piece in source.read(0, 0):
        sizes = [
            len(row.encode()) if isinstance(row, str) else len(row) * piece.column.type.value_type.bit_width // 8
            for row in piece.column.to_pylist()
        ]
        assert len(sizes) <= 3
        assert len(sizes) == 1 or sum(sizes) <= 64
    assert values(source, 0, 0) == rows * 3


def test_a_shard_of_another_size_than_frozen_is_refused_by_name(
    kind: tuple[str, str, Write, list[Any]], tmp_path: Path
) -> None:
    spec, suffix, write, rows = kind
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / f"a.{suffix}"
    write(path, rows)
    shards = open_source(spec_of(spec), tmp_path, None, None).shards
    size = path.stat().st_size
    source = open_source(spec_of(spec), tmp_path, shards, None)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(SourceChanged, match=rf"a\.{suffix}' was shortened: found {size - 3} bytes, expected {size}"):
        list(source.read(0, 0))
    path.unlink()
    with pytest.raises(SourceChanged, match=rf"a\.{suffix}' is missing"):
        list(source.read(0, 0))


def test_a_source_without_a_row_is_refused_and_an_empty_shard_among_others_is_not(
    kind: tuple[str, str, Write, list[Any]], tmp_path: Path
) -> None:
    spec, suffix, write, rows = kind
    (tmp_path / "data").mkdir()
    none_of_type = pa.array([], pa.string() if isinstance(rows[0], str) else pa.list_(pa.int64()))
    write(tmp_path / "data" / f"a.{suffix}", none_of_type)
    with pytest.raises(SourceError, match=r"has no rows: its 1 files .* take it out of the mixture"):
        open_source(spec_of(spec), tmp_path, None, None)
    write(tmp_path / "data" / f"b.{suffix}", rows)
    source = open_source(spec_of(spec), tmp_path, None, None)
    assert (source.row_count(0), values(source, 0, 0)) == (0, [])
    assert values(source, 1, 0) == rows


def test_a_shard_that_is_replaced_by_one_of_its_size_is_noticed_when_it_is_opened_again(tmp_path: Path) -> None:
    write_txt(tmp_path / "a.txt", ["first", "second"])
    source = open_source(spec_of("txt:a.txt:text"), tmp_path, None, None)
    assert values(source, 0, 0) == ["first", "second"]
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    assert values(source, 0, 0) == ["first", "second"], "touched, and nothing else"
    write_txt(tmp_path / "a.txt", ["third", "fourth"])
    with pytest.raises(SourceChanged, match=r"'a.txt' has other content: found fingerprint xxh3:.*put the file back"):
        values(source, 0, 0)


@pytest.mark.parametrize("kind", ["parquet text", "arrow stream text"], indirect=True)
def test_a_file_of_no_bytes_is_an_error_where_the_format_has_a_header(
    kind: tuple[str, str, Write, list[Any]], tmp_path: Path
) -> None:
    spec, suffix, write, rows = kind
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / f"a.{suffix}", rows)
    (tmp_path / "data" / f"b.{suffix}").touch()
    with pytest.raises(SourceError, match=rf"b\.{suffix}' is empty \(0 bytes\)"):
        open_source(spec_of(spec), tmp_path, None, None)


@pytest.mark.parametrize("kind", ["parquet ids", "arrow stream text", "arrow file ids"], indirect=True)
def test_damaged_bytes_give_rows_or_an_error_that_names_the_file_and_nothing_else(
    kind: tuple[str, str, Write, list[Any]], tmp_path: Path
) -> None:
    spec, suffix, write, rows = kind
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / f"a.{suffix}"
    write(path, rows)
    whole, errors = path.read_bytes(), 0
    for position in range(0, len(whole), 7):
        path.write_bytes(whole[:position] + b"\xff" + whole[position + 1 :])
        try:
            source = open_source(spec_of(spec), tmp_path, None, None)
            for row in (0, 4):
                values(source, 0, row)
        except SourceError as error:
            errors += 1
            assert f"a.{suffix}'" in str(error)
    assert errors > 10


def test_several_shards_give_a_warning_about_their_order(tmp_path: Path) -> None:
    spec = spec_of("txt:*.txt:text")
    for name in "abc":
        write_txt(tmp_path / f"{name}.txt", TEXTS)
    shards = open_source(spec, tmp_path, None, None).shards
    assert order_warning(spec, shards[:1]) is None
    warning = order_warning(spec, shards)
    assert warning is not None
    assert "3 shards are read in file order; where documents should be mixed across files, set shuffle" in warning


PARQUET = "parquet:data/*.parquet:column"
ARROW = "arrow:data:column"


@pytest.mark.parametrize(
    ("spec", "suffix", "write"), [(PARQUET, "parquet", write_parquet), (ARROW, "arrow", write_file)]
)
class TestColumns:
    """Types of columns, in both formats that have types."""

    def open(self, tmp_path: Path, spec: str, suffix: str, write: Write, *shards: Any) -> Source:
        (tmp_path / "data").mkdir()
        for i, rows in enumerate(shards):
            write(tmp_path / "data" / f"{i}.{suffix}", rows)
        return open_source(spec_of(spec), tmp_path, None, None)

    @pytest.mark.parametrize(
        "kind",
        [
            *(pa.list_(t) for t in (pa.int8(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64())),
            pa.large_list(pa.uint16()),
            pa.list_(pa.int32(), 2),
        ],
        ids=str,
    )
    def test_lists_of_integers_of_any_width_are_ids_and_null_is_an_empty_row(
        self, tmp_path: Path, spec: str, suffix: str, write: Write, kind: Any
    ) -> None:
        rows = [[1, 2], None, [3, 4], None, [5, 6]]
        source = self.open(tmp_path, spec, suffix, write, pa.array(rows, kind))
        assert source.content is Content.IDS
        for row in range(6):
            assert values(source, 0, row) == [r or [] for r in rows[row:]]

    @pytest.mark.parametrize(
        "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())], ids=str
    )
    def test_strings_of_any_layout_are_text_and_null_is_an_empty_row(
        self, tmp_path: Path, spec: str, suffix: str, write: Write, kind: Any
    ) -> None:
        rows = ["a longer text than a view holds inside of itself", None, "b", None, ""]
        column = pa.array(rows).cast(kind) if pa.types.is_string_view(kind) else pa.array(rows, kind)
        source = self.open(tmp_path, spec, suffix, write, column)
        assert source.content is Content.TEXT
        for row in range(6):
            assert values(source, 0, row) == [r or "" for r in rows[row:]]
            assert all(str(p.column.type) in ("string", "large_string") for p in source.read(0, row))

    @pytest.mark.parametrize(
        "column", [[1.5], [[1.5]], [1], [True], [b"bytes"], [[["nested"]]], [{"a": 1}], [["words"]]], ids=str
    )
    def test_a_column_of_another_type_is_refused_with_both_types(
        self, tmp_path: Path, spec: str, suffix: str, write: Write, column: Any
    ) -> None:
        kind = str(pa.array(column).type)
        if suffix == "parquet":
            kind = kind.replace("item:", "element:")
        with pytest.raises(SourceError) as caught:
            self.open(tmp_path, spec, suffix, write, column)
        assert f"0.{suffix}': column 'column' is of type {kind}, expected text (string), or lists" in str(caught.value)

    def test_a_missing_column_lists_those_that_exist(
        self, tmp_path: Path, spec: str, suffix: str, write: Write
    ) -> None:
        other = spec.replace(":column", ":text")
        with pytest.raises(SourceError, match=rf"0\.{suffix}' has no column 'text'; its columns are other, column"):
            self.open(tmp_path, other, suffix, write, TEXTS)

    def test_a_later_shard_of_another_content_is_refused_when_it_is_touched(
        self, tmp_path: Path, spec: str, suffix: str, write: Write
    ) -> None:
        source = self.open(tmp_path, spec, suffix, write, TEXTS, IDS, [1])
        assert values(source, 0, 0) == TEXTS
        with pytest.raises(
            SourceError, match=rf"1\.{suffix}': column 'column' holds ids, but .* first shard holds text"
        ):
            list(source.read(1, 0))
        with pytest.raises(SourceError, match=rf"2\.{suffix}': column 'column' is of type int64"):
            source.row_count(2)

    def test_a_null_among_ids_is_an_error_that_names_the_row(
        self, tmp_path: Path, spec: str, suffix: str, write: Write
    ) -> None:
        source = self.open(tmp_path, spec, suffix, write, [[1], None, [2, None], [3]])
        with pytest.raises(SourceError, match=rf"0\.{suffix}': row 2 has a null among its ids"):
            list(source.read(0, 0))
        assert values(source, 0, 3) == [[3]]

    def test_text_that_is_not_utf8_is_an_error_that_names_the_row(
        self, tmp_path: Path, spec: str, suffix: str, write: Write
    ) -> None:
        column = pa.StringArray.from_buffers(2, *pa.array([b"good", b"b\xffd"]).buffers()[1:])
        source = self.open(tmp_path, spec, suffix, write, column)
        with pytest.raises(SourceError, match=rf"0\.{suffix}': row 1 is damaged: .*UTF-8"):
            list(source.read(0, 0))


@pytest.mark.parametrize("kind", [pa.list_view(pa.int32()), pa.large_list_view(pa.uint8())], ids=str)
def test_list_views_in_arrow_files_are_ids(tmp_path: Path, kind: Any) -> None:
    rows = [[1, 2], None, [3, 4], [], [5, 6, 7]]
    (tmp_path / "data").mkdir()
    write_stream(tmp_path / "data" / "a.arrow", pa.array(rows, kind))
    source = open_source(spec_of(ARROW), tmp_path, None, None)
    for row in range(6):
        assert values(source, 0, row) == [r or [] for r in rows[row:]]
