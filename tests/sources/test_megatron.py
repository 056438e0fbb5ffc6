"""Indexed datasets of Megatron-LM, written here by numpy alone: rows, resume, and how damage is named."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.catalog import CATALOG, paths_of, spec_of
from support.corpora import flat
from support.sources import opened, rows_of
from tokenloom_server.config import mixture_file as config
from tokenloom_server.errors import ConfigError, SourceError
from tokenloom_server.order import builder
from tokenloom_server.sources import megatron
from tokenloom_server.sources.base import Content

CODES = {
    "uint8": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "float64": 6,
    "float32": 7,
    "uint16": 8,
}
SPEC = "megatron:data/corpus"

#: Documents of sequences: one, several, an empty one among others, none at all.
DOCUMENTS = [[[1, 2, 3]], [[4], [5, 6]], [[7, 8], [], [9]], [], [[10] * 40], [[]], [[11, 12]]]
ROWS = [[i for sequence in document for i in sequence] for document in DOCUMENTS]


def index_bytes(
    lengths: list[int],
    edges: list[int],
    code: int = 8,
    *,
    version: int = 1,
    magic: bytes = b"MMIDIDX\0\0",
) -> bytes:
    """An .idx as the format says: header, lengths, pointers, document edges."""
    size = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4}.get(code, 2)
    pointers = np.concatenate(([0], np.cumsum(np.array(lengths, np.int64) * size)))[: len(lengths)]
    head = magic + struct.pack("<Q", version) + struct.pack("<B", code)
    head += struct.pack("<Q", len(lengths)) + struct.pack("<Q", len(edges))
    arrays = (np.array(lengths, np.int32), pointers.astype(np.int64), np.array(edges, np.int64))
    return head + b"".join(array.tobytes() for array in arrays)


def write(prefix: Path, documents: list[list[list[int]]], kind: str = "uint16") -> None:
    """A dataset, sequence by sequence, as Megatron-LM's builder adds them."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    lengths, edges = [], [0]
    with prefix.with_name(prefix.name + ".bin").open("wb") as out:
        for document in documents:
            for sequence in document:
                out.write(np.array(sequence, kind).tobytes())
                lengths.append(len(sequence))
            edges.append(len(lengths))
    prefix.with_name(prefix.name + ".idx").write_bytes(index_bytes(lengths, edges, CODES[kind]))


@pytest.mark.parametrize(
    ("kind", "chunk"),
    [("uint8", (1, 1)), ("int32", (2, 5)), ("uint16", (2, 5)), ("int64", (1 << 13, 1 << 22))],
)
def test_rows_are_documents_from_every_row_on(
    tmp_path: Path, kind: str, chunk: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron, "CHUNK_DOCUMENTS", chunk[0])
    monkeypatch.setattr(megatron, "CHUNK_IDS", chunk[1])
    write(tmp_path / "data/corpus", DOCUMENTS, kind)
    source = opened(tmp_path, SPEC)
    assert source.content is Content.IDS
    assert [shard.path for shard in source.shards] == ["data/corpus.bin", "data/corpus.idx"]
    assert [source.row_count(shard) for shard in (0, 1)] == [len(ROWS), 0]
    for row in range(len(ROWS) + 1):
        assert rows_of(source, row) == ROWS[row:]
    assert rows_of(source, shard=1) == []
    with pytest.raises(SourceError, match=r"corpus.bin' has 7 rows, but row 8 was asked for"):
        rows_of(source, 8)


def test_a_prefix_may_be_a_pattern_and_each_dataset_has_a_type_of_its_own(tmp_path: Path) -> None:
    write(tmp_path / "data/b_text_document", [[[1, 2]]], "int32")
    write(tmp_path / "data/a_text_document", [[[3]], [[4, 5]]], "uint16")
    write(tmp_path / "data/empty_text_document", [])
    write(tmp_path / "data/b", [[[9]]])
    source = opened(tmp_path, "megatron:data/*_text_document")
    assert [shard.path[5:6] for shard in source.shards] == ["a", "a", "b", "b", "e", "e"]
    rows = [rows_of(source, shard=shard) for shard in range(6)]
    assert rows == [[[3], [4, 5]], [], [[1, 2]], [], [], []]
    starred = tmp_path / "data/[b]*"
    write(starred, [[[7]]])
    assert rows_of(opened(tmp_path, "megatron:data/[b]*")) == [[7]]


def test_only_several_datasets_are_warned_about(tmp_path: Path) -> None:
    for prefix, count in (("a", 0), ("b", 1)):
        write(tmp_path / f"data/{prefix}", DOCUMENTS)
        parsed = config.parse(flat(["megatron:data/*"]) | IDS, where="test", catalog=CATALOG)
        assert len(builder.warnings(builder.create(parsed, tmp_path, None))) == count


def test_a_spec_is_a_prefix_and_its_column_is_implied() -> None:
    for text in ("megatron:data/corpus", "megatron:data/corpus:ids"):
        assert (str(spec_of(text)), spec_of(text).column) == ("megatron:data/corpus", "ids")
    assert spec_of("megatron:s3://bucket/a:b").location == "s3://bucket/a:b"
    with pytest.raises(ConfigError, match=r"the prefix that both files share; leave '\.idx' out"):
        spec_of("megatron:data/corpus.idx")
    with pytest.raises(ConfigError, match="expected megatron:PREFIX"):
        spec_of("megatron:")


def test_half_a_dataset_and_none_are_named(tmp_path: Path) -> None:
    write(tmp_path / "data/corpus", DOCUMENTS)
    (tmp_path / "data/corpus.idx").rename(tmp_path / "data/elsewhere.idx")
    for prefix, says in (
        ("corpus", r"'data/corpus.idx' is missing beside 'data/corpus.bin'"),
        ("else*", r"'data/elsewhere.bin' is missing beside 'data/elsewhere.idx'"),
        ("other", r"no file matches .*other\.idx'; the nearest folder .*corpus\.bin"),
    ):
        with pytest.raises(SourceError, match=says):
            paths_of(spec_of(f"megatron:data/{prefix}"), tmp_path)


