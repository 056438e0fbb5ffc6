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
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from support.catalog import spec_of
from support.mutations import IDS, TEXTS, formats
from tokenloom_server.config.row_rules import Comparison, RowRules, Template
from tokenloom_server.errors import SourceError
from tokenloom_server.sources.base import Source
from tokenloom_server.sources.open import open_source

#: Of each variant of a format: several hundred of each format.
MUTATIONS = {"parquet": 100, "arrow": 100, "jsonl": 150, "txt": 200}
SEED = 1
CHILD_S = 100

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", formats())
def test_mutated_files_give_their_rows_or_an_error_that_names_them(name: str, tmp_path: Path) -> None:
    count = MUTATIONS[name.split()[0]]
    command = [sys.executable, "-m", "support.mutations", name, str(SEED), str(count), str(tmp_path)]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=CHILD_S, check=False)
    said = [json.loads(line) for line in done.stdout.splitlines()]
    outcomes = Counter(line["outcome"] for line in said if "outcome" in line)
    assert done.returncode == 0, f"{said[-1:]} of seed {SEED} ended it: {done.stderr[-3000:]}"
    assert outcomes.total() == count
    # Where checksums cover the rows, there are no others.
    allowed = {"rows", "error"} | (set() if formats()[name].checked else {"others"})
    assert set(outcomes) <= allowed, [line for line in said if line.get("outcome") not in {*allowed, None}]
    assert outcomes["error"] > count // 10


def opened(folder: Path, spec: str, **rules: Any) -> Source:
    return open_source(spec_of(spec), folder, None, None, rules=RowRules(**rules))


def read(folder: Path, spec: str, **rules: Any) -> list[Any]:
    return [value for rows in opened(folder, spec, **rules).read(0, 0) for value in rows.column.to_pylist()]


def write_table(path: Path, table: Any) -> None:
    if path.suffix == ".parquet":
        pq.write_table(table, path)
        return
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


SPECS = {"parquet": "parquet:a.parquet:column", "arrow": "arrow:.:column"}

REFUSED_TYPES: dict[str, tuple[Any, str]] = {
    "decimals": (pa.array([Decimal("1.50")]), "is of type decimal128"),
    "lists of lists": (pa.array([[[1]]]), "is of type list<"),
    "lists of text": (pa.array([["a"]]), "is of type list<"),
    "lists of decimals": (pa.array([[Decimal("1.5")]]), "is of type list<"),
    "bytes": (pa.array([b"abc"]), "where its bytes are UTF-8, write it as a string column"),
    "large bytes": (pa.array([b"abc"], pa.large_binary()), "where its bytes are UTF-8"),
    "bytes of one size": (pa.array([b"abc"], pa.binary(3)), "is of type fixed_size_binary[3]"),
    "nulls": (pa.nulls(3), "is of type null"),
    "structures": (pa.array([{"text": "a"}]), "is of type struct<text: string>"),
    "numbers": (pa.array([1]), "is of type int64"),
    "times": (pa.array([1], pa.timestamp("us")), "is of type timestamp[us]"),
    "maps": (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())), "is of type map<"),
}


@pytest.mark.parametrize("suffix", SPECS)
@pytest.mark.parametrize("kind", REFUSED_TYPES)
def test_columns_that_are_neither_text_nor_ids_are_refused(tmp_path: Path, kind: str, suffix: str) -> None:
    column, says = REFUSED_TYPES[kind]
    write_table(tmp_path / f"a.{suffix}", pa.table({"column": column, "text": pa.array(["x"] * len(column))}))
    with pytest.raises(SourceError) as caught:
        read(tmp_path, SPECS[suffix])
    for part in (f"a.{suffix}': column 'column' is of type", says, "expected text (string), or lists of integers"):
        assert part in str(caught.value)


READ_TYPES: dict[str, tuple[Any, list[Any]]] = {
    "uint64 over int64": (pa.array([[2**64 - 1, 5]], pa.list_(pa.uint64())), [[2**64 - 1, 5]]),
    "lists of fixed size with null rows": (pa.array([[1, 2], None], pa.list_(pa.int8(), 2)), [[1, 2], []]),
    "large lists": (pa.array([[1], [], None], pa.large_list(pa.uint8())), [[1], [], []]),
    "large text": (pa.array(["a", None], pa.large_string()), ["a", ""]),
    "views": (pa.array(["longer than twelve", None]).cast(pa.string_view()), ["longer than twelve", ""]),
    "a dictionary": (pa.array(["a", None, "b", "a"]).dictionary_encode(), ["a", "", "b", "a"]),
    "a dictionary of large text": (pa.array(["b", "b"], pa.large_string()).dictionary_encode(), ["b", "b"]),
}  # fmt: skip


