"""Texts of version 1 are read for ever: each says of a state what version 2 says of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.corpora import CODE, DOCS, mixture, order_of, write_corpus
from support.features import CATALOG
from support.goldens import FOLDER, MIXTURES, write_mixtures
from tokenloom_proto.seal import canonical, unseal
from tokenloom_server.config import mixture_file
from tokenloom_server.core.state import EpochCursor, FileCursor, PackedCursor, RowCounts, State, WindowCursor
from tokenloom_server.errors import SnapshotInvalid
from tokenloom_server.order import builder, snapshot
from tokenloom_server.order.snapshot import ResumePoint, read_foreign
from tokenloom_server.order.timeline import Timeline


@pytest.fixture(scope="module")
def timelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Timeline]:
    """Of the runs that the goldens are of."""
    folder = tmp_path_factory.mktemp("mixtures")
    write_mixtures(folder)
    documents = {run: {"run": run} | document for run, document in MIXTURES.items()}
    return {
        run: Timeline(builder.create(mixture_file.parse(text, where="test", catalog=CATALOG), folder, folder / "index"))
        for run, text in documents.items()
    }


@pytest.mark.parametrize("run", MIXTURES)
def test_the_golden_snapshots_of_version_1_say_what_those_of_today_say(
    timelines: dict[str, Timeline], run: str
) -> None:
    timeline = timelines[run]
    template, config = timeline.first.record.template("", "train", 0), timeline.first.config
    before, today = (
        [
            _without_figures(snapshot.parse(text, template | _of_version(text), timeline.shape_at, config))
            for text in json.loads(path.read_text())[run]
        ]
        for path in (FOLDER / "before_house" / "snapshots.json", FOLDER / "snapshots.json")
    )
    # Under order version 2 balances leave out padding.
    assert before == today or MIXTURES[run].get("packing") == "none"
    assert len({point.sample_index for point in before}) > 1
    old = json.loads((FOLDER / "before_house" / "snapshots.json").read_text())[run][-1]
    document = read_foreign(old)
    assert unseal(old)["version"] == 1 and document is not None
    if run != "buckets":  # of batches a text of version 1 says so only by its spec's column
        base = before[-1].base
        assert base is not None
        assert [source.state for source in document.sources()] == list(base.sources)


def _without_figures(point: ResumePoint) -> ResumePoint:
    """Only those of today count what the sources gave up to their sample index, and what they are owed."""
    base = point.base
    assert base is not None
    base = replace(base, sources=tuple(replace(source, owed=0) for source in base.sources))
    return replace(point, base=base, counts=None)


def _of_version(text: str) -> dict[str, Any]:
    """What the order version makes of a template."""
    return {field: unseal(text)[field] for field in ("order_version", "config_digest")}


def as_version_1(resume_state: str, *, best_fit: bool, in_batches: bool) -> str:
    """The text that version 1 had for a state."""
    document = json.loads(resume_state)
    del document["version"]
    for entry in document["datasets"]:
        names = ("window", "window_row") if entry.get("shuffle") == "rows" else ("shard_index", "row_offset")
        if in_batches:
            entry[names[0]], entry[names[1]] = 0, entry.pop("epoch_rows", 0)
        for lane in entry.get("lanes", ()):
            _fill(lane, names)
        entry["lanes"] = [
            [
                *(lane[name] for name in ("epoch", *names)),
                lane.get("packed_samples", lane["row_token_offset"]) if best_fit else lane["row_token_offset"],
                *(lane[name] for name in ("samples", "rows")),
                *(lane.get(name, 0) for name in RowCounts._fields),
            ]
            for lane in entry.get("lanes", ())
        ]
        _fill(entry, names)
        if names[0] == "shard_index":
            entry.setdefault("shard", "none of version 1 is without")
    return canonical(document)


def _fill(entry: dict[str, Any], names: tuple[str, str]) -> None:
    for name in ("epoch", *names, "row_token_offset"):
        entry.setdefault(name, 0)


CONFIGS: dict[str, dict[str, Any]] = {
    "shuffled lanes, best fit": {
        "packing": "best_fit",
        "sequence_length": 16,
        "pack_window_rows": 5,
        "mixture": {
            "policy": "weighted",
            "children": [
                {"source": CODE, "shuffle": "rows", "shuffle_window_rows": 9, "lanes": 3, "epochs": 2},
                {"source": DOCS, "shuffle": "shards", "lanes": 2},
            ],
        },
    },
    "shuffled lanes, concat": {
        "mixture": {
            "policy": "weighted",
            "children": [
                {"source": CODE, "shuffle": "rows", "shuffle_window_rows": 9, "lanes": 3, "epochs": 2},
                {"source": DOCS, "lanes": 2},
            ],
        }
    },
    "split rows": {"packing": "none", "sequence_length": 12, "long_rows": "split"},
}


def walked(timeline: Timeline) -> Iterator[State]:
    """The states of a run, one after each pick."""
    pipeline = timeline.pipeline(timeline.initial())
    while True:
        yield pipeline.state()
        before = pipeline.state().sample_index
        pipeline.advance(timeline.first.config.pick_samples)
        if pipeline.state().sample_index == before:
            return


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("name", [*CONFIGS, "buckets"])
def test_every_state_reads_back_from_either_version(timelines: dict[str, Timeline], folder: Path, name: str) -> None:
    timeline = timelines[name] if name == "buckets" else Timeline(order_of(folder, mixture(**CONFIGS[name])))
    best_fit, kinds = "best fit" in name, set()
    for state in walked(timeline):
        text = timeline.encode(state)
        assert timeline.decode(text) == state
        assert timeline.decode(as_version_1(text, best_fit=best_fit, in_batches=name == "buckets")) == state
        kinds |= {type(source.cursor) for source in state.sources}
        kinds |= {type(lane.cursor) for source in state.sources for lane in source.lanes}
    expected = {"buckets": {EpochCursor}, "split rows": {FileCursor}}.get(name, {FileCursor, WindowCursor})
    assert kinds == expected | {type(None)} | ({PackedCursor} if best_fit else set())


def test_rows_that_were_to_be_packed_again_are_so(folder: Path) -> None:
    timeline = Timeline(order_of(folder, mixture(packing="best_fit", sequence_length=16, pack_window_rows=5)))
    packed = next(state for state in walked(timeline) if isinstance(state.sources[0].cursor, PackedCursor))
    document = json.loads(as_version_1(timeline.encode(packed), best_fit=True, in_batches=False))
    document["datasets"][0]["packed_samples"] = 2**52
    cursor = packed.sources[0].cursor
    assert isinstance(cursor, PackedCursor)
    # Also where its first row is the first of all: a state that has begun is not one of the beginning.
    assert timeline.decode(canonical(document)).sources[0].cursor == cursor.first


def test_a_source_that_is_back_at_its_first_row_stands_there(folder: Path) -> None:
    """As after another data loader's checkpoint, or a fork of rows that were packed together."""
    timeline = Timeline(order_of(folder, mixture()))
    pipeline = timeline.pipeline(timeline.initial())
    pipeline.advance(5)
    state = pipeline.state()
    code, *others = state.sources
    assert code.samples
    state = replace(state, sources=(replace(code, cursor=FileCursor(0, 0, 0)), *others))
    text = timeline.encode(state)
    assert timeline.decode(text) == state
    assert timeline.decode(as_version_1(text, best_fit=False, in_batches=False)) == state


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"row_token_offset": 3}, "packed_samples is .* beside a row_token_offset of 3"),
        (
            {"packed_samples": 0, "row_token_offset": 3},
            "row_token_offset is 3, but this run's packing has no such place",
        ),
    ],
)
def test_a_cursor_of_another_packing_is_refused(folder: Path, fields: dict[str, int], says: str) -> None:
    timeline = Timeline(order_of(folder, mixture(packing="best_fit", sequence_length=16, pack_window_rows=5)))
    packed = next(state for state in walked(timeline) if isinstance(state.sources[0].cursor, PackedCursor))
    document = json.loads(timeline.encode(packed))
    document["datasets"][0] |= fields
    with pytest.raises(SnapshotInvalid, match=says):
        timeline.decode(canonical(document))
