"""Flat arrays of ids: .npy files, shards of llm.c, raw ids; their rows, their index, and how damage is named."""

from __future__ import annotations

import logging
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.catalog import CATALOG, spec_of
from support.corpora import flat, write_megatron
from support.mixing import node
from support.sources import opened, rows_of
from tokenloom_server.config import mixture_file as config
from tokenloom_server.config.order_fields import order_digest
from tokenloom_server.errors import ConfigError, SnapshotInvalid, SourceError
from tokenloom_server.order import builder
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.run import fork
from tokenloom_server.sources import npy
from tokenloom_server.sources.base import Content, Source

END = 9
ROWS = [[1, 2, 3, END], [END], [4, END], [5] * 30 + [END], [END], [6, 7, END], [8]]
IDS = [i for row in ROWS for i in row]


def write_npy(kind: str) -> Callable[[Path, list[int]], None]:
    return lambda path, ids: np.save(path, np.array(ids, kind))


def write_raw(kind: str) -> Callable[[Path, list[int]], None]:
    return lambda path, ids: path.write_bytes(np.array(ids, kind).tobytes()) and None


def write_llm_c(magic: int, version: int, kind: str) -> Callable[[Path, list[int]], None]:
    def write(path: Path, ids: list[int]) -> None:
        header = np.zeros(256, "<i4")
        header[:3] = magic, version, len(ids)
        path.write_bytes(header.tobytes() + np.array(ids, kind).tobytes())

    return write


KINDS: dict[str, tuple[str, str, Callable[[Path, list[int]], None]]] = {
    **{
        f"npy {kind}": ("npy:data/*.npy", "npy", write_npy(kind))
        for kind in ("uint16", "uint32", "int32", "int64")
    },
    **{
        f"raw {kind}": (f"npy:data/*.bin:{kind}", "bin", write_raw(kind))
        for kind in ("uint16", "uint32", "int32")
    },
    "llm.c gpt-2": ("npy:data/*.bin", "bin", write_llm_c(20240520, 1, "<u2")),
    "llm.c llama-3": ("npy:data/*.bin", "bin", write_llm_c(20240801, 7, "<u4")),
}


def read(folder: Path, spec: str = "npy:a.npy", **options: Any) -> Source:
    return opened(folder, spec, **{"end": END} | options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [16, 1 << 20])