@pytest.mark.parametrize("suffix", SPECS)
@pytest.mark.parametrize("nested", [False, True], ids=["", "nested"])
@pytest.mark.parametrize("kind", READ_TYPES)
def test_text_and_ids_of_any_layout_are_read(tmp_path: Path, kind: str, nested: bool, suffix: str) -> None:
    column, known = READ_TYPES[kind]
    if nested:
        column = pa.StructArray.from_arrays([column, pa.array([1] * len(column))], names=["in.side", "other"])
    write_table(tmp_path / f"a.{suffix}", pa.table({"column": column, "other": [0] * len(column)}))
    spec = SPECS[suffix] + (".in.side" if nested else "")
    assert read(tmp_path, spec) == known
    # As with a filter, which goes another way.
    assert read(tmp_path, spec, filter=(Comparison.parse("other == 0"),)) == known


def test_nulls_may_lie_in_a_dictionary_itself(tmp_path: Path) -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 0]), pa.array(["a", None]))
    write_table(tmp_path / "a.arrow", pa.table({"column": column}))
    assert read(tmp_path, SPECS["arrow"]) == ["a", "", "", "a"]


@pytest.mark.parametrize("suffix", SPECS)
def test_a_column_of_just_that_name_comes_before_a_field_and_below_a_null_there_is_null(
    tmp_path: Path, suffix: str
) -> None:
    meta = pa.array([{"text": "field", "ids": [1, None]}, None, {"text": None, "ids": [2]}])
    write_table(tmp_path / f"a.{suffix}", pa.table({"meta": meta, "column": ["a", "b", "c"]}))
    spec = SPECS[suffix].removesuffix("column")
    assert read(tmp_path, f"{spec}meta.text") == ["field", "", ""]
    with pytest.raises(SourceError, match="row 0 has a null among its ids"):
        read(tmp_path, f"{spec}meta.ids")
    assert read(tmp_path, f"{spec}meta.ids", skip_bad=True) == [[], [], [2]]
    for missing in ("meta.body", "meta.text.deeper", "other.text", "meta."):
        with pytest.raises(SourceError, match=rf"has no column '{missing}'; its columns are meta, column"):
            read(tmp_path, f"{spec}{missing}")
    write_table(tmp_path / f"a.{suffix}", pa.table({"meta": meta, "meta.text": ["own", "b", "c"]}))
    assert read(tmp_path, f"{spec}meta.text") == ["own", "b", "c"]


def test_of_json_lines_the_first_that_has_a_key_says_where_it_lies(tmp_path: Path) -> None:
    nested, literal = {"meta": {"text": "nested"}}, {"meta.text": "literal"}
    lines = tmp_path / "a.jsonl"
    lines.write_text("\n".join(json.dumps(each) for each in ({"meta": None}, nested, nested | literal)))
    assert read(tmp_path, "jsonl:a.jsonl:meta.text") == ["", "nested", "nested"]
    lines.write_text("\n".join(json.dumps(each) for each in (nested | literal, literal, nested)))
    with pytest.raises(SourceError, match=r"line 3 has no key 'meta\.text'; its keys are meta"):
        read(tmp_path, "jsonl:a.jsonl:meta.text")
    assert read(tmp_path, "jsonl:a.jsonl:meta.text", skip_bad=True) == ["literal", "literal", ""]
    lines.write_text('{"meta": {"text": "a"}}\n{"meta": "no object"}\n')
    with pytest.raises(SourceError, match="line 2: 'meta' is a string, expected an object"):
        read(tmp_path, "jsonl:a.jsonl:meta.text")


