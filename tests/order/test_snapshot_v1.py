"""Texts of version 1 are read for ever: each says of a state what version 2 says of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.corpora import CODE, DOCS, mixture, order_of
from support.features import CATALOG
from support.goldens import FOLDER, MIXTURES, write_mixtures
from tokenloom_proto.seal import canonical, unseal
from tokenloom_server.config import mixture_file
from tokenloom_server.core.state import FileCursor, PackedCursor, RowCounts, State, WindowCursor
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


def as_version_1(resume_state: str) -> str:
    """The text that version 1 had for a state of lanes and of ``best_fit``."""
    document = json.loads(resume_state)
    del document["version"]
    for entry in document["datasets"]:
        names = ("window", "window_row") if entry.get("shuffle") == "rows" else ("shard_index", "row_offset")
        places = [entry, *entry.get("lanes", ())]
        for place in places:
            for name in ("epoch", *names, "row_token_offset"):
                place.setdefault(name, 0)
        entry["lanes"] = [
            [
                *(lane[name] for name in ("epoch", *names)),
                lane.get("packed_samples", lane["row_token_offset"]),
                *(lane[name] for name in ("samples", "rows")),
                *(lane.get(name, 0) for name in RowCounts._fields),
            ]
            for lane in places[1:]
        ]
        if names[0] == "shard_index":
            entry.setdefault("shard", "none of version 1 is without")
    return canonical(document)


SHUFFLED_LANES: dict[str, Any] = {
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
}


def walked(timeline: Timeline) -> Iterator[State]:
    """The states of a run, one after each sample."""
    pipeline = timeline.pipeline(timeline.initial())
    while pipeline.ended is None:
        yield pipeline.state()
        pipeline.advance(1)


def test_every_state_reads_back_from_either_version(folder: Path) -> None:
    timeline = Timeline(order_of(folder, mixture(**SHUFFLED_LANES)))
    kinds = set()
    for state in walked(timeline):
        text = timeline.encode(state)
        assert timeline.decode(text) == timeline.decode(as_version_1(text)) == state
        kinds |= {type(source.cursor) for source in state.sources}
        kinds |= {type(lane.cursor) for source in state.sources for lane in source.lanes}
    assert kinds == {FileCursor, WindowCursor, PackedCursor, type(None)}


def test_rows_that_were_to_be_packed_again_are_so(folder: Path) -> None:
    timeline = Timeline(order_of(folder, mixture(packing="best_fit", sequence_length=16, pack_window_rows=5)))
    packed = next(state for state in walked(timeline) if isinstance(state.sources[0].cursor, PackedCursor))
    document = json.loads(as_version_1(timeline.encode(packed)))
    document["datasets"][0]["packed_samples"] = 2**52
    cursor = packed.sources[0].cursor
    assert isinstance(cursor, PackedCursor)
    # Also where its first row is the first of all: a state that has begun is not one of the beginning.
    assert timeline.decode(canonical(document)).sources[0].cursor == cursor.first
