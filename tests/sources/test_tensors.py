"""Rows that are ready tensors: whatever type they have, any rows in any order are what was written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.catalog import spec_of
from support.features import write_arrow
from support.sources import write_table
from tokenloom_server.errors import SourceChanged, SourceError
from tokenloom_server.sources import tensor_source
from tokenloom_server.sources.base import Shard
from tokenloom_server.sources.manifest import build
from tokenloom_server.sources.scheme import ReadRequest
from tokenloom_server.sources.tensor_source import FeatureSource
from tokenloom_server.sources.tensors import Values

ROWS = 23


def parquet(folder: Path, table: pa.Table) -> str:
    (folder / "p").mkdir(exist_ok=True)
    pq.write_table(table.slice(0, 15), folder / "p" / "0.parquet", row_group_size=4)
    pq.write_table(table.slice(15), folder / "p" / "1.parquet", row_group_size=100)
    return "parquet:p/*.parquet:*"


def stream(folder: Path, table: pa.Table) -> str:
    write_arrow(folder / "a", table, batch_rows=6)
    return "arrow:a:*"


def compressed(folder: Path, table: pa.Table) -> str:
    write_table(folder / "c" / "data.arrow", table, 6, pa.ipc.new_file, compression="zstd")
    (folder / "c" / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    return "arrow:c:*"


Writer = Callable[[Path, pa.Table], str]
WRITERS: dict[str, Writer] = {
    "parquet": parquet,
    "arrow stream": stream,
    "compressed arrow file": compressed,
}


def opened(folder: Path, spec: str, names: list[str] | None = None, **dtypes: str) -> FeatureSource:
    parsed = spec_of(spec)
    shards: tuple[Shard, ...] = build([parsed], folder).shards(spec)
    return FeatureSource(
        ReadRequest(spec=parsed, shards=shards, base_dir=folder), names=names, dtypes=dtypes
    )


def rows_of(
    source: FeatureSource, rows: list[int]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Shards, and rows in them, of rows of the source."""
    ends = np.cumsum(
        [0, *(int(source._file(shard).ends[-1]) for shard in range(len(source.shards)))]
    )
    numbers = np.array(rows)
    shards = np.searchsorted(ends, numbers, "right") - 1
    return shards, numbers - ends[shards]


def tensors(values: Values, dtype: str) -> list[np.ndarray[Any, Any]]:
    """Each row's tensor."""
    shapes = values.dims.tolist()
    return [
        np.frombuffer(found, dtype).reshape(dims)
        for found, dims in zip(bytes_of(values), shapes, strict=True)
    ]


def bytes_of(values: Values) -> list[bytes]:
    """Each row's bytes."""
    ends = np.cumsum(values.sizes + 1)
    out = np.full(int(ends[-1]), 255, np.uint8)
    begins = ends - values.sizes
    values.copy_to(out, begins)
    assert (out[begins - 1] == 255).all(), "nothing is written beside them"
    return [
        out[begin:end].tobytes() for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)
    ]


