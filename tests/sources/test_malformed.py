"""Files that are not what their names say: rows that were written, or an error that names the file, and nothing else.

Most are made by seeded mutations and read in a child process with a bound on its memory, since what a decoder may do
wrong is to crash, to hang, or to ask for all there is. The rest are made on purpose.
"""

from __future__ import annotations

import gzip
import json
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.mutations import IDS, TEXTS, formats
from support.sources import opened, rows_of, write_table
from tokenloom_server.config.row_rules import Comparison
from tokenloom_server.errors import SourceError
from tokenloom_server.sources import parquet_pages

#: Of each variant of a format: some hundreds of each format.
MUTATIONS = {"parquet": 60, "arrow": 50, "jsonl": 80, "txt": 100}
SEED = 1
CHILD_S = 400

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("kind", MUTATIONS)
def test_mutated_files_give_their_rows_or_an_error_that_names_them(
    kind: str, tmp_path: Path
) -> None:
    count = MUTATIONS[kind]
    variants = {name: form for name, form in formats().items() if name.split()[0] == kind}
    command = [sys.executable, "-m", "support.mutations", tmp_path, str(SEED), str(count)]
    done = subprocess.run(
        [*command, *variants],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=CHILD_S,
        check=False,
    )
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"{said[-1:]} of seed {SEED} ended it: {done.stderr[-3000:]}"
    for name, form in variants.items():
        outcomes = Counter(
            line["outcome"] for line in said if line["of"] == name and "outcome" in line
        )
        assert outcomes.total() == count
        # Where checksums cover the rows, there are no others.
        allowed = {"rows", "error"} | (set() if form.checked else {"others"})
        assert set(outcomes) <= allowed, [
            line for line in said if line.get("outcome") not in {*allowed, None}
        ]
        assert outcomes["error"] > count // 10


SPECS = {"parquet": "parquet:a.parquet:column", "arrow": "arrow:.:column"}


def read(folder: Path, spec: str, **rules: Any) -> list[Any]:
    return rows_of(opened(folder, spec, **rules))


def absurd_footer(path: Path) -> None:
    pq.write_table(pa.table({"column": ["a"]}), path)
    data = path.read_bytes()
    path.write_bytes(data[:-8] + struct.pack("<I", 2**31 - 1) + b"PAR1")


def absurd_message(path: Path) -> None:
    write_table(path, pa.table({"column": ["a"]}))
    data = bytearray(path.read_bytes())
    data[4:8] = struct.pack("<I", 2**31 - 8)
    path.write_bytes(data)


PLAIN = b"text\n" * 9
MADE: dict[str, tuple[str, str, bytes | Callable[[Path], None], str]] = {
    "an absurd footer": (
        "a.parquet",
        SPECS["parquet"],
        absurd_footer,
        "is not a readable Parquet file",
    ),
    "an absurd message": (
        "a.arrow",
        SPECS["arrow"],
        absurd_message,
        "is not a readable Arrow file",
    ),
    "text in place of parquet": ("a.parquet", SPECS["parquet"], PLAIN, "not a readable"),
    "parquet in place of arrow": ("a.arrow", SPECS["arrow"], absurd_footer, "not a readable"),
    "text in place of arrow": ("a.arrow", SPECS["arrow"], PLAIN, "not a readable"),
    "a gzip in place of text": (
        "a.txt",
        "txt:a.txt:text",
        gzip.compress(b"text"),
        "line 1 is not UTF-8",
    ),
    "text in place of a gzip": ("a.txt.gz", "txt:a.txt.gz:text", PLAIN, "cannot be decompressed"),
    "only magic": ("a.parquet", SPECS["parquet"], b"PAR1" * 3, "not a readable Parquet file"),
}


def test_what_is_no_file_of_its_format_is_an_error_that_names_it(tmp_path: Path) -> None:
    for case, (name, spec, content, says) in MADE.items():
        if isinstance(content, bytes):
            (tmp_path / name).write_bytes(content)
        else:
            content(tmp_path / name)
        with pytest.raises(SourceError) as caught:
            read(tmp_path, spec)
        assert name in str(caught.value), case
        assert says in str(caught.value), case


