"""Where another loader's row offsets lie: counted through the whole spec or within a shard, and how one is told from
the other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.corpora import CODE, DOCS, PROSE, advanced, flat, mixture, order_of, write_parquet
from support.imports import import_entries, state_of
from tokenloom_server.core.state import FileCursor, SourceState
from tokenloom_server.errors import SnapshotInvalid
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.timeline import Timeline

#: 14 and 12 rows; 12 and 10; 9.
SHARDS = {CODE: "data/code-{}.parquet", PROSE: "data/prose/{}.txt", DOCS: "data/docs.jsonl"}
TRAIN = "parquet:train-*-of-01024.parquet:ids"


@pytest.fixture(scope="module")
def order(folder: Path) -> PipelineFactory:
    """Two epochs of each source."""
    document = flat([CODE, PROSE, DOCS])
    for child in document["mixture"]["children"]:
        child["epochs"] = 2
    return order_of(folder, document)


def entry(spec: str, row_offset: int, shard: int | None = None, **more: Any) -> dict[str, Any]:
    named = {} if shard is None else {"shard": SHARDS[spec].format(shard)}
    return {"spec": spec, **named, "row_offset": row_offset, "token_offset": 80, **more}


def first_source(order: PipelineFactory, *entries: dict[str, Any], **beside: Any) -> SourceState:
    """The first source that an import gives a place."""
    base = state_of(import_entries(order, *entries, **beside))
    return next(source for source in base.sources if source.cursor is not None)


# --- Without a shard ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "row_offset", "cursor"),
    [
        (CODE, 0, FileCursor(0, 0, 0)),
        (CODE, 13, FileCursor(0, 0, 13)),
        (CODE, 14, FileCursor(0, 1, 0)),
        (CODE, 25, FileCursor(0, 1, 11)),
        (CODE, 26, FileCursor(1, 0, 0)),
        (CODE, 26 + 14 + 3, FileCursor(1, 1, 3)),
        (CODE, 2 * 26, FileCursor(1, 1, 12)),  # the end of the last epoch
        (PROSE, 12, FileCursor(0, 1, 0)),
        (PROSE, 22 + 13, FileCursor(1, 1, 1)),
        (DOCS, 9 + 8, FileCursor(1, 0, 8)),
    ],
)
def test_a_row_offset_without_a_shard_counts_rows_of_the_whole_spec_and_wraps(
    order: PipelineFactory, spec: str, row_offset: int, cursor: FileCursor
) -> None:
    source = first_source(order, entry(spec, row_offset))
    assert source.cursor == cursor
    assert (source.rows, source.tokens) == (row_offset, 80)


def test_within_a_named_epoch_a_row_offset_does_not_wrap(order: PipelineFactory) -> None:
    source = first_source(order, entry(CODE, 14 + 5, epoch=1))
    assert (source.cursor, source.rows) == (FileCursor(1, 1, 5), 26 + 14 + 5)
    assert first_source(order, entry(CODE, 26, epoch=1)).cursor == FileCursor(1, 1, 12)
    with pytest.raises(
        SnapshotInvalid, match=r"row_offset is 27, but it names no shard; .* after the end of it"
    ):
        import_entries(order, entry(CODE, 27, epoch=1))


def test_more_epochs_than_the_mixture_reads_are_refused(order: PipelineFactory) -> None:
    with pytest.raises(
        SnapshotInvalid, match="epoch is 2, but the mixture file reads the source for 2 epochs"
    ):
        import_entries(order, entry(CODE, 2 * 26 + 1))


# --- With a shard ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> PipelineFactory:
    """Ninety shards of 1,475 rows."""
    folder = tmp_path_factory.mktemp("train")
    first = folder / "train-00000-of-01024.parquet"
    write_parquet(first, [[i % 250] for i in range(1475)], group=1475)
    for shard in range(1, 90):
        shutil.copy(first, folder / f"train-{shard:05}-of-01024.parquet")
    return order_of(folder, flat([TRAIN]))


def of_train(row_offset: int, shard: int, **more: Any) -> dict[str, Any]:
    return {
        "spec": TRAIN,
        "shard": f"train-{shard:05}-of-01024.parquet",
        "row_offset": row_offset,
        **more,
    }


@pytest.mark.parametrize(
    ("row_offset", "shard", "row"),
    [
        (128400, 87, 75),
        (87 * 1475, 87, 0),
        (88 * 1475, 87, 1475),  # its very end
        (88 * 1475, 88, 0),
        (90 * 1475, 89, 1475),
        (75, 87, 75),  # within the shard alone
        (0, 87, 0),
        (1475, 87, 1475),
        (75, 0, 75),  # both agree in the first one
        (1475, 0, 1475),
    ],
)
def test_of_both_readings_the_one_that_fits_holds(
    train: PipelineFactory, row_offset: int, shard: int, row: int
) -> None:
    source = first_source(train, of_train(row_offset, shard))
    assert (source.cursor, source.rows) == (FileCursor(0, shard, row), shard * 1475 + row)


def test_where_both_fit_and_differ_it_must_be_said_which(train: PipelineFactory) -> None:
    said = (
        r"datasets\.0 .*: row_offset is 1475, but train-00001-of-01024\.parquet has 1475 rows; counted through the "
        r"whole spec that is row 0 of train-00001-of-01024\.parquet: say which .* row_offset_of: shard or spec"
    )
    with pytest.raises(SnapshotInvalid, match=said):
        import_entries(train, of_train(1475, 1))
    shard, spec = {"row_offset_of": "shard"}, {"row_offset_of": "spec"}
    # What an entry says itself comes first.
    for own, beside, row in (
        (shard, {}, 1475),
        ({}, shard, 1475),
        (spec, {}, 0),
        ({}, spec, 0),
        (spec, shard, 0),
    ):
        source = first_source(train, of_train(1475, 1, **own), **beside)
        assert source.cursor == FileCursor(0, 1, row)


@pytest.mark.parametrize("more", [{}, {"row_offset_of": "spec"}, {"row_offset_of": "shard"}])
def test_where_neither_fits_it_is_refused_with_both(
    train: PipelineFactory, more: dict[str, str]
) -> None:
    said = r"row_offset is 128400, but train-00003-of-01024\.parquet has 1475 rows"
    if more != {"row_offset_of": "shard"}:
        said += r".* whole spec that is row 75 of train-00087-of-01024\.parquet"
    with pytest.raises(SnapshotInvalid, match=said):
        import_entries(train, of_train(128400, 3, **more))


def test_what_was_said_otherwise_is_refused(train: PipelineFactory) -> None:
    with pytest.raises(
        SnapshotInvalid, match="row_offset_of: found 'rows'; Input should be 'spec' or 'shard'"
    ):
        import_entries(train, of_train(75, 3, row_offset_of="rows"))
    with pytest.raises(SnapshotInvalid, match="row_offset is 75, but it names no shard"):
        import_entries(train, {"spec": TRAIN, "row_offset": 75, "row_offset_of": "shard"})


def test_an_epoch_of_the_spec_wraps_into_the_named_shard(order: PipelineFactory) -> None:
    for place, cursor in (
        (entry(CODE, 26 + 14 + 3, 1), FileCursor(1, 1, 3)),
        (entry(DOCS, 9 + 3, 0), FileCursor(1, 0, 3)),
        (entry(DOCS, 9, 0), FileCursor(0, 0, 9)),
        (entry(CODE, 14 + 3, 1, epoch=1), FileCursor(1, 1, 3)),
    ):
        assert first_source(order, place).cursor == cursor


def test_our_own_payloads_count_within_the_shard(train: PipelineFactory) -> None:
    timeline = Timeline(train)
    # One row of one id and the end of its text is a quarter of a sample of 8: three rows of the next shard.
    state = advanced(timeline, state_of(import_entries(train, of_train(1474, 1))), 1)
    ours = json.loads(timeline.encode(state))["datasets"][0]
    assert (ours["shard_index"], ours["row_offset"]) == (2, 3)
    whole = {**ours, "shard": "train-00001-of-01024.parquet", "shard_index": 1, "row_offset": 1475}
    copied = {
        name: whole[name]
        for name in ("spec", "shard", "shard_index", "row_offset", "samples", "rows")
    }
    for own in (whole, copied):
        assert first_source(train, own).cursor == FileCursor(0, 1, 1475)


def test_our_own_source_that_has_not_begun_begins(order: PipelineFactory) -> None:
    timeline = Timeline(order)
    ours = json.loads(timeline.encode(advanced(timeline, timeline.initial(), 2)))["datasets"]
    assert [entry["samples"] for entry in ours] == [1, 0, 1]
    base = state_of(import_entries(order, *ours))
    assert (base.sources[1].cursor, base.sources[1].rows) == (FileCursor(0, 0, 0), 0)
    # An entry that says nothing of that, or has given samples, names a row.
    for missing in ({"spec": DOCS}, {**ours[1], "samples": 1}):
        with pytest.raises(SnapshotInvalid, match="row_offset: found nothing"):
            import_entries(order, missing)


def test_what_was_not_in_file_order_when_it_was_saved_is_refused(train: PipelineFactory) -> None:
    ours = {"spec": TRAIN, "samples": 9, "rows": 75, "token_offset": 72}
    for drawn in (
        of_train(75, 3, shuffle="shards"),
        of_train(75, 3, shuffle=True),
        of_train(75, 3, lanes=[{"row_offset": 3}]),
        {**ours, "window": 0, "window_row": 75},
        {**ours, "epoch_rows": 75},
    ):
        with pytest.raises(
            SnapshotInvalid,
            match=r"datasets\.0 .*: it was shuffled or read in lanes, so row_offset is no",
        ):
            import_entries(train, drawn)
    for plain in ({"shuffle": "none"}, {"shuffle": False}, {"lanes": []}):
        assert first_source(train, of_train(75, 3, **plain)).cursor == FileCursor(0, 3, 75)


def test_resume_lines_of_imports_say_row_and_offset_as_others_do(train: PipelineFactory) -> None:
    assert import_entries(train, of_train(128400, 87, token_offset=80)).notes[:-1] == (
        f"resume: spec={TRAIN} sample_row=128400 shard=train-00087-of-01024.parquet offset=75 row_offset=128400 "
        "tokens=80 (from an older checkpoint)",
    )


def test_a_preserved_entry_keeps_what_was_said_beside_the_entries(folder: Path) -> None:
    order = order_of(folder, mixture())
    gone = {"spec": "gone:a:b", "row_offset": 9}
    state = state_of(import_entries(order, entry(DOCS, 4), gone, row_offset_of="spec"))
    assert [json.loads(text) for text in state.preserved] == [
        {"spec": "gone:a:b", "row_offset": 9, "row_offset_of": "spec"}
    ]
