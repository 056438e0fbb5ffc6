"""``best_fit`` against a plain reading of the same rules, document by document; and from every sample on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from support.documents import FIELDS, Case, Sample, state_after
from tokenloom_server.core.hashing import Purpose, draw
from tokenloom_server.core.state import FileCursor, PackedCursor, RowCounts, SourceState
from tokenloom_server.errors import SourceError
from tokenloom_server.packing.best_fit import BestFitPacker, Window, best_fit

SOURCE_ID, SEED = 3, 11
_WINDOW = Window(8, 100)


@dataclass(frozen=True)
class BestFit(Case):
    """Rows packed window by window."""

    window: Window = _WINDOW
    closed_before: tuple[int, ...] = ()

    def packer(self, state: SourceState | None = None, chunk_rows: int = 0) -> BestFitPacker:
        return BestFitPacker(
            self.documents(chunk_rows),
            state or SourceState(),
            source_id=SOURCE_ID,
            form=self.form,
            window=self.window,
            seed=SEED,
            closed_before=self.closed_before,
        )


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


def windows(case: BestFit) -> Iterator[list[tuple[int, int, int, list[int]]]]:
    """(epoch, shard, row, tokens) of the rows of each window."""
    for rows in case.rows():
        window: list[tuple[int, int, int, list[int]]] = []
        for row in rows:
            closes = window and any(
                window[-1][1] < closed <= row[1] for closed in case.closed_before
            )
            tokens = sum(len(ids) for *_, ids in window)
            if closes or len(window) == case.window.rows or tokens >= case.window.tokens:
                yield window
                window = []
            window.append(row)
        if window:
            yield window


def expected(case: BestFit) -> Iterator[Sample]:
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
        bins = [
            bins[i] for _, i in sorted((draw(key, Purpose.PACK, 0, i), i) for i in range(len(bins)))
        ]
        given_out = [
            [each for each in its if window[each[0]][1:3] not in case.excluded] for its in bins
        ]
        last = max((i for i, its in enumerate(given_out) if its), default=None)
        for rank, its in enumerate(given_out):
            if not its:
                continue
            ids = tuple(chain.from_iterable(window[row][3][begin:end] for row, begin, end in its))
            cut = sum(begin == 0 and end < len(window[row][3]) for row, begin, end in its)
            row_counts = row_counts._replace(
                padding_tokens=row_counts.padding_tokens + case.padding_tokens(ids),
                cut_documents=row_counts.cut_documents + cut,
            )
            ends = np.cumsum([end - begin for _, begin, end in its])
            starts = [0, *ends[:-1].tolist()]
            raw = case.raw(ids)
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
                tuple(start + (width - len(ids)) * case.left for start in starts),
                xxhash.xxh3_128_intdigest(raw, SOURCE_ID),
            )
        passed += len(window)


cases = st.builds(
    BestFit,
    **FIELDS,
    window=st.builds(Window, st.integers(1, 12), st.integers(12, 60)),
    excluded=st.frozensets(st.tuples(st.integers(0, 2), st.integers(0, 7)), max_size=4),
    closed_before=st.sampled_from([(), (1,), (1, 2)]),
).filter(Case.has_tokens)


@given(cases)
@settings(max_examples=100, deadline=None)
def test_samples_places_and_counters_are_those_of_the_definition(case: BestFit) -> None:
    assert case.samples(60) == list(islice(expected(case), 60))


@given(cases, st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_a_packer_goes_on_from_every_sample_whatever_the_chunks(
    case: BestFit, chunk_rows: int
) -> None:
    case.check_that_it_goes_on_from_every_sample(chunk_rows)


@given(cases, st.integers(1, 20), st.tuples(st.integers(0, 2), st.integers(0, 7)))
@settings(max_examples=40, deadline=None)
def test_rows_that_are_excluded_within_a_window_do_not_move_the_others(
    case: BestFit, k: int, more: tuple[int, int]
) -> None:
    changed = replace(case, excluded=case.excluded | {more})
    samples = case.samples(40)[:k]
    if not samples or not changed.has_tokens():
        return
    state = state_after(samples, case.length)
    before, now = case.samples(20, state), changed.samples(20, state)
    # What comes is what would have come, without the row's tokens.
    shard, at = more
    gone = (
        case.shards[shard][at]
        if shard < len(case.shards) and at < len(case.shards[shard])
        else None
    )
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


@given(st.lists(st.integers(1, 20), max_size=60))
@settings(max_examples=100, deadline=None)
def test_no_two_bins_could_be_one(lengths: list[int]) -> None:
    placed, bins = best_fit(np.array(lengths, np.int64), 20)
    sums = sorted(np.bincount(placed, lengths, bins).tolist())
    assert all(0 < total <= 20 for total in sums)
    assert len(sums) < 2 or sums[0] + sums[1] > 20


def test_a_state_after_more_samples_than_the_window_has_is_refused() -> None:
    case = BestFit((((1, 2, 3), (4, 5)),), 4)
    with pytest.raises(
        SourceError, match=r"stands after 7 samples of the window .* row 0 of shard-0"
    ):
        case.samples(
            1, SourceState(cursor=PackedCursor(FileCursor(0, 0, 0), 7), samples=7, tokens=28)
        )


@pytest.mark.parametrize("epochs", [0.5, 1.0, math.inf])
def test_an_epoch_of_which_every_row_is_excluded_is_an_error(epochs: float) -> None:
    case = BestFit((((1, 2), (3,)),), epochs=epochs, excluded=frozenset({(0, 0), (0, 1)}))
    with pytest.raises(SourceError, match="memory: epoch 0 has no token in any of its rows"):
        case.samples(1)


def test_files_that_came_later_leave_the_windows_before_them_as_they_were() -> None:
    rows = tuple((i, i + 1, i + 2)[: 1 + i % 3] for i in range(11))
    before, after = BestFit((rows,), 4), BestFit((rows, rows), 4, closed_before=(1,))
    samples = before.samples(99)
    for k in range(1, len(samples)):
        state = state_after(samples[:k], 4)
        assert after.samples(99, state)[: len(samples) - k] == samples[k:]
