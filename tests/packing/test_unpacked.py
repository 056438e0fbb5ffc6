"""``none`` against a plain reading of the same rules; and from every sample on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from support.documents import FIELDS, Case, Sample
from tokenloom_server.core.state import FileCursor, RowCounts, SourceState
from tokenloom_server.packing import unpacked
from tokenloom_server.packing.unpacked import UnpackedPacker

SOURCE_ID = 5


@dataclass(frozen=True)
class Unpacked(Case):
    """Each row a sample, or several."""

    splits: bool = False

    def packer(self, state: SourceState | None = None, chunk_rows: int = 0) -> UnpackedPacker:
        return UnpackedPacker(
            self.documents(chunk_rows),
            state or SourceState(),
            source_id=SOURCE_ID,
            form=self.form,
            splits=self.splits,
        )


def expected(case: Unpacked) -> Iterator[Sample]:
    """The samples by definition."""
    width, passed, row_counts = case.form.width, 0, RowCounts()
    for rows in case.rows():
        for epoch, shard, row, document in rows:
            passed += 1
            chunks = [document[at : at + width] for at in range(0, len(document), width)]
            lost = len(document) - width if not case.splits else 0
            for i, chunk in enumerate(chunks if case.splits else chunks[:1]):
                row_counts = RowCounts(
                    padding_tokens=row_counts.padding_tokens + case.padding_tokens(chunk),
                    cut_documents=row_counts.cut_documents + (i == 0 and len(chunks) > 1),
                    lost_tokens=row_counts.lost_tokens + max(0, lost),
                )
                whole = not case.splits or i == len(chunks) - 1
                raw = case.raw(chunk)
                yield Sample(
                    tuple(chunk),
                    raw,
                    FileCursor(epoch, shard, row + whole, 0 if whole else (i + 1) * width),
                    passed - (not whole),
                    row_counts,
                    ((width - len(chunk)) * case.left,),
                    xxhash.xxh3_128_intdigest(raw, SOURCE_ID),
                )


cases = st.builds(Unpacked, **FIELDS, splits=st.booleans()).filter(Case.has_tokens)


@given(cases)
@settings(max_examples=100, deadline=None)
def test_samples_places_and_counters_are_those_of_the_definition(case: Unpacked) -> None:
    assert case.samples(60) == list(islice(expected(case), 60))


@given(cases, st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_a_packer_goes_on_from_every_sample_whatever_the_chunks(
    case: Unpacked, chunk_rows: int
) -> None:
    case.check_that_it_goes_on_from_every_sample(chunk_rows)


def test_short_rows_in_long_samples_come_in_blocks_of_bounded_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Unpacked((tuple((i,) for i in range(40)),), length=16, chunk_rows=40)
    whole = case.samples(99)
    monkeypatch.setattr(unpacked, "BLOCK_BYTES", 3 * case.form.sample_bytes)
    assert [len(block.ids) for block in case.packer().blocks()] == [3] * 13 + [1]
    assert case.samples(99) == whole
