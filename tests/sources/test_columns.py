"""Columns: which types are text or ids, where a name leads, what files say of theirs, and what rules make of them."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.catalog import SOURCES
from support.sources import all_rows, opened, rows_of, write_table
from tokenloom_server.config.row_rules import Comparison, Template
from tokenloom_server.errors import SourceError
from tokenloom_server.sources.base import Content
from tokenloom_server.sources.open import columns_of

#: Of the formats whose columns have types.
SPECS = {"parquet": "parquet:a.parquet:column", "arrow": "arrow:.:column"}


def read(folder: Path, spec: str, **rules: Any) -> list[Any]:
    return rows_of(opened(folder, spec, **rules))


def passing(*comparisons: str) -> dict[str, Any]:
    """The rules of a source with this filter."""
    return {"filter": tuple(map(Comparison.parse, comparisons))}


def making(template: str) -> dict[str, Any]:
    return {"template": Template.parse(template)}


def write_lines(folder: Path, *rows: Any) -> None:
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


REFUSED_TYPES: dict[str, tuple[Any, str]] = {
    "decimals": (pa.array([Decimal("1.50")]), "is of type decimal128"),
    "lists of lists": (pa.array([[[1]]]), "is of type list<"),
    "lists of text": (pa.array([["a"]]), "is of type list<"),
    "lists of decimals": (pa.array([[Decimal("1.5")]]), "is of type list<"),
    "bytes": (pa.array([b"abc"]), "where its bytes are UTF-8, write it as a string column"),
    "structures": (pa.array([{"text": "a"}]), "is of type struct<text: string>"),
    "numbers": (pa.array([1]), "is of type int64"),
    "fractions": (pa.array([1.5]), "is of type double"),
    "lists of fractions": (pa.array([[1.5]]), "is of type list<"),
    "maps": (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())), "is of type map<"),
}


@pytest.mark.parametrize("suffix", SPECS)
def test_columns_that_are_neither_text_nor_ids_are_refused(tmp_path: Path, suffix: str) -> None:
    for column, says in REFUSED_TYPES.values():
        write_table(
            tmp_path / f"a.{suffix}",
            pa.table({"column": column, "text": pa.array(["x"] * len(column))}),
        )
        with pytest.raises(SourceError) as caught:
            opened(tmp_path, SPECS[suffix])
        for part in (
            f"a.{suffix}': column 'column' is of type",
            says,
            "expected text (string), or lists of integers",
        ):
            assert part in str(caught.value)


WIDTHS = (pa.int8(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64())
LISTS: list[Any] = [[1, 2], None, [3, 4], None, [5, 6]]
JSON = pa.ListArray.from_arrays([0, None, 2], pa.array(['{"a": [1.50]}', None], pa.json_()))
LONG = "a longer text than a view holds inside of itself"
READ_TYPES: dict[str, tuple[Any, list[Any]]] = {
    **{
        f"lists of {kind}": (pa.array(LISTS, pa.list_(kind)), [row or [] for row in LISTS])
        for kind in WIDTHS
    },
    "uint64 over int64": (pa.array([[2**64 - 1, 5]], pa.list_(pa.uint64())), [[2**64 - 1, 5]]),
    "lists of fixed size with null rows": (
        pa.array(LISTS, pa.list_(pa.int8(), 2)),
        [row or [] for row in LISTS],
    ),
    "large lists": (pa.array([[1], [], None], pa.large_list(pa.uint8())), [[1], [], []]),
    "text": (pa.array(["a", None, ""]), ["a", "", ""]),
    "large text": (pa.array(["a", None], pa.large_string()), ["a", ""]),
    "views": (pa.array([LONG, None, "b"]).cast(pa.string_view()), [LONG, "", "b"]),
    "JSON": (pa.array(['{"a":1}', None, '"b"'], pa.json_()), ['{"a":1}', "", '"b"']),
    "JSON in large text": (pa.array(["[1]", None], pa.json_(pa.large_string())), ["[1]", ""]),
    "lists of JSON": (JSON, ['[{"a": [1.5]}, null]', ""]),
    "lists of nothing": (pa.array([[], None, []], pa.list_(pa.null())), [[], [], []]),
    "a dictionary": (pa.array(["a", None, "b", "a"]).dictionary_encode(), ["a", "", "b", "a"]),
    "a dictionary of large text": (
        pa.array(["b", "b"], pa.large_string()).dictionary_encode(),
        ["b", "b"],
    ),
}
#: Parquet has no such types, and takes no null within a dictionary.
ARROW_TYPES: dict[str, tuple[Any, list[Any]]] = {
    "a dictionary with a null": (
        pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 0]), pa.array(["a", None])),
        ["a", "", "", "a"],
    ),
    # As Polars writes its categories.
    "a dictionary of views": (
        pa.DictionaryArray.from_arrays(
            pa.array([1, 0, None], pa.uint32()), pa.array([LONG, "b"], pa.string_view())
        ),
        ["b", LONG, ""],
    ),
    **{
        f"{kind}": (pa.array([*LISTS, [7]], kind), [*(row or [] for row in LISTS), [7]])
        for kind in (pa.list_view(pa.int32()), pa.large_list_view(pa.uint8()))
    },
}


@pytest.mark.parametrize("suffix", SPECS)
@pytest.mark.parametrize("nested", [False, True], ids=["", "nested"])
def test_text_and_ids_of_any_layout_are_read_from_any_row_and_null_is_an_empty_one(
    tmp_path: Path, nested: bool, suffix: str
) -> None:
    for column, known in (
        READ_TYPES | (ARROW_TYPES if suffix == "arrow" and not nested else {})
    ).values():
        if nested:
            column = pa.StructArray.from_arrays(
                [column, pa.array([1] * len(column))], names=["in.side", "other"]
            )
        write_table(
            tmp_path / f"a.{suffix}", pa.table({"column": column, "other": [0] * len(column)})
        )
        spec = SPECS[suffix] + (".in.side" if nested else "")
        source = opened(tmp_path, spec)
        is_text = isinstance(known[0], str)
        assert source.content is (Content.TEXT if is_text else Content.IDS)
        for row in range(len(known) + 1):
            assert rows_of(source, row) == known[row:]
        assert all(
            str(rows.column.type).endswith("string") is is_text for rows in source.read(0, 0)
        )
        # As with a filter, which goes another way.
        assert read(tmp_path, spec, **passing("other == 0")) == known


@pytest.mark.parametrize("suffix", SPECS)
def test_a_column_of_just_that_name_comes_before_a_field_and_below_a_null_there_is_null(
    tmp_path: Path, suffix: str
) -> None:
    meta = pa.array([{"text": "field", "ids": [1, None]}, None, {"text": None, "ids": [2]}])
    write_table(tmp_path / f"a.{suffix}", pa.table({"meta": meta, "column": ["a", "b", "c"]}))
    spec = SPECS[suffix].removesuffix("column")
    assert read(tmp_path, f"{spec}meta.text") == ["field", "", ""]
    source = opened(tmp_path, f"{spec}meta.ids")
    with pytest.raises(SourceError, match=rf"a\.{suffix}': row 0 has a null among its ids"):
        rows_of(source)
    assert rows_of(source, 2) == [[2]]
    assert read(tmp_path, f"{spec}meta.ids", skip_bad=True) == [[], [], [2]]
    for missing in ("text", "meta.body", "meta.text.deeper", "other.text", "meta."):
        with pytest.raises(
            SourceError,
            match=rf"a\.{suffix}' has no column '{missing}'; its columns are meta, column",
        ):
            opened(tmp_path, f"{spec}{missing}")
    write_table(tmp_path / f"a.{suffix}", pa.table({"meta": meta, "meta.text": ["own", "b", "c"]}))
    assert read(tmp_path, f"{spec}meta.text") == ["own", "b", "c"]


@pytest.mark.parametrize("suffix", SPECS)
def test_a_later_shard_of_another_content_is_refused_when_it_is_touched(
    tmp_path: Path, suffix: str
) -> None:
    for number, rows in enumerate((["a"], [[1]], [1])):
        write_table(tmp_path / f"{number}.{suffix}", pa.table({"column": rows}))
    source = opened(tmp_path, SPECS[suffix].replace("a.", "*."))
    assert rows_of(source) == ["a"]
    with pytest.raises(
        SourceError,
        match=rf"1\.{suffix}': column 'column' holds ids, but .* first shard holds text",
    ):
        rows_of(source, shard=1)
    with pytest.raises(SourceError, match=rf"2\.{suffix}': column 'column' is of type int64"):
        source.row_count(2)


#: A column as the first file of a source has it, all null, and as the second one does; and what its rows become.
NULLS: dict[str, tuple[Any, Any, list[Any]]] = {
    "text": (pa.nulls(3), pa.array(["a", None]), ["", "", "", "a", ""]),
    "ids": (pa.nulls(2), pa.array([[1], None], pa.list_(pa.uint16())), [[], [], [1], []]),
    "ids in a file of empty lists": (
        pa.array([[], None], pa.list_(pa.null())),
        pa.array([[1]]),
        [[], [], [1]],
    ),
    "a field": (pa.nulls(2), pa.array([{"x": "a"}, None]), ["", "", "a", ""]),
}


@pytest.mark.parametrize("suffix", SPECS)
def test_a_file_in_which_a_column_is_null_throughout_is_one_of_any_type(
    tmp_path: Path, suffix: str
) -> None:
    def written(first: Any, second: Any, name: str) -> str:
        for number, column in enumerate((first, second)):
            rest = {"column": ["x"] * len(column)} if name != "column" else {}
            write_table(
                tmp_path / f"{number}.{suffix}",
                pa.table({name: column, "one": [1] * len(column), **rest}),
            )
        return SPECS[suffix].replace("a.", "*.")

    for name, (first, second, known) in NULLS.items():
        for files, expected in (
            ((first, second), known),
            ((second, first), known[len(first) :] + known[: len(first)]),
        ):
            spec = written(*files, "column") + (".x" if name == "a field" else "")
            for rules in ({}, passing("one == 1")):
                assert all_rows(tmp_path, spec, **rules) == expected, name
            assert opened(tmp_path, spec).content is (
                Content.TEXT if known[0] == "" else Content.IDS
            )
    spec = written(pa.nulls(2), pa.array([5, None]), "n")
    for comparison in ("n > 0", "n not in [7]", "n <= 5"):
        assert all_rows(tmp_path, spec, **passing(comparison)) == ["", "", "x", ""], comparison
    assert all_rows(tmp_path, spec, **making("{n}{column}")) == ["x", "x", "5x", "x"]
    written(pa.nulls(2), pa.array([["a"], None]), "n")
    tools = all_rows(tmp_path, spec, template=Template.of_lines("column", "n"), as_json=True)
    assert tools == ["x\n", "x\n", 'x\n["a"]', "x\n"]
    spec = written(pa.nulls(2), pa.nulls(2), "column")
    with pytest.raises(
        SourceError, match="'column' is null in every row of its files, so there is nothing to read"
    ):
        opened(tmp_path, spec)
    written(pa.array([["a"]]), pa.array(["a"]), "column")
    with pytest.raises(SourceError, match=rf"0\.{suffix}': column 'column' is of type list<"):
        opened(tmp_path, spec)


def test_text_that_should_be_json_and_is_none_is_a_bad_row(tmp_path: Path) -> None:
    texts = pa.array(['{"a"', "[1]", '"\\ud800"'], pa.json_())
    for items, good in (
        (texts, "[[1]]"),
        (pa.StructArray.from_arrays([texts], ["content"]), '[{"content": [1]}]'),
    ):
        write_table(
            tmp_path / "a.parquet",
            pa.table({"column": pa.ListArray.from_arrays([0, 1, 2, 3], items)}),
        )
        rules = {"template": Template.of_lines("column"), "as_json": True}
        assert read(tmp_path, SPECS["parquet"], skip_bad=True, **rules) == ["", good, ""]
        with pytest.raises(
            SourceError, match=r"a\.parquet': row 0: the JSON in 'column' is damaged: Expecting ':'"
        ):
            read(tmp_path, SPECS["parquet"], **rules)


def test_of_json_lines_the_first_that_has_a_key_says_where_it_lies(tmp_path: Path) -> None:
    spec, nested, literal = (
        "jsonl:a.jsonl:meta.text",
        {"meta": {"text": "nested"}},
        {"meta.text": "literal"},
    )
    write_lines(tmp_path, {"meta": None}, nested, nested | literal)
    assert read(tmp_path, spec) == ["", "nested", "nested"]
    write_lines(tmp_path, nested | literal, literal, nested)
    with pytest.raises(SourceError, match=r"line 3 has no key 'meta\.text'; its keys are meta"):
        read(tmp_path, spec)
    assert read(tmp_path, spec, skip_bad=True) == ["literal", "literal", ""]
    write_lines(tmp_path, nested, {"meta": "no object"})
    with pytest.raises(SourceError, match="line 2: 'meta' is a string, expected an object"):
        read(tmp_path, spec)


COMPARED: dict[str, tuple[Any, list[int]]] = {
    "n >= 2": (pa.array([1, 2, 3, None], pa.int16()), [1, 2]),
    "n > -1": (pa.array([0, 2**64 - 1], pa.uint64()), [0, 1]),
    "n == 18446744073709551615": (pa.array([0, 2**64 - 1], pa.uint64()), [1]),
    "n > 1.5": (pa.array([1, 2, -3], pa.int64()), [1]),
    "x == 0.1": (pa.array([0.1, 0.2, None, float("nan")], pa.float32()), [0]),
    "x != 0.1": (pa.array([0.1, 0.2, None, float("nan")], pa.float64()), [1, 3]),
    "x <= 0.5": (pa.array([0.5, 0.75], pa.float16()), [0]),
    "x < 1e6": (pa.array([6e4, float("inf")], pa.float16()), [0]),
    "x in [0, 1]": (pa.array([-0.0, 0.0, 2.0, None], pa.float64()), [0, 1]),
    "x not in [0]": (pa.array([-0.0, 1.0, None, float("nan")], pa.float32()), [1, 3]),
    "d > 1.25": (pa.array([Decimal("1.20"), Decimal("1.30"), None]), [1]),
    'lang == "en"': (pa.array(["en", "de", None]).dictionary_encode(), [0]),
    'lang != "en"': (pa.array(["en", "de", None], pa.large_string()), [1]),
    'lang in ["de", "fr"]': (pa.array(["en", "de", None]).cast(pa.string_view()), [1]),
    'lang not in ["de", "fr"]': (pa.array(["en", "de", None]), [0]),
    "good == true": (pa.array([True, False, None]), [0]),
    'day >= "2024-05-01"': (pa.array([19_843, 19_844, None], pa.date32()), [1]),
    'at < "2024-05-01"': (pa.array([0, 1_800_000_000], pa.timestamp("s")), [0]),
    # A date is one of the column's own zone, unless it names another.
    'utc >= "2024-05-01"': (
        pa.array([1_714_521_599, 1_714_521_600, None], pa.timestamp("s", "UTC")),
        [1],
    ),
    'zone >= "2024-05-01"': (
        pa.array([1_714_514_399, 1_714_514_400], pa.timestamp("s", "Europe/Berlin")),
        [1],
    ),
    'zone == "2024-05-01T02:00+02:00"': (
        pa.array([1_714_521_600_000], pa.timestamp("ms", "Asia/Tokyo")),
        [0],
    ),
    'zone in ["2024-05-01", "2024-05-01T00Z"]': (
        pa.array([1714514400, 1714521600], pa.timestamp("s", "+02:00")),
        [0, 1],
    ),
}


@pytest.mark.parametrize("suffix", SPECS)
def test_comparisons_mean_what_they_say(tmp_path: Path, suffix: str) -> None:
    for comparison, (column, passes) in COMPARED.items():
        texts = [f"row {i}" for i in range(len(column))]
        write_table(
            tmp_path / f"a.{suffix}", pa.table({"column": texts, comparison.split()[0]: column})
        )
        # The file is one piece.
        (rows,) = opened(tmp_path, SPECS[suffix], **passing(comparison)).read(0, 0)
        values = [text if i in passes else "" for i, text in enumerate(texts)]
        assert rows.column.to_pylist() == values, comparison
        out = [] if rows.filtered is None else rows.filtered.nonzero()[0].tolist()
        assert out == [i for i in range(len(texts)) if i not in passes], comparison


BOOLEANS: list[Any] = [[True, False], None, [], [True, True]]
MASKS: dict[str, Any] = {
    **{
        str(of(pa.bool_())): pa.array(BOOLEANS, of(pa.bool_()))
        for of in (pa.list_, pa.large_list, pa.list_view)
    },
    "bytes": pa.ListArray.from_arrays(
        [0, None, 2, 2, 4],
        pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, 0, 5, 1], pa.int8())),
    ),
}


@pytest.mark.parametrize("suffix", [*SPECS, "jsonl"])
def test_a_loss_mask_may_be_of_booleans_and_ids_may_not(tmp_path: Path, suffix: str) -> None:
    spec = (SPECS | {"jsonl": "jsonl:a.jsonl:column"})[suffix]
    for column in MASKS.values():
        if suffix == "jsonl":
            write_lines(tmp_path, *({"column": row} for row in BOOLEANS))
        else:
            write_table(tmp_path / f"a.{suffix}", pa.table({"column": column}), 2)
        source = opened(tmp_path, spec, is_mask=True)
        assert [rows_of(source, row) for row in (0, 1, 3)] == [
            [[1, 0], [], [], [1, 1]],
            [[], [], [1, 1]],
            [[1, 1]],
        ]
        with pytest.raises(
            SourceError, match=r"column 'column' is of type|'column' has a boolean among its ids"
        ):
            read(tmp_path, spec)


FOLDERS = {
    "lang=en%2Fgb/year=2024/good=false": "english",
    "lang=de/year=2023/good=true": "german",
    "lang=__HIVE_DEFAULT_PARTITION__/year=2025/good=false": "unknown",
}
PARTITIONS = {
    'lang == "en/gb"': "english",
    'lang != "en/gb"': "german",
    'lang not in ["x"]': "english german",
    "year >= 2024": "english unknown",
    "good == true": "german",
    # A column of the file comes first.
    "n > 0": "english german unknown",
}


def test_names_of_folders_are_compared_as_columns_are(tmp_path: Path) -> None:
    for folder, text in FOLDERS.items():
        write_table(tmp_path / "n=0" / folder / "a.parquet", pa.table({"column": [text], "n": [1]}))
    spec = "parquet:n=0/**/*.parquet:column"
    for comparison, texts in PARTITIONS.items():
        rows = all_rows(tmp_path, spec, **passing(comparison, "n == 1"))
        assert sorted(filter(None, rows)) == texts.split(), comparison
    for comparison, says in (
        ("lang > 1", "the folder 'lang=de' has no value that is .* a number"),
        ("x == 1", "no column 'x'"),
    ):
        with pytest.raises(SourceError, match=says):
            all_rows(tmp_path, spec, **passing(comparison))


RULES: list[tuple[dict[str, Any], str]] = [
    (passing("absent > 1"), "has no column 'absent'; its columns are column, n"),
    (passing("column > 1"), "'column' is of type string, which is not compared with a number"),
    (passing('n == "a"'), "'n' is of type int64, which is not compared with text"),
    (passing("n == true"), "is not compared with true or false"),
    (passing("l == 1"), "which is not compared with a number"),
    (passing('j == "a"'), "'j' is of type extension<arrow.json>, which is not compared with"),
    (making("{column} {absent}"), "has no column 'absent'"),
    (making("{column} {l}"), "template: column 'l' is of type list<"),
]


def test_rules_that_do_not_fit_a_file_name_it(tmp_path: Path) -> None:
    write_table(
        tmp_path / "a.parquet",
        pa.table({"column": ["a"], "n": [1], "l": [[1]], "j": JSON[:1].values[:1]}),
    )
    for rules, says in RULES:
        with pytest.raises(SourceError, match=r"a\.parquet") as caught:
            read(tmp_path, SPECS["parquet"], **rules)
        assert says in str(caught.value)


def test_rules_that_do_not_fit_json_lines_are_refused_when_the_source_is_opened(
    tmp_path: Path,
) -> None:
    spec = "jsonl:a.jsonl:column"
    write_lines(tmp_path, *[{"column": "a", "n": 1, "s": "x", "f": 1.5}] * 3)
    for rules, says in (
        (
            passing("absent > 1"),
            "no line has the key 'absent' (looked for in every row); check its spelling",
        ),
        (making("{column} {titel}"), "no line has the key 'titel'"),
        (making("{column} {f}"), "'f' is a number, expected a string or an integer"),
        (passing('column == "a"', "column > 1"), "not compared with a number"),
    ):
        with pytest.raises(SourceError, match=r"jsonl:a\.jsonl:column") as caught:
            opened(tmp_path, spec, **rules)
        assert says in str(caught.value)
    # A value of another type than the constant is one row's fault.
    with pytest.raises(SourceError, match=r"line 1: 's' is a string, expected a number"):
        read(tmp_path, spec, **passing("s > 1"))
    assert read(tmp_path, spec, **making("{n}: {column}")) == ["1: a"] * 3


def test_rules_are_refused_where_files_have_no_columns(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\n")
    with pytest.raises(
        SourceError, match="has no columns, as it is of txt files; leave filter and template out"
    ):
        opened(tmp_path, "txt:a.txt:text", **passing("n > 1"))


TABLE = pa.table(
    {
        "id": [1, 2],
        "text": ["a", None],
        "tokens": pa.array([[1], [2, 3]], pa.list_(pa.uint16())),
        "scores": pa.array([[0.5], []], pa.list_(pa.float32())),
    }
)
HELD = {"id": None, "text": Content.TEXT, "tokens": Content.IDS, "scores": None}


def test_columns_of_parquet_and_of_both_forms_of_arrow(tmp_path: Path) -> None:
    for name, new in (
        ("a.parquet", None),
        ("file.arrow", pa.ipc.new_file),
        ("stream.arrow", pa.ipc.new_stream),
    ):
        write_table(tmp_path / name, TABLE, new=new)
        assert dict(columns_of(SOURCES.schemes[name.partition(".")[2]], name, tmp_path)) == HELD


def test_keys_of_json_lines_are_judged_by_their_first_value(tmp_path: Path) -> None:
    write_lines(
        tmp_path,
        {"id": 1, "body": None, "ids": [1, 2]},
        {"id": 2, "body": "a text", "late": "b"},
        {"body": 3},
    )
    path = tmp_path / "a.jsonl"
    assert dict(columns_of(SOURCES.schemes["jsonl"], str(path), tmp_path)) == {
        "id": None,
        "body": Content.TEXT,
        "ids": Content.IDS,
        "late": Content.TEXT,
    }
    assert dict(columns_of(SOURCES.schemes["txt"], str(path), tmp_path)) == {"text": Content.TEXT}
