"""``balance_remaining`` ends together, however long the rows of a source are from its first to its last."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import corpora
from support.corpora import advanced, reread
from support.mixing import node
from support.timelines import revised
from tokenloom_server.core.state import State
from tokenloom_server.errors import SourceError
from tokenloom_server.order import builder, size_estimates
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.segments import measured_ahead
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.sources.base import Rows
from tokenloom_server.sources.parquet import ParquetSource

LENGTH = 16
#: Samples between the last of the first source that ends and the end of the run, where sources are read whole.
TOGETHER = 16
#: And where a few places of each were looked at.
NEARLY = 256


def lengths(shape: str, rows: int, seed: int) -> npt.NDArray[np.int64]:
    at, rng = np.arange(rows), np.random.default_rng(seed)
    match shape:
        case "rising":
            return 4 + 36 * at // rows
        case "falling":
            return (4 + 36 * at // rows)[::-1]
        case "up":
            return np.where(at < 2 * rows // 3, 4, 40)
        case "down":
            return np.where(at < 2 * rows // 3, 40, 4)
        case "heavy":
            return np.minimum(2000, rng.pareto(1.3, rows) * 8 + 1).astype(np.int64)
        case "flat":
            return np.full(rows, 20)
    return rng.integers(1, 40, rows)


def write(path: Path, of: npt.NDArray[np.int64], group: int = 1000) -> None:
    ends = np.concatenate(([0], np.cumsum(of))).astype(np.int32)
    ids = pa.ListArray.from_arrays(pa.array(ends), pa.array(np.full(ends[-1], 7, np.uint16)))
    pq.write_table(pa.table({"ids": ids}), path, row_group_size=group)


def order_of(
    folder: Path,
    shapes: Sequence[str],
    rows: Sequence[int],
    seed: int,
    policy: str = "balance_remaining",
    **of: Any,
) -> PipelineFactory:
    children = []
    for i, (shape, count) in enumerate(zip(shapes, rows, strict=True)):
        write(folder / f"{i}.parquet", lengths(shape, count, seed + i))
        children.append({"source": f"parquet:{i}.parquet:ids", "alias": shape, **of})
    mixture = node(policy, *children)
    return corpora.order_of(
        folder, corpora.mixture(mixture=mixture, sequence_length=LENGTH, seed=seed)
    )


def gone_through(order: PipelineFactory | Timeline, step: int) -> list[State]:
    pipeline, states = order.pipeline(order.initial()), [order.initial()]
    while pipeline.ended is None:
        pipeline.advance(step)
        states.append(pipeline.state())
    return states


def apart(states: Sequence[State]) -> int:
    """Samples between the first source's last one and the last source's."""
    end = [source.samples for source in states[-1].sources]
    lasts = [
        next(
            after.sample_index
            for after in states
            if i < len(after.sources) and after.sources[i].samples == count
        )
        for i, count in enumerate(end)
    ]
    return max(lasts) - min(lasts)


def last_quarter(states: Sequence[State]) -> npt.NDArray[np.float64]:
    """Each source's share of the last quarter, by its share of the run."""
    end = states[-1]
    begin = next(state for state in states if state.sample_index >= 3 * end.sample_index // 4)
    given = np.array([[source.samples for source in state.sources] for state in (begin, end)])
    return (
        (given[1] - given[0])
        / (end.sample_index - begin.sample_index)
        / (given[1] / end.sample_index)
    )


MIXES = [
    (["flat", "rising"], [30_000, 30_000]),
    (["flat", "falling"], [30_000, 30_000]),
    (
        ["rising", "falling", "up", "down", "random", "flat"],
        [9_000, 8_000, 10_000, 9_000, 12_000, 7_000],
    ),
    (["heavy", "rising", "random"], [9_000, 30_000, 12_000]),
]


def longest(shapes: Sequence[str], rows: Sequence[int], seed: int) -> int:
    """Samples that the longest row of all makes."""
    return (
        max(
            int(lengths(shape, count, seed + i).max())
            for i, (shape, count) in enumerate(zip(shapes, rows, strict=True))
        )
        // LENGTH
    )


@pytest.mark.parametrize(("shapes", "rows"), MIXES, ids=lambda value: "-".join(map(str, value)))
@pytest.mark.parametrize(
    ("seed", "read_bytes"), [(1, 1 << 25), (2, 1 << 14)], ids=["whole", "sampled"]
)
def test_what_grows_and_what_shrinks_end_together(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shapes: list[str],
    rows: list[int],
    seed: int,
    read_bytes: int,
) -> None:
    # Sampled: of a source's mebibyte 64 places of 256 bytes, some six rows each.
    monkeypatch.setattr(size_estimates, "READ_BYTES", read_bytes)
    monkeypatch.setattr(size_estimates, "ENCODED_BYTES", read_bytes)
    states = gone_through(order_of(tmp_path, shapes, rows, seed), 4)
    is_whole = read_bytes == 1 << 25
    assert apart(states) <= (TOGETHER if is_whole else NEARLY) + longest(shapes, rows, seed)
    # And up to there nobody has more or less than its share.
    assert last_quarter(states) == pytest.approx(1, abs=0.01 if is_whole else 0.1)


@pytest.mark.parametrize("epochs", [0.6, 2.5])
def test_epochs_and_parts_of_them_end_together(tmp_path: Path, epochs: float) -> None:
    states = gone_through(
        order_of(tmp_path, ["rising", "falling", "up"], [4_000, 5_000, 3_000], 1, epochs=epochs), 4
    )
    assert apart(states) <= TOGETHER


@pytest.mark.parametrize("shuffle", ["shards", "rows"])
def test_shuffled_sources_end_together(tmp_path: Path, shuffle: str) -> None:
    children = []
    for i, shape in enumerate(("rising", "falling", "up")):
        for shard, part in enumerate(np.array_split(lengths(shape, 9_000, 1), 5)):
            write(tmp_path / f"{i}-{shard}.parquet", part, group=100)
        children.append({"source": f"parquet:{i}-*.parquet:ids", "shuffle": shuffle, "epochs": 2})
    mixture = node("balance_remaining", *children)
    order = corpora.order_of(tmp_path, corpora.mixture(mixture=mixture, sequence_length=LENGTH))
    strata = [len(estimate.rows) - 1 for estimate in order.record.size_estimates.values()]
    # Of shuffled files the curve is in the order of the last epoch; a shuffle of rows mixes them.
    assert strata == ([60] * 3 if shuffle == "shards" else [1] * 3)
    states = gone_through(order, 4)
    assert apart(states) <= NEARLY
    if shuffle == "shards":
        end = order.record.size_estimates[0]
        # The first file of the last epoch, by its rows of 4 to 11 or of 33 to 39 tokens, is what the curve begins with.
        first = order.readers.reading(0, order.readers.open(0)).parts(1)[0]
        written = int(np.array_split(lengths("rising", 9_000, 1), 5)[first].sum()) + 1_800
        assert end.tokens_before(1_800) == pytest.approx(written, abs=2)


def test_much_text_is_measured_all_over_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size_estimates, "COUNTED_BYTES", 1 << 14)
    monkeypatch.setattr(size_estimates, "READ_BYTES", 1 << 16)
    monkeypatch.setattr(size_estimates, "ENCODED_BYTES", 1 << 16)
    children = []
    for i, shape in enumerate(("rising", "falling", "flat")):
        corpora.write_jsonl(
            tmp_path / f"{i}.jsonl", ["x" * length for length in lengths(shape, 20_000, 1).tolist()]
        )
        children.append({"source": f"jsonl:{i}.jsonl:text"})
    mixture = node("balance_remaining", *children)
    document = corpora.mixture(mixture=mixture, sequence_length=LENGTH)
    order = builder.create(corpora.parsed(document), tmp_path, tmp_path / "index")
    assert not list((tmp_path / "index").glob("lines-*"))
    for estimate in order.record.size_estimates.values():
        assert (len(estimate.rows), estimate.epoch_rows) == (65, pytest.approx(20_000, rel=0.01))
    states = gone_through(order, 4)
    # How many rows there are is an estimate, too.
    assert apart(states) <= 0.01 * states[-1].sample_index