def test_a_url_is_refused_with_the_remedy(tmp_path: Path) -> None:
    for spec in ("megatron:s3://bucket/corpus", "npy:https://host/*.npy"):
        with pytest.raises(
            SourceError, match=r"is a URL, but files of \w+: are mapped; copy or mount them"
        ):
            opened(tmp_path, spec)


def test_blocks_are_some_documents_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron, "BLOCK_DOCUMENTS", 3)
    write(tmp_path / "data/corpus", DOCUMENTS)
    source = opened(tmp_path, SPEC)
    assert [source.blocks(shard).tolist() for shard in (0, 1)] == [[0, 3, 6, 7], [0]]


LENGTHS, EDGES = [3, 1, 2], [0, 1, 3]
FAULTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", r"has 0 bytes, expected at least the 34"),
    "a head alone": (index_bytes(LENGTHS, EDGES)[:20], r"has 20 bytes"),
    "another magic": (
        index_bytes(LENGTHS, EDGES, magic=b"TNTIDX\0\0\0"),
        r"begins with b'TNTIDX.*preprocess_data.py",
    ),
    "a version to come": (index_bytes(LENGTHS, EDGES, version=2), r"has version 2, expected 1"),
    "floats": (index_bytes(LENGTHS, EDGES, 7), r"type code 7, expected one of 1 \(uint8\)"),
    "no type": (index_bytes(LENGTHS, EDGES, 99), r"type code 99"),
    "cut off": (
        index_bytes(LENGTHS, EDGES)[:-8],
        r"3 sequences and 3 document edges take 94: it is truncated",
    ),
    "absurd counts": (
        index_bytes(LENGTHS, EDGES)[:18] + struct.pack("<QQ", 2**63, 2**63) + bytes(60),
        r"9223372036854775808 sequences",
    ),
    "modes": (
        index_bytes(LENGTHS, EDGES) + bytes(3),
        r"a mode for each of its 3 sequences: it is a multimodal",
    ),
    "no edges": (index_bytes(LENGTHS, []), r"no document edges"),
    "an open document": (
        index_bytes(LENGTHS, [0, 1]),
        r"from sequence 0 to 1, expected 0 to 3.*end_document",
    ),
    "other lengths": (
        index_bytes([3, 1, 1], EDGES),
        r"says that 'data/corpus.bin' has 10 bytes.*it has 12",
    ),
    "another type": (
        index_bytes(LENGTHS, EDGES, 4),
        r"says that 'data/corpus.bin' has 24 bytes of int32",
    ),
}


def test_a_damaged_index_is_named_with_what_was_expected(tmp_path: Path) -> None:
    write(tmp_path / "data/corpus", [[[1, 2, 3]], [[4], [5, 6]]])
    for content, message in FAULTS.values():
        (tmp_path / "data/corpus.idx").write_bytes(content)
        with pytest.raises(
            SourceError, match=rf"source 'megatron:data/corpus': 'data/corpus.idx'.*{message}"
        ):
            opened(tmp_path, SPEC)


def test_sequences_that_do_not_lie_one_after_the_other_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "data/corpus", [[[1, 2, 3]], [[4], [5, 6]]])
    index = tmp_path / "data/corpus.idx"
    good, pointers = index.read_bytes(), 34 + 12
    for at, value, what in (
        (8, 4, "sequences"),
        (0, -2, "sequences"),
        (8, 7, "sequences"),
        (24 + 8, 5, "document edges"),
        (24 + 8, -1, "document edges"),
    ):
        index.write_bytes(
            good[: pointers + at] + struct.pack("<q", value) + good[pointers + at + 8 :]
        )
        with pytest.raises(
            SourceError, match=rf"corpus.idx': the {what} of documents 0 to 1 do not lie"
        ):
            rows_of(opened(tmp_path, SPEC))


def test_files_without_documents_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "data/corpus", [])
    with pytest.raises(SourceError, match=r"has no rows: its 2 files have none"):
        opened(tmp_path, SPEC)


def test_whatever_happened_to_an_index_is_an_error_that_names_the_file_or_other_rows(
    tmp_path: Path,
) -> None:
    """A few hundred mutations: never another exception, never ids from outside the file."""
    write(tmp_path / "data/corpus", DOCUMENTS)
    good = (tmp_path / "data/corpus.idx").read_bytes()
    ids = np.fromfile(tmp_path / "data/corpus.bin", np.uint16).tolist()
    rng = random.Random(6)
    refused = 0
    for _ in range(400):
        content = bytearray(good)
        match rng.randrange(4):
            case 0:
                del content[rng.randrange(len(content)) :]
            case 1:
                content[rng.randrange(len(content))] = rng.randrange(256)
            case 2:
                at = rng.randrange(len(content))
                content[at:at] = rng.randbytes(rng.randrange(1, 9))
            case _:
                at = rng.randrange(0, len(content) - 8)
                content[at : at + 8] = struct.pack(
                    "<q", rng.choice([-1, 0, 1, 2**31, 2**62, -(2**63)])
                )
        (tmp_path / "data/corpus.idx").write_bytes(content)
        try:
            rows = rows_of(opened(tmp_path, SPEC))
        except SourceError as error:
            assert "corpus.idx" in str(error), error
            refused += 1
        else:
            assert [i for row in rows for i in row] == ids
    assert refused > 300


IDS: dict[str, Any] = {"tokenizer": None, "vocab_size": 60_000, "end_of_text_id": 5}
