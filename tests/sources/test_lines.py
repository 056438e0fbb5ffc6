"""Files of lines: the index, its cache, and equality with Python's own reading."""

from __future__ import annotations

import io
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.catalog import spec_of
from support.sources import opened, rows_of
from tokenloom_server.errors import SourceError
from tokenloom_server.sources import lines, row_index
from tokenloom_server.sources.open import open_source

TXT, JSONL = "txt:a.txt:text", "jsonl:a.jsonl:text"


def text_lines(data: bytes) -> list[str]:
    """Python's own reading, with only \\n and \\r\\n as ends."""
    text = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig", newline="\n")
    return [
        line.removesuffix("\n").removesuffix("\r") if line.endswith("\n") else line for line in text
    ]


@contextmanager
def in_blocks(size: int) -> Iterator[Path]:
    """A folder whose files are read in blocks of so many bytes."""
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(lines, "BLOCK_BYTES", size),
        patch.object(lines, "STRIDE_BYTES", size),
    ):
        yield Path(folder)


pieces_of_text = st.sampled_from(
    [
        "a",
        "bc",
        "\n",
        "\n",
        "\r\n",
        "\r",
        "\x00",
        "é",
        "🥊",
        "\u2028",
        "\x0b",
        "\ufeff",
        " ",
        "x" * 40,
    ]
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(pieces_of_text, min_size=1, max_size=40).map("".join),
    st.booleans(),
    st.integers(1, 64),
)
def test_txt_rows_equal_pythons_own_lines(text: str, mark: bool, block_bytes: int) -> None:
    data = (b"\xef\xbb\xbf" if mark else b"") + text.encode()
    expected = text_lines(data)
    if not expected:  # only a byte order mark
        return
    with in_blocks(block_bytes) as folder:
        (folder / "a.txt").write_bytes(data)
        source = opened(folder, TXT)
        assert source.row_count(0) == len(expected)
        for row in range(len(expected) + 1):
            assert rows_of(source, row) == expected[row:]


values = st.one_of(st.none(), st.text(max_size=8), st.just("x" * 50))
others = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)
good_lines = st.builds(
    lambda value, other, ascii_only, before, after: (
        before + json.dumps({"k}{": other, "text": value}, ensure_ascii=ascii_only) + after
    ).encode("utf-8", "replace"),
    values,
    others,
    st.booleans(),
    st.sampled_from(["", "", " "]),
    st.sampled_from(["", "", "\t", "\r"]),
)
odd_lines = st.sampled_from(
    [
        b'{"text":"a"}{"text":"b"}',
        b"",
        b"  ",
        b'{"text":',
        b'"c"}',
        b'{"text":"first","text":"second"}',
        b'{"te\\u0078t":"escaped key"}',
        b'{"text":"\\ud83e\\udd4a"}',
        b'{"text":"\\ud83e"}',
        b'{"text":"good","other":"\\ud83e"}',
        b'{"text":"control \x01"}',
        b'{"text":"bad \xff"}',
        b'{"other":1}',
        b'{"text":1}',
        b'{"text":["a"]}',
        b'{"text":[1]}',
        b'{"text":{"text":"deeper"}}',
        b'["text"]',
        b'"text"',
        b"{}",
        b"}{",
        b"{",
        b'{"text":"a",}',
        b"{'text':'a'}",
        b'{"text":"a"} // comment',
        b'{"text":"a","n":1e999}',
        b'{"text":"a","n":NaN}',
        b'{"text":"a","n":01}',
        b'{"x":[{}',
        b'{"text":"nul \x00"}',
        b'{"text":"a"}\r{"text":"b"}',
        b"\x00",
    ]
)


