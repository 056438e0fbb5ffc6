"""``concat`` against a plain-Python reading of the same rule: one endless row of tokens, cut at stride L."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import numbers
from support.documents import EOT, FIELDS, Case, MemorySource, Row, Sample, samples_of
from tokenloom_server.core.state import Cursor, FileCursor, RowCounts, SourceState
from tokenloom_server.errors import SourceError
from tokenloom_server.packing.concat import ConcatPacker
from tokenloom_server.packing.documents import Documents
from tokenloom_server.packing.samples import SampleFormat
from tokenloom_server.tokenizer.documents import DocumentEncoder

SOURCE_ID = 3


@dataclass(frozen=True)
class Concat(Case):
    """All documents joined and cut."""

    pads: bool = False

    @property
    def lengths(self) -> bool:
        return self.pads

    def packer(self, state: SourceState | None = None, chunk_rows: int = 0) -> ConcatPacker:
        return ConcatPacker(
            self.documents(chunk_rows),
            state or SourceState(),
            source_id=SOURCE_ID,
            form=self.form,
            pads=self.pads,
            label_starts=True,
        )


def expected(case: Concat, limit: int) -> tuple[list[Sample], int]:
    """The same by definition, a token at a time: (samples, dropped tokens)."""

    def tokens() -> Iterator[tuple[int, bool, Cursor, int]]:
        """Each token with: does it begin a document, the cursor after it, the rows counter after it."""
        for number, (epoch, shard, row, ids) in enumerate(chain.from_iterable(case.rows())):
            for offset, token in enumerate(ids):
                last = offset == len(ids) - 1
                cursor = FileCursor(epoch, shard, row + last, 0 if last else offset + 1)
                yield token, offset == 0, cursor, number + last

    def sample(ids: tuple[int, ...], advanced: list[Any], read: list[Any]) -> Sample:
        raw, padding = case.raw(ids), case.form.width - len(ids)
        return Sample(
            ids=ids,
            raw=raw,
            cursor=advanced[-1][2],
            rows=advanced[-1][3],
            row_counts=RowCounts(padding_tokens=case.padding_tokens(ids)),
            starts=tuple(
                at + padding * case.left for at, (_, begins, *_) in enumerate(read) if begins
            ),
            hash=xxhash.xxh3_128_intdigest(raw, SOURCE_ID),
        )

    # One sample more than asked for, so that the lookahead is there.
    all_tokens = list(islice(tokens(), (limit + 1) * case.length + 1))
    found, at = [], 0
    while at + case.length + case.lookahead <= len(all_tokens) and len(found) < limit:
        advanced = all_tokens[at : at + case.length]
        read = all_tokens[at : at + case.length + case.lookahead]
        ids = tuple(token for token, *_ in read)
        found.append(sample(ids, advanced, read))
        at += case.length
    left = all_tokens[at:]
    if case.pads and len(left) > case.lookahead and len(found) < limit:
        return [*found, sample(tuple(token for token, *_ in left), left, left)], 0
    return found, len(left)


cases = st.builds(Concat, **FIELDS, pads=st.booleans()).filter(Case.has_tokens)


@given(cases)
@settings(max_examples=100, deadline=None)
def test_samples_cursors_counters_starts_and_hashes_are_those_of_the_definition(
    case: Concat,
) -> None:
    limit = 60
    samples, dropped = expected(case, limit)
    packer = case.packer()
    assert samples_of(packer, case.form, limit) == samples
    if len(samples) < limit:
        assert packer.dropped_tokens == dropped


@given(cases, st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_a_packer_goes_on_from_every_sample_whatever_the_chunks(
    case: Concat, chunk_rows: int
) -> None:
    case.check_that_it_goes_on_from_every_sample(chunk_rows)


def case_of(*rows: Row, **fields: Any) -> Concat:
    return Concat((tuple(None if ids is None else tuple(ids) for ids in rows),), **fields)


@pytest.mark.parametrize(
    ("epochs", "rows"),
    [(2.1, 30 * 2 + 3), (0.1, 3), (1.7, 51), (0.01, 1), (2.0, 60), (0.999, 30), (1.0000001, 31)],
)
def test_a_fraction_of_an_epoch_is_that_part_of_its_rows_as_written(
    epochs: float, rows: int
) -> None:
    # 2.1 - 2 is 0.10000000000000009 in doubles, which would round up to a row more.
    case = case_of(*[[i] for i in range(30)], length=2, epochs=epochs)
    assert len(case.samples(100)) == rows


@pytest.mark.parametrize("epochs", [0.5, 1.0, 2.0, math.inf])
@pytest.mark.parametrize("rows", [(), ([],), (None, [], None)])
def test_an_epoch_without_a_token_is_an_error_that_names_the_source(
    rows: tuple[Row, ...], epochs: float
) -> None:
    with pytest.raises(SourceError, match="memory: epoch 0 has no token in any of its rows"):
        case_of(*rows, epochs=epochs).samples(1)


def test_a_last_part_of_an_epoch_may_have_no_token() -> None:
    # Its first rows are empty; the epochs before it were not.
    case = case_of([], [], [1, 2, 3], [4, 5, 6], epochs=1.5)
    assert [sample.ids for sample in case.samples(9)] == [(1, 2, 3, EOT), (4, 5, 6, EOT)]


def test_a_cursor_inside_a_row_that_is_shorter_now_is_refused() -> None:
    state = SourceState(cursor=FileCursor(0, 0, 1, 3), samples=1, rows=1, tokens=4)
    with pytest.raises(SourceError, match="token 3 of row 1 of shard-0, but that row has 2 tokens"):
        case_of([1], [2], [3, 4, 5, 6, 7, 8, 9]).samples(1, state)


def test_wide_ids_are_hashed_as_they_travel() -> None:
    ids = numbers(64, 1, 0, 2**20)
    source = MemorySource([[list(ids)]], 1)
    encoder = DocumentEncoder(None, vocab_size=2**20 + 1, eot_id=2**20)
    form = SampleFormat(length=16, width=16, dtype=np.dtype(np.uint32))
    packer = ConcatPacker(
        Documents("memory", source, encoder, 1.0), SourceState(), source_id=9, form=form
    )
    (block,) = packer.blocks()
    wire = b"".join(token.to_bytes(4, "little") for token in ids)
    expected_ids = [wire[at : at + 64] for at in range(0, 256, 64)]
    assert [bytes(ids) for ids in block.ids] == expected_ids
    assert block.hashes == [xxhash.xxh3_128_intdigest(ids, 9) for ids in expected_ids]