def regular(shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    return (np.arange(ROWS * int(np.prod(shape))).reshape(ROWS, *shape) % 251).astype(dtype)


def nested(values: np.ndarray[Any, Any], kind: Any, sizes: tuple[int | None, ...]) -> pa.Array:
    """As lists, of fixed size where one is given."""
    for size in reversed(sizes):
        kind = pa.list_(kind) if size is None else pa.list_(kind, size)
    return pa.array(values.tolist(), kind)


Case = tuple[pa.Array, str, np.ndarray[Any, Any], tuple[int | None, ...]]


def lists_of(dtype: str, shape: tuple[int, ...], dims: tuple[int | None, ...]) -> Case:
    """Regular values of a shape, as lists: the array, and what a source makes of it."""
    values = regular(shape, dtype)
    return nested(values, pa.from_numpy_dtype(np.dtype(dtype)), dims), dtype, values, dims


TRUTHS = regular((), "uint8") % 3 == 0
COLUMNS: dict[str, Case] = {
    "float16 in lists": lists_of("float16", (2, 3, 4), (None, None, None)),
    "large values": lists_of("float32", (40, 40), (None, None)),
    "fixed lists": lists_of("uint8", (3, 2), (3, 2)),
    "fixed lists in lists": lists_of("int16", (3, 2), (None, 2)),
    "lists in fixed lists": lists_of("int64", (3, 2), (3, None)),
    "large lists": (
        pa.array(regular((5,), "float64").tolist(), pa.large_list(pa.float64())),
        "float64",
        regular((5,), "float64"),
        (None,),
    ),
    "a tensor type": (
        pa.FixedShapeTensorArray.from_numpy_ndarray(regular((2, 3), "int32")),
        "int32",
        regular((2, 3), "int32"),
        (2, 3),
    ),
    "scalars": lists_of("uint16", (), ()),
    "booleans": (pa.array(TRUTHS.tolist()), "bool", TRUTHS, ()),
    "lists of booleans": (
        pa.array([[each] * 3 for each in TRUTHS.tolist()]),
        "bool",
        TRUTHS.repeat(3).reshape(-1, 3),
        (None,),
    ),
    "lists without items": (
        pa.array([[]] * ROWS, pa.list_(pa.int8())),
        "int8",
        np.zeros((ROWS, 0), "int8"),
        (None,),
    ),
}
ASKED = [0, 1, 2, 3, 4, 22, 21, 7, 7, 15, 14, 16, 3]


@pytest.mark.parametrize("write", WRITERS.values(), ids=list(WRITERS))
@pytest.mark.parametrize("what", COLUMNS)
def test_any_rows_in_any_order_are_what_was_written(
    tmp_path: Path, write: Writer, what: str
) -> None:
    array, dtype, expected, dims = COLUMNS[what]
    source = opened(tmp_path, write(tmp_path, pa.table({"x": array})))
    (column,) = source.columns
    assert (column.name, column.dtype, column.dims) == ("x", dtype, dims)
    (values,) = source.take(*rows_of(source, ASKED))
    assert np.array_equal(tensors(values, dtype), expected[ASKED])


TEXTS: dict[str, tuple[pa.Array, str]] = {
    "strings": (pa.array(["é" * i for i in range(ROWS)]), "string"),
    "large strings": (pa.array([str(i) for i in range(ROWS)], pa.large_string()), "string"),
    "string views": (
        pa.array(["a long text that is not inlined"] * ROWS, pa.string_view()),
        "string",
    ),
    "a dictionary": (pa.array(["a", "b", "a"] * 7 + ["c", "c"]).dictionary_encode(), "string"),
    "binary": (pa.array([bytes([i]) * i for i in range(ROWS)]), "binary"),
    "fixed binary": (pa.array([bytes([i] * 5) for i in range(ROWS)], pa.binary(5)), "binary"),
}


@pytest.mark.parametrize("write", [parquet, stream])
def test_texts_travel_as_their_bytes(tmp_path: Path, write: Writer) -> None:
    for array, dtype in TEXTS.values():
        source = opened(tmp_path, write(tmp_path, pa.table({"x": array})))
        assert [(column.dtype, column.dims) for column in source.columns] == [(dtype, ())]
        (values,) = source.take(*rows_of(source, ASKED))
        expected = [array[row].as_py() for row in ASKED]
        assert bytes_of(values) == [
            one.encode() if isinstance(one, str) else one for one in expected
        ]


def test_arrays_of_datasets_are_tensors(tmp_path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    shape = datasets.Features(
        {"x": datasets.Array2D((2, 3), "float32"), "y": datasets.Value("string")}
    )
    values = regular((2, 3), "float32")
    found = datasets.Dataset.from_dict(
        {"x": values, "y": [str(i) for i in range(ROWS)]}, features=shape
    )
    found.save_to_disk(tmp_path / "d", num_shards=2)
    source = opened(tmp_path, "arrow:d:*")
    assert [(column.name, column.dtype) for column in source.columns] == [
        ("x", "float32"),
        ("y", "string"),
    ]
    x, y = source.take(*rows_of(source, ASKED))
    assert np.array_equal(tensors(x, "float32"), values[ASKED])
    assert bytes_of(y) == [str(row).encode() for row in ASKED]


def test_what_arrow_has_no_type_for_is_said_by_dtypes(tmp_path: Path) -> None:
    table = pa.table(
        {
            "x": pa.array(regular((3,), "uint16").tolist(), pa.list_(pa.uint16())),
            "y": pa.array([1] * ROWS),
        }
    )
    spec = parquet(tmp_path, table)
    source = opened(tmp_path, spec, x="bfloat16")
    assert [(column.dtype, column.item_bytes) for column in source.columns] == [
        ("bfloat16", 2),
        ("int64", 8),
    ]
    with pytest.raises(
        SourceError,
        match=r"column 'y' is bfloat16, which is stored as uint16, but .* of type int64",
    ):
        opened(tmp_path, spec, y="bfloat16")


def test_what_cannot_travel_is_left_out_and_named_or_refused_where_it_is_asked_for(
    tmp_path: Path,
) -> None:
    table = pa.table(
        {
            "x": pa.array(range(ROWS)),
            "when": pa.array([0] * ROWS, pa.timestamp("s")),
            "words": pa.array([["a"]] * ROWS),
            "bucket": pa.array(["b"] * ROWS),
        }
    )
    spec = parquet(tmp_path, table)
    source = opened(tmp_path, spec)
    assert [column.name for column in source.columns] == ["x"]
    assert sorted(source.left_out) == ["bucket", "when", "words"]
    assert "of type timestamp[ms], which does not travel" in source.left_out["when"]
    assert "has a name that every batch uses for something of its own" in source.left_out["bucket"]
    for name, says in (
        ("words", r"column 'words' is of type list<.*which does not travel"),
        ("y", r"has no column named 'y'; its columns are x, when, words, bucket"),
    ):
        with pytest.raises(SourceError, match=says):
            opened(tmp_path, spec, [name])
    only = parquet(tmp_path, table.select(["when"]))
    with pytest.raises(SourceError, match="has no column that can travel"):
        opened(tmp_path, only)


def test_nulls_and_ragged_rows_are_named_with_their_file(tmp_path: Path) -> None:
    rows: list[Any] = [[[1, 2], [3, 4]]] * ROWS
    rows[17], rows[18], rows[19] = None, [[1, 2], [3]], [[1, None], [3, 4]]
    table = pa.table({"x": pa.array(rows, pa.list_(pa.list_(pa.int32())))})
    source = opened(tmp_path, parquet(tmp_path, table))
    assert len(source.take(*rows_of(source, [15, 16, 20]))[0].dims) == 3
    for row, says in (
        (17, "row 2 has a null"),
        (19, "row 4 has a null"),
        (18, "row 3 has lists of lengths 1 to 2"),
    ):
        with pytest.raises(SourceError, match=rf"p/1.parquet.*column 'x': {says}"):
            source.take(*rows_of(source, [15, row]))


def test_a_file_of_another_type_or_size_is_named(tmp_path: Path) -> None:
    spec = parquet(tmp_path, pa.table({"x": pa.array(range(ROWS))}))
    pq.write_table(pa.table({"x": pa.array([0.5])}), tmp_path / "p" / "1.parquet")
    source = opened(tmp_path, spec)
    with pytest.raises(
        SourceError, match=r"p/1.parquet.*column 'x' has float64 .*first file has int64"
    ):
        source.take(np.array([1]), np.array([0]))
    (tmp_path / "p" / "1.parquet").write_bytes(b"PAR1")
    with pytest.raises(SourceChanged, match=r"'p/1.parquet' was shortened"):
        source.take(np.array([1]), np.array([0]))
    garbage = opened(tmp_path, spec)
    with pytest.raises(SourceError, match=r"p/1.parquet' is not a readable parquet file"):
        garbage.take(np.array([1]), np.array([0]))


def test_decoded_parts_are_kept_up_to_a_bound_and_files_open_up_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_source, "KEPT_BYTES", 3000)
    monkeypatch.setattr(tensor_source, "OPEN_FILES", 1)
    source = opened(
        tmp_path,
        parquet(tmp_path, pa.table({"x": nested(regular((40,), "int64"), pa.int64(), (40,))})),
    )
    for row in (*range(ROWS), 0):
        (values,) = source.take(*rows_of(source, [row]))
        assert np.array_equal(tensors(values, "int64")[0], regular((40,), "int64")[row])
        assert source._kept_bytes == sum(size for size, _ in source._kept.values())
        assert source._kept_bytes <= 3000 or len(source._kept) == 1
        assert len(source._opened) == 1
