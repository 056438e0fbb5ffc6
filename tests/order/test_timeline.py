"""A run's order under phases and revisions: interrupted anywhere, it is the order of the uninterrupted run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.corpora import (
    CODE,
    DOCS,
    PROSE,
    ROWS,
    WIKI,
    advanced,
    mixture,
    order_of,
    parsed,
    write_corpus,
    write_parquet,
)
from support.mixing import node
from support.timelines import revised
from tokenloom_proto.seal import canonical
from tokenloom_server.config.order_fields import differences, refuse
from tokenloom_server.core.state import PackedCursor, State
from tokenloom_server.errors import ConfigError, SnapshotInvalid
from tokenloom_server.order.pipeline import Pipeline
from tokenloom_server.order.steps import BatchPlan, StepGroup
from tokenloom_server.order.timeline import Timeline


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_corpus(tmp_path_factory.mktemp("corpus"))
    write_parquet(folder / "data/extra.parquet", [[i % 200] * (i % 17) for i in range(60)])
    (folder / "out.jsonl").write_text(
        "".join(
            json.dumps({"spec": "code", "shard": "data/code-1.parquet", "row": row}) + "\n"
            for row in (1, 2, 7, 8)
        )
    )
    return folder


EXTRA = "parquet:data/extra.parquet:ids"
CODE_ALONE = {"source": CODE, "alias": "code"}
CHILD = CODE_ALONE | {"weight": 2}


def timeline_of(folder: Path, *root: Any, **fields: Any) -> Timeline:
    """Of a run over a node of a policy and children, else over the mixture of the corpus."""
    if root:
        fields["mixture"] = node(*root)
    return Timeline(order_of(folder, mixture(**fields)))


def walked(timeline: Timeline, limit: int = 10**6) -> list[str]:
    """The state text behind each sample, one by one from the beginning."""
    pipeline = timeline.pipeline(timeline.initial())
    found = [timeline.encode(pipeline.state())]
    while pipeline.ended is None and len(found) <= limit:
        pipeline.advance(1)
        if pipeline.ended is None or pipeline.sample_index == len(found):
            found.append(timeline.encode(pipeline.state()))
    return found


def filled(pipeline: Pipeline, plan: BatchPlan) -> list[StepGroup]:
    groups: list[StepGroup] = []
    while pipeline.ended is None:
        groups.append(pipeline.begin_group(plan))
        pipeline.fill(groups[-1], plan.group_micro_steps)
    return groups


def _end(timeline: Timeline) -> State:
    return advanced(timeline, timeline.initial(), 10**6)


def test_rows_stay_left_out_when_their_source_gets_another_alias(folder: Path) -> None:
    (folder / "more.jsonl").write_text(
        "".join(
            json.dumps({"spec": CODE, "shard": "data/code-0.parquet", "row": row}) + "\n"
            for row in (4, 5)
        )
    )
    timeline = revised(timeline_of(folder), 5, exclude={"file": "out.jsonl"})
    timeline = revised(timeline, 10, set=[{"child": "code", "alias": "programs"}])
    timeline = revised(timeline, 15, exclude={"file": "more.jsonl"})
    for found in (timeline, Timeline(timeline.first, timeline.revisions)):
        counts = [found.at(index).record.excluded.count(CODE) for index in (0, 5, 10, 15)]
        assert counts == [0, 4, 4, 6]
        assert [file.path for file in found.at(15).record.excluded.files] == [
            "out.jsonl",
            "more.jsonl",
        ]


def test_a_longer_context_begins_where_its_phase_does(folder: Path) -> None:
    timeline = timeline_of(
        folder,
        last_micro_step="pad",
        phases=[
            {"until_tokens": 90},
            {"until_tokens": 200, "sequence_length": 16},
            {
                "sequence_length": 4,
                "mixture": node("weighted", {"source": DOCS}, {"source": EXTRA}),
            },
        ],
    )
    # 12 samples of 8, then 7 of 16, the first multiples at or behind the tokens asked for.
    begins = [(segment.begin, segment.tokens) for segment in timeline.segments]
    assert begins == [(0, 0), (12, 96), (19, 208)]
    for tokens, index in ((0, 0), (90, 12), (96, 12), (97, 13), (208, 19), (209, 20)):
        assert timeline.index_at(tokens) == index
    states = walked(timeline)
    for at in (0, 11, 12, 13, 18, 19, 20, len(states) - 1):
        state = timeline.decode(states[at])
        assert state.total_tokens == timeline.tokens_at(at)
        assert timeline.encode(advanced(timeline, state, len(states))) == timeline.encode(
            _end(timeline)
        )
    pipeline = timeline.pipeline(timeline.initial())
    plan = BatchPlan(start_index=0, world_size=1, batch_size=5, group_micro_steps=4)
    (group,) = filled(pipeline, plan)
    assert [mark.sample_index for mark in group.marks] == [5, 10, 12]
    assert pipeline.ended is not None and "sequence length of 16" in pipeline.ended
    assert timeline.encode(group.state_after(2)) == states[12]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"set": [{"child": "code", "max_tokens": 3}]},
            "code: max_tokens is 3, which is less than one sample of 8",
        ),
        (
            {"set": [{"child": "nobody", "weight": 2}]},
            "set.0.child: the mixture has no 'nobody'; it has",
        ),
        ({"set": [{"child": "code"}]}, "set.0: sets nothing of 'code'"),
        (
            {"set": [{"child": "code", "policy": "weighted"}]},
            "set.0.policy: a source has no policy",
        ),
        ({"set": [{"child": "code", "weight": -1}]}, "mixture.children.0.weight"),
        ({"drop": ["mixture"]}, "is the whole mixture"),
        ({"add": [{"child": {"source": CODE}}]}, "is in the mixture already"),
        ({"add": [{"child": {"source": EXTRA}, "to": "code"}]}, "'code' is a source"),
        ({"add": [{"child": {"source": EXTRA, "wieght": 1}}]}, "add.0.child.*wieght|wieght"),
        (
            {"exclude": {"file": "nothing.jsonl"}},
            r"exclude.file: 'nothing.jsonl' cannot be read \(No such",
        ),
        ({"exclude": {"file": "/dev/stdin"}}, "exclude.file: '/dev/stdin' cannot be read"),
        ({"exclude": {"file": "a\x00b"}}, r"exclude.file: 'a\\x00b' cannot be read"),
        (
            {"exclude": {"file": "data/code-0.parquet"}},
            "'data/code-0.parquet' cannot be read as JSON lines",
        ),
        ({"add": [{"child": {"source": "parquet:none-*.parquet:ids"}}]}, "no file matches"),
        (
            {"add": [{"child": {"source": "parquet:\x00.parquet:ids"}}]},
            r"child\.source: .* is U\+0000: leave it",
        ),
        (
            {"add": [{"child": {"source": f"parquet:{'x' * 900}:ids"}}]},
            r"cannot be looked up \(File name too long\)",
        ),
        (
            {"mixture": node("weighted", CHILD), "drop": ["code"]},
            "so set, add and drop must be left",
        ),
        (
            {"add": [{"child": {"source": EXTRA, "presence": "dropped"}}]},
            r"add\.0\.child\.presence: unknown key",
        ),
        ({"append_files": ["docs"]}, "'docs' has no file that the run does not read already"),
        ({"set": [{"child": "code", "weight": 2}]}, "this changes nothing"),
        ({}, "this changes nothing"),
        ({"mixture": node("weighted")}, "mixture"),
        (
            {"mixture": node("weighted", {"source": CODE, "add_bos": True})},
            "add_bos is not given",
        ),
    ],
)
def test_what_cannot_be_changed_is_refused_by_name(
    folder: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        revised(timeline_of(folder), 5, **change)


def test_files_that_are_appended_come_behind_the_others_and_wake_their_source(
    tmp_path: Path,
) -> None:
    folder = write_corpus(tmp_path)
    code = {"source": CODE, "alias": "code", "weight": 9}
    timeline = timeline_of(folder, "least_consumed", code, {"source": WIKI, "alias": "wiki"})
    write_parquet(folder / "data/code-9.parquet", [[9] * 40] * 3)
    out = next(
        at
        for at, text in enumerate(walked(timeline))
        if json.loads(text)["datasets"][0].get("exhausted")
    )
    appended = revised(timeline, out + 1, append_files=["code"])
    both = revised(appended, out + 1, set=[{"child": "wiki", "weight": 2}])
    before, after = _end(timeline).sources[0], _end(appended).sources[0]
    assert after.tokens + after.dropped_tokens == before.tokens + before.dropped_tokens + 3 * 41
    assert _end(both).sources[0].tokens == after.tokens
    assert both.segments[1].grown == (0,)


def test_a_phase_in_which_a_revision_begins_is_told_apart(folder: Path) -> None:
    phases = [{"until_tokens": 80}, {"sequence_length": 16}]
    timeline = timeline_of(folder, last_micro_step="pad", phases=phases)
    timeline = revised(timeline, 10, set=[{"child": "code", "weight": 9}])
    (switch,) = timeline.switches(0)
    assert switch.end_reason is not None and "sample 10 begins phase 1" in switch.end_reason
    assert [(each.begin, each.phase, each.revision is None) for each in timeline.segments] == [
        (0, 0, True),
        (10, 1, False),
    ]


def test_a_node_that_a_source_leaves_keeps_its_turn(folder: Path) -> None:
    docs = {"source": DOCS, "alias": "docs"}
    inner = node("round_robin", {"source": PROSE}, docs, alias="inner")
    timeline = timeline_of(folder, "round_robin", CODE_ALONE, inner)
    timeline = revised(timeline, 20, drop=["docs"])
    timeline = revised(timeline, 20, add=[{"child": docs}])
    states = walked(timeline, 60)
    # Turn by turn, though the inner node has only half of the samples that it gave.
    given = [[child.samples for child in timeline.decode(states[at]).nodes[0]] for at in (20, 26)]
    assert [after - before for before, after in zip(*given, strict=True)] == [2, 2, 2]
    for at in range(20, 30):
        assert timeline.encode(advanced(timeline, timeline.decode(states[at]), 3)) == states[at + 3]


def test_a_phase_of_less_than_a_sample_gives_nothing(folder: Path) -> None:
    phases = [
        {"until_tokens": 90},
        {"until_tokens": 95, "sequence_length": 4},
        {"sequence_length": 16},
    ]
    timeline = timeline_of(folder, last_micro_step="pad", phases=phases)
    assert [(each.begin, each.phase) for each in timeline.segments] == [(0, 0), (12, 2)]
    reached = advanced(timeline, timeline.initial(), 12)
    assert timeline.encode(reached) == timeline.encode(timeline.decode(walked(timeline, 12)[12]))
    assert reached == timeline.decode(timeline.encode(reached))


@pytest.mark.parametrize(
    "change", [{"exclude": {"file": "out.jsonl"}}, {"set": [{"child": "code", "max_tokens": 400}]}]
)
def test_a_state_of_a_line_without_the_revision_is_refused(
    folder: Path, change: dict[str, Any]
) -> None:
    plain = timeline_of(folder)
    timeline = revised(plain, 10, **change)
    states = [walked(each, 20) for each in (plain, timeline)]
    assert timeline.decode(states[0][9]) == timeline.decode(states[1][9])
    with pytest.raises(
        SnapshotInvalid,
        match=r"revisions: found None; expected \(10, .*: it was dropped, or made on another line",
    ):
        timeline.decode(states[0][10])
    with pytest.raises(SnapshotInvalid, match=r"revisions: found \(10, .*; expected None"):
        plain.decode(states[1][20])


def test_another_mixture_in_the_last_phase_does_not_move_the_end_of_the_run(folder: Path) -> None:
    timeline = timeline_of(folder, phases=[{"until_tokens": 160}, {"until_tokens": 400}])
    root = node("weighted", {"source": WIKI}, {"source": CODE, "alias": "code"})
    for given, ends in ((root, 400), (root | {"max_tokens": 320}, 320)):
        changed = revised(timeline, 30, mixture=given)
        assert [
            name
            for name in json.loads(changed.revisions[0].content)["changes"]
            if "max_tokens" in name
        ] == ([] if ends == 400 else ["node 0: max_tokens 400 → 320"])
        assert json.loads(walked(changed)[-1])["nodes"] and len(walked(changed)) == ends // 8 + 1
    # Before the last phase, too: it brings the end itself.
    assert len(walked(revised(timeline, 3, mixture=root))) == 51


def test_a_state_tells_a_ledger_that_knows_no_revision_all_files_that_came_since(
    tmp_path: Path,
) -> None:
    write_corpus(tmp_path)
    write_parquet(tmp_path / "data/extra.parquet", [[5] * 20] * 20)
    first = order_of(tmp_path, mixture())
    write_parquet(tmp_path / "data/code-2.parquet", [[6] * 9] * 8)
    timeline = revised(
        Timeline(first),
        4,
        add=[{"child": {"source": EXTRA, "alias": "extra"}}],
        append_files=["code"],
    )
    timeline = revised(timeline, 9, set=[{"child": "code", "weight": 7}])
    pipeline = timeline.pipeline(timeline.initial())
    pipeline.advance(30)
    [brought] = json.loads(timeline.encode(pipeline.state()))["revisions"]
    elsewhere = Timeline(
        first,
        [
            replace(
                timeline.revisions[0],
                sample_index=brought["sample_index"],
                content=canonical({**brought["content"], "generation": 0}),
            )
        ],
    )
    there = elsewhere.pipeline(elsewhere.decode(timeline.encode(pipeline.state())))
    for each in (pipeline, there):
        each.advance(1000)
    assert pipeline.ended and there.state() == pipeline.state()


def test_what_left_with_its_node_comes_back_where_it_stood(folder: Path) -> None:
    plain = timeline_of(folder)
    gone = revised(plain, 20, drop=["rest"])
    assert {s.source for s in gone.at(20).config.sources if s.presence == "dropped"} == {
        PROSE,
        WIKI,
    }
    with pytest.raises(ConfigError, match=r"set\.0\.child: the mixture has no 'parquet|txt"):
        revised(gone, 21, set=[{"child": PROSE, "weight": 3}])
    alone = revised(gone, 30, add=[{"child": {"source": WIKI}}])
    both = node("round_robin", {"source": WIKI}, {"source": PROSE}, alias="rest")
    whole = revised(gone, 30, add=[{"child": both}])
    assert [each.alias for each in whole.at(30).config.nodes] == [None, "rest"], (
        "the old node is of nothing any more"
    )
    for timeline, sources in ((alone, (WIKI,)), (whole, (WIKI, PROSE))):
        pipeline = timeline.pipeline(timeline.initial())
        pipeline.advance(20)
        left = pipeline.state()
        assert timeline.decode(timeline.encode(left)) == left
        pipeline.advance(10)
        back = pipeline.state()
        for spec in sources:
            assert (
                back.sources[timeline.at(30).record.specs.index(spec)]
                == left.sources[timeline.at(20).record.specs.index(spec)]
            )
        pipeline.advance(1000)
        assert (
            pipeline.ended
            and timeline.decode(timeline.encode(pipeline.state())) == pipeline.state()
        )
        assert all(
            pipeline.state().sources[timeline.at(30).record.specs.index(spec)].exhausted
            for spec in sources
        )


def test_a_change_that_a_phase_ends_says_so(folder: Path) -> None:
    phases = [
        {"until_tokens": 160},
        {"until_tokens": 240},
        {"mixture": node("weighted", CHILD)},
    ]
    timeline = timeline_of(folder, phases=phases)
    for at, told in ((5, True), (29, True), (30, False)):
        changes = json.loads(
            revised(timeline, at, set=[{"child": "code", "weight": 7}]).revisions[0].content
        )["changes"]
        assert (
            changes[-1] == "until sample 30, where phase 2 begins with a mixture of its own"
        ) == told


def test_a_state_tells_what_is_still_to_come(folder: Path) -> None:
    timeline = revised(timeline_of(folder), 20, drop=["docs"])
    timeline = revised(timeline, 60, set=[{"child": "code", "weight": 5}])
    early = json.loads(walked(timeline, 5)[5])
    assert [each["sample_index"] for each in early["revisions"]] == [20, 60]
    late = json.loads(walked(timeline, 70)[70])
    assert [each["sample_index"] for each in late["revisions"]] == [60]


def test_what_a_revision_dropped_stays_dropped_in_a_phase_that_has_it(folder: Path) -> None:
    both = node("weighted", {"source": WIKI}, {"source": CODE, "alias": "code"})
    phases = [{"until_tokens": 160}, {"mixture": both | {"policy": "least_consumed"}}]
    timeline = revised(timeline_of(folder, mixture=both, phases=phases), 5, drop=["code"])
    again = revised(timeline, 10, add=[{"child": CODE_ALONE}])
    # One that an earlier phase just does not have comes with the phase that has it.
    phases = [{"until_tokens": 80}, {"mixture": both}]
    one = timeline_of(folder, "weighted", {"source": WIKI}, phases=phases)
    for found, code in ((timeline, "dropped"), (again, "live"), (one, "live")):
        assert [source.presence for source in found.at(30).config.sources] == ["live", code]


def test_a_run_ends_with_the_first_whole_sample_at_its_last_phases_end(folder: Path) -> None:
    timeline = timeline_of(folder, phases=[{"until_tokens": 83}, {"until_tokens": 203}])
    assert timeline.segments[1].tokens == 88
    assert _end(timeline).total_tokens == 208


def test_rows_that_are_left_out_of_a_window_under_way_leave_its_other_samples_as_they_were(
    folder: Path,
) -> None:
    plain = timeline_of(folder, "sequential", CODE_ALONE, packing="best_fit", sequence_length=32)
    given = {}
    for timeline in (plain, revised(plain, 3, exclude={"file": "out.jsonl"})):
        pipeline, found = timeline.pipeline(timeline.initial()), []
        plan = BatchPlan(start_index=0, world_size=1, batch_size=1, group_micro_steps=4)
        for group in filled(pipeline, plan):
            found += [
                set(timeline.first.form.ids(sample).tolist())
                for sample in group.ids(0, 0, len(group.marks))
            ]
        given[timeline is plain] = found
        assert "packed_samples" in walked(timeline)[4]
    assert given[True][:3] == given[False][:3]
    # Of the others, some have less, and none has anything else.
    assert all(any(less <= whole for whole in given[True]) for less in given[False])
    assert given[True] != given[False]


def test_files_that_are_appended_to_a_packed_source_repeat_and_lose_nothing(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path)
    plain = timeline_of(folder, "sequential", CODE_ALONE, packing="best_fit", sequence_length=16)
    write_parquet(folder / "data/code-9.parquet", [[9] * 40] * 3)
    for index in (1, len(walked(plain)) - 2):
        later = revised(plain, index, append_files=["code"])
        before, after = _end(plain).sources[0], _end(later).sources[0]
        filled_up = [end.samples * 16 - end.row_counts.padding_tokens for end in (before, after)]
        assert filled_up[1] - filled_up[0] == 3 * 41
        assert after.rows == before.rows + 3


@pytest.mark.parametrize(("epochs", "other"), [(1.5, 2), (2, 1.5), (1.5, 2.5)])
def test_a_part_of_an_epoch_of_packed_windows_cannot_become_another(
    folder: Path, epochs: float, other: float
) -> None:
    child = CODE_ALONE | {"epochs": epochs}
    timeline = timeline_of(folder, "sequential", child, packing="best_fit")
    says = f"code: epochs is {epochs:g} and would be {other:g}, but with packing: best_fit"
    with pytest.raises(ConfigError, match=says):
        revised(timeline, 5, set=[{"child": "code", "epochs": other}])


def test_a_window_under_way_where_samples_become_longer_is_packed_again(folder: Path) -> None:
    timeline = timeline_of(
        folder,
        "sequential",
        CODE_ALONE,
        packing="best_fit",
        last_micro_step="pad",
        sequence_length=16,
        phases=[{"until_tokens": 160}, {"sequence_length": 64}],
    )
    states = walked(timeline)
    before, begun = (timeline.decode(states[index]).sources[0].cursor for index in (9, 10))
    assert isinstance(before, PackedCursor)
    assert begun == before.first
    for at in (10, 11, len(states) - 2):
        end = advanced(timeline, timeline.decode(states[at]), len(states))
        assert timeline.encode(end) == timeline.encode(_end(timeline))
    # From its first row on: what it had given comes once more.
    end, then = _end(timeline).sources[0], timeline.decode(states[10]).sources[0]
    padding = end.row_counts.padding_tokens - then.row_counts.padding_tokens
    given = end.tokens - 160 - padding
    assert given == sum(len(row) + 1 for shard in ROWS[CODE] for row in shard if row)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"add": [{"child": {"source": EXTRA, "loss_mask": "ids"}, "to": "rest"}]},
            "began without a source that has",
        ),
        (
            {"mixture": node("weighted", CHILD, packing="none")},
            "packing: unknown key",
        ),
    ],
)
def test_how_samples_are_packed_cannot_be_revised(
    folder: Path, change: dict[str, Any], says: str
) -> None:
    timeline = timeline_of(folder, packing="best_fit")
    with pytest.raises(ConfigError, match=says):
        revised(timeline, 5, **change)
    other = parsed(mixture(packing="none"))
    with pytest.raises(
        ConfigError, match=r"packing: the run began with \"best_fit\", the file has \"none\""
    ):
        refuse(other, differences(other, json.loads(timeline.first.record.to_json())))