COMPARED: dict[str, tuple[Any, list[int]]] = {
    "n >= 2": (pa.array([1, 2, 3, None], pa.int16()), [1, 2]),
    "n < 300": (pa.array([1, 255, None], pa.uint8()), [0, 1]),
    "n > -1": (pa.array([0, 2**64 - 1], pa.uint64()), [0, 1]),
    "n == 18446744073709551615": (pa.array([0, 2**64 - 1], pa.uint64()), [1]),
    "n > 1.5": (pa.array([1, 2, -3], pa.int64()), [1]),
    "x == 0.1": (pa.array([0.1, 0.2, None, float("nan")], pa.float32()), [0]),
    "x != 0.1": (pa.array([0.1, 0.2, None, float("nan")], pa.float64()), [1, 3]),
    "x <= 0.5": (pa.array([0.5, 0.75], pa.float16()), [0]),
    "x >= 0.1": (pa.array([0.1, 0.0, 0.2], pa.float16()), [0, 2]),
    "x < 1e6": (pa.array([6e4, float("inf")], pa.float16()), [0]),
    "x in [0, 1]": (pa.array([-0.0, 0.0, 2.0, None], pa.float64()), [0, 1]),
    "x not in [0]": (pa.array([-0.0, 1.0, None, float("nan")], pa.float32()), [1, 3]),
    "d > 1.25": (pa.array([Decimal("1.20"), Decimal("1.30"), None]), [1]),
    'lang == "en"': (pa.array(["en", "de", None]).dictionary_encode(), [0]),
    'lang != "en"': (pa.array(["en", "de", None], pa.large_string()), [1]),
    'lang in ["de", "fr"]': (pa.array(["en", "de", None]).cast(pa.string_view()), [1]),
    'lang not in ["de", "fr"]': (pa.array(["en", "de", None]), [0]),
    "n in [1, 3]": (pa.array([1, 2, 3, None], pa.int32()), [0, 2]),
    "good == true": (pa.array([True, False, None]), [0]),
    'day >= "2024-05-01"': (pa.array([19_843, 19_844, None], pa.date32()), [1]),
    'at < "2024-05-01"': (pa.array([0, 1_800_000_000], pa.timestamp("s")), [0]),
}


@pytest.mark.parametrize("suffix", SPECS)
@pytest.mark.parametrize("comparison", COMPARED)
def test_comparisons_mean_what_they_say(tmp_path: Path, comparison: str, suffix: str) -> None:
    column, passing = COMPARED[comparison]
    name = comparison.split()[0]
    texts = [f"row {i}" for i in range(len(column))]
    write_table(tmp_path / f"a.{suffix}", pa.table({"column": texts, name: column}))
    source = opened(tmp_path, SPECS[suffix], filter=(Comparison.parse(comparison),))
    found = list(source.read(0, 0))
    assert [value for rows in found for value in rows.column.to_pylist()] == [
        text if i in passing else "" for i, text in enumerate(texts)
    ]
    out = [i for rows in found if rows.filtered is not None for i in rows.filtered.nonzero()[0].tolist()]
    assert out == [i for i in range(len(texts)) if i not in passing]


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({"filter": (Comparison.parse("absent > 1"),)}, "has no column 'absent'; its columns are column, n"),
        (
            {"filter": (Comparison.parse("column > 1"),)},
            "'column' is of type string, which is not compared with a number",
        ),
        ({"filter": (Comparison.parse('n == "a"'),)}, "'n' is of type int64, which is not compared with text"),
        ({"filter": (Comparison.parse("n == true"),)}, "is not compared with true or false"),
        ({"filter": (Comparison.parse("l == 1"),)}, "which is not compared with a number"),
        ({"template": Template.parse("{column} {absent}")}, "has no column 'absent'"),
        ({"template": Template.parse("{column} {l}")}, "template: column 'l' is of type list<"),
    ],
)
def test_rules_that_do_not_fit_a_file_name_it(tmp_path: Path, rules: dict[str, Any], says: str) -> None:
    write_table(tmp_path / "a.parquet", pa.table({"column": ["a"], "n": [1], "l": [[1]]}))
    with pytest.raises(SourceError) as caught:
        read(tmp_path, SPECS["parquet"], **rules)
    assert "a.parquet" in str(caught.value)
    assert says in str(caught.value)


