"""Sources in memory, and what a packer makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from tokenloom_server.core.state import Cursor, RowCounts, SourceState
from tokenloom_server.packing.base import Packer
from tokenloom_server.packing.documents import Documents
from tokenloom_server.packing.samples import SampleFormat
from tokenloom_server.sources.base import Content, Rows, Shard
from tokenloom_server.tokenizer.documents import DocumentEncoder

EOT = 250

Row = Sequence[int] | None


class MemorySource:
    """Implements ``Source`` over lists, so many rows at a time."""

    content = Content.IDS

    def __init__(self, shards: Sequence[Sequence[Row]], chunk_rows: int) -> None:
        self._rows = [[None if row is None else list(row) for row in shard] for shard in shards]
        self._chunk_rows = chunk_rows
        self.shards = tuple(Shard(f"shard-{i}", 1, "") for i in range(len(shards)))

    def row_count(self, shard: int) -> int:
        return len(self._rows[shard])

    def read(self, shard: int, row: int) -> Iterator[Rows]:
        assert row <= len(self._rows[shard])
        for first in range(row, len(self._rows[shard]), self._chunk_rows):
            yield Rows(first, pa.array(self._rows[shard][first : first + self._chunk_rows], pa.list_(pa.int32())))


def documents_of(
    shards: Sequence[Sequence[Row]],
    chunk_rows: int,
    epochs: float = 1.0,
    excluded: dict[int, npt.NDArray[np.int64]] | None = None,
    vocab_size: int = 256,
) -> Documents:
    """Each row ends with ``EOT``."""
    encoder = DocumentEncoder(None, vocab_size=vocab_size, eot_id=EOT)
    return Documents("memory", MemorySource(shards, chunk_rows), encoder, epochs, excluded)


@dataclass(frozen=True)
class Sample:
    """``ids`` without padding, ``raw`` as they travel; where the source stands after it."""

    ids: tuple[int, ...]
    raw: bytes
    cursor: Cursor | None
    rows: int
    row_counts: RowCounts
    starts: tuple[int, ...]
    hash: int


def samples_of(packer: Packer, form: SampleFormat, limit: int) -> list[Sample]:
    """The packer's first samples."""
    found: list[Sample] = []
    for block in packer.blocks():
        origins = block.origins
        assert len(block.ids) == len(block.hashes) == len(origins) > 0
        for number, (raw, hashed) in enumerate(zip(block.ids, block.hashes, strict=True), start=origins.first_sample):
            assert memoryview(raw).readonly
            assert len(raw) == form.sample_bytes
            position = origins.after(number)
            found.append(
                Sample(
                    tuple(form.ids(raw).tolist()),
                    bytes(raw),
                    *position[:3],
                    tuple(origins.starts_of(number).tolist()),
                    hashed,
                )
            )
        if len(found) >= limit:
            break
    return found[:limit]


def state_after(samples: Sequence[Sample], length: int) -> SourceState:
    """The state after the last of a source's samples."""
    last = samples[-1]
    return SourceState(
        cursor=last.cursor,
        samples=len(samples),
        rows=last.rows,
        tokens=len(samples) * length,
        row_counts=last.row_counts,
    )
