"""Blocks of many files: what was looked up is kept under the files' signatures, and never taken for other files'."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from support.catalog import spec_of
from support.corpora import write_jsonl, write_parquet
from tokenloom_server.sources import row_index
from tokenloom_server.sources.base import Source
from tokenloom_server.sources.open import open_source

SPEC = spec_of("parquet:*.parquet:ids")
FILES = 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(FILES):
        write_parquet(tmp_path / f"{number:02}.parquet", [[number]] * (number + 1), group=4)
    return tmp_path


def looked_up(folder: Path, source: Source | None = None) -> list[list[int]]:
    source = source or open_source(SPEC, folder)
    return [edges.tolist() for edges in row_index.blocks(source, SPEC, folder, folder / "index")]


def edges(rows: int) -> list[int]:
    return [*range(0, rows, 4), rows]


def forgetful(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """A source that cannot be asked for its blocks."""
    source = open_source(SPEC, folder)
    monkeypatch.setattr(source, "blocks", lambda _: pytest.fail("a file was looked up again"))
    return source


def test_what_was_looked_up_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [edges(number + 1) for number in range(FILES)]
    assert looked_up(folder) == expected
    assert looked_up(folder, forgetful(folder, monkeypatch)) == expected
    assert row_index.row_counts(open_source(SPEC, folder)) == [
        number + 1 for number in range(FILES)
    ]


def test_other_files_are_looked_up_anew(folder: Path) -> None:
    looked_up(folder)
    write_parquet(folder / "03.parquet", [[7]] * 9, group=4)
    assert looked_up(folder)[3] == edges(9)
    # Of a local file the fingerprint sees the head and the end; another time of modification is reason enough to look.
    os.utime(folder / "05.parquet", ns=(1, 1))
    looked_up(folder)
    assert len(list((folder / "index").glob("blocks-*.npy"))) == 3


def test_few_files_and_no_folder_keep_nothing(folder: Path) -> None:
    write_jsonl(folder / "a.jsonl", ["x"] * 3)
    few = spec_of("jsonl:a.jsonl:text")
    found: list[npt.NDArray[np.int64]] = row_index.blocks(
        open_source(few, folder), few, folder, folder / "index"
    )
    assert [each[-1] for each in found] == [3]
    assert len(row_index.blocks(open_source(SPEC, folder), SPEC, folder, None)) == FILES
    assert not (folder / "index").exists()


def test_progress_is_logged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(row_index, "PROGRESS_S", 0.0)
    with caplog.at_level(logging.INFO):
        looked_up(folder)
    assert "looking up where rows lie: 20 of 20 files (the first is 00.parquet)" in caplog.text
