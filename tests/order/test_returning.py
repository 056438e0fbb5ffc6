"""What a state preserves of a source goes on where it stood once the mixture has its spec: at its row, with its share
at once, and the same in every replay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.corpora import CODE, DOCS, PROSE, WIKI, advanced, flat, mixture, order_of
from support.imports import import_entries, import_into, state_of
from support.mixing import node
from support.timelines import revised
from tokenloom_server.core.state import FileCursor, State
from tokenloom_server.errors import ConfigError, SnapshotInvalid
from tokenloom_server.order.timeline import Timeline

#: 17 rows of 26 were read.
CODE_ENTRY = {
    "spec": CODE,
    "shard": "data/code-1.parquet",
    "row_offset": 3,
    "token_offset": 400,
    "note": "kept",
}
CURSOR = FileCursor(0, 1, 3)


def imported(timeline: Timeline, *entries: dict[str, Any]) -> State:
    """The state of an import: of documents and prose many tokens were read, and of what else is preserved."""
    docs = {"spec": DOCS, "row_offset": 1, "token_offset": 800}
    prose = {"spec": PROSE, "row_offset": 2}
    return state_of(import_entries(timeline, docs, prose, *entries))


def endless(spec: str) -> dict[str, Any]:
    return {"source": spec, "epochs": "inf"}


def timeline_of(folder: Path, *specs: str, **fields: Any) -> Timeline:
    """Over sources without an end."""
    root = node("least_consumed", *map(endless, specs))
    return Timeline(order_of(folder, mixture(mixture=root, **fields)))


@pytest.fixture
def plain(folder: Path) -> Timeline:
    return timeline_of(folder, DOCS, PROSE)


def specs_of(timeline: Timeline, state: State) -> list[str]:
    return [entry["spec"] for entry in json.loads(timeline.encode(state))["datasets"]]


def at(timeline: Timeline, state: State, sample_index: int) -> State:
    """The state at a sample index, by going forward from one before it."""
    return advanced(timeline, state, sample_index - state.sample_index)


ADDED = {"source": CODE, "alias": "code", "epochs": 4}


@pytest.mark.parametrize("whole", [False, True])
def test_a_preserved_spec_that_is_added_goes_on_where_it_stood(
    plain: Timeline, whole: bool
) -> None:
    start = imported(plain, CODE_ENTRY, {"spec": "gone:a:b", "row_offset": 5})
    index = start.sample_index + 10
    change: dict[str, Any] = {"add": [{"child": ADDED}]}
    if whole:
        change = {"mixture": node("least_consumed", endless(DOCS), endless(PROSE), ADDED)}
    timeline = revised(plain, index, state=start, **change)
    assert specs_of(timeline, at(timeline, start, index - 1)) == [DOCS, PROSE, CODE, "gone:a:b"]
    after = at(timeline, start, index)
    code = after.sources[2]
    assert (code.cursor, code.rows, code.samples, code.tokens) == (CURSOR, 14 + 3, 0, 0)
    # The snapshot has it once, and what is in no mixture still.
    assert specs_of(timeline, after) == [DOCS, PROSE, CODE, "gone:a:b"]
    assert timeline.decode(timeline.encode(after)) == after
    (line,) = [
        line for line in json.loads(timeline.revisions[0].content)["changes"] if "goes on" in line
    ]
    assert line == f"code: goes on: spec={CODE} sample_row=17 shard=data/code-1.parquet offset=3"


def test_a_replay_from_any_state_meets_it_at_the_same_place(plain: Timeline) -> None:
    start = imported(plain, CODE_ENTRY)
    index = start.sample_index + 10
    timeline = revised(plain, index, state=start, add=[{"child": ADDED}])
    whole = at(timeline, start, index + 40)
    for sample in (index - 5, index - 1, index, index + 1, index + 13):
        between = timeline.decode(timeline.encode(at(timeline, start, sample)))
        assert at(timeline, between, index + 40) == whole
    # Another server lays the same timeline from the ledger's text.
    again = Timeline(timeline.first, timeline.revisions)
    assert at(again, start, index + 40) == whole
    # A run that never read it elsewhere begins it.
    assert at(timeline, timeline.initial(), index).sources[2].cursor is None


@pytest.mark.parametrize("baseline", ["min", "mean"])
def test_it_does_not_dominate_the_next_picks(folder: Path, baseline: str) -> None:
    plain = timeline_of(folder, DOCS, PROSE, WIKI, new_source_baseline=baseline)
    # What was read of it before is next to nothing beside what the others had since.
    start = imported(
        plain,
        {**CODE_ENTRY, "token_offset": 8},
        {"spec": WIKI, "row_offset": 2, "token_offset": 8_000},
    )
    timeline = revised(
        plain, start.sample_index + 10, state=start, add=[{"child": {**ADDED, "epochs": "inf"}}]
    )
    before = at(timeline, start, start.sample_index + 10)
    for picks in (4, 40, 200):
        after = at(timeline, start, before.sample_index + picks)
        given = [
            now.samples - was.samples
            for now, was in zip(after.sources, before.sources, strict=True)
        ]
        assert abs(given[3] - picks / 4) <= 1, given


@pytest.mark.parametrize(
    ("entry", "child", "said"),
    [
        ({}, {"shuffle": "rows"}, r"place in file order, but .* shuffle: rows .* from_start"),
        (
            {"shard": "data/code-9.parquet"},
            {},
            r"'data/code-9\.parquet' is none of the source's files.* from_start",
        ),
        (
            {"row_offset": 100, "epoch": 0},
            {},
            r"row_offset is 100, but .* row_offset_of: shard or spec.* from_start",
        ),
        ({"shard": 7}, {}, r"shard: found 7.* from_start"),
        ({"shuffle": "shards"}, {}, r"it was shuffled or read in lanes, .* from_start"),
        (
            {"lanes": [{"samples": 1, "rows": 1}]},
            {},
            r"it was shuffled or read in lanes, .* from_start",
        ),
    ],
)
def test_where_it_cannot_go_on_it_is_refused_with_why(
    plain: Timeline, entry: dict[str, Any], child: dict[str, Any], said: str
) -> None:
    preserved = json.dumps(CODE_ENTRY | entry)
    start = imported(plain)
    state = State(
        **{name: getattr(start, name) for name in start.__slots__} | {"preserved": (preserved,)}
    )
    with pytest.raises(ConfigError, match=said):
        revised(plain, start.sample_index + 10, state=state, add=[{"child": ADDED | child}])
    anew = revised(
        plain, start.sample_index + 10, state=state, add=[{"child": ADDED | child}], from_start=True
    )
    after = at(anew, state, start.sample_index + 10)
    assert (after.sources[2].cursor, after.sources[2].rows, after.preserved) == (None, 0, ())
    assert "code: is read from its first row" in json.loads(anew.revisions[0].content)["changes"]


def test_two_revisions_at_one_sample_both_hold(plain: Timeline) -> None:
    start = imported(plain, CODE_ENTRY, {"spec": WIKI, "row_offset": 7})
    index = start.sample_index + 10
    timeline = revised(plain, index, state=start, add=[{"child": ADDED}])
    timeline = revised(timeline, index, state=start, add=[{"child": {"source": WIKI}}])
    after = at(timeline, start, index)
    assert ([source.rows for source in after.sources[2:]], after.preserved) == ([17, 7], ())


def test_a_phase_that_has_it_goes_on_with_it(folder: Path) -> None:
    child = {"source": CODE, "epochs": 4}
    later = node("least_consumed", endless(DOCS), child)
    document = flat(
        [DOCS, PROSE], phases=[{"until_tokens": 900}, {"mixture": later}], last_micro_step="pad"
    )
    document["mixture"]["children"][0]["epochs"] = "inf"
    timeline = Timeline(order_of(folder, document))
    start = imported(timeline, CODE_ENTRY, {"spec": WIKI, "row_offset": 7})
    index = timeline.with_clock(start.clock_offset).segments[1].begin
    timeline = timeline.with_clock(start.clock_offset)
    before, after = at(timeline, start, index - 1), at(timeline, start, index)
    assert (after.sources[2].cursor, after.sources[2].rows) == (CURSOR, 17)
    assert specs_of(timeline, before) == [DOCS, PROSE, CODE, WIKI]
    assert specs_of(timeline, after) == [DOCS, PROSE, CODE, WIKI]
    assert len(after.preserved) == 1
    whole = at(timeline, start, index + 30)
    assert at(timeline, timeline.decode(timeline.encode(before)), index + 30) == whole
    # Where it could not go on there, that is said before anything is trained.
    child["shuffle"] = "rows"
    document["phases"][1]["mixture"] = later
    with pytest.raises(SnapshotInvalid, match=r"place in file order, but .* shuffle: rows"):
        imported(Timeline(order_of(folder, document)), CODE_ENTRY)


# --- Sources of ours that were dropped ---------------------------------------------------------------------------


def test_a_dropped_source_of_ours_goes_on_under_its_old_id_and_does_not_dominate(
    plain: Timeline,
) -> None:
    start = imported(plain)
    begin = start.sample_index
    timeline = revised(plain, begin + 10, state=start, drop=[PROSE])
    again = [{"child": endless(PROSE)}]
    timeline = revised(timeline, begin + 300, state=start, add=again)
    left = at(timeline, start, begin + 10)
    was, back, after = (
        at(timeline, start, begin + so_many).sources[1] for so_many in (10, 300, 500)
    )
    assert (back.cursor, back.rows) == (was.cursor, was.rows)
    assert abs(after.samples - back.samples - 100) <= 1
    assert (
        f"{PROSE}: goes on where it is when it is dropped"
        in json.loads(timeline.revisions[1].content)["changes"]
    )
    timeline = revised(plain, begin + 10, state=start, drop=[PROSE])
    timeline = revised(timeline, begin + 300, state=left, add=again)
    line = f"{PROSE}: goes on: spec={PROSE} sample_row={left.sources[1].rows} shard=data/prose/0.txt offset="
    assert line in " ".join(json.loads(timeline.revisions[1].content)["changes"])


def test_a_dropped_source_of_ours_is_read_anew_where_that_is_asked_for(plain: Timeline) -> None:
    start = imported(plain)
    begin = start.sample_index
    timeline = revised(plain, begin + 10, state=start, drop=[PROSE])
    again = [{"child": endless(PROSE)}]
    timeline = revised(timeline, begin + 20, state=start, add=again, from_start=True)
    left, back = (at(timeline, start, begin + after).sources[1] for after in (10, 20))
    assert back.cursor == FileCursor(0, 0, 0)
    assert (back.samples, back.tokens, back.rows) == (left.samples, left.tokens, left.rows)
    state = at(timeline, start, begin + 20)
    assert timeline.decode(timeline.encode(state)) == state


def test_a_dropped_source_of_ours_with_other_options_is_refused(plain: Timeline) -> None:
    timeline = revised(plain, 10, drop=[PROSE])
    with pytest.raises(
        ConfigError, match="shuffle is none in this run and rows in the new mixture"
    ):
        revised(timeline, 20, add=[{"child": {"source": PROSE, "shuffle": "rows"}}])


# --- A new run under the old state -------------------------------------------------------------------------------


def test_what_another_runs_state_preserved_goes_on_in_a_run_that_has_it(
    folder: Path, plain: Timeline
) -> None:
    start = imported(plain, CODE_ENTRY)
    resume_state = json.loads(plain.encode(at(plain, start, start.sample_index + 20)))
    order = order_of(folder, flat([DOCS, PROSE, CODE]))
    point = import_into(order, {"resume_state": resume_state})
    base = state_of(point)
    code = base.sources[2]
    assert (code.cursor, code.rows, code.samples, code.tokens) == (CURSOR, 17, 0, 0)
    assert (point.sample_index, base.preserved) == (start.sample_index + 20, ())
    (line,) = [note for note in point.notes if CODE in note]
    assert line.endswith(
        "tokens=0 (from an older checkpoint; preserved until now, its balance begins as a new source's)"
    )
    # The others had hundreds of tokens since; from here on it has its share, and no more.
    after = advanced(order, base, 30)
    given = [
        now.samples - was.samples for now, was in zip(after.sources, base.sources, strict=True)
    ]
    assert given[2] <= 16, given
