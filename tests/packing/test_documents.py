"""A source's rows as tokens: how many of them are encoded together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.sources import opened, write_table
from tokenloom_server.errors import SourceError
from tokenloom_server.packing.documents import Documents
from tokenloom_server.packing.reading import Layout, Windows
from tokenloom_server.sources.columns import PIECE_BYTES
from tokenloom_server.tokenizer.documents import DocumentEncoder
from tokenloom_server.tokenizer.documents import Documents as Encoded
from tokenloom_server.tokenizer.engine import BytesEngine

ROW_BYTES, ROWS = 100_000, 120


class NotingEncoder:
    """Encodes, and notes how many rows were given together."""

    def __init__(self) -> None:
        self._encoder = DocumentEncoder(BytesEngine(), vocab_size=257, eot_id=256)
        self.rows: list[int] = []

    def encode(self, column: Any, first_row: int, shard: int) -> Encoded:
        self.rows.append(len(column))
        return self._encoder.encode(column, first_row, shard)


def written(folder: Path, last_line: str = "") -> None:
    lines = [json.dumps({"text": f"{row:06d}" * (ROW_BYTES // 6)}) for row in range(ROWS)]
    (folder / "a.jsonl").write_text("\n".join([*lines, last_line]), encoding="utf-8")


def documents(
    folder: Path, encoder: NotingEncoder, joined_bytes: int, epochs: float = 1
) -> Documents:
    return Documents(
        "texts", opened(folder, "jsonl:a.jsonl:text"), encoder, epochs, joined_bytes=joined_bytes
    )


def test_texts_are_encoded_together_in_doubling_amounts_and_give_the_same_tokens(
    tmp_path: Path,
) -> None:
    written(tmp_path)
    alone, together = NotingEncoder(), NotingEncoder()
    pieces = list(documents(tmp_path, alone, 0).read(None))
    joined = list(documents(tmp_path, together, 4 * PIECE_BYTES).read(None))
    assert max(alone.rows) * ROW_BYTES <= PIECE_BYTES
    # What is asked for first comes as soon as it did; then each call has twice as much, up to the bound.
    assert together.rows[0] == alone.rows[0]
    assert together.rows[1] == 2 * alone.rows[0]
    assert max(together.rows) * ROW_BYTES <= 5 * PIECE_BYTES
    assert len(together.rows) < len(alone.rows) / 2
    assert np.array_equal(
        np.concatenate([rows.ids for rows in pieces]), np.concatenate([rows.ids for rows in joined])
    )
    assert [rows.first_row for rows in joined] == np.cumsum([0, *together.rows[:-1]]).tolist()


def test_what_lies_before_a_fault_is_given_and_what_lies_behind_the_end_is_not_encoded(
    tmp_path: Path,
) -> None:
    written(tmp_path, last_line="{")
    encoder, given = NotingEncoder(), 0
    with pytest.raises(SourceError, match="line 121"):
        for rows in documents(tmp_path, encoder, 64 * PIECE_BYTES).read(None):
            given += len(rows.ends)
    assert given == ROWS
    written(tmp_path)
    encoder = NotingEncoder()
    list(documents(tmp_path, encoder, 64 * PIECE_BYTES, epochs=0.25).read(None))
    assert sum(encoder.rows) == ROWS / 4


@pytest.mark.parametrize("kind", ["ids", "text"])
def test_rows_that_were_encoded_are_not_held(kind: str, tmp_path: Path) -> None:
    row = np.arange(1000, dtype=np.int32) if kind == "ids" else "x" * 4000
    pq.write_table(
        pa.table({kind: [row] * 600}),
        tmp_path / "a.parquet",
        row_group_size=300,
        use_dictionary=False,
    )
    encoder = DocumentEncoder(BytesEngine(), vocab_size=30_000, eot_id=256)
    source, left = opened(tmp_path, f"parquet:a.parquet:{kind}"), 0
    before = pa.total_allocated_bytes()
    for rows in Documents("rows", source, encoder, 1, joined_bytes=4 * PIECE_BYTES).read(None):
        # Tokens with the ends of documents among them are in Arrow's memory, too.
        left = pa.total_allocated_bytes() - before - rows.ids.nbytes
    assert left < 20_000, "at the last rows, whose file was read to its end"


def test_rows_of_a_window_keep_their_ids_whatever_the_widths_of_its_files(tmp_path: Path) -> None:
    kinds = [pa.list_(pa.uint16()), pa.large_list(pa.int64()), pa.null(), pa.list_(pa.int32())]
    for shard, kind in enumerate(kinds):
        rows = [None if kind == pa.null() else [shard, row][: row % 3] for row in range(50)]
        write_table(tmp_path / f"{shard}.parquet", pa.table({"ids": pa.array(rows, kind)}), 16)
    source = opened(tmp_path, "parquet:*.parquet:ids")
    windows = Windows(Layout.of(map(source.blocks, range(len(kinds)))), 7, 0, 2**10)
    documents = Documents(
        "ids", source, DocumentEncoder(None, vocab_size=300, eot_id=299), 1, reading=windows
    )
    (rows,) = documents.read(None)
    assert rows.ids.dtype == np.uint16
    seen = {}
    for row, ids in enumerate(np.split(rows.ids, rows.ends[:-1])):
        seen[tuple(rows.origins[:, row].tolist())] = ids.tolist()
    wanted = {(s, r): [] if s == 2 else [s, r][: r % 3] for s in range(4) for r in range(50)}
    assert seen == {origin: [*ids, 299] if ids else [] for origin, ids in wanted.items()}
    assert [*seen] != sorted(seen)