def json_rows(data: list[bytes], *, skip_blank: bool) -> tuple[list[str], int | None]:
    """The rows before the first line that Python's json or the contract refuses, and that line's number."""
    rows: list[str] = []
    for number, line in enumerate(data, 1):
        if skip_blank and not line.strip():
            rows.append("")
            continue
        try:
            value = json.loads(line.decode())["text"]
            if value is not None and not isinstance(value, str):
                return rows, number
            (value or "").encode()
        except (ValueError, KeyError, TypeError):
            return rows, number
        rows.append(value or "")
    return rows, None


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.one_of(good_lines, good_lines, good_lines, odd_lines), min_size=1, max_size=12),
    st.booleans(),
    st.sampled_from([16, 100, 1 << 16]),
    st.booleans(),
)
def test_jsonl_rows_and_refused_lines_equal_pythons_json(
    data: list[bytes], final: bool, block_bytes: int, skip_blank: bool
) -> None:
    # A line that holds no value does not tell what the source holds, so the first one does.
    data = [b'{"text":"first"}', *data]
    expected, bad = json_rows(data, skip_blank=skip_blank)
    with in_blocks(block_bytes) as folder:
        (folder / "a.jsonl").write_bytes(
            b"\n".join(data) + (b"\n" if final or not data[-1] else b"")
        )
        source = opened(folder, JSONL, skip_blank=skip_blank)
        for row in range(len(expected) + 1):
            found: list[str] = []
            try:
                for rows in source.read(0, row):
                    found += rows.column.to_pylist()
            except SourceError as error:
                assert bad is not None
                assert f"'a.jsonl': line {bad}" in str(error)
            else:
                assert bad is None
            assert found == expected[row:]


@pytest.fixture
def text_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(lines, "STRIDE_BYTES", 64)
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {i}\n" for i in range(100)))
    return path


def test_reading_from_the_first_row_scans_nothing(
    text_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(row_index, "cached", lambda *_: pytest.fail("the index was built"))
    source = opened(tmp_path, TXT, tmp_path / "index")
    assert len(rows_of(source)) == 100


def test_an_index_is_built_once_and_then_read_from_its_cache(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index_dir = tmp_path / "deep" / "index"
    assert rows_of(opened(tmp_path, TXT, index_dir), 42)[0] == "line 42"
    (cache,) = index_dir.iterdir()
    assert cache.stat().st_size <= 128 + 16 * (text_file.stat().st_size // 64 + 4)
    monkeypatch.setattr(row_index, "build", lambda *_: pytest.fail("the index was built again"))
    again = opened(tmp_path, TXT, index_dir)
    assert again.row_count(0) == 100
    for row in range(101):
        assert rows_of(again, row) == [f"line {i}" for i in range(row, 100)]


def test_a_damaged_cache_is_built_again_with_a_log_line(
    text_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index_dir = tmp_path / "index"
    opened(tmp_path, TXT, index_dir).row_count(0)
    (cache,) = index_dir.iterdir()
    good = cache.read_bytes()
    flipped = bytearray(good)
    flipped[-50] ^= 1
    objects = tmp_path / "objects.npy"
    np.save(objects, np.array([object()]), allow_pickle=True)
    for damaged in (b"", b"junk", good[:-8], bytes(flipped), objects.read_bytes()):
        cache.write_bytes(damaged)
        caplog.clear()
        source = opened(tmp_path, TXT, index_dir)
        assert source.row_count(0) == 100
        assert rows_of(source, 99) == ["line 99"]
        assert [
            r.levelno for r in caplog.records if "is not usable and is built again" in r.message
        ] == [logging.WARNING]
        assert cache.read_bytes() == good


def test_a_change_that_the_fingerprint_cannot_see_makes_a_new_index(tmp_path: Path) -> None:
    path, half = tmp_path / "a.txt", "x" * 70_000 + "\n"
    path.write_text(half + "one\ntwo\n" + half)
    first = opened(tmp_path, TXT, tmp_path / "index")
    assert first.row_count(0) == 4
    path.write_text(half + "one two\n" + half)
    os.utime(path, (1, 1))
    second = open_source(spec_of(TXT), tmp_path, first.shards, tmp_path / "index")
    assert first.shards == second.shards
    assert second.row_count(0) == 3


def test_a_cache_that_cannot_be_written_is_only_a_warning(
    text_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "index").write_text("a file where the folder should be")
    assert opened(tmp_path, TXT, tmp_path / "index").row_count(0) == 100
    assert "cannot be kept" in caplog.text


def test_few_indexes_are_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_index, "HELD_INDEXES", 2)
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text("line\n" * (i + 1))
    source = opened(tmp_path, "txt:*.txt:text")
    for _ in range(2):
        assert [source.row_count(i) for i in range(5)] == [1, 2, 3, 4, 5]
    assert [len(list(source.read(i, 1))) for i in range(5)] == [0, 1, 1, 1, 1]