def test_rows_are_documents_from_every_row_on(
    kind: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(npy, "CHUNK_BYTES", chunk)
    spec, suffix, write = KINDS[kind]
    (tmp_path / "data").mkdir()
    write(tmp_path / f"data/a.{suffix}", IDS)
    write(tmp_path / f"data/b.{suffix}", IDS[:-1])
    write(tmp_path / f"data/c.{suffix}", [])
    if "raw" in kind:
        (tmp_path / f"data/c.{suffix}").unlink()
    source = read(tmp_path, spec, index_dir=tmp_path / "index")
    assert source.content is Content.IDS
    for shard, rows in enumerate((ROWS, ROWS[:-1], [])[: len(source.shards)]):
        assert source.row_count(shard) == len(rows)
        for row in range(len(rows) + 1):
            assert rows_of(source, row, shard) == rows[row:]
    with pytest.raises(SourceError, match=rf"a\.{suffix}' has 7 rows, but row 8 was asked for"):
        rows_of(source, 8)


def test_a_spec_names_a_type_for_raw_files_alone(tmp_path: Path) -> None:
    for text, expected in (
        ("npy:a/*.npy", "npy:a/*.npy"),
        ("npy:a:ids", "npy:a"),
        ("npy:a:uint16", "npy:a:uint16"),
    ):
        assert str(spec_of(text)) == expected
    assert spec_of("npy:s3://b/a:b").location == "s3://b/a:b"
    with pytest.raises(ConfigError, match="expected npy:GLOB"):
        spec_of("npy::uint16")
    write_npy("uint16")(tmp_path / "a.npy", IDS)
    write_llm_c(20240520, 1, "<u2")(tmp_path / "a.bin", IDS)
    for name, kind in (("a.npy", "a .npy file"), ("a.bin", "an llm.c shard")):
        with pytest.raises(
            SourceError, match=rf"'{name}' is {kind}, which says .* leave ':uint16' out"
        ):
            read(tmp_path, f"npy:{name}:uint16")


def test_the_index_is_built_on_first_touch_and_kept_for_each_end_of_text_id(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    write_npy("uint16")(tmp_path / "a.npy", IDS)

    def built() -> int:
        found = sum("building the index of a.npy" in record.message for record in caplog.records)
        caplog.clear()
        return found

    source = read(tmp_path, index_dir=tmp_path / "index")
    assert rows_of(source) == ROWS
    assert built() == 0
    assert rows_of(source, 3) == ROWS[3:]
    assert built() == 1
    assert read(tmp_path, index_dir=tmp_path / "index").row_count(0) == len(ROWS)
    assert built() == 0
    assert read(tmp_path, index_dir=tmp_path / "index", end=5).row_count(0) == 31
    assert built() == 1


FAULTS: dict[str, tuple[str, bytes, str]] = {
    "empty": ("npy:a.npy", b"", "is empty"),
    "text": (
        "npy:a.npy",
        b"plain text of no kind",
        r"begins with b'plain .*of which type: 'npy:a.npy:uint16'",
    ),
    "a cut header": (
        "npy:a.npy",
        b"\x93NUMPY\x01\x00\x76\x00{'descr'",
        "is not a readable .npy file",
    ),
    "a version to come": (
        "npy:a.npy",
        b"\x93NUMPY\x09\x00\x76\x00" + bytes(200),
        r"version 9.0, expected 1.0 or 2.0",
    ),
    "an odd size": (
        "npy:a.npy:uint16",
        b"\x01\x00\x02",
        "has 3 bytes, which is no whole number of uint16",
    ),
    **{
        f"a cut shard, {spec}": (
            spec,
            (struct.pack("<iii", 20240520, 1, 7) + bytes(1020))[:size],
            rf"has the header of an llm.c shard \(20240520, version 1\) of 7 ids of uint16, but .* has {left} after",
        )
        for spec, size, left in (
            ("npy:a.npy", 1032, 4),
            ("npy:a.npy:uint16", 1031, 3.5),
            ("npy:a.npy", 100, 0),
        )
    },
}


def test_a_damaged_file_is_named_with_what_was_expected(tmp_path: Path) -> None:
    for spec, content, message in FAULTS.values():
        (tmp_path / "a.npy").write_bytes(content)
        with pytest.raises(SourceError, match=rf"'{spec}': 'a.npy'.*{message}"):
            read(tmp_path, spec)


ARRAYS: dict[str, tuple[Any, str]] = {
    "floats": (np.zeros(3, np.float32), "is an array of float32, expected little-endian integers"),
    "two dimensions": (
        np.zeros((3, 2), np.uint16),
        r"is an array of 2 dimensions, expected one; save array.reshape",
    ),
    "big-endian": (np.zeros(3, ">u2"), "is an array of >u2, expected little-endian integers"),
    "booleans": (np.zeros(3, np.bool_), "is an array of bool"),
    "nothing": (np.zeros(0, np.uint16), r"has no rows: its 1 files have none"),
}


def test_an_array_of_another_kind_and_a_truncated_one_are_refused(tmp_path: Path) -> None:
    for array, message in ARRAYS.values():
        np.save(tmp_path / "a.npy", array)
        with pytest.raises(SourceError, match=message):
            read(tmp_path)
    np.save(tmp_path / "a.npy", np.zeros(50, np.uint16))
    with pytest.raises(SourceError, match="set end_of_text_id in the mixture file"):
        read(tmp_path, end=None)
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-10])
    with pytest.raises(
        SourceError, match=r"has 218 bytes, but its header and 50 ids of uint16 take 228"
    ):
        read(tmp_path)


def test_an_end_of_text_id_that_never_comes_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(npy, "CHUNK_BYTES", 16)
    monkeypatch.setattr(npy, "MAX_ROW_IDS", 100)
    np.save(tmp_path / "short.npy", np.ones(100, np.uint16))
    assert rows_of(read(tmp_path, "npy:short.npy", end=70_000)) == [[1] * 100]
    np.save(tmp_path / "a.npy", np.ones(500, np.uint16))
    with pytest.raises(
        SourceError, match=r"a.npy': the end-of-text id 9 does not occur in 100 ids from position 0"
    ):
        rows_of(read(tmp_path))