def test_a_column_that_becomes_large_is_read_in_pieces(tmp_path: Path) -> None:
    # 64 MiB of one letter in a few KiB: decoded page by page, never as a whole.
    table = pa.table({"column": ["a" * (1 << 16)] * 1024})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    assert (tmp_path / "a.parquet").stat().st_size < 1 << 20
    before = pa.default_memory_pool().max_memory()
    pieces = [len(rows.column) for rows in opened(tmp_path, SPECS["parquet"]).read(0, 0)]
    assert sum(pieces) == 1024
    assert max(pieces) <= 16
    assert pa.default_memory_pool().max_memory() - before < 48 << 20


def page_that_claims(path: Path, number: int, **sizes: int) -> None:
    """Gives a page's header other sizes; as much of its body is overwritten as the header is longer then."""
    column, data = pq.read_metadata(path).row_group(0).column(0), bytearray(path.read_bytes())
    position = column.dictionary_page_offset or column.data_page_offset
    for page in range(number + 1):
        fields, length = parquet_pages.read_struct(data[position:], 0)
        if page < number:
            position += length + fields[3]
    claimed = (fields[1], sizes.get("size", fields[2]), sizes.get("stored", fields[3]))
    old, new = (b"".join(b"\x15" + parquet_pages.integer(each) for each in values) for values in (
        (fields[1], fields[2], fields[3]), claimed
    ))  # fmt: skip
    header = new + data[position + len(old) : position + length]
    data[position : position + len(header)] = header
    path.write_bytes(data)


@pytest.mark.parametrize(
    "options",
    [{"use_dictionary": True}, {"use_dictionary": False}, {"data_page_version": "2.0"}],
    ids=str,
)
@pytest.mark.parametrize(
    "sizes", [{"size": 2**31 - 1}, {"stored": 2**31 - 1}, {"size": 2**28 + 1}], ids=str
)
def test_a_page_that_says_it_is_huge_is_refused_before_memory_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], sizes: dict[str, int]
) -> None:
    path, rows = tmp_path / "a.parquet", [f"row {i} " + "x" * 300 for i in range(3000)]
    for number, buffer_bytes in ((0, 1 << 20), (1, 1 << 20), (1, 100)):
        monkeypatch.setattr("tokenloom_server.sources.parquet.BUFFER_BYTES", buffer_bytes)
        pq.write_table(
            pa.table({"column": rows, "other": rows}), path, data_page_size=1 << 14, **options
        )
        assert read(tmp_path, SPECS["parquet"]) == rows
        page_that_claims(path, number, **sizes)
        for name, rules in (
            ("column", {}),
            ("other", {"filter": (Comparison.parse('column != "x"'),)}),
        ):
            before = pa.default_memory_pool().max_memory()
            with pytest.raises(
                SourceError,
                match=r"a\.parquet' cannot be read in row group 0 \(.*the page at byte \d+",
            ):
                read(tmp_path, f"parquet:a.parquet:{name}", skip_bad=True, **rules)
            assert pa.default_memory_pool().max_memory() - before < 64 << 20


@pytest.mark.parametrize("rows", [TEXTS, IDS], ids=["text", "ids"])
@pytest.mark.parametrize("reader", ["fast", "arrow"])
def test_page_checksums_are_verified_on_every_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Any], reader: str
) -> None:
    monkeypatch.setattr(
        "tokenloom_server.sources.parquet_lists.MIN_VALUES", 1 if reader == "fast" else 1 << 30
    )
    path = tmp_path / "a.parquet"
    for rules in ({}, {"filter": (Comparison.parse("other >= 0"),)}):
        options = {"write_page_checksum": True, "compression": "none", "use_dictionary": False}
        pq.write_table(pa.table({"column": rows, "other": list(range(len(rows)))}), path, **options)
        known = [row or type(rows[0])() for row in rows]
        assert read(tmp_path, SPECS["parquet"], **rules) == known
        whole, column = bytearray(path.read_bytes()), pq.read_metadata(path).row_group(0).column(0)
        whole[column.data_page_offset + column.total_compressed_size // 2] ^= 1
        path.write_bytes(whole)
        for skip in (False, True):
            with pytest.raises(
                SourceError, match=r"a\.parquet' cannot be read in row group 0 .*checksum"
            ):
                read(tmp_path, SPECS["parquet"], skip_bad=skip, **rules)