def test_a_bad_line_amid_much_text_is_named_by_the_run_that_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size_estimates, "COUNTED_BYTES", 1 << 10)
    corpora.write_jsonl(tmp_path / "a.jsonl", ["x" * 20] * 2_000)
    lines = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_text("".join([*lines[:1_200], "{\n", *lines[1_200:]]))
    order = corpora.order_of(tmp_path, corpora.flat(["jsonl:a.jsonl:text"], "balance_remaining"))
    assert order.record.size_estimates[0].epoch_rows == pytest.approx(2_001, rel=0.01)
    with pytest.raises(SourceError, match=r"'a\.jsonl': line 1201 "):
        gone_through(order, 64)


def test_a_run_goes_on_by_the_curves_of_its_record_and_reads_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = order_of(tmp_path, ["rising", "falling", "heavy"], [700, 600, 300], 1)
    record = order.record.to_json()
    monkeypatch.setattr(builder, "measure", None)
    again = builder.load(order.config, tmp_path, None, record)
    assert again.record.size_estimates == order.record.size_estimates
    assert again.record.to_json() == record
    # Exactly so from every index.
    states = gone_through(order, 1)
    for before, after in pairwise(states[:-1]):
        assert advanced(again, reread(again, before), 1) == after
    for begin in range(0, len(states), 97):
        assert advanced(again, reread(again, states[begin]), 10**6) == states[-1]