@pytest.mark.filterwarnings(
    "ignore:Reading `.npy` or `.npz` file required additional header parsing"
)
def test_whatever_happened_to_a_header_is_an_error_that_names_the_file_or_ids_of_the_file(
    tmp_path: Path,
) -> None:
    """A few hundred mutations: never another exception, never ids from outside the file."""
    np.save(tmp_path / "a.npy", np.array(IDS, np.uint16))
    good = (tmp_path / "a.npy").read_bytes()
    rng = random.Random(6)
    refused = 0
    for _ in range(400):
        content = bytearray(good)
        match rng.randrange(3):
            case 0:
                del content[rng.randrange(len(content)) :]
            case 1:
                for _ in range(rng.randrange(1, 4)):
                    content[rng.randrange(80)] = rng.randrange(256)
            case _:
                at = rng.randrange(80)
                content[at:at] = rng.choice(
                    [b"9", b"-", b"(", b"'", b"\0", b"L", b"1e9", b"99999999999999999999"]
                )
        (tmp_path / "a.npy").write_bytes(content)
        try:
            found = rows_of(read(tmp_path))
        except SourceError as error:
            assert "a.npy" in str(error), error
            refused += 1
        else:
            assert sum(map(len, found)) <= 2 * len(IDS)
    assert refused > 250


def order(folder: Path, spec: str, **fields: Any) -> PipelineFactory:
    run = {"tokenizer": None, "vocab_size": 60_000, "end_of_text_id": END, "sequence_length": 4}
    return builder.create(
        config.parse(flat([spec]) | run | fields, where="test", catalog=CATALOG),
        folder,
        folder / "index",
    )


def ids_of(order: PipelineFactory) -> list[int]:
    cursor = order.initial().sources[0].cursor
    return [i for piece in order.documents(0).read(cursor) for i in piece.ids.tolist()]


@pytest.mark.parametrize("spec", ["npy:a.npy", "megatron:a"])
def test_end_of_text_ids_are_neither_doubled_nor_lost(tmp_path: Path, spec: str) -> None:
    write_npy("uint16")(tmp_path / "a.npy", IDS)
    write_megatron(tmp_path / "a", ROWS)
    assert ids_of(order(tmp_path, spec)) == [*IDS, END]
    assert ids_of(order(tmp_path, spec, add_eot="auto")) == [*IDS, END]
    assert ids_of(order(tmp_path, spec, add_eot=False)) == IDS
    doubled = node("weighted", {"source": spec, "add_eot": True})
    assert ids_of(order(tmp_path, spec, mixture=doubled)) == [
        i for row in ROWS for i in (*row, END)
    ]


def test_another_override_of_the_end_is_another_order_and_survives_the_record(
    tmp_path: Path,
) -> None:
    write_npy("uint16")(tmp_path / "a.npy", IDS)
    digests = {}
    for override in (None, "auto", True, False):
        child = {"source": "npy:a.npy"} | ({} if override is None else {"add_eot": override})
        mixture = node("least_consumed", child)
        run = order(tmp_path, "npy:a.npy", mixture=mixture)
        again = builder.load(run.config, tmp_path, None, run.record.to_json())
        digests[override] = order_digest(run.config)
        assert ids_of(again) == ids_of(run)
    assert digests[None] == digests["auto"]
    assert len(set(digests.values())) == 3


def test_runs_with_other_ends_of_text_have_other_documents(tmp_path: Path) -> None:
    write_npy("uint16")(tmp_path / "a.npy", IDS)
    ours, same, other = (order(tmp_path, "npy:a.npy", end_of_text_id=end) for end in (END, END, 5))
    fork._refuse_other_documents(ours, same)
    with pytest.raises(
        SnapshotInvalid, match=r"'npy:a.npy': end_of_text_id is 5 in run 'test' and 9 in 'test'"
    ):
        fork._refuse_other_documents(other, ours)
