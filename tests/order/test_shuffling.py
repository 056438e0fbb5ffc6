"""Runs over shuffled sources and lanes: their order, their states, and what is refused of them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.corpora import (
    CODE,
    DOCS,
    PROSE,
    WIKI,
    advanced,
    decode_state,
    encode_state,
    mixture,
    order_of,
    write_corpus,
    write_parquet,
)
from support.mixing import node
from support.timelines import revised
from test_combinations import taken
from tokenloom_proto.seal import canonical
from tokenloom_server.core.state import State, digest_hex
from tokenloom_server.errors import ConfigError, SnapshotInvalid
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.run.fork import _refuse_other_documents
from tokenloom_server.run.stats import StatsReader


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_corpus(tmp_path_factory.mktemp("corpus"))
    (folder / "out.jsonl").write_text(
        "".join(
            json.dumps({"spec": spec, "shard": shard, "row": row}) + "\n"
            for spec, shard in ((CODE, "data/code-1.parquet"), (PROSE, "data/prose/0.txt"))
            for row in (1, 2, 7, 8)
        )
    )
    return folder


def shuffled(**fields: Any) -> dict[str, Any]:
    """Every scheme shuffled in some way."""
    children = [
        {
            "source": CODE,
            "alias": "code",
            "shuffle": "rows",
            "shuffle_window_rows": 10,
            "epochs": 2,
        },
        {"source": DOCS, "alias": "docs", "shuffle": "rows", "epochs": 2.5},
        {"source": PROSE, "shuffle": "shards", "epochs": 2},
        {"source": WIKI, "shuffle": "rows", "lanes": 3, "epochs": 2},
    ]
    return mixture(mixture=node("weighted", *children), **fields)


def states(timeline: Timeline) -> list[State]:
    """The state behind each sample, from the first."""
    _, found, ended = taken(timeline, timeline.initial())
    assert ended == "every source is exhausted"
    return [timeline.initial(), *found]


GOLDEN = {
    "shuffled": (329, "4bc8c5631f5a98305d0f30bfaf7be0a4"),
    "shuffled, shifted": (329, "60d2636d0a63423ab56311bfe4d85792"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_shuffled_orders_are_what_they_were(folder: Path, name: str) -> None:
    order = order_of(folder, shuffled(labels="shifted" if "shifted" in name else "same"))
    last = states(Timeline(order))[-1]
    assert (last.sample_index, digest_hex(last.digest)) == GOLDEN[name]


def test_a_run_goes_on_from_every_sample_also_where_rows_are_left_out_from_some_sample_on(
    folder: Path,
) -> None:
    timeline = revised(Timeline(order_of(folder, shuffled())), 60, exclude={"file": "out.jsonl"})
    whole = states(timeline)
    plain = states(Timeline(timeline.first))
    assert whole[60].digest == plain[60].digest
    assert whole[-1].sample_index < plain[-1].sample_index
    # From every sample around the revision; elsewhere test_combinations does so for every shuffle.
    for at in [*range(0, 45, 5), *range(50, 71), *range(75, len(whole), 5)]:
        again = timeline.decode(timeline.encode(whole[at]))
        assert again == whole[at]
        rest = len(whole) - 1 - at
        steps = min(7, rest) if at % 50 else rest
        assert advanced(timeline, again, steps) == whole[at + steps]


LANE = {"samples": 0, "rows": 0}
BAD: dict[str, tuple[int, dict[str, Any], str]] = {
    "a window that is a place in a file": (
        0,
        {"shuffle": "shards", "shard": "data/code-0.parquet"},
        "shard: found .*; expected no such field",
    ),
    "a window of shuffled files": (
        0,
        {"shuffle": "shards"},
        "shuffle: found 'shards'; expected 'rows'",
    ),
    "a place in a file that is a window": (
        2,
        {"window": 1},
        "window: found 1; expected no such field",
    ),
    "another shuffle": (2, {"shuffle": "none"}, "shuffle: found 'none'; expected 'shards'"),
    "a window below 0": (0, {"window": -1}, "window: "),
    "lanes of a source that has none": (0, {"lanes": [LANE]}, "lanes: found 1; expected 0"),
    "a lane too few": (
        3,
        {"lanes": [LANE] * 2},
        "lanes: found 2; expected 3",
    ),
    "lanes that gave something else": (
        3,
        {"lanes": [{**LANE, "samples": 1}] * 3},
        "samples: found 15; expected 3: what its lanes have",
    ),
    "a lane that says no rows": (
        3,
        {"lanes": [{"samples": 0}] * 3},
        r"lanes\.0\.rows: found None; expected this field",
    ),
    "a lane in a file": (
        3,
        {"lanes": [{**LANE, "epoch": 0, "shard_index": 0, "row_offset": 0}] * 3},
        "lanes",
    ),
    "a lane of text": (3, {"lanes": ["a"] * 3}, r"lanes\.0"),
}


@pytest.mark.parametrize(("source", "fields", "says"), BAD.values(), ids=BAD)
def test_a_state_that_does_not_fit_is_refused(
    folder: Path, source: int, fields: dict[str, Any], says: str
) -> None:
    order = order_of(folder, shuffled())
    document = json.loads(encode_state(order, advanced(order, order.initial(), 80)))
    document["datasets"][source].update(fields)
    with pytest.raises(SnapshotInvalid, match=says):
        decode_state(order, canonical(document))


def test_files_are_appended_to_shuffled_files_and_not_to_shuffled_rows(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    document = shuffled()
    children = document["mixture"]["children"]
    children[2] |= {"alias": "prose"}
    children[1] |= {"shuffle": "none", "lanes": 2}
    timeline = Timeline(order_of(tmp_path, document))
    index = states(timeline)[-1].sample_index
    write_parquet(tmp_path / "data/code-2.parquet", [[1, 2, 3]] * 9)
    (tmp_path / "data/docs-2.jsonl").write_text("")
    (tmp_path / "data/prose/2.txt").write_text("one\ntwo\n")
    for alias, says in (
        ("code", "'code' is read with shuffle: rows, and with more files every"),
        ("docs", "'docs' is read in 2 lanes"),
    ):
        with pytest.raises(ConfigError, match=f"append_files: {says}"):
            revised(timeline, 10, append_files=[alias])
    more = states(revised(timeline, 10, append_files=["prose"]))
    assert more[10].digest == states(timeline)[10].digest
    assert more[-1].sample_index > index


def test_another_shuffle_of_a_source_is_no_revision(folder: Path) -> None:
    timeline = Timeline(order_of(folder, shuffled()))
    for field, value in (("shuffle", "none"), ("shuffle_window_rows", 11), ("lanes", 2)):
        document = shuffled()["mixture"]
        document["children"][0] |= {field: value}
        if field == "shuffle":
            del document["children"][0]["shuffle_window_rows"]
        with pytest.raises(
            ConfigError, match=f"{field} is .* in this run and .* another order of its rows"
        ):
            revised(timeline, 10, mixture=document)


def test_a_fork_takes_a_shuffled_source_over_only_with_all_that_draws_its_order(
    folder: Path,
) -> None:
    ours = order_of(folder, shuffled())
    _refuse_other_documents(ours, order_of(folder, shuffled(run="fork")))

    def fork(change: Any = None, **fields: Any) -> PipelineFactory:
        document = shuffled(run="fork", **fields)
        if change is not None:
            change(document["mixture"]["children"])
        return order_of(folder, document)

    for says, order in (
        ("seed is 7 in run 'test' and 8 in 'fork': it is shuffled", fork(seed=8)),
        (
            ": shuffle_window_rows is 10 in run .*: it is shuffled",
            fork(lambda children: children[0].update(shuffle_window_rows=11)),
        ),
        (
            ": shuffle is rows in run .*: it is shuffled",
            fork(lambda children: children[1].update(shuffle="shards")),
        ),
        (
            ": lanes is 3 in run .*: it is shuffled",
            fork(lambda children: children[3].update(lanes=2)),
        ),
        (
            ": place in the mixture .* is 3 in run .*: it is shuffled",
            fork(lambda children: children.reverse()),
        ),
    ):
        with pytest.raises(SnapshotInvalid, match=says):
            _refuse_other_documents(ours, order)


@pytest.mark.parametrize(("epochs", "other"), [(1.5, 2), (2, 1.5), (1, 1.5), (1.5, 1)])
def test_the_part_of_an_epoch_that_lanes_share_cannot_become_another(
    folder: Path, epochs: float, other: float
) -> None:
    def order(epochs: float, lanes: int = 3, run: str = "test") -> PipelineFactory:
        children = [{"source": CODE, "alias": "code", "lanes": lanes, "epochs": epochs}]
        return order_of(folder, mixture(run=run, mixture=node("sequential", *children)))

    # Each lane would go on in a part that is not its own: over rows that another gave.
    says = f"code: epochs is {epochs:g} and would be {other:g}, but its 3 lanes share the rows of an epoch"
    with pytest.raises(ConfigError, match=says):
        revised(Timeline(order(epochs)), 5, set=[{"child": "code", "epochs": other}])
    with pytest.raises(
        SnapshotInvalid, match=f"epochs is {epochs:g} in run 'test' and {other:g} in 'fork': its 3"
    ):
        _refuse_other_documents(order(epochs), order(other, run="fork"))

    revised(Timeline(order(epochs, lanes=1)), 5, set=[{"child": "code", "epochs": other}])
    revised(Timeline(order(2)), 5, set=[{"child": "code", "epochs": 3}])
    _refuse_other_documents(order(2), order(3, run="fork"))


def test_the_epochs_of_shuffled_sources_go_on_from_sample_to_sample(folder: Path) -> None:
    order = order_of(folder, shuffled())
    past: Any = SimpleNamespace(coordinator=None)
    losses: Any = None
    stats = StatsReader(past, losses)
    every = states(Timeline(order))
    for source, epochs in enumerate(order.config.epochs):
        read = []
        for state in every:
            own = state.sources[source]
            _, done = stats._rows_of_epoch(order, source, own)
            read.append(own.epoch + done)
        assert read[0] == 0
        # A file's bytes stand for its rows, so between two files it may go back by a little.
        assert all(now > before - 0.01 for before, now in pairwise(read))
        assert epochs - 0.3 < read[-1] <= epochs + 0.01


def test_a_long_document_is_spread_over_the_samples_of_all_lanes(tmp_path: Path) -> None:
    # Ids 1 fill a document of a hundred samples among many small ones of others.
    rows = [[2 + i % 50] * 5 for i in range(1200)]
    rows[30] = [1] * 800
    write_parquet(tmp_path / "long.parquet", rows, group=10)
    source = {"source": "parquet:long.parquet:ids", "lanes": 4}
    order = order_of(tmp_path, mixture(mixture=node("sequential", source)))
    samples, _, _ = taken(order, order.initial())
    has = [1 in memoryview(ids).cast("H").tolist() for ids in samples]
    # One of four is the long document's.
    assert 100 <= sum(has) <= 102
    assert not any(before and after for before, after in pairwise(has))
