"""Shuffled sources: every row once per epoch, from any cursor on, whatever was left out, in bounded memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenloom_server.core.state import Cursor, FileCursor, WindowCursor
from tokenloom_server.errors import SourceError
from tokenloom_server.packing import window
from tokenloom_server.packing.documents import Documents
from tokenloom_server.packing.reading import FileOrder, Layout, Reading, ShuffledFiles, Windows
from tokenloom_server.sources.base import Content, Rows, Shard
from tokenloom_server.tokenizer.documents import DocumentEncoder

KINDS = ("none", "shards", "rows")
SEED, SOURCE_ID = 11, 4


class Numbered:
    """Implements ``Source``: row r of shard s has the ids (s, r), and some more of them; every fifth row is empty.
    ``reads``: what was opened."""

    content = Content.IDS

    def __init__(
        self, counts: list[int], block: int = 3, chunk_rows: int = 2, more: int = 0
    ) -> None:
        self._counts = counts
        self._block = block
        self._chunk_rows = chunk_rows
        self._more = more
        self.shards = tuple(Shard(f"shard-{i}", 1, "") for i in range(len(counts)))
        self.reads: list[tuple[int, int]] = []

    def row_count(self, shard: int) -> int:
        return self._counts[shard]

    def blocks(self, shard: int) -> npt.NDArray[np.int64]:
        return np.array([*range(0, self._counts[shard], self._block), self._counts[shard]])

    def read(self, shard: int, row: int) -> Iterator[Rows]:
        self.reads.append((shard, row))
        for first in range(row, self._counts[shard], self._chunk_rows):
            rows = range(first, min(first + self._chunk_rows, self._counts[shard]))
            ids = [
                [] if r % 5 == 4 else [shard, r % 200, r // 200, *[9] * self._more] for r in rows
            ]
            yield Rows(first, pa.array(ids, pa.list_(pa.int32())))


@dataclass(frozen=True)
class Taken:
    """A row that came: its cursor, its origin, and its tokens."""

    cursor: FileCursor | WindowCursor
    origin: tuple[int, int]
    ids: tuple[int, ...]


def reading_of(kind: str, source: Numbered, window_rows: int = 7, seed: int = SEED) -> Reading:
    match kind:
        case "none":
            return FileOrder(source)
        case "shards":
            return ShuffledFiles(source, seed, SOURCE_ID)
    return Windows(
        Layout.of([source.blocks(shard) for shard in range(len(source.shards))]),
        seed,
        SOURCE_ID,
        window_rows,
    )


def documents_of(
    kind: str,
    source: Numbered,
    epochs: float = 2,
    lane: tuple[int, int] = (0, 1),
    excluded: Any = None,
    **more: Any,
) -> Documents:
    encoder = DocumentEncoder(None, vocab_size=300, eot_id=299)
    return Documents(
        "numbered", source, encoder, epochs, excluded, reading_of(kind, source, **more), lane
    )


def rows_of(documents: Documents, start: Cursor | None) -> Iterator[Taken]:
    for rows in documents.read(start):
        begins = [0, *rows.ends.tolist()]
        for index, (begin, end) in enumerate(pairwise(begins)):
            cursor = documents.cursor_kind(rows.epoch, rows.part, rows.first_row + index)
            yield Taken(cursor, rows.origin(index), tuple(rows.ids[begin:end].tolist()))


def read(documents: Documents, start: Cursor | None = None) -> list[Taken]:
    return list(rows_of(documents, start))


def origins(taken: list[Taken], epoch: int = 0) -> list[tuple[int, int]]:
    return [row.origin for row in taken if row.cursor.epoch == epoch]


COUNTS = st.lists(st.integers(0, 23), min_size=1, max_size=5).filter(lambda counts: max(counts) > 0)


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    counts=COUNTS,
    block=st.integers(1, 9),
    chunk_rows=st.integers(1, 5),
    window_rows=st.integers(2, 12),
    lanes=st.integers(1, 4),
    held_bytes=st.integers(1, 200),
)
def test_every_epoch_has_every_row_once_with_its_own_tokens(
    kind: str,
    counts: list[int],
    block: int,
    chunk_rows: int,
    window_rows: int,
    lanes: int,
    held_bytes: int,
) -> None:
    every = [(shard, row) for shard, rows in enumerate(counts) for row in range(rows)]
    lanes = min(lanes, 1 if len(every) < 10 * lanes else lanes)
    window_rows = max(
        1, min(window_rows, len(every) // lanes)
    )  # as orders have it: a lane has a window at least
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window, "WINDOW_BYTES", held_bytes)
        found: list[Taken] = []
        for lane in range(lanes):
            source = Numbered(counts, block, chunk_rows)
            found += read(documents_of(kind, source, lane=(lane, lanes), window_rows=window_rows))
    for epoch in range(2):
        assert sorted(origins(found, epoch)) == every
    for row in found:
        shard, number = row.origin
        assert row.ids == (() if number % 5 == 4 else (shard, number % 200, number // 200, 299))


@pytest.mark.parametrize("lane", [(0, 1), (1, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_reading_goes_on_from_every_cursor(
    kind: str, lane: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A window of several portions, which end where they did, however many rows come at once.
    monkeypatch.setattr(window, "WINDOW_BYTES", 40)
    counts = [13, 0, 21, 8]
    whole = read(documents_of(kind, Numbered(counts), 2.5, lane))
    assert {row.cursor.epoch for row in whole} == {0, 1, 2}
    for at, row in enumerate(whole):
        before = whole[at - 1].cursor
        # As a state has it: after the row before, or within the row.
        cursors = [replace(before, row=before.row + 1)] if at else []
        cursors += [replace(row.cursor, tokens=1)] if row.ids else []
        for cursor in cursors:
            again = read(
                documents_of(kind, Numbered(counts, chunk_rows=1 + at % 4), 2.5, lane), cursor
            )
            assert again == whole[at:]


@pytest.mark.parametrize("kind", KINDS)
def test_excluded_rows_have_no_tokens_and_move_no_other(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "WINDOW_BYTES", 60)
    counts, out = [13, 21, 8], {0: np.array([0, 3, 12]), 2: np.array([1, 2, 3, 4, 5])}
    whole = read(documents_of(kind, Numbered(counts)))
    left = read(documents_of(kind, Numbered(counts), excluded=out))
    gone = {(shard, row) for shard, rows in out.items() for row in rows.tolist()}
    expected = [
        Taken(row.cursor, row.origin, () if row.origin in gone else row.ids) for row in whole
    ]
    assert left == expected
    for at, row in enumerate(whole):
        if row.ids:
            # A row that a sample has begun is read to its end, though it was excluded since.
            start = replace(row.cursor, tokens=1)
            again = read(documents_of(kind, Numbered(counts), excluded=out), start)
            assert again == [row, *expected[at + 1 :]]


@pytest.mark.parametrize("kind", ["shards", "rows"])
def test_epochs_and_seeds_have_orders_of_their_own(kind: str) -> None:
    counts = [9] * 8
    found = read(documents_of(kind, Numbered(counts), 4))
    orders = [tuple(origins(found, epoch)) for epoch in range(4)]
    orders += [
        tuple(origins(read(documents_of(kind, Numbered(counts), 1, seed=seed))))
        for seed in (1, 2, 3)
    ]
    assert len(set(orders)) == 7
    assert sorted(orders[0]) not in orders


def test_a_file_that_was_appended_has_its_turn_among_the_others() -> None:
    counts = [5] * 12
    before = [
        shard for shard, row in origins(read(documents_of("shards", Numbered(counts)))) if row == 0
    ]
    after = [
        shard
        for shard, row in origins(read(documents_of("shards", Numbered([*counts, 5, 5]))))
        if row == 0
    ]
    # Those of before keep their order, so a cursor that stands in one has the same ones after it.
    assert [shard for shard in after if shard < 12] == before
    middle = before[6]
    at = FileCursor(0, middle, 2)
    found = read(documents_of("shards", Numbered([*counts, 5, 5]), 2), at)
    late = [shard for shard in (12, 13) if after.index(shard) < after.index(middle)]
    here = [shard for shard, row in origins(found, 0) if row == 0]
    assert here == after[after.index(middle) + 1 :]
    assert not set(late) & set(here)
    assert sorted({shard for shard, _ in origins(found, 1)}) == list(range(14))


def test_a_part_of_an_epoch_is_its_first_rows_in_its_order() -> None:
    for kind in KINDS:
        whole = origins(read(documents_of(kind, Numbered([13, 21, 8]), 1)))
        assert origins(read(documents_of(kind, Numbered([13, 21, 8]), 0.4))) == whole[:17]
        lanes = [
            origins(read(documents_of(kind, Numbered([13, 21, 8]), 1.4, (lane, 3))), 1)
            for lane in range(3)
        ]
        alone = origins(read(documents_of(kind, Numbered([13, 21, 8]), 1.4)), 1)
        assert sorted(chain.from_iterable(lanes)) == sorted(alone)


def test_a_window_that_ends_within_a_block_does_not_begin_it_again() -> None:
    source = Numbered([100, 100], block=50, chunk_rows=7)
    found = read(documents_of("rows", source, 1, window_rows=11))
    assert len(found) == 200
    # Each of four blocks once, or two in one go where they follow each other.
    assert len(source.reads) <= 4


def test_a_window_reaches_over_blocks_of_several_files() -> None:
    found = origins(read(documents_of("rows", Numbered([30, 30, 30], block=3), 1, window_rows=30)))
    for begin in range(0, 90, 30):
        assert len({shard for shard, _ in found[begin : begin + 30]}) == 3


def test_a_lane_without_tokens_is_refused_by_name() -> None:
    source = Numbered([3])
    with pytest.raises(
        SourceError, match="lane 0 of 8 has no token in any of its rows of epoch 0; read"
    ):
        read(documents_of("none", source, lane=(0, 8)))


def test_a_lane_without_tokens_in_some_epoch_goes_on_with_the_next() -> None:
    def taken(start: Cursor | None = None) -> list[Taken]:
        # Six rows in six lanes, of which one is empty: another lane's in each epoch.
        source = Numbered([6], block=1)
        return [
            row
            for row in read(documents_of("rows", source, 30, (1, 6), window_rows=1), start)
            if row.ids
        ]

    whole = taken()
    epochs = [row.cursor.epoch for row in whole]
    assert epochs[0] == 0 and 15 < len(epochs) < 30
    for at, row in enumerate(whole):
        assert taken(replace(row.cursor, row=row.cursor.row + 1)) == whole[at + 1 :]


def test_a_lane_that_never_has_tokens_is_refused_after_some_epochs() -> None:
    excluded = {0: np.arange(6)}
    documents = documents_of(
        "rows", Numbered([6], block=1), float("inf"), (1, 6), excluded, window_rows=1
    )
    with pytest.raises(
        SourceError, match="lane 1 of 6 has no token in any of its rows of epoch 65"
    ):
        list(documents.read(WindowCursor(1, 0, 6)))


def test_a_file_that_ends_before_its_index_says_is_named() -> None:
    source = Numbered([30])
    documents = documents_of("rows", source)
    source._counts = [20]
    with pytest.raises(SourceError, match=r"shard-0 ends at row \d+, where its index has"):
        read(documents)


def test_what_is_held_of_a_window_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = 1 << 20
    monkeypatch.setattr(window, "WINDOW_BYTES", bound)
    # 32 MiB of ids in one window, by rows.
    source = Numbered([4000], block=100, chunk_rows=50, more=2045)
    chunks = documents_of("rows", source, 1, window_rows=4000).read(None)
    begin, most, count = pa.total_allocated_bytes(), 0, 0
    tracemalloc.start()
    try:
        for rows in chunks:
            most = max(most, pa.total_allocated_bytes() - begin)
            count += len(rows.ends)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 4000
    assert most + peak < 6 * bound


def ranks(kind: str, counts: list[int], block: int, **more: Any) -> npt.NDArray[np.int64]:
    """Where each row of the order lies in the files, counted over all of them."""
    before = np.cumsum([0, *counts])
    found = origins(read(documents_of(kind, Numbered(counts, block, 64), 1, **more)))
    return np.array([before[shard] + row for shard, row in found])


def test_shuffled_rows_have_nothing_of_the_order_that_they_lie_in() -> None:
    counts = [2500] * 8
    found = ranks("rows", counts, 25, window_rows=1000)
    count = len(found)
    assert abs(np.corrcoef(np.arange(count), found)[0, 1]) < 0.05
    # Neighbours lie as far from each other as two rows that were drawn at random: a third of the source.
    spread = float(np.abs(np.diff(found)).mean()) / count
    assert 0.31 < spread < 0.35
    # Forty blocks in a window: rarely two of the same one after the other.
    assert float((found[1:] // 25 == found[:-1] // 25).mean()) < 0.05
    files = ranks("shards", counts, 25)
    assert float((np.abs(np.diff(files)) == 1).mean()) > 0.99
