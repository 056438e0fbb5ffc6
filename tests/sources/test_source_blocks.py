"""The index of a source's blocks: looked up once, kept, and made anew where it is not what the files are."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from support.corpora import id_rows, write_arrow, write_jsonl, write_parquet
from tokenloom_server.sources import block_index, parquet
from tokenloom_server.sources.open import open_source
from tokenloom_server.spec import Spec

SPEC = Spec.parse("parquet:data/*.parquet:ids")


def found(folder: Path, spec: Spec = SPEC) -> list[list[int]]:
    blocks = block_index.load_or_build(spec, open_source(spec, folder), folder, folder / "index")
    assert all(edges.dtype == np.int64 for edges in blocks)
    return [edges.tolist() for edges in blocks]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i, rows in enumerate((7, 0, 3, 12)):
        write_parquet(tmp_path / f"data/{i}.parquet", id_rows(rows, i, 9), group=5)
    return tmp_path


def test_a_kept_index_is_what_the_files_say_and_spares_opening_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [[0, 5, 7], [0, 0], [0, 3], [0, 5, 10, 12]]
    assert found(folder) == expected
    monkeypatch.delattr(parquet.ParquetSource, "blocks")
    assert found(folder) == expected


def test_a_file_that_changed_makes_another_index(folder: Path) -> None:
    found(folder)
    write_parquet(folder / "data/2.parquet", id_rows(6, 2, 9), group=4)
    assert found(folder)[2] == [0, 4, 6]
    (folder / "data/0.parquet").unlink()
    assert found(folder) == [[0, 0], [0, 4, 6], [0, 5, 10, 12]]


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other"])
def test_a_damaged_index_is_made_again_and_a_line_says_so(
    folder: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = found(folder)
    (cache,) = (folder / "index").iterdir()
    content = cache.read_bytes()
    at = len(content) - 40
    damaged = {
        "cut": content[:-8],
        "flipped": content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :],
        "empty": b"",
        "other": b"not an array",
    }
    cache.write_bytes(damaged[damage])
    with caplog.at_level(logging.WARNING):
        assert found(folder) == expected
    assert f"the cached index {cache} is not usable and is built again" in caplog.text
    assert cache.read_bytes() == content


def test_other_formats_have_their_own(tmp_path: Path) -> None:
    write_arrow(tmp_path / "saved", id_rows(6, 1, 9))
    write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    assert found(tmp_path, Spec.parse("arrow:saved:ids"))[0][-1] == 6
    assert found(tmp_path, Spec.parse("jsonl:*.jsonl:text")) == [[0, 1, 2]]
