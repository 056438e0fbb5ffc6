"""``concat`` against a plain-Python reading of the same rule: one endless row of tokens, cut at stride L."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, count, islice
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import numbers
from support.documents import EOT, MemorySource, Row, Sample, documents_of, samples_of, state_after
from tokenloom_server.core.state import Cursor, FileCursor, RowCounts, SourceState
from tokenloom_server.errors import SourceError
from tokenloom_server.packing.concat import ConcatPacker
from tokenloom_server.packing.documents import Documents
from tokenloom_server.packing.samples import SampleFormat
from tokenloom_server.tokenizer.documents import DocumentEncoder

SOURCE_ID, PAD = 3, 255


@dataclass(frozen=True)
class Case:
    """A source, and how it is packed."""

    shards: tuple[tuple[tuple[int, ...] | None, ...], ...]
    length: int
    lookahead: int
    epochs: float
    chunk_rows: int
    pads: bool = False
    left: bool = False

    @property
    def form(self) -> SampleFormat:
        width = self.length + self.lookahead
        return SampleFormat(
            length=self.length,
            width=width,
            dtype=np.dtype(np.uint8),
            lengths=self.pads,
            padding="left" if self.left else "right",
            pad_id=PAD,
        )

    def packer(self, state: SourceState | None = None, chunk_rows: int = 0) -> ConcatPacker:
        return ConcatPacker(
            documents_of(self.shards, chunk_rows or self.chunk_rows, self.epochs),
            state or SourceState(),
            source_id=SOURCE_ID,
            form=self.form,
            pads=self.pads,
            label_starts=True,
        )


def taken(packer: ConcatPacker, limit: int) -> list[Sample]:
    return samples_of(packer, packer.form, limit)


def expected(case: Case, limit: int) -> tuple[list[Sample], int]:
    """The same by definition, a token at a time: (samples, dropped tokens)."""
    rows = [(shard, row, ids) for shard, many in enumerate(case.shards) for row, ids in enumerate(many)]
    exact = None if math.isinf(case.epochs) else Fraction(repr(case.epochs))

    def documents() -> Iterator[tuple[int, int, int, list[int]]]:
        for epoch in count():
            left = None if exact is None else exact - epoch
            if left is not None and left <= 0:
                return
            last = len(rows) if left is None or left >= 1 else math.ceil(left * len(rows))
            for shard, row, ids in rows[:last]:
                yield epoch, shard, row, [*ids, EOT] if ids else []

    def tokens() -> Iterator[tuple[int, bool, Cursor, int]]:
        """Each token with: does it begin a document, the cursor after it, the rows counter after it."""
        for number, (epoch, shard, row, ids) in enumerate(documents()):
            for offset, token in enumerate(ids):
                last = offset == len(ids) - 1
                cursor = FileCursor(epoch, shard, row + last, 0 if last else offset + 1)
                yield token, offset == 0, cursor, number + last

    def sample(ids: tuple[int, ...], advanced: list[Any], read: list[Any]) -> Sample:
        rest = case.form.width - len(ids)
        padding = [PAD] * rest
        raw = bytes([*padding, *ids] if case.left else [*ids, *padding]) + (
            len(ids).to_bytes(4, "little") if case.pads else b""
        )
        return Sample(
            ids=ids,
            raw=raw,
            cursor=advanced[-1][2],
            rows=advanced[-1][3],
            # With padding on the right, the last of L + 1 ids is no input.
            row_counts=RowCounts(padding_tokens=rest if case.left else max(0, rest - case.lookahead)),
            starts=tuple(i + rest * case.left for i, (_, begins, *_) in enumerate(read) if begins),
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


row = st.one_of(st.none(), st.lists(st.integers(0, 255), max_size=9).map(tuple), st.just(()))
shards = st.lists(st.lists(row, max_size=6).map(tuple), min_size=1, max_size=3).map(tuple)
cases = st.builds(
    Case,
    shards=shards.filter(lambda found: any(ids for ids in chain(*found))),
    length=st.integers(2, 12),
    lookahead=st.integers(0, 1),
    epochs=st.sampled_from([1.0, 2.0, 2.5, 0.4, 2.1, 3.7, 1.0 / 3.0, math.inf]),
    chunk_rows=st.integers(1, 7),
    pads=st.booleans(),
    left=st.booleans(),
)


def has_tokens(case: Case) -> bool:
    """Whether the first epoch, as far as it is read, has one."""
    rows = list(chain(*case.shards))
    return any(rows[: math.ceil(min(Fraction(1), Fraction(repr(min(case.epochs, 1)))) * len(rows))])


@given(cases.filter(has_tokens))
@settings(max_examples=150, deadline=None)
def test_samples_cursors_counters_starts_and_hashes_are_those_of_the_definition(case: Case) -> None:
    limit = 60
    samples, dropped = expected(case, limit)
    packer = case.packer()
    assert taken(packer, limit) == samples
    if len(samples) < limit:
        assert packer.dropped_tokens == dropped


@given(cases.filter(has_tokens), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_a_packer_goes_on_from_every_sample_whatever_the_chunks(case: Case, chunk_rows: int) -> None:
    limit = 25
    samples = taken(case.packer(), limit)
    for k in range(1, len(samples) + 1):
        state = state_after(samples[:k], case.length)
        assert taken(case.packer(state, chunk_rows), limit - k) == samples[k:]
        spans = case.packer(state, chunk_rows).spans(limit - k)
        assert [tuple(chain.from_iterable(span.ids.tolist() for span in its)) for its in spans] == [
            sample.ids for sample in samples[k:]
        ]


@given(cases.filter(has_tokens), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_nothing_depends_on_where_chunks_end(case: Case, chunk_rows: int) -> None:
    one, other = case.packer(), case.packer(chunk_rows=chunk_rows)
    assert taken(one, 40) == taken(other, 40)
    assert one.dropped_tokens == other.dropped_tokens or math.isinf(case.epochs) or len(taken(case.packer(), 41)) > 40


def case_of(*rows: Row, **fields: Any) -> Case:
    made = Case((tuple(None if ids is None else tuple(ids) for ids in rows),), 4, 0, 1.0, 2)
    return replace(made, **fields)


def test_the_tail_that_fills_no_sample_is_dropped_and_counted() -> None:
    packer = case_of([1, 2, 3], [4, 5]).packer()
    assert [sample.ids for sample in taken(packer, 9)] == [(1, 2, 3, EOT)]
    assert packer.dropped_tokens == 3


def test_a_shifted_sample_reads_one_token_further_and_advances_by_its_length() -> None:
    packer = case_of([1, 2, 3, 4, 5, 6, 7], [8], lookahead=1).packer()
    assert [sample.ids for sample in taken(packer, 9)] == [(1, 2, 3, 4, 5), (5, 6, 7, EOT, 8)]
    assert packer.dropped_tokens == 2


def test_a_document_that_does_not_fit_opens_the_next_sample_across_epochs_too() -> None:
    found = taken(case_of([1, 2, 3, 4], epochs=3.0).packer(), 9)
    assert [sample.ids for sample in found] == [(1, 2, 3, 4), (EOT, 1, 2, 3), (4, EOT, 1, 2)]
    assert [sample.cursor.epoch for sample in found] == [0, 1, 2]
    assert [sample.starts for sample in found] == [(0,), (1,), (2,)]


def test_rows_without_tokens_are_counted_when_the_next_token_is_taken() -> None:
    found = taken(case_of([], [1, 2, 3], None, [], [4, 5, 6, 7]).packer(), 9)
    assert [(sample.rows, sample.cursor) for sample in found] == [(2, FileCursor(0, 0, 2)), (4, FileCursor(0, 0, 4, 4))]


def test_a_sample_within_one_long_document_has_no_start() -> None:
    found = taken(case_of(list(range(20))).packer(), 9)
    assert [sample.starts for sample in found] == [(0,), (), (), (), ()]


@pytest.mark.parametrize(
    ("epochs", "rows"), [(2.1, 30 * 2 + 3), (0.1, 3), (1.7, 51), (0.01, 1), (2.0, 60), (0.999, 30), (1.0000001, 31)]
)
def test_a_fraction_of_an_epoch_is_that_part_of_its_rows_as_written(epochs: float, rows: int) -> None:
    # 2.1 - 2 is 0.10000000000000009 in doubles, which would round up to a row more.
    case = case_of(*[[i] for i in range(30)], length=2, epochs=epochs)
    assert len(taken(case.packer(), 100)) == rows


@pytest.mark.parametrize("epochs", [0.5, 1.0, 2.0, math.inf])
@pytest.mark.parametrize("rows", [(), ([],), (None, [], None)])
def test_an_epoch_without_a_token_is_an_error_that_names_the_source(rows: tuple[Row, ...], epochs: float) -> None:
    with pytest.raises(SourceError, match="memory: epoch 0 has no token in any of its rows"):
        taken(case_of(*rows, epochs=epochs).packer(), 1)


def test_a_last_part_of_an_epoch_may_have_no_token() -> None:
    # Its first rows are empty; the epochs before it were not.
    case = case_of([], [], [1, 2, 3], [4, 5, 6], epochs=1.5)
    assert [sample.ids for sample in taken(case.packer(), 9)] == [(1, 2, 3, EOT), (4, 5, 6, EOT)]


def test_a_cursor_inside_a_row_that_is_shorter_now_is_refused() -> None:
    state = SourceState(cursor=FileCursor(0, 0, 1, 3), samples=1, rows=1, tokens=4)
    with pytest.raises(SourceError, match="token 3 of row 1 of shard-0, but that row has 2 tokens"):
        taken(case_of([1], [2], [3, 4, 5, 6, 7, 8, 9]).packer(state), 1)


def test_wide_ids_are_hashed_as_they_travel() -> None:
    ids = numbers(64, 1, 0, 2**20)
    source = MemorySource([[list(ids)]], 1)
    encoder = DocumentEncoder(None, vocab_size=2**20 + 1, eot_id=2**20)
    form = SampleFormat(length=16, width=16, dtype=np.dtype(np.uint32))
    packer = ConcatPacker(Documents("memory", source, encoder, 1.0), SourceState(), source_id=9, form=form)
    (block,) = packer.blocks()
    wire = b"".join(token.to_bytes(4, "little") for token in ids)
    expected_ids = [wire[at : at + 64] for at in range(0, 256, 64)]
    assert [bytes(ids) for ids in block.ids] == expected_ids
    assert block.hashes == [xxhash.xxh3_128_intdigest(ids, 9) for ids in expected_ids]
