"""Shards of Mosaic streaming, written by its own writer: rows from every cursor, and each kind of damaged file."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from support.catalog import paths_of, spec_of
from support.mosaic import merge_folders, mosaic, write_mds
from support.sources import all_rows, opened, rows_of
from tokenloom_server.errors import SourceError
from tokenloom_server.sources import samples as sample_files
from tokenloom_server.sources.base import Content
from tokenloom_server.sources.open import columns_of
from tokenloom_server.sources.scheme import scheme_of

COLUMNS = {
    "any": "ndarray",
    "binary": "bytes",
    "fixed": "ndarray:int32:3",
    "n": "int",
    "pickled": "pkl",
    "score": "float32",
    "text": "str",
    "tokens": "ndarray:uint16",
}
#: By spec, what is compared with the field of that name.
FIELDS = ("any:int16", "binary:int64", "fixed", "text", "tokens")


def sample(i: int) -> dict[str, Any]:
    """Arrays of one to 300 ids, so that shapes take one byte or two, and text that may be empty."""
    return {
        "any": np.arange(1, i % 7 + 2, dtype=np.int16),
        "binary": np.arange(i % 5, dtype=np.int64).tobytes(),
        "fixed": np.array([i, -1, 2**31 - 1], np.int32),
        "n": i,
        "pickled": {"n": i},
        "score": i / 4,
        "text": f"row {i}: é" * (i % 3),
        "tokens": np.arange(1 + 300 * (i % 9 == 8), dtype=np.uint16) + i,
    }


def plain(value: Any) -> Any:
    if isinstance(value, bytes):
        value = np.frombuffer(value, np.int64)
    return value if isinstance(value, str) else value.tolist()


@pytest.mark.parametrize("compression", [None, "zstd:7", "br"])
def test_rows_are_what_the_library_reads_from_every_row_on(
    tmp_path: Path, compression: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_files, "CHUNK_BYTES", 700)
    options = {"size_limit": 2500, "compression": compression, "hashes": ["sha1", "xxh64"]}
    write_mds(tmp_path / "raw", COLUMNS, map(sample, range(40)), size_limit=2500)
    write_mds(tmp_path / "data", COLUMNS, map(sample, range(40)), **options)
    entries = json.loads((tmp_path / "raw/index.json").read_text())["shards"]
    reader = [
        mosaic().base.format.reader_from_json(str(tmp_path / "raw"), None, entry)
        for entry in entries
    ]
    for spec in FIELDS:
        source, field = opened(tmp_path, f"mds:data:{spec}"), spec.partition(":")[0]
        assert source.content is (Content.TEXT if field == "text" else Content.IDS)
        counts = [0, *map(len, reader)]
        assert [source.row_count(shard) for shard in range(len(source.shards))] == counts
        assert len(reader) > 2
        for shard, samples in enumerate(reader, 1):
            rows = [plain(samples[i][field]) for i in range(len(samples))]
            for row in range(len(rows) + 1):
                assert rows_of(source, row, shard) == rows[row:]
        assert rows_of(source, shard=0) == []
        assert [source.blocks(shard)[-1] for shard in range(len(source.shards))] == counts
        with pytest.raises(SourceError, match=r"has \d+ rows, but row 99 was asked for"):
            rows_of(source, 99, 1)


def test_shards_in_an_object_store_and_in_folders_of_their_own_are_the_same(tmp_path: Path) -> None:
    for part in ("a", "b"):
        write_mds(
            tmp_path / "data" / part,
            COLUMNS,
            map(sample, range(30)),
            size_limit=4000,
            compression="zstd",
        )
    merge_folders(tmp_path / "data")
    place = f"/{tmp_path.name}"
    fsspec.filesystem("memory").put(str(tmp_path / "data"), place, recursive=True)
    rows = all_rows(tmp_path, "mds:data:text")
    assert rows == [sample(i)["text"] for i in range(30)] * 2
    assert all_rows(tmp_path, f"mds:memory:/{place}:text") == rows
    with pytest.raises(
        SourceError, match=r"there is no 'memory://nowhere/index.json'; give the folder that has"
    ):
        opened(tmp_path, "mds:memory://nowhere:text")


def test_a_raw_shard_beside_its_compressed_form_is_read(tmp_path: Path) -> None:
    write_mds(
        tmp_path / "data", COLUMNS, map(sample, range(9)), compression="zstd", keep_local=True
    )
    write_mds(tmp_path / "raw", COLUMNS, map(sample, range(9)))
    config = (tmp_path / "data/index.json").read_text()
    assert paths_of(spec_of("mds:data:text"), tmp_path)[1] == "data/shard.00000.mds.zstd"
    shutil.copy(tmp_path / "raw/shard.00000.mds", tmp_path / "data")
    raw = (tmp_path / "data/shard.00000.mds").read_bytes()
    entry = json.loads(config)
    entry["shards"][0]["raw_data"]["bytes"] = len(raw)
    (tmp_path / "data/index.json").write_text(json.dumps(entry))
    assert paths_of(spec_of("mds:data:text"), tmp_path)[1] == "data/shard.00000.mds"
    assert all_rows(tmp_path, "mds:data:text") == [sample(i)["text"] for i in range(9)]


def test_a_spec_may_say_the_type_of_bytes(tmp_path: Path) -> None:
    for text, location, column in (
        ("mds:data/c4:tokens", "data/c4", "tokens"),
        ("mds:data/c4:tokens:uint16", "data/c4", "tokens:uint16"),
        ("mds:s3://bucket/c4:uint16", "s3://bucket/c4", "uint16"),
        ("mds:s3://bucket/c4:tokens:int64", "s3://bucket/c4", "tokens:int64"),
    ):
        spec = spec_of(text)
        assert (str(spec), spec.location, spec.column) == (text, location, column)
    write_mds(tmp_path / "data", COLUMNS, map(sample, range(3)))
    for column, message in (
        ("binary", r"'bytes', expected str, or ids: .* as in 'mds:DIR:FIELD:uint16'"),
        ("any", r"'ndarray', expected str, or ids"),
        ("any:int32", r"row 0 is no array of int32, as the spec says"),
        ("text:int8", r"column 'text:int8' is of 'str', expected str"),
        ("binary:int32", r"^$"),
        ("binary:uint64", r"^$"),
        ("tokens:uint16", r"'ndarray:uint16', expected str"),
        ("pickled", r"'pkl', expected str.*nothing is unpickled"),
        ("n", r"column 'n' is of type int64, expected text \(string\)"),
        ("nowhere", r"has no column 'nowhere'; its columns are any, binary"),
    ):
        if message == "^$":
            assert len(all_rows(tmp_path, f"mds:data:{column}")) == 3
            continue
        with pytest.raises(SourceError, match=message):
            all_rows(tmp_path, f"mds:data:{column}")
    shown = columns_of(scheme_of(spec_of("mds:data:text")), "data/index.json", tmp_path)
    assert {name for name, content in shown.items() if content is not None} == {
        "fixed",
        "text",
        "tokens",
    }


def test_what_does_not_lie_there_is_named(tmp_path: Path) -> None:
    write_mds(tmp_path / "data/train", COLUMNS, map(sample, range(30)), size_limit=4000)
    (tmp_path / "data/train/shard.00001.mds").unlink()
    for place, says in (
        ("data", r"there is no 'data/index.json'; give the folder .*in it: train/"),
        ("elsewhere/deep", r"there is no 'elsewhere/deep/index.json'.*the nearest folder"),
        (
            "data/train",
            r"index.json' lists 'shard.00001.mds', which is missing; copy the folder whole",
        ),
    ):
        with pytest.raises(SourceError, match=says):
            opened(tmp_path, f"mds:{place}:text")


#: Whose value is put into the first shard's entry of the index, and what the error says.
LIES: dict[str, tuple[dict[str, Any], str]] = {
    "samples": ({"samples": 10}, r"shard.00000.mds' begins with a number of 9 samples"),
    "absurd samples": (
        {"samples": 2**40},
        r"index.json' .*shards.0.samples: Input should be less than",
    ),
    "an encoding": ({"column_encodings": ["bytes", "str"]}, r"shard.00000.mds' has the header"),
    "a size": ({"column_sizes": [4, None]}, r"shard.00000.mds' has the header"),
    "columns": ({"column_names": ["m", "text"]}, r"shard.00000.mds' has the header"),
    "no columns": ({"column_names": []}, r"has no column 'text'"),
    "another format": ({"format": "jsonl"}, r"shards.0.format: Input should be 'mds'"),
    "a later version": ({"version": 3}, r"shards.0.version: Input should be 2"),
    "a compression": (
        {"compression": "snappy"},
        r"shards.0.compression: \'snappy\' is not decompressed here; write it anew with one of zstd, gz, bz2, br",
    ),
    # Of its file.
    "bytes": ({"bytes": 7}, r"shard.00000.mds' has \d+ bytes, but 'data/index.json' says 7"),
    "a hash": ({"hashes": {"sha1": "0" * 40}}, r"shard.00000.mds' has the sha1 [0-9a-f]{40}"),
    "no name": ({"basename": None}, r"shards.0.raw_data.basename: Input should be a valid"),
    "another name": ({"basename": "x"}, r"index.json' lists 'x', which is missing"),
}


def test_an_index_that_lies_is_refused_by_name(tmp_path: Path) -> None:
    write_mds(
        tmp_path / "data", {"n": "int", "text": "str"}, ({"n": i, "text": "wiki"} for i in range(9))
    )
    good = (tmp_path / "data/index.json").read_text()
    for lie, message in LIES.values():
        index = json.loads(good)
        entry = index["shards"][0]
        (entry["raw_data"] if lie.keys() <= entry["raw_data"].keys() else entry).update(lie)
        (tmp_path / "data/index.json").write_text(json.dumps(index))
        with pytest.raises(SourceError, match=rf"source 'mds:data:text': .*{message}"):
            all_rows(tmp_path, "mds:data:text")
    for content in ("", "[" * 9_000, '{"chunks": []}', '{"shards": 1}', "\xff", '{"shards": []}'):
        (tmp_path / "data/index.json").write_bytes(content.encode("latin1"))
        with pytest.raises(SourceError, match=r"index.json' is no index that mds reads"):
            opened(tmp_path, "mds:data:text")


def with_bytes(folder: Path, content: bytes, form: str = "raw_data") -> None:
    """Puts a content into the place of the only shard, whose size in the index follows."""
    index = json.loads((folder / "index.json").read_text())
    info = index["shards"][0][form]
    info["bytes"] = len(content)
    info["hashes"] = {name: hashlib.new(name, content).hexdigest() for name in info["hashes"]}
    (folder / info["basename"]).write_bytes(content)
    (folder / "index.json").write_text(json.dumps(index))


def test_a_damaged_shard_is_refused_by_name_and_row(tmp_path: Path) -> None:
    columns = {"any": "ndarray", "text": "str", "tokens": "ndarray:uint16"}
    rows = [
        {"any": np.arange(1, 4), "text": "wiki", "tokens": np.arange(5, dtype=np.uint16)}
        for _ in range(9)
    ]
    write_mds(tmp_path / "data", columns, rows)
    shard = tmp_path / "data/shard.00000.mds"
    good = shard.read_bytes()
    begin = struct.unpack_from("<I", good, 4)[0]
    # A sample: three sizes of uint32, then the type, shape and numbers of ``any``, the text, shape and ids of tokens.
    for place, value, field, message in (
        (4, 2**31, "text", r"the offsets of its 9 samples do not ascend within its \d+ bytes"),
        (8, 1, "text", r"the offsets of its 9 samples"),
        (40, 2**32 - 1, "text", r"the offsets of its 9 samples"),
        (44, 0, "text", r"has the header b"),
        (begin, 1, "text", r"row 0 is not as long as its values together"),
        (begin + 4, 2**32 - 1, "text", r"row 0 is not as long as its values together"),
        (begin + 12, 0x01030400 | 66, "any:int64", r"row 0 is no array of int64"),
        (begin + 12, 0x01030800 | 65, "any:int64", r"row 0 is an array of several dimensions"),
        (begin + 12, 0x01090400 | 65, "any:int64", r"row 0 is not as long as its shape says"),
    ):
        with_bytes(tmp_path / "data", good[:place] + struct.pack("<I", value) + good[place + 4 :])
        with pytest.raises(SourceError, match=rf"'data/shard.00000.mds'.*{message}"):
            all_rows(tmp_path, f"mds:data:{field}")
    with_bytes(tmp_path / "data", good.replace(b"wiki", b"w\xffki"))
    with pytest.raises(SourceError, match=r"row 0 is damaged: its text is not UTF-8"):
        all_rows(tmp_path, "mds:data:text")
    assert len(all_rows(tmp_path, "mds:data:text", skip_bad=True)) == 9
    for size in (0, 3, 40, len(good) - 1):
        with_bytes(tmp_path / "data", good[:size])
        with pytest.raises(SourceError, match=r"'data/shard.00000.mds'"):
            all_rows(tmp_path, "mds:data:text")


def test_a_damaged_compressed_shard_is_refused_by_name(tmp_path: Path) -> None:
    write_mds(
        tmp_path / "data",
        {"text": "str"},
        ({"text": f"row {i}"} for i in range(99)),
        compression="zstd",
    )
    good = (tmp_path / "data/shard.00000.mds.zstd").read_bytes()
    for content, message in (
        (b"no zstd at all", "cannot be decompressed somewhere after byte 0"),
        (b"", "cannot be decompressed|begins with a number of 0 samples"),
        (good[:-9], "cannot be decompressed|ends at byte"),
    ):
        with_bytes(tmp_path / "data", content, "zip_data")
        with pytest.raises(SourceError, match=rf"'data/shard.00000.mds.zstd'.*({message})"):
            all_rows(tmp_path, "mds:data:text")
    with_bytes(tmp_path / "data", good, "zip_data")
    for size, message in (
        (2**32 - 1, r"has \d+ bytes, which cannot become the 4294967295"),
        (500, "the offsets of"),
    ):
        index = json.loads((tmp_path / "data/index.json").read_text())
        index["shards"][0]["raw_data"]["bytes"] = size
        (tmp_path / "data/index.json").write_text(json.dumps(index))
        with pytest.raises(SourceError, match=message):
            all_rows(tmp_path, "mds:data:text")
