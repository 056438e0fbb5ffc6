"""``none`` against a plain reading of the same rules; and from every sample on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, count, islice

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from support.documents import EOT, Sample, documents_of, samples_of, state_after
from tokenloom_server.core.state import FileCursor, RowCounts, SourceState
from tokenloom_server.packing import unpacked
from tokenloom_server.packing.samples import SampleFormat
from tokenloom_server.packing.unpacked import UnpackedPacker

SOURCE_ID, PAD = 5, 255


@dataclass(frozen=True)
class Case:
    """A source, and how its rows become samples."""

    shards: tuple[tuple[tuple[int, ...] | None, ...], ...]
    length: int = 4
    lookahead: int = 0
    epochs: float = 1.0
    chunk_rows: int = 3
    left: bool = False
    splits: bool = False

    @property
    def form(self) -> SampleFormat:
        return SampleFormat(
            length=self.length,
            width=self.length + self.lookahead,
            dtype=np.dtype(np.uint16),
            lengths=True,
            padding="left" if self.left else "right",
            pad_id=PAD,
        )

    def packer(self, state: SourceState | None = None, chunk_rows: int = 0) -> UnpackedPacker:
        return UnpackedPacker(
            documents_of(self.shards, chunk_rows or self.chunk_rows, self.epochs, vocab_size=300),
            state or SourceState(),
            source_id=SOURCE_ID,
            form=self.form,
            splits=self.splits,
        )

    def samples(self, limit: int, state: SourceState | None = None, chunk_rows: int = 0) -> list[Sample]:
        return samples_of(self.packer(state, chunk_rows), self.form, limit)


def expected(case: Case) -> Iterator[Sample]:
    """The samples by definition."""
    rows = [(shard, row, ids) for shard, many in enumerate(case.shards) for row, ids in enumerate(many)]
    exact = None if math.isinf(case.epochs) else Fraction(repr(case.epochs))
    width, passed, row_counts = case.form.width, 0, RowCounts()
    for epoch in count():
        left = None if exact is None else exact - epoch
        if left is not None and left <= 0:
            return
        for shard, row, ids in rows[: len(rows) if left is None or left >= 1 else math.ceil(left * len(rows))]:
            passed += 1
            document = [*ids, EOT] if ids else []
            chunks = [document[at : at + width] for at in range(0, len(document), width)]
            lost = len(document) - width if not case.splits else 0
            for i, chunk in enumerate(chunks if case.splits else chunks[:1]):
                rest = width - len(chunk)
                # With padding on the right, the last of L + 1 ids is no input.
                row_counts = RowCounts(
                    padding_tokens=row_counts.padding_tokens + (rest if case.left else max(0, rest - case.lookahead)),
                    cut_documents=row_counts.cut_documents + (i == 0 and len(chunks) > 1),
                    lost_tokens=row_counts.lost_tokens + max(0, lost),
                )
                whole = not case.splits or i == len(chunks) - 1
                padded = [*[PAD] * rest, *chunk] if case.left else [*chunk, *[PAD] * rest]
                raw = np.array(padded, "<u2").tobytes() + len(chunk).to_bytes(4, "little")
                yield Sample(
                    tuple(chunk),
                    raw,
                    FileCursor(epoch, shard, row + whole, 0 if whole else (i + 1) * width),
                    passed - (not whole),
                    row_counts,
                    (rest * case.left,),
                    xxhash.xxh3_128_intdigest(raw, SOURCE_ID),
                )


row = st.one_of(st.none(), st.lists(st.integers(0, 249), max_size=14).map(tuple), st.just(()))
shards = st.lists(st.lists(row, max_size=8).map(tuple), min_size=1, max_size=3).map(tuple)


def has_tokens(case: Case) -> bool:
    """Whether the first epoch, as far as it is read, has one."""
    rows = list(chain(*case.shards))
    return any(rows[: math.ceil(min(Fraction(1), Fraction(repr(min(case.epochs, 1)))) * len(rows))])


cases = st.builds(
    Case,
    shards=shards,
    length=st.integers(2, 12),
    lookahead=st.integers(0, 1),
    epochs=st.sampled_from([1.0, 2.0, 2.5, 0.4, 3.7, 1.0 / 3.0, math.inf]),
    chunk_rows=st.integers(1, 7),
    left=st.booleans(),
    splits=st.booleans(),
).filter(has_tokens)


@given(cases)
@settings(max_examples=150, deadline=None)
def test_samples_places_and_counters_are_those_of_the_definition(case: Case) -> None:
    assert case.samples(60) == list(islice(expected(case), 60))


@given(cases, st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_a_packer_goes_on_from_every_sample_whatever_the_chunks(case: Case, chunk_rows: int) -> None:
    samples = case.samples(25)
    for k in range(1, len(samples) + 1):
        state = state_after(samples[:k], case.length)
        assert case.samples(25 - k, state, chunk_rows) == samples[k:]
        spans = case.packer(state, chunk_rows).spans(25 - k)
        assert [tuple(chain.from_iterable(span.ids.tolist() for span in its)) for its in spans] == [
            sample.ids for sample in samples[k:]
        ]


def test_short_rows_in_long_samples_come_in_blocks_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((tuple((i,) for i in range(40)),), length=16, chunk_rows=40)
    whole = case.samples(99)
    monkeypatch.setattr(unpacked, "BLOCK_BYTES", 3 * case.form.sample_bytes)
    assert [len(block.ids) for block in case.packer().blocks()] == [3] * 13 + [1]
    assert case.samples(99) == whole