def test_rules_that_do_not_fit_json_lines_are_refused_when_the_source_is_opened(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"column": "a", "n": 1, "s": "x", "f": 1.5}\n' * 3)
    for rules, says in (
        (
            {"filter": (Comparison.parse("absent > 1"),)},
            "no line has the key 'absent' (looked for in every row); check its spelling",
        ),
        ({"template": Template.parse("{column} {titel}")}, "no line has the key 'titel'"),
        ({"template": Template.parse("{column} {f}")}, "'f' is a number, expected a string or an integer"),
        ({"filter": (Comparison.parse('column == "a"'), Comparison.parse("column > 1"))}, "not compared with a number"),
    ):
        with pytest.raises(SourceError, match=r"jsonl:a\.jsonl:column") as caught:
            opened(tmp_path, "jsonl:a.jsonl:column", **rules)
        assert says in str(caught.value)
    # A value of another type than the constant is one row's fault.
    with pytest.raises(SourceError, match=r"line 1: 's' is a string, expected a number"):
        read(tmp_path, "jsonl:a.jsonl:column", filter=(Comparison.parse("s > 1"),))
    assert read(tmp_path, "jsonl:a.jsonl:column", template=Template.parse("{n}: {column}")) == ["1: a"] * 3


def test_rules_are_refused_where_files_have_no_columns(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\n")
    with pytest.raises(SourceError, match="has no columns, as it is of txt files; leave filter and template out"):
        opened(tmp_path, "txt:a.txt:text", filter=(Comparison.parse("n > 1"),))


def absurd_footer(path: Path) -> None:
    pq.write_table(pa.table({"column": ["a"]}), path)
    data = path.read_bytes()
    path.write_bytes(data[:-8] + struct.pack("<I", 2**31 - 1) + b"PAR1")


def absurd_message(path: Path) -> None:
    write_table(path, pa.table({"column": ["a"]}))
    data = bytearray(path.read_bytes())
    data[4:8] = struct.pack("<I", 2**31 - 8)
    path.write_bytes(data)


def bomb_of_pages(path: Path) -> None:
    # 64 MiB of one letter in a few KiB: decoded page by page, never as a whole.
    pq.write_table(pa.table({"column": ["a" * (1 << 16)] * 1024}), path, compression="zstd", use_dictionary=False)


def other_format(path: Path) -> None:
    pq.write_table(pa.table({"column": ["a"]}), path)


def packed(path: Path) -> None:
    path.write_bytes(gzip.compress(b"text"))


def plain(path: Path) -> None:
    path.write_text("text\n" * 9)


MADE: dict[str, tuple[str, str, Callable[[Path], Any], str]] = {
    "an absurd footer": ("a.parquet", SPECS["parquet"], absurd_footer, "is not a readable Parquet file"),
    "an absurd message": ("a.arrow", SPECS["arrow"], absurd_message, "is not a readable Arrow file"),
    "text in place of parquet": ("a.parquet", SPECS["parquet"], plain, "not a readable"),
    "parquet in place of arrow": ("a.arrow", SPECS["arrow"], other_format, "not a readable"),
    "a gzip in place of text": ("a.txt", "txt:a.txt:text", packed, "line 1 is not UTF-8"),
    "text in place of a gzip": ("a.txt.gz", "txt:a.txt.gz:text", plain, "cannot be decompressed"),
    "only magic": ("a.parquet", SPECS["parquet"], lambda p: p.write_bytes(b"PAR1" * 3), "not a readable Parquet file"),
}  # fmt: skip


@pytest.mark.parametrize("case", MADE)
def test_what_is_no_file_of_its_format_is_an_error_that_names_it(tmp_path: Path, case: str) -> None:
    name, spec, write, says = MADE[case]
    write(tmp_path / name)
    with pytest.raises(SourceError) as caught:
        read(tmp_path, spec)
    assert name in str(caught.value)
    assert says in str(caught.value)


def test_a_column_that_becomes_large_is_read_in_pieces(tmp_path: Path) -> None:
    bomb_of_pages(tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 1 << 20
    before = pa.default_memory_pool().max_memory()
    pieces = [len(rows.column) for rows in opened(tmp_path, SPECS["parquet"]).read(0, 0)]
    assert sum(pieces) == 1024
    assert max(pieces) <= 16
    assert pa.default_memory_pool().max_memory() - before < 48 << 20


@pytest.mark.parametrize("rows", [TEXTS, IDS], ids=["text", "ids"])
@pytest.mark.parametrize("reader", ["fast", "arrow"])
def test_page_checksums_are_verified_on_every_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Any], reader: str
) -> None:
    monkeypatch.setattr("tokenloom_server.sources.parquet.lists.MIN_VALUES", 1 if reader == "fast" else 1 << 30)
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
            with pytest.raises(SourceError, match=r"a\.parquet' cannot be read in row group 0 .*checksum"):
                read(tmp_path, SPECS["parquet"], skip_bad=skip, **rules)
