"""What all sources promise alike: the rows that were written, in order, from any row on."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from support.catalog import spec_of
from support.corpora import write_txt
from support.sources import opened, rows_of, write_table
from tokenloom_server.errors import SourceChanged, SourceError
from tokenloom_server.sources import columns, lines
from tokenloom_server.sources.base import Content
from tokenloom_server.sources.open import open_source
from tokenloom_server.sources.scheme import order_warning

TEXTS = ["first", "", "zwölf Boxkämpfer 🥊", "a\tb", "nul\x00inside", "x" * 300, "", "last"]
IDS = [[1, 2, 3], [], [7], list(range(200)), [0], [2**31 - 1], []]


def in_table(path: Path, rows: list[Any], **options: Any) -> None:
    write_table(path, pa.table({"other": [0] * len(rows), "column": rows}), 3, **options)


def write_jsonl(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps({"other": 0, "column": row}) + "\n" for row in rows))


class Kind(NamedTuple):
    spec: str
    suffix: str
    write: Callable[[Path, list[Any]], None]
    rows: list[Any]

    def put(self, folder: Path, name: str, rows: list[Any]) -> Path:
        path = folder / "data" / f"{name}.{self.suffix}"
        path.parent.mkdir(exist_ok=True)
        self.write(path, rows)
        return path


in_ipc_file = partial(in_table, new=pa.ipc.new_file)
KINDS = {
    "parquet text": Kind("parquet:data/*.parquet:column", "parquet", in_table, TEXTS),
    "parquet ids": Kind("parquet:data/*.parquet:column", "parquet", in_table, IDS),
    "jsonl text": Kind("jsonl:data/*.jsonl:column", "jsonl", write_jsonl, TEXTS),
    "jsonl ids": Kind("jsonl:data/*.jsonl:column", "jsonl", write_jsonl, IDS),
    "txt": Kind("txt:data/*.txt:text", "txt", write_txt, TEXTS),
    "arrow stream text": Kind("arrow:data:column", "arrow", in_table, TEXTS),
    "arrow stream ids": Kind("arrow:data:column", "arrow", in_table, IDS),
    "arrow file text": Kind("arrow:data:column", "arrow", in_ipc_file, TEXTS),
    "arrow file ids": Kind("arrow:data:column", "arrow", in_ipc_file, IDS),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def test_rows_come_back_as_they_were_written_from_every_row_on(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", 16)
    monkeypatch.setattr(lines, "STRIDE_BYTES", 16)
    rows = kind.rows
    kind.put(tmp_path, "b", rows)
    kind.put(tmp_path, "a", rows[::-1])
    source = opened(tmp_path, kind.spec, tmp_path / "index")
    assert [shard.path for shard in source.shards] == [
        f"data/a.{kind.suffix}",
        f"data/b.{kind.suffix}",
    ]
    assert source.content is (Content.TEXT if isinstance(rows[0], str) else Content.IDS)
    for shard, expected in enumerate((rows[::-1], rows)):
        for row in range(len(rows) + 1):
            assert rows_of(source, row, shard) == expected[row:]
        assert source.row_count(shard) == len(rows)
    with pytest.raises(
        SourceError,
        match=rf"a\.{kind.suffix}' has {len(rows)} rows, but row {len(rows) + 1} was asked",
    ):
        rows_of(source, len(rows) + 1)


def test_pieces_are_bounded_and_a_larger_row_is_a_piece_of_its_own(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "PIECE_BYTES", 64)
    monkeypatch.setattr(columns, "PIECE_IDS", 16)
    monkeypatch.setattr(columns, "PIECE_ROWS", 3)
    kind.put(tmp_path, "a", kind.rows * 3)
    source = opened(tmp_path, kind.spec)
    for piece in source.read(0, 0):
        rows = piece.column.to_pylist()
        sizes = [len(row.encode()) if isinstance(row, str) else len(row) for row in rows]
        assert len(sizes) <= 3
        assert len(sizes) == 1 or sum(sizes) <= (64 if isinstance(rows[0], str) else 16)
    assert rows_of(source) == kind.rows * 3


def test_a_shard_of_another_size_than_frozen_is_refused_by_name(kind: Kind, tmp_path: Path) -> None:
    path = kind.put(tmp_path, "a", kind.rows)
    source = opened(tmp_path, kind.spec)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(
        SourceChanged,
        match=rf"a\.{kind.suffix}' was shortened: found {size - 3} bytes, expected {size}",
    ):
        rows_of(source)
    path.unlink()
    with pytest.raises(SourceChanged, match=rf"a\.{kind.suffix}' is missing"):
        rows_of(source)


def test_a_source_without_a_row_is_refused_and_an_empty_shard_among_others_is_not(
    kind: Kind, tmp_path: Path
) -> None:
    none_of_type = pa.array(
        [], pa.string() if isinstance(kind.rows[0], str) else pa.list_(pa.int64())
    )
    kind.put(tmp_path, "a", none_of_type)
    with pytest.raises(
        SourceError, match=r"has no rows: its 1 files .* take it out of the mixture"
    ):
        opened(tmp_path, kind.spec)
    path = kind.put(tmp_path, "b", kind.rows)
    source = opened(tmp_path, kind.spec)
    assert (source.row_count(0), rows_of(source)) == (0, [])
    assert rows_of(source, shard=1) == kind.rows
    if kind.suffix in ("parquet", "arrow"):
        path.write_bytes(b"")
        with pytest.raises(SourceError, match=rf"b\.{kind.suffix}' is empty \(0 bytes\)"):
            opened(tmp_path, kind.spec)


def test_several_shards_give_a_warning_about_their_order(tmp_path: Path) -> None:
    spec = spec_of("txt:*.txt:text")
    for name in "abc":
        write_txt(tmp_path / f"{name}.txt", TEXTS)
    shards = open_source(spec, tmp_path).shards
    assert order_warning(spec, shards[:1]) is None
    warning = order_warning(spec, shards)
    assert warning is not None
    assert (
        "3 shards are read in file order; where documents should be mixed across files, set shuffle"
        in warning
    )
