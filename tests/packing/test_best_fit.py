"""``best_fit`` against a plain reading of the same rules, document by document; and from every sample on."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import flat, order_of, reread
from support.documents import EOT, Row, Sample, documents_of, samples_of, state_after
from tokenloom_server.core.hashing import Purpose, draw
from tokenloom_server.core.state import FileCursor, PackedCursor, RowCounts, SourceState
from tokenloom_server.errors import SourceError
from tokenloom_server.order.steps import BatchPlan
from tokenloom_server.packing.best_fit import BestFitPacker, Window
from tokenloom_server.packing.fit import best_fit
from tokenloom_server.packing.samples import SampleFormat

SOURCE_ID, SEED, PAD = 3, 11, 255
_WINDOW = Window(8, 100)


@dataclass(frozen=True)
class Case:
    """A source, and how it is packed."""

    shards: tuple[tuple[tuple[int, ...] | None, ...], ...]
    length: int = 4
    lookahead: int = 0
    epochs: float = 1.0
    chunk_rows: int = 3
    window: Window = _WINDOW
    left: bool = False
    excluded: frozenset[tuple[int, int]] = frozenset()
    closed_before: tuple[int, ...] = ()

    @property
    def form(self) -> SampleFormat:
        return SampleFormat(
            length=self.length,
            width=self.length + self.lookahead,
            dtype=np.dtype(np.uint8),
            lengths=True,
            padding="left" if self.left else "right",
            pad_id=PAD,
        )

    def packer(self, state: SourceState | None = None, chunk_rows: int = 0) -> BestFitPacker:
        excluded = {
            shard: np.array(sorted(row for its, row in self.excluded if its == shard), np.int64)
            for shard in {shard for shard, _ in self.excluded}
        }
        return BestFitPacker(
            documents_of(self.shards, chunk_rows or self.chunk_rows, self.epochs, excluded),
            state or SourceState(),
            source_id=SOURCE_ID,
            form=self.form,
            window=self.window,
            seed=SEED,
            closed_before=self.closed_before,
        )

    def samples(self, limit: int, state: SourceState | None = None, chunk_rows: int = 0) -> list[Sample]:
        return samples_of(self.packer(state, chunk_rows), self.form, limit)


TimelineSegment = tuple[int, int, int]  # row of the window, begin, end


def fitted(segments: list[TimelineSegment], capacity: int) -> list[list[TimelineSegment]]:
    """Best-fit decreasing by looking at every bin; of equal ones the bin that came to its room last."""
    bins: list[list[TimelineSegment]] = []
    rooms: list[tuple[int, int]] = []  # room, when it came to it
    for moment, segment in enumerate(sorted(segments, key=lambda each: each[1] - each[2])):
        length = segment[2] - segment[1]
        fits = [(room, -since, i) for i, (room, since) in enumerate(rooms) if room >= length]
        if not fits:
            bins.append([])
            rooms.append((capacity, moment))
            fits = [(capacity, -moment, len(bins) - 1)]
        chosen = min(fits)[2]
        bins[chosen].append(segment)
        rooms[chosen] = (rooms[chosen][0] - length, moment)
    return bins


def windows(case: Case) -> Iterator[list[tuple[int, int, int, list[int]]]]:
    """(epoch, shard, row, tokens) of the rows of each window."""
    rows = [(shard, row, ids) for shard, many in enumerate(case.shards) for row, ids in enumerate(many)]
    exact = None if math.isinf(case.epochs) else Fraction(repr(case.epochs))
    for epoch in count():
        left = None if exact is None else exact - epoch
        if left is not None and left <= 0:
            return
        window: list[tuple[int, int, int, list[int]]] = []
        for shard, row, ids in rows[: len(rows) if left is None or left >= 1 else math.ceil(left * len(rows))]:
            closes = window and any(window[-1][1] < closed <= shard for closed in case.closed_before)
            tokens = sum(len(ids) for *_, ids in window)
            if closes or len(window) == case.window.rows or tokens >= case.window.tokens:
                yield window
                window = []
            window.append((epoch, shard, row, [*ids, EOT] if ids else []))
        if window:
            yield window


def expected(case: Case) -> Iterator[Sample]:
    """The samples by definition."""
    width, passed, row_counts = case.form.width, 0, RowCounts()
    for window in windows(case):
        segments = [
            (row, begin, min(begin + width, len(ids)))
            for row, (*_, ids) in enumerate(window)
            for begin in range(0, len(ids), width)
        ]
        bins = [sorted(each) for each in fitted(segments, width)]
        epoch, shard, first, _ = window[0]
        key = draw(draw(SEED, Purpose.PACK, SOURCE_ID, epoch), Purpose.PACK, shard, first)
        bins = [bins[i] for _, i in sorted((draw(key, Purpose.PACK, 0, i), i) for i in range(len(bins)))]
        given_out = [[each for each in its if window[each[0]][1:3] not in case.excluded] for its in bins]
        last = max((i for i, its in enumerate(given_out) if its), default=None)
        for rank, its in enumerate(given_out):
            if not its:
                continue
            ids = tuple(chain.from_iterable(window[row][3][begin:end] for row, begin, end in its))
            rest = width - len(ids)
            cut = sum(begin == 0 and end < len(window[row][3]) for row, begin, end in its)
            # With padding on the right, the last of L + 1 ids is no input.
            padded = rest if case.left else max(0, rest - case.lookahead)
            row_counts = row_counts._replace(
                padding_tokens=row_counts.padding_tokens + padded, cut_documents=row_counts.cut_documents + cut
            )
            ends = np.cumsum([end - begin for _, begin, end in its])
            starts = [0, *ends[:-1].tolist()]
            padding = bytes([PAD] * rest)
            raw = (padding + bytes(ids) if case.left else bytes(ids) + padding) + len(ids).to_bytes(4, "little")
            whole = rank == last
            after = (
                FileCursor(epoch, window[-1][1], window[-1][2] + 1)
                if whole
                else PackedCursor(FileCursor(epoch, shard, first), rank + 1)
            )
            rows = len(window) if whole else len(window) * (rank + 1) // len(bins)
            yield Sample(
                ids,
                raw,
                after,
                passed + rows,
                row_counts,
                tuple(start + rest * case.left for start in starts),
                xxhash.xxh3_128_intdigest(raw, SOURCE_ID),
            )
        passed += len(window)


row = st.one_of(st.none(), st.lists(st.integers(0, 249), max_size=14).map(tuple), st.just(()))
shards = st.lists(st.lists(row, max_size=8).map(tuple), min_size=1, max_size=3).map(tuple)


def has_tokens(case: Case) -> bool:
    """Whether the first epoch, as far as it is read, has one that is not excluded."""
    rows = [(shard, at) for shard, many in enumerate(case.shards) for at, _ in enumerate(many)]
    read = rows[: math.ceil(min(Fraction(1), Fraction(repr(min(case.epochs, 1)))) * len(rows))]
    return any(case.shards[shard][at] and (shard, at) not in case.excluded for shard, at in read)


cases = st.builds(
    Case,
    shards=shards,
    length=st.integers(2, 12),
    lookahead=st.integers(0, 1),
    epochs=st.sampled_from([1.0, 2.0, 2.5, 0.4, 3.7, 1.0 / 3.0, math.inf]),
    chunk_rows=st.integers(1, 7),
    window=st.builds(Window, st.integers(1, 12), st.integers(12, 60)),
    left=st.booleans(),
    excluded=st.frozensets(st.tuples(st.integers(0, 2), st.integers(0, 7)), max_size=4),
    closed_before=st.sampled_from([(), (1,), (1, 2)]),
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


@given(cases, st.integers(1, 20), st.tuples(st.integers(0, 2), st.integers(0, 7)))
@settings(max_examples=60, deadline=None)
def test_rows_that_are_excluded_within_a_window_do_not_move_the_others(
    case: Case, k: int, more: tuple[int, int]
) -> None:
    changed = Case(**{**case.__dict__, "excluded": case.excluded | {more}})
    samples = case.samples(40)[:k]
    if not samples or not has_tokens(changed):
        return
    state = state_after(samples, case.length)
    before, now = case.samples(20, state), changed.samples(20, state)
    # What comes is what would have come, without the row's tokens.
    shard, at = more
    gone = case.shards[shard][at] if shard < len(case.shards) and at < len(case.shards[shard]) else None
    if not gone:
        assert now == before
    for i in range(1, len(now) + 1):
        later = SourceState(
            cursor=now[i - 1].cursor,
            samples=k + i,
            rows=now[i - 1].rows,
            tokens=(k + i) * case.length,
            row_counts=now[i - 1].row_counts,
        )
        assert changed.samples(20 - i, later) == now[i:]


@given(shards, st.integers(2, 12), st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_every_document_is_there_once_and_whole_unless_it_is_longer_than_a_sample(
    shards: tuple[tuple[Row, ...], ...], length: int, rows: int
) -> None:
    case = Case(shards, length, window=Window(rows, 2**20))
    if not has_tokens(case):
        return
    segments: Counter[tuple[int, ...]] = Counter()
    for sample in case.samples(1000):
        ends = [*sample.starts[1:], len(sample.ids)]
        segments.update(sample.ids[begin:end] for begin, end in zip(sample.starts, ends, strict=True))
    wanted: Counter[tuple[int, ...]] = Counter()
    for ids in chain(*shards):
        if ids:
            document = (*ids, EOT)
            wanted.update(document[at : at + length] for at in range(0, len(document), length))
    assert segments == wanted


@given(st.lists(st.integers(1, 20), max_size=60))
@settings(max_examples=100, deadline=None)
def test_no_two_bins_could_be_one(lengths: list[int]) -> None:
    placed, bins = best_fit(np.array(lengths, np.int64), 20)
    sums = sorted(np.bincount(placed, lengths, bins).tolist())
    assert all(0 < total <= 20 for total in sums)
    assert len(sums) < 2 or sums[0] + sums[1] > 20


def test_a_long_document_is_cut_into_full_samples_and_its_rest_is_packed() -> None:
    case = Case(((tuple(range(9)), (20, 21)),), 4)
    found = case.samples(9)
    # Ten tokens: 4 + 4 + 2; the rest of it and the second, of three, do not fit together.
    assert sorted(sample.ids for sample in found) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, EOT), (20, 21, EOT)]
    assert found[-1].row_counts == RowCounts(padding_tokens=3, cut_documents=1)


def test_a_state_after_more_samples_than_the_window_has_is_refused() -> None:
    case = Case((((1, 2, 3), (4, 5)),), 4)
    with pytest.raises(SourceError, match=r"stands after 7 samples of the window .* row 0 of shard-0"):
        case.samples(1, SourceState(cursor=PackedCursor(FileCursor(0, 0, 0), 7), samples=7, tokens=28))


@pytest.mark.parametrize("epochs", [0.5, 1.0, math.inf])
def test_an_epoch_of_which_every_row_is_excluded_is_an_error(epochs: float) -> None:
    case = Case((((1, 2), (3,)),), epochs=epochs, excluded=frozenset({(0, 0), (0, 1)}))
    with pytest.raises(SourceError, match="memory: epoch 0 has no token in any of its rows"):
        case.samples(1)


def test_files_that_came_later_leave_the_windows_before_them_as_they_were() -> None:
    rows = tuple((i, i + 1, i + 2)[: 1 + i % 3] for i in range(11))
    before, after = Case((rows,), 4), Case((rows, rows), 4, closed_before=(1,))
    samples = before.samples(99)
    for k in range(1, len(samples)):
        state = state_after(samples[:k], 4)
        assert after.samples(99, state)[: len(samples) - k] == samples[k:]


@pytest.mark.parametrize("packing", ["best_fit", "none"])
@pytest.mark.parametrize("drawn", [{}, {"shuffle": "rows", "shuffle_window_rows": 9}, {"lanes": 3}], ids=str)
def test_bad_and_filtered_rows_and_masks_go_with_every_packing(
    tmp_path: Path, packing: str, drawn: dict[str, Any]
) -> None:
    rows = [
        {"ids": [5 + i] * (1 + i % 7), "mask": [i % 2] * (1 + i % 7), "score": i % 4 / 4}
        if i % 11 != 5
        else {"ids": "bad", "mask": [], "score": 1.0}
        for i in range(34)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"source": "jsonl:rows.jsonl:ids", "filter": "score > 0.2", "on_bad_row": "skip", "epochs": 2} | drawn
    document = flat([], packing=packing, sequence_length=12, pack_window_rows=10 if packing == "best_fit" else 8192)
    document["mixture"] = {"policy": "sequential", "children": [source | {"loss_mask": "mask", "max_bad_rows": 3}]}
    order = order_of(tmp_path, document)
    states, found = [order.initial()], []
    pipeline = order.pipeline(order.initial())
    plan = BatchPlan(start_index=0, world_size=1, batch_size=1, group_micro_steps=1)
    while pipeline.ended is None:
        group = pipeline.begin_group(plan)
        pipeline.fill(group, 1)
        found += [bytes(sample) for sample in group.ids(0, 0, len(group.marks))]
        states.append(pipeline.state())
    kept = [row for i, row in enumerate(rows) if i % 11 != 5 and row["score"] > 0.2]
    tokens = sorted(token for raw in found for token in order.form.ids(raw).tolist())
    assert tokens == sorted([*(token for row in kept for token in row["ids"]), *[256] * len(kept)] * 2)
    # An end of text counts as the id before it does.
    counted = [bin(int.from_bytes(raw[-order.form.mask_bytes :], "little")).count("1") for raw in found]
    assert sum(counted) == 2 * sum(len(row["ids"]) + 1 for row in kept if row["mask"][0])
    end = states[-1].sources[0].row_counts
    assert (end.bad_rows, end.filtered_rows) == (6, 2 * (len(rows) - 3 - len(kept)))
    for k, state in enumerate(states[:-1]):
        again = order.pipeline(reread(order, state))
        again.advance(1 if k % 8 else 10**6)
        assert again.state() == states[k + 1 if k % 8 else -1]
