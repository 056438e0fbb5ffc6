"""Plain text whose rows are paragraphs, or whole files: from every row, whatever the blocks that are read."""

from __future__ import annotations

import gzip
import random
import re
from pathlib import Path

import pytest
from support.catalog import spec_of
from support.sources import opened, rows_of
from tokenloom_server.errors import ConfigError, SourceError
from tokenloom_server.sources import txt

#: With a mark, with blank lines before, between and after paragraphs, of both kinds of ends, and none at the end.
TEXTS = (
    "one\ntwo\n\nthree\n",
    "\ufeff\n\n\r\none\r\n\r\n\r\n\r\ntwo\r\nthree\r\n\r\n",
    "one\n \n\n\nÜber\n\n\ntwo",
    "\n\n",
    "x" * 50 + "\n\n" + "y\n" * 30 + "\nz",
)


def paragraphs(text: str) -> list[str]:
    """The rows of a text, by regular expressions. Blank lines at its end are a row of none."""
    rows = re.findall(
        r"(?:\r?\n)*(?:[^\r\n].*(?:\r?\n|\Z))*(?:\r?\n|\Z)", text.removeprefix("\ufeff")
    )
    return [row.strip("\r\n") for row in rows if row]


def test_rows_are_paragraphs_from_every_row_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(5)
    drawn = ["".join(rng.choices(["a", "b c", "\n", "\r\n", "\n\n"], k=60)) for _ in range(20)]
    for block_bytes in (3, 1 << 19):
        monkeypatch.setattr(txt, "BLOCK_BYTES", block_bytes)
        for number, text in enumerate((*TEXTS, *drawn)):
            (tmp_path / "a.txt").write_bytes(text.encode())
            (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text.encode()))
            for name in ("a.txt", "b.txt.gz"):
                source = opened(
                    tmp_path, f"txt:{name}:paragraph", tmp_path / f"index-{block_bytes}-{number}"
                )
                rows = paragraphs(text)
                assert source.row_count(0) == len(rows)
                assert int(source.blocks(0)[-1]) == len(rows)
                for row in range(len(rows) + 1):
                    assert rows_of(source, row) == rows[row:]
                with pytest.raises(SourceError, match="was asked for"):
                    rows_of(source, len(rows) + 1)


def test_a_file_is_a_row(tmp_path: Path) -> None:
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_bytes(text.encode())
    source = opened(tmp_path, "txt:*.txt:file")
    assert [rows_of(source, shard=shard) for shard in range(5)] == [
        [text.removeprefix("\ufeff")] for text in TEXTS
    ]
    assert [source.row_count(shard) for shard in range(5)] == [1] * 5
    assert rows_of(source, 1, 3) == []


def test_what_is_no_text_is_refused_by_row_or_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n\ntw\xff\n\nthree\n")
    with pytest.raises(SourceError, match=r"'a.txt': row 1 is damaged: its text is not UTF-8"):
        rows_of(opened(tmp_path, "txt:a.txt:paragraph"))
    assert rows_of(opened(tmp_path, "txt:a.txt:paragraph", skip_bad=True)) == ["one", "", "three"]
    with pytest.raises(
        ConfigError, match=r"one column, 'text', but 'line' was asked for; .* 'paragraph' or 'file'"
    ):
        spec_of("txt:a.txt:line")
    with pytest.raises(
        SourceError, match=r"a.txt': row 0 has more than the 0 MiB that max_row_mib allows: cut it"
    ):
        rows_of(opened(tmp_path, "txt:a.txt:file", most_bytes=9))