def test_what_a_revision_adds_is_measured_once_and_kept_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = order_of(tmp_path, ["rising", "falling"], [3_000, 3_000], 1)
    write(tmp_path / "more.parquet", lengths("up", 3_000, 1))
    added = {"child": {"source": "parquet:more.parquet:ids"}}
    (revision,) = revised(Timeline(order), 2_000, add=[added]).revisions
    # What the run's record has is not in every state that carries the revision.
    assert set(json.loads(revision.content)["size_estimates"]) == {"2"}
    monkeypatch.setattr(builder, "measure", None)
    timeline = Timeline(order, [revision])
    assert timeline.at(2_000).record.size_estimates.keys() == {0, 1, 2}
    assert apart(gone_through(timeline, 4)) <= TOGETHER


def reads_of(order: PipelineFactory, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows from which on a source is read when it is measured."""
    reads, read = [], ParquetSource.read

    def counted(source: ParquetSource, shard: int, row: int) -> Iterator[Rows]:
        reads.append(row)
        return read(source, shard, row)

    monkeypatch.setattr(ParquetSource, "read", counted)
    assert len(size_estimates.measure(order, 0).rows) == 65
    return reads


def test_a_small_source_is_read_from_its_beginning_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = order_of(tmp_path, ["rising"], [5_000], 1, policy="least_consumed")
    assert reads_of(order, monkeypatch) == [0]


@pytest.mark.parametrize(("group", "reads"), [(20, 64), (1_500, 1)])
def test_no_block_of_a_large_source_is_begun_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: int, reads: int
) -> None:
    monkeypatch.setattr(size_estimates, "READ_BYTES", 1 << 10)
    write(tmp_path / "0.parquet", lengths("rising", 6_000, 1), group=group)
    order = corpora.order_of(tmp_path, corpora.flat(["parquet:0.parquet:ids"]))
    begun = reads_of(order, monkeypatch)
    assert (len(set(begun)), [row % group for row in begun]) == (reads, [0] * reads)


@pytest.mark.parametrize("begins_with", [["rising", "falling"], ["rising", "flat"]])
def test_what_a_later_phase_goes_by_is_measured_once_too(
    begins_with: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = {}
    for i, shape in enumerate(("rising", "falling", "flat")):
        write(tmp_path / f"{i}.parquet", lengths(shape, 3000, i))
        children[shape] = {"source": f"parquet:{i}.parquet:ids", "alias": shape}
    later = node("balance_remaining", children["rising"], children["falling"])
    order = corpora.order_of(
        tmp_path,
        corpora.mixture(
            mixture=node("least_consumed", *(children[shape] for shape in begins_with)),
            phases=[{"until_tokens": 16_000}, {"mixture": later}],
            sequence_length=LENGTH,
        ),
    )
    first = measured_ahead(order)
    assert [*first.record.phase_estimates] == [f"parquet:{i}.parquet:ids" for i in range(2)]
    states = gone_through(first, 4096)
    monkeypatch.setattr(builder, "measure", lambda *_, **__: pytest.fail("measured again"))
    loaded = builder.load(order.record.config, tmp_path, None, first.record.to_json())
    assert loaded.record.to_json() == first.record.to_json()
    # Also where a revision gave a source the number that the phase's would have.
    write(tmp_path / "3.parquet", lengths("flat", 3000, 3))
    added = {"child": {"source": "parquet:3.parquet:ids"}}
    for timeline in (Timeline(loaded), revised(Timeline(loaded), 32, add=[added])):
        last = timeline.segments[-1].factory.record
        sizes = {last.specs[i]: one for i, one in last.size_estimates.items()}
        assert sizes == first.record.phase_estimates
    assert states == gone_through(loaded, 4096)
