"""Chunks of LitData, written and read by the library itself: rows from every cursor, and each kind of damaged file."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.catalog import SOURCES, spec_of
from support.litdata_files import read_litdata, write_litdata
from support.mosaic import write_mds
from support.sources import all_rows, opened, rows_of
from tokenloom_server.config.row_rules import Comparison, Template
from tokenloom_server.errors import SourceError
from tokenloom_server.sources import samples as sample_files
from tokenloom_server.sources.base import Content
from tokenloom_server.sources.open import columns_of
from tokenloom_server.sources.scheme import scheme_of
from tokenloom_tools import short_form

CHUNKS = {"compression": "zstd:2", "compression_level": "chunk"}
FRAMES = {"compression": "zstd", "compression_batch_size": 4}


def mixed(i: int) -> dict[str, Any]:
    """A sample with tensors, which is written value by value."""
    return {
        "meta": {"n": i, "score": i / 4},
        "text": f"row {i}: é" * (i % 3),
        "tokens": torch.arange(i % 7) + i,
        "words": np.arange(i % 5, dtype=np.uint16),
        "square": torch.zeros(2, 2),
    }


def record(i: int) -> dict[str, Any]:
    """A sample of texts and lists, which is written as a row of a record batch."""
    return {"ids": list(range(i, i + 1 + i % 6)), "text": f"row {i}: é" * (i % 3)}


def field_of(item: Any, field: str) -> Any:
    for key in field.split(".") if field else ():
        item = item[int(key)] if isinstance(item, tuple) else item[key]
    return item.tolist() if hasattr(item, "tolist") else item


@pytest.mark.parametrize(
    ("make", "fields", "options"),
    [
        (mixed, ("text", "tokens", "words"), {}),
        (mixed, ("text", "tokens"), CHUNKS),
        (mixed, ("text", "tokens"), FRAMES),
        (record, ("text", "ids"), {"compression": "zstd"}),
        (lambda i: f"row {i}", ("",), FRAMES),
        (lambda i: (f"row {i}", torch.arange(i, dtype=torch.uint8)), ("0", "1"), {}),
    ],
)
def test_rows_are_what_the_library_reads_from_every_row_on(
    tmp_path: Path,
    make: Callable[[int], Any],
    fields: tuple[str, ...],
    options: dict[str, Any],
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(sample_files, "CHUNK_BYTES", 300)
    write_litdata(tmp_path / "data", map(make, range(34)), **options)
    expected = read_litdata(shutil.copytree(tmp_path / "data", tmp_path / "copy"))
    for field in fields:
        source = opened(tmp_path, f"litdata:data:{field}".rstrip(":"))
        rows = [field_of(item, field) for item in expected]
        assert source.content is (Content.TEXT if isinstance(rows[0], str) else Content.IDS)
        assert [source.row_count(shard) for shard in range(len(source.shards))] == [
            0,
            10,
            10,
            10,
            4,
        ]
        for shard in range(5):
            begin, count = max(0, 10 * (shard - 1)), source.row_count(shard)
            assert (int(source.blocks(shard)[0]), int(source.blocks(shard)[-1])) == (0, count)
            for row in range(count + 1):
                assert rows_of(source, row, shard) == rows[begin + row : begin + count]
        with pytest.raises(SourceError, match=r"has 4 rows, but row 5 was asked for"):
            rows_of(source, 5, 4)
        assert all_rows(tmp_path, f"litdata:copy:{field}".rstrip(":")) == rows


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.int32, CHUNKS), (torch.uint16, {}), (np.int64, {}), (np.uint8, CHUNKS)],
)
def test_a_stream_of_ids_has_the_samples_for_rows(
    tmp_path: Path, kind: Any, options: dict[str, Any]
) -> None:
    documents = [[*range(1 + i % 50), 0] for i in range(60)]
    make = torch.tensor if isinstance(kind, torch.dtype) else np.array
    write_litdata(
        tmp_path / "data",
        (make(row, dtype=kind) for row in documents),
        tokens=True,
        chunk_size=500,
        **options,
    )
    source = opened(tmp_path, "litdata:data")
    assert len(source.shards) > 3
    assert all_rows(tmp_path, "litdata:data") == documents
    for row in range(source.row_count(1) + 1):
        assert rows_of(source, row, 1) == documents[row : source.row_count(1)]


def test_filters_and_templates_look_at_other_fields(tmp_path: Path) -> None:
    write_litdata(tmp_path / "data", map(mixed, range(20)))
    rules = {
        "filter": (Comparison.parse("meta.n >= 4"), Comparison.parse("meta.score < 2")),
        "template": Template.parse("{meta.n}: {text}"),
    }
    rows = all_rows(tmp_path, "litdata:data:text", **rules)
    assert [row for row in rows if row] == [f"{i}: {mixed(i)['text']}" for i in range(4, 8)]
    assert len(rows) == 20


def test_a_spec_may_leave_out_the_field(tmp_path: Path) -> None:
    for text, location, column in (
        ("litdata:data/c4", "data/c4", "item"),
        ("litdata:data/c4:text", "data/c4", "text"),
        ("litdata:s3://bucket/c4", "s3://bucket/c4", "item"),
        ("litdata:s3://bucket/c4:meta.text", "s3://bucket/c4", "meta.text"),
    ):
        spec = spec_of(text)
        assert (str(spec), spec.location, spec.column) == (text, location, column)
    write_litdata(tmp_path / "data", map(mixed, range(3)))
    for spec, message in (
        (
            "litdata:data",
            r"has no column 'item'; its columns are meta.n, meta.score, text, tokens, words, square",
        ),
        (
            "litdata:data:square",
            r"is of 'tensor', expected str, or ids: .* in one dimension.*nothing is unpickled",
        ),
        ("litdata:data:meta.n", r"'meta.n' is of type int64, expected text"),
    ):
        with pytest.raises(SourceError, match=message):
            opened(tmp_path, spec)
    shown = columns_of(scheme_of(spec_of("litdata:data")), "data/index.json", tmp_path)
    assert {name for name, content in shown.items() if content is not None} == {
        "text",
        "tokens",
        "words",
    }


def test_a_folder_alone_shows_its_scheme_and_its_field(tmp_path: Path) -> None:
    write_litdata(tmp_path / "one", (f"row {i}" for i in range(9)))
    write_litdata(tmp_path / "fields", map(record, range(9)))
    write_mds(tmp_path / "streamed", {"body": "str"}, ({"body": f"row {i}"} for i in range(9)))
    document = short_form.document("one fields streamed", tmp_path, SOURCES, run="mix")
    sources = [child["source"] for child in document["mixture"]["children"]]
    assert sources == ["litdata:one", "litdata:fields:text", "mds:streamed:body"]


#: What is put where in the index (``...``: nothing), or made of what is there, and what the error says.
LIES: dict[str, tuple[str, Any, str]] = {
    "samples": ("chunks.0.chunk_size", 9, r"chunk-0-0.bin' begins with a number of 10 samples"),
    "absurd samples": (
        "chunks.0.chunk_size",
        2**40,
        r"chunks.0.chunk_size: Input should be less",
    ),
    "bytes": ("chunks.0.chunk_bytes", 7, r"chunk-0-0.bin' has \d+ bytes, but .* says 7"),
    "ids": ("chunks.0.dim", 7, r"chunk-0-0.bin': its \d+ bytes are not the 7 ids that"),
    "a name": (
        "chunks.0.filename",
        "x.bin",
        r"lists 'x.bin', which is missing; copy the folder",
    ),
    "a file twice": (
        "chunks",
        lambda chunks: chunks * 2,
        r"lists 'data/chunk-0-0.bin' 2 times; write",
    ),
    "a type": ("config.data_format", ["no_header_tensor:17"], r"are not the \d+ ids"),
    "a type of text": ("config.data_format", ["str"], r"are not the \d+ ids"),
    "no tree": ("config.data_spec", "[1, {}]", r"config.data_spec: it is no tree of fields"),
    "no JSON": ("config.data_spec", "[", r"config.data_spec: "),
    "deep": ("config.data_spec", "[" * 20_000, r"config.data_spec: it is no tree of fields"),
    "encryption": (
        "config.encryption",
        {"algorithm": "fernet"},
        r"config.encryption: Input should",
    ),
    "a loader": ("config.item_loader", "ParquetLoader", r"config.item_loader: Input should be"),
    "a compression": ("config.compression", "lz4", r"config.compression: String should match"),
    "no config": ("config", ..., r"config: Field required"),
}


def test_an_index_that_lies_is_refused_by_name(tmp_path: Path) -> None:
    write_litdata(
        tmp_path / "data",
        (np.arange(5, dtype=np.uint16) for _ in range(10)),
        tokens=True,
        chunk_size=60,
    )
    good = (tmp_path / "data/index.json").read_text()
    for path, value, message in LIES.values():
        index = json.loads(good)
        *above, field = path.split(".")
        at = index
        for key in above:
            at = at[int(key) if key.isdigit() else key]
        if value is ...:
            del at[field]
        else:
            at[field] = value(at[field]) if callable(value) else value
        (tmp_path / "data/index.json").write_text(json.dumps(index))
        with pytest.raises(SourceError, match=rf"source 'litdata:data': .*{message}"):
            all_rows(tmp_path, "litdata:data")
    write_litdata(tmp_path / "batches", map(record, range(5)))
    index = json.loads((tmp_path / "batches/index.json").read_text())
    index["chunks"][0]["chunk_size"] = 6
    (tmp_path / "batches/index.json").write_text(json.dumps(index))
    source = opened(tmp_path, "litdata:batches:text")
    for read in (source.row_count, lambda shard: list(source.read(shard, 0))):
        with pytest.raises(
            SourceError, match=r"batches/chunk-0-0.bin' has 5 samples, but its index says 6"
        ):
            read(1)


def with_bytes(folder: Path, content: bytes) -> Path:
    """Puts a content into the place of the only chunk, whose size in the index follows."""
    index = json.loads((folder / "index.json").read_text())
    index["chunks"][0]["chunk_bytes"] = len(content)
    path = folder / str(index["chunks"][0]["filename"])
    path.write_bytes(content)
    (folder / "index.json").write_text(json.dumps(index))
    return path


def test_a_damaged_chunk_is_refused_by_name(tmp_path: Path) -> None:
    for name, options in (("plain", {}), ("chunks", CHUNKS), ("frames", FRAMES)):
        write_litdata(tmp_path / name, (f"row {i}" for i in range(9)), **options)
    write_litdata(tmp_path / "batches", ({"item": f"row {i}"} for i in range(9)))
    good = {path.parent.name: path.read_bytes() for path in tmp_path.glob("*/chunk*")}
    table = 24 + 4 * 10  # of frames: a header and ten offsets before it
    for name, place, value, message in (
        ("plain", 4, 2**31, "the offsets of its 9 samples do not ascend"),
        ("plain", 8, 0, "the offsets of its 9 samples do not ascend"),
        ("plain", 44, 2**32 - 1, "row 0 is not as long as its values together"),
        ("chunks", 0, 0, "cannot be decompressed somewhere after byte 0"),
        ("frames", 8, 7, "has frames in version 7 of 9 samples, expected 1 of 9"),
        ("frames", 12, 8, "has frames in version 1 of 8 samples, expected 1 of 9"),
        ("frames", 20, 2**32 - 1, "has frames in version 1"),
        ("frames", 24, 9, "its frames do not lie one after the other"),
        ("frames", table, 1, "its frames do not lie one after the other"),
        ("frames", table + 4, 5, "its frames do not lie one after the other"),
        ("frames", table + 8, 2**30, "frame 0 cannot be decompressed"),
        ("frames", table + 12, 2**31, "frame 0 cannot be decompressed"),
        ("frames", table + 20, 2**32 - 1, "its frames do not lie one after the other"),
        (
            "batches",
            len(good["batches"]) - 12,
            2**31,
            "does not end with record batches|is not a readable Arrow",
        ),
    ):
        path = with_bytes(
            tmp_path / name, good[name][:place] + struct.pack("<I", value) + good[name][place + 4 :]
        )
        with pytest.raises(SourceError, match=rf"'{name}/{path.name}'.*({message})"):
            all_rows(tmp_path, f"litdata:{name}")
    for name, content in good.items():
        for size in (0, 3, 20, 60, len(content) - 1):
            path = with_bytes(tmp_path / name, content[:size])
            with pytest.raises(SourceError, match=rf"'{name}/({path.name}|index.json)'"):
                all_rows(tmp_path, f"litdata:{name}")


@pytest.mark.parametrize("options", [{}, CHUNKS, FRAMES])
def test_whatever_happened_to_a_chunk_is_rows_or_an_error_that_names_it(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Never another exception, never another number of rows."""
    write_litdata(tmp_path / "data", map(mixed, range(10)), **options)
    write_litdata(
        tmp_path / "batches", map(record, range(10)), compression=options.get("compression")
    )
    rng = random.Random(16)
    for name, fields in (("data", ("text", "tokens")), ("batches", ("text", "ids"))):
        path = next((tmp_path / name).glob("chunk*"))
        good = path.read_bytes()
        for _ in range(25):
            content = bytearray(good)
            begin = rng.randrange(len(content) - 8)
            if rng.randrange(2):
                content[begin] = rng.randrange(256)
            else:
                content[begin : begin + 4] = struct.pack("<I", rng.choice([0, 1, 2**31, 2**32 - 1]))
            path.write_bytes(content)
            for field in fields:
                try:
                    assert len(all_rows(tmp_path, f"litdata:{name}:{field}", skip_bad=True)) == 10
                except SourceError as error:
                    assert path.name in str(error)
