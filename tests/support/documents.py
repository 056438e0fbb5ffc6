"""Sources in memory, and what a packer makes of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, count
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from hypothesis import strategies as st
from tokenloom_server.core.state import Cursor, RowCounts, SourceState
from tokenloom_server.packing.base import DocumentPacker
from tokenloom_server.packing.documents import Documents
from tokenloom_server.packing.samples import SampleFormat
from tokenloom_server.sources.base import Content, Rows, Shard
from tokenloom_server.tokenizer.documents import DocumentEncoder

EOT, PAD = 250, 255

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
            yield Rows(
                first,
                pa.array(self._rows[shard][first : first + self._chunk_rows], pa.list_(pa.int32())),
            )


def documents_of(
    shards: Sequence[Sequence[Row]],
    chunk_rows: int,
    epochs: float = 1.0,
    excluded: dict[int, npt.NDArray[np.int64]] | None = None,
) -> Documents:
    """Each row ends with ``EOT``."""
    encoder = DocumentEncoder(None, vocab_size=256, eot_id=EOT)
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


def samples_of(packer: DocumentPacker, form: SampleFormat, limit: int) -> list[Sample]:
    """The packer's first samples."""
    found: list[Sample] = []
    for block in packer.blocks():
        origins = block.origins
        assert len(block.ids) == len(block.hashes) == len(origins) > 0
        for number, (raw, hashed) in enumerate(
            zip(block.ids, block.hashes, strict=True), start=origins.first_sample
        ):
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


@dataclass(frozen=True)
class Case:
    """A source, and how it is packed: of each packing a subclass."""

    shards: tuple[tuple[tuple[int, ...] | None, ...], ...]
    length: int = 4
    lookahead: int = 0
    epochs: float = 1.0
    chunk_rows: int = 3
    left: bool = False
    excluded: frozenset[tuple[int, int]] = frozenset()

    @property
    def lengths(self) -> bool:
        """Whether samples say how many of their ids are no padding."""
        return True

    @property
    def form(self) -> SampleFormat:
        return SampleFormat(
            length=self.length,
            width=self.length + self.lookahead,
            dtype=np.dtype(np.uint8),
            lengths=self.lengths,
            padding="left" if self.left else "right",
            pad_id=PAD,
        )

    def packer(self, state: SourceState | None = None, chunk_rows: int = 0) -> DocumentPacker:
        raise NotImplementedError

    def documents(self, chunk_rows: int) -> Documents:
        excluded = {
            shard: np.array(sorted(row for its, row in self.excluded if its == shard), np.int64)
            for shard in {shard for shard, _ in self.excluded}
        }
        return documents_of(self.shards, chunk_rows or self.chunk_rows, self.epochs, excluded)

    def samples(
        self, limit: int, state: SourceState | None = None, chunk_rows: int = 0
    ) -> list[Sample]:
        return samples_of(self.packer(state, chunk_rows), self.form, limit)

    def rows(self) -> Iterator[list[tuple[int, int, int, list[int]]]]:
        """By epoch, as far as it is read: (epoch, shard, row, tokens)."""
        every = [
            (shard, row, ids)
            for shard, many in enumerate(self.shards)
            for row, ids in enumerate(many)
        ]
        exact = None if math.isinf(self.epochs) else Fraction(repr(self.epochs))
        for epoch in count():
            left = None if exact is None else exact - epoch
            if left is not None and left <= 0:
                return
            last = len(every) if left is None or left >= 1 else math.ceil(left * len(every))
            yield [
                (epoch, shard, row, [*ids, EOT] if ids else []) for shard, row, ids in every[:last]
            ]

    def has_tokens(self) -> bool:
        """Whether the first epoch, as far as it is read, has one that is not excluded."""
        return any(
            ids and (shard, row) not in self.excluded for _, shard, row, ids in next(self.rows())
        )

    def raw(self, ids: Sequence[int]) -> bytes:
        """A sample as it travels."""
        padding = [PAD] * (self.form.width - len(ids))
        length = len(ids).to_bytes(4, "little") if self.lengths else b""
        return bytes([*padding, *ids] if self.left else [*ids, *padding]) + length

    def padding_tokens(self, ids: Sequence[int]) -> int:
        """With padding on the right, the last of L + 1 ids is no input."""
        rest = self.form.width - len(ids)
        return rest if self.left else max(0, rest - self.lookahead)

    def check_that_it_goes_on_from_every_sample(self, chunk_rows: int) -> None:
        samples = self.samples(16)
        for k in range(1, len(samples) + 1):
            state = state_after(samples[:k], self.length)
            assert self.samples(16 - k, state, chunk_rows) == samples[k:]
            spans = self.packer(state, chunk_rows).spans(16 - k)
            assert [
                tuple(chain.from_iterable(span.ids.tolist() for span in its)) for its in spans
            ] == [sample.ids for sample in samples[k:]]


_row = st.one_of(st.none(), st.lists(st.integers(0, 249), max_size=14).map(tuple), st.just(()))
#: The fields that all cases have, drawn.
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "shards": st.lists(st.lists(_row, max_size=8).map(tuple), min_size=1, max_size=3).map(tuple),
    "length": st.integers(2, 12),
    "lookahead": st.integers(0, 1),
    "epochs": st.sampled_from([1.0, 2.0, 2.5, 0.4, 2.1, 3.7, 1.0 / 3.0, math.inf]),
    "chunk_rows": st.integers(1, 7),
    "left": st.booleans(),
}
