"""Older data loaders' checkpoints: what they hold goes on, what they lack is said, what does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.catalog import CATALOG
from support.corpora import CODE, DOCS, PROSE, ROWS, WIKI, advanced, flat, mixture, order_of
from support.imports import import_entries, import_into, state_of
from support.mixing import node
from tokenloom_proto.seal import seal
from tokenloom_server.config import mixture_file as config
from tokenloom_server.core.state import MAX_COUNTER, FileCursor, SourceState, State
from tokenloom_server.errors import SnapshotInvalid
from tokenloom_server.mixing import elsewhere
from tokenloom_server.mixing.mixer import Mixer
from tokenloom_server.mixing.policies import policies
from tokenloom_server.order import foreign_checkpoint, foreign_payload
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.pipeline import Pipeline
from tokenloom_server.order.steps import BatchPlan
from tokenloom_server.order.timeline import Timeline

SPECS = [CODE, DOCS, PROSE, WIKI]
SHARDS = {CODE: "data/code-1.parquet", DOCS: "data/docs.jsonl", PROSE: "data/prose/0.txt"}
END = 257


@pytest.fixture(scope="module")
def order(folder: Path) -> PipelineFactory:
    return order_of(folder)


def entry(
    spec: str, row_offset: int = 0, token_offset: int | None = None, **more: Any
) -> dict[str, Any]:
    """One source as older tools write it."""
    found = {"spec": spec, "shard": SHARDS.get(spec, ""), "row_offset": row_offset}
    return found | ({} if token_offset is None else {"token_offset": token_offset}) | more


def wiki(order: PipelineFactory, **more: Any) -> dict[str, Any]:
    return entry(WIKI, shard=order.record.shard_paths[order.record.specs.index(WIKI)][0], **more)


def carried(run: config.RunConfig, samples: list[int], known: list[bool]) -> elsewhere.Imported:
    """The nodes over sources that gave so many samples elsewhere."""
    sources = [SourceState(samples=count, tokens=count * run.sequence_length) for count in samples]
    return elsewhere.imported(run, sources, [source.tokens for source in sources], known)


def decoded(order: PipelineFactory, state: State) -> State:
    """A state through its text."""
    timeline = Timeline(order)
    return timeline.decode(timeline.encode(state))


def picks(order: PipelineFactory, state: State, count: int) -> list[int]:
    """Samples of each source among the next ``count``."""
    after = advanced(order, state, count)
    return [
        now.samples - was.samples for now, was in zip(after.sources, state.sources, strict=True)
    ]


def first_ids(pipeline: Pipeline, source: int) -> list[int]:
    """The first sample that a source gives."""
    plan = BatchPlan(
        start_index=pipeline.state().sample_index, world_size=1, batch_size=1, group_micro_steps=100
    )
    group = pipeline.begin_group(plan)
    pipeline.fill(group, 100)
    at = group.source_ids.reshape(-1).tolist().index(source)
    return list(memoryview(group.samples[at]).cast("H"))


# --- What goes on ------------------------------------------------------------------------------------------------


def test_cursors_and_counters_are_what_the_payload_says(order: PipelineFactory) -> None:
    point = import_entries(
        order,
        entry(CODE, 3, 83),
        entry(DOCS, 4, 40),
        entry(PROSE, 12, 16),
        wiki(order, row_offset=5),
    )
    state = state_of(point)

    # Of 83 tokens 10 samples; of prose all of the first shard; without a token_offset nothing.
    known = [
        (FileCursor(0, 1, 3), 10, len(ROWS[CODE][0]) + 3),
        (FileCursor(0, 0, 4), 5, 4),
        (FileCursor(0, 0, 12), 2, 12),
        (FileCursor(0, 0, 5), 0, 5),
    ]
    assert [(own.cursor, own.samples, own.rows) for own in state.sources] == known
    assert [own.tokens for own in state.sources] == [80, 40, 16, 0]
    assert (state.sample_index, state.total_tokens) == (17, 136)
    assert (point.sample_index, point.total_tokens) == (17, 136)
    assert (point.run_uid, point.generation) == (None, 0)
    assert [[child.samples for child in children] for children in state.nodes] == [
        [10, 5, 2],
        [2, 0],
    ]
    assert all(child.tokens == child.samples * 8 for each in state.nodes for child in each)
    assert decoded(order, state) == state


def test_each_spec_is_told_in_one_line(order: PipelineFactory) -> None:
    point = import_entries(
        order, entry(CODE, 3, 83), entry(DOCS, 4), entry("hf:old/set:train:text", 9, shard="x")
    )

    assert [note.replace(CODE, "CODE") for note in point.notes] == [
        "resume: spec=CODE sample_row=17 shard=data/code-1.parquet offset=3 row_offset=3 tokens=80 (from an older "
        "checkpoint)",
        f"resume: spec={DOCS} sample_row=4 shard=data/docs.jsonl offset=4 row_offset=4 tokens=0 (from an older "
        "checkpoint; it has no token_offset, which counts as 0)",
        f"resume: spec={PROSE} new: starts at the minimum, 0 tokens",
        f"resume: spec={WIKI} new: starts at the minimum, 0 tokens",
        "resume: spec=hf:old/set:train:text preserved: not in this mixture",
        "resume: total_tokens=80 (those of the samples; where its clock was another, write total_tokens into the "
        "checkpoint's copy)",
    ]


def test_a_source_goes_on_with_the_row_behind_its_cursor(order: PipelineFactory) -> None:
    state = state_of(
        import_entries(order, entry(CODE, 3, 80), entry(DOCS, 4, 40), entry(PROSE, 12, 40))
    )

    rows = [
        END if token is None else token
        for row in ROWS[CODE][1][3:]
        for token in [*row, *([None] if row else [])]
    ]
    assert first_ids(order.pipeline(state), 0) == rows[:8]


@pytest.mark.parametrize("policy", [None, *policies()])
def test_every_state_after_an_import_leads_to_the_same_rest(
    folder: Path, policy: str | None
) -> None:
    order = order_of(folder, flat(SPECS, policy) if policy else None)
    state = state_of(
        import_entries(order, entry(CODE, 3, 83), entry(DOCS, 4, 40), entry("old:x:y", shard="z"))
    )
    whole = order.pipeline(state)
    whole.advance(10_000)
    assert whole.ended is not None
    for stop in range(1, whole.state().sample_index - state.sample_index, 7):
        between = decoded(order, advanced(order, state, stop))
        assert between.preserved == state.preserved != ()
        assert between.imported == state.imported
        assert advanced(order, between, 10_000) == whole.state()


def test_a_round_is_the_first_for_all_whatever_they_were_given(folder: Path) -> None:
    order = order_of(folder, flat([CODE, DOCS, PROSE], policy="round_robin"))
    state = state_of(import_entries(order, entry(CODE, 3, 80), entry(DOCS, 1, 8)))
    assert [picks(order, state, count) for count in (1, 2, 3, 6)] == [
        [1, 0, 0],
        [1, 1, 0],
        [1, 1, 1],
        [2, 2, 2],
    ]


def test_a_balance_that_is_too_far_off_to_be_counted_is_kept_in_proportion(folder: Path) -> None:
    order = order_of(folder, flat([CODE, DOCS, PROSE]))
    billions = carried(order.config, [2**50 // 8, 0, 0], [True] * 3).nodes[0]
    assert max(abs(child.credit) for child in billions) <= MAX_COUNTER
    state = state_of(
        import_entries(order, entry(CODE, 3, 2**49), entry(DOCS, 2, 0), entry(PROSE, 2, 0))
    )
    assert picks(order, state, 40)[0] == 0


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 300), st.booleans()), min_size=2, max_size=6
    )
)
def test_whatever_was_consumed_shares_become_those_of_the_weights_and_stay_there(
    children: list[tuple[int, int, bool]],
) -> None:
    document = flat([f"txt:{i}.txt:text" for i in range(len(children))])
    for child, (weight, _, _) in zip(document["mixture"]["children"], children, strict=True):
        child["weight"] = weight
    run = config.parse(document, where="mixture.yaml", catalog=CATALOG)
    before = [samples if known else 0 for _, samples, known in children]
    begin = carried(run, before, [known for *_, known in children])
    weights = [weight for weight, *_ in children]
    begun = [
        max(samples, (at or 0) / 8) for samples, at in zip(before, begin.baselines, strict=True)
    ]
    # As many samples as it takes until who had the most for its weight is due again.
    level = max(had / weight for had, weight in zip(begun, weights, strict=True))
    count = int(level * sum(weights) - sum(begun)) + 50
    mixer = Mixer(run, begin.nodes)
    picked: list[int] = []
    while len(picked) < count:
        some = min(97, count - len(picked))
        picked += mixer.plan(some).tolist()
        mixer.take_planned(some)
    total = sum(begun) + count
    for i, (had, weight) in enumerate(zip(begun, weights, strict=True)):
        assert (
            abs(had + picked.count(i) - total * weight / sum(weights)) < 1.2
        )  # a sample, and what baselines round


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**54), 2**54) | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "spec": st.sampled_from([*SPECS, "gone:a:b"]) | JSON,
        "shard": st.sampled_from(["data/code-1.parquet", "0.txt", "a\0b", "/", "", ".."]) | JSON,
        "row_offset": st.integers(-1, 14) | JSON,
        "token_offset": st.integers(-1, 2**53) | JSON,
        "epoch": st.integers(-1, 3) | JSON,
        "unknown": JSON,
    },
)


KNOWN = st.fixed_dictionaries(
    {
        "spec": st.just(CODE),
        "shard": st.just("data/code-1.parquet"),
        "row_offset": st.integers(0, 13),
    },
    optional={"token_offset": st.integers(0, 2**40), "unknown": JSON, "note": JSON},
)
GONE = st.fixed_dictionaries(
    {
        "spec": st.text(min_size=1, max_size=5),
        "shard": st.text(min_size=1),
        "row_offset": st.integers(0, 99),
    },
    optional={"unknown": JSON, "note": JSON},
)
DATASETS = st.lists(KNOWN | GONE | ENTRIES, max_size=4)
PAYLOADS = st.fixed_dictionaries(
    {},
    optional={
        "resume_state": st.fixed_dictionaries({"datasets": DATASETS | JSON}) | JSON,
        "sample_index": st.integers(-1, 2**54) | JSON,
    },
)


@settings(max_examples=300, deadline=None)
@given(PAYLOADS)
def test_whatever_a_payload_holds_it_becomes_a_state_or_is_refused(
    order: PipelineFactory, document: dict[str, Any]
) -> None:
    try:
        payload = foreign_payload.read(json.dumps(document))
        if payload is None:
            return
        point = foreign_checkpoint.resume_point(payload, Timeline(order))
    except SnapshotInvalid:
        return
    if point.base is not None:
        assert decoded(order, point.base) == point.base


@pytest.mark.parametrize("policy", ["soft_sequential", "balance_remaining"])
@pytest.mark.parametrize("said", [{}, {"token_offset": 0}, {"token_offset": 640, "unknown": True}])
def test_what_is_left_follows_from_the_rows_where_no_tokens_are_said(
    folder: Path, policy: str, said: dict[str, Any]
) -> None:
    order = order_of(folder, flat([CODE, DOCS, WIKI], policy))
    point = import_entries(
        order, {"spec": CODE, "row_offset": 25, **said}, wiki(order, row_offset=2)
    )
    state = state_of(point)
    size = order.record.size_estimates[0]
    assert state.sources[0].samples == size.tokens_before(25) // 8 > 50
    assert state.total_tokens == state.sample_index * 8
    # Of its 26 rows one is left.
    assert picks(order, state, 30)[0] <= 6
    assert "by its size" in point.notes[0]
    assert "by its size" not in point.notes[1]


def test_what_is_not_said_counts_as_nothing_for_balances_whatever_is_left(folder: Path) -> None:
    inner = node("soft_sequential", {"source": DOCS}, {"source": WIKI})
    order = order_of(folder, mixture(mixture=node("least_consumed", {"source": CODE}, inner)))
    state = state_of(
        import_entries(order, entry(CODE, 3), entry(DOCS, 8), wiki(order, row_offset=2))
    )
    assert [child.samples > 0 for child in state.nodes[0]] == [False, True]
    assert [child.credit for child in state.nodes[0]] == [0, 0]
    assert picks(order, state, 20)[0] == 10
    assert decoded(order, state) == state


def test_of_phases_the_one_that_goes_by_what_is_left_counts_the_rows(folder: Path) -> None:
    document = flat([CODE, WIKI])
    later = {"mixture": flat([CODE, WIKI], "soft_sequential")["mixture"]}
    order = Timeline(order_of(folder, document | {"phases": [{"until_tokens": 160}, later]}))
    entries = {"spec": CODE, "row_offset": 25}, {"spec": WIKI, "row_offset": 2}
    assert state_of(import_entries(order, *entries)).sample_index == 0
    state = state_of(import_entries(order, *entries, total_tokens=800))
    assert (state.total_tokens, state.sources[0].samples > 50) == (800, True)


def test_the_digest_is_that_of_the_place_and_tells_places_apart(order: PipelineFactory) -> None:
    same = [
        import_entries(order, entry(CODE, 3, 83, note=note), entry(DOCS, 4)).digest for note in "ab"
    ]
    other = import_entries(order, entry(CODE, 4, 83), entry(DOCS, 4)).digest
    assert same[0] == same[1] != other
    assert state_of(import_entries(order, entry(CODE, 3, 83))).imported is not None


def test_a_sample_index_alone_skips_so_many_samples(order: PipelineFactory) -> None:
    point = import_into(order, {"sample_index": 37})
    assert (point.sample_index, point.total_tokens, point.digest) == (37, 296, None)
    assert point.base == Timeline(order).initial()
    assert "sample_index=37" in point.notes[0]
    assert import_into(order, {"resume_state": {"sample_index": 37}}) == point


# --- What is new, and what is not there any more -----------------------------------------------------------------


@pytest.mark.parametrize(("baseline", "tokens"), [("min", 40), ("mean", 60), ("zero", 0)])
def test_a_new_source_begins_at_the_baseline_and_counts_nothing(
    folder: Path, baseline: str, tokens: int
) -> None:
    order = order_of(folder, flat([CODE, DOCS, PROSE], new_source_baseline=baseline))
    point = import_entries(order, entry(CODE, 3, 80), entry(DOCS, 2, 40))
    state = state_of(point)

    new, child = state.sources[2], state.nodes[0][2]
    assert (new.samples, new.rows, new.cursor) == (0, 0, None)
    assert (child.samples, child.tokens) == (0, 0)
    assert sum(child.credit for child in state.nodes[0]) == 0
    which = {"min": "the minimum", "mean": "the mean", "zero": "zero"}[baseline]
    assert point.notes[2].endswith(f"starts at {which}, {tokens} tokens")
    # As many tokens until all are level with the one that has the most: its start is what it had.
    missing = (80 - 40) // 8, (80 - tokens) // 8
    assert picks(order, state, sum(missing)) == [0, *missing]


def test_a_node_that_is_new_begins_at_the_baseline_as_a_whole(order: PipelineFactory) -> None:
    begin = carried(order.config, [10, 5, 0, 0], [True, True, False, False])
    # Of 2 : 1 : 1.5 parts, 80/2 and 40/1 are 40 tokens a part; the integers are 4 : 2 : 3.
    assert begin.baselines == (None, None, 60, 60)
    assert [child.credit for child in begin.nodes[0]] == [0, 0, 0]


def test_without_balances_a_new_source_just_begins(folder: Path) -> None:
    order = order_of(folder, flat([CODE, DOCS], policy="weighted"))
    assert import_entries(order, entry(CODE, 3, 80)).notes[1] == (
        f"resume: spec={DOCS} new: starts at its beginning; the policies above it keep no balance"
    )


def test_what_the_mixture_lacks_is_written_back_as_it_was(order: PipelineFactory) -> None:
    old = entry("hf:old/set@main:train:text", 9, 1000, shard="part-7", extra={"b": [1, None]})
    state = state_of(import_entries(order, entry(CODE, 3, 80), old))
    datasets = json.loads(Timeline(order).encode(state))["datasets"]
    assert datasets[-1] == {**old, "unknown": True}
    assert [found["spec"] for found in datasets[:-1]] == SPECS


# --- Paths -------------------------------------------------------------------------------------------------------


def test_a_shard_is_found_by_an_absolute_path_and_relative_to_another_folder(
    order: PipelineFactory, folder: Path
) -> None:
    for place in (
        "data/",
        f"{folder}/data/",
        "/old/machine/data/",
        "",
        "./data/../data/",
    ):
        point = import_entries(order, entry(CODE, 3, shard=f"{place}code-1.parquet"))
        assert state_of(point).sources[0].cursor.shard == 1


@pytest.mark.parametrize("wrapped", [{}, {"dataset": {}, "epoch": 2}])
def test_a_list_of_sources_alone_and_one_in_a_dataset_are_read_and_specs_by_absolute_paths(
    folder: Path, order: PipelineFactory, wrapped: dict[str, Any]
) -> None:
    plain = [entry(CODE, 3, 83), entry(DOCS, 4), entry("old:x:y", shard="z")]
    moved = [{**one, "spec": one["spec"].replace(":data", f":{folder}/./data")} for one in plain]
    alone = {"datasets": moved, "row_offset_of": "shard"}
    point = import_into(order, {**wrapped, "dataset": alone} if wrapped else alone)
    assert state_of(point) == state_of(import_entries(order, *plain, row_offset_of="shard"))


def test_a_shard_that_may_be_several_is_refused(tmp_path: Path) -> None:
    for part in ("a", "b"):
        (tmp_path / "data" / part).mkdir(parents=True)
        (tmp_path / "data" / part / "0.txt").write_text("some text\n")
    spec = "txt:data/*/0.txt:text"
    order = order_of(tmp_path, flat([spec]))
    with pytest.raises(SnapshotInvalid, match=r"may be each of 'data/a/0\.txt', 'data/b/0\.txt'"):
        import_entries(order, entry(spec, shard="0.txt"))
    point = import_entries(order, entry(spec, shard="b/0.txt"))
    assert state_of(point).sources[0].cursor.shard == 1


# --- What is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"row_offset": -1},
            r"datasets\.0 \(spec 'parquet:.*'\): row_offset: found -1; .*greater than or equal to 0",
        ),
        (
            {"row_offset": 13},
            r"datasets\.0 \(spec 'parquet:.*'\): row_offset is 13, but data/code-1.parquet has 12",
        ),
        ({"row_offset": "3"}, r"datasets\.0 .*row_offset: found '3'; .*valid integer"),
        ({"row_offset": True}, r"datasets\.0 .*row_offset: found True; .*valid integer"),
        ({"row_offset": 1.5}, r"datasets\.0 .*row_offset: found 1\.5; .*valid integer"),
        ({"token_offset": -8}, r"datasets\.0 .*token_offset: found -8"),
        ({"token_offset": 2**53}, r"datasets\.0 .*token_offset: found 9007199254740992"),
        (
            {"shard": "data/code-7.parquet"},
            r"datasets\.0 .*shard 'data/code-7.parquet' is none of the source's files; ",
        ),
        (
            {"shard": "/elsewhere/code-7.parquet"},
            r"expected one of 'data/code-0.parquet', 'data/code-1.parquet'",
        ),
        ({"shard": 1}, r"datasets\.0 .*shard: found 1; .*valid string"),
        (
            {"epoch": 1},
            r"datasets\.0 .*epoch is 1, but the mixture file reads the source for 1 epochs",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_by_spec_and_field(
    order: PipelineFactory, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(SnapshotInvalid, match=said):
        import_entries(order, entry(CODE, 3, 80) | change, entry(DOCS, 1))


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"resume_state": []}, "resume_state: expected a mapping with datasets, found list"),
        ({"resume_state": {"datasets": []}}, r"resume_state\.datasets: found \[\]"),
        ({"resume_state": {"datasets": {}}}, r"resume_state\.datasets: found {}; .*valid list"),
        ({"resume_state": {"datasets": [7]}}, r"resume_state\.datasets\.0: found 7"),
        (
            {"resume_state": {"datasets": [{"spec": CODE, "shard": "x"}]}},
            r"row_offset: found nothing; Field required",
        ),
        (
            {"resume_state": {}},
            "sample_index: found nothing; expected that, or resume_state.datasets",
        ),
        ({"sample_index": -1}, "sample_index: found -1"),
        ({"sample_index": "12"}, "sample_index: found '12'"),
        ({"sample_index": True}, "sample_index: found True"),
    ],
)
def test_what_is_no_payload_is_refused(document: dict[str, Any], said: str) -> None:
    with pytest.raises(SnapshotInvalid, match=said):
        foreign_payload.read(json.dumps(document))


def test_a_spec_that_stands_there_twice_is_refused(order: PipelineFactory) -> None:
    with pytest.raises(SnapshotInvalid, match=r"datasets\.1 .*stands there already, at 0"):
        import_entries(order, entry(CODE), entry(CODE))


def test_a_payload_of_which_nothing_is_known_is_refused(order: PipelineFactory) -> None:
    with pytest.raises(
        SnapshotInvalid,
        match="none of its specs is in this mixture; found 'a:b:c', expected some of",
    ):
        import_entries(order, entry("a:b:c", shard="x"))


def test_more_tokens_than_can_be_counted_are_refused(order: PipelineFactory) -> None:
    for entries in ([entry(DOCS, 1, MAX_COUNTER)], [entry(DOCS, 1, MAX_COUNTER), entry(PROSE)]):
        with pytest.raises(SnapshotInvalid, match=r"token_offset.*counters end at 2\^53 − 1"):
            import_entries(order, entry(CODE, 3, MAX_COUNTER), *entries)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"note": "x" * 2**17}, "is 131[0-9]+ bytes; expected at most 131072"),
        (
            {"note": "\ud800"},
            r"'gone:a:b', which this mixture lacks, is no JSON .*UnicodeEncodeError",
        ),
    ],
)
def test_what_every_later_state_would_carry_is_bounded_and_can_be_written(
    order: PipelineFactory, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(SnapshotInvalid, match=said):
        import_entries(order, entry(CODE, 3, 80), entry("gone:a:b", shard="x", **more))


def test_under_phases_an_import_is_placed_by_its_tokens_as_long_as_samples_have_one_length(
    folder: Path,
) -> None:
    phases = [{"until_tokens": 400}, {"sequence_length": 16}]
    order = order_of(folder, mixture(phases=phases, last_micro_step="pad"))
    state = state_of(import_entries(order, entry(CODE, 3, 200), entry(DOCS, 4, 40)))
    assert state.sample_index == 30
    assert advanced(Timeline(order), state, 40).total_tokens == 50 * 8 + 20 * 16
    with pytest.raises(SnapshotInvalid, match="phases change the sequence length"):
        import_entries(order, entry(CODE, 3, 400), entry(DOCS, 4, 40))


def test_a_snapshot_is_no_older_payload_even_where_it_is_torn() -> None:
    for text in (
        seal({"format": "tokenloom/snapshot", "sample_index": 3}),
        '{"checksum": "x", "sample_index": 3}',
        '{"sample_index": 3',
        b"\xff",
        "[1]",
        '{"other": 1}',
    ):
        assert foreign_payload.read(text) is None
