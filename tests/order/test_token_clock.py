"""The token clock of an older data loader's checkpoint goes on: whatever follows the run's tokens follows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.corpora import CODE, DOCS, PROSE, WIKI, advanced, mixture, order_of
from support.imports import import_into, state_of
from support.mixing import node
from support.timelines import revised
from tokenloom_proto.seal import canonical
from tokenloom_server.core.state import State
from tokenloom_server.errors import SnapshotInvalid
from tokenloom_server.order import foreign_payload
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.planning.forecast import Planner

LENGTH = 8
CLOCK = 100_003
#: The order of the samples below does not matter here, only how far it goes.
SHARDS = {CODE: "data/code-1.parquet", DOCS: "data/docs.jsonl", PROSE: "data/prose/0.txt"}


@pytest.fixture(scope="module")
def order(folder: Path) -> PipelineFactory:
    return order_of(folder)


def entry(spec: str, row_offset: int, token_offset: int | None = None) -> dict[str, Any]:
    fields = {
        "spec": spec,
        "shard": SHARDS.get(spec, "gone"),
        "row_offset": row_offset,
        "row_offset_of": "shard",
    }
    return fields | ({} if token_offset is None else {"token_offset": token_offset})


ALL = [entry(CODE, 3, 83), entry(DOCS, 4, 44), entry(PROSE, 12, 17)]
REMOVED = [*ALL, entry("parquet:gone-*.parquet:text", 9, 5001)]
MISSING = [*ALL[:2], entry(PROSE, 12)]
#: What is beside the entries, or within ``resume_state``.
CLOCK_FIRST = {"total_tokens": CLOCK, "sample_index": 5, "context_length": 64}


def imported(timeline: Timeline, **more: Any) -> State:
    """A state that begins with ``ALL``, by the clock of the payload."""
    return state_of(
        import_into(timeline, {"resume_state": {"datasets": ALL}, "total_tokens": CLOCK, **more})
    )


def ended(timeline: Timeline, state: State) -> tuple[State, str]:
    """The end of the data, and why they end."""
    pipeline = timeline.with_clock(state.clock_offset).pipeline(state)
    while pipeline.ended is None:
        pipeline.advance(10_000)
    return pipeline.state(), pipeline.ended


# --- which clock -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "tokens", "said"),
    [
        ({"resume_state": {"datasets": ALL}} | CLOCK_FIRST, CLOCK, "as the older checkpoint says"),
        (
            {"resume_state": {"datasets": REMOVED} | CLOCK_FIRST},
            CLOCK,
            "as the older checkpoint says",
        ),
        (
            {"resume_state": {"datasets": ALL}},
            83 + 44 + 17,
            "the sum of the older checkpoint's token_offset",
        ),
        (
            {"resume_state": {"datasets": REMOVED}, "sample_index": 9, "context_length": 8},
            5145,
            "the sum of the older",
        ),
        (
            {"resume_state": {"datasets": MISSING, "sample_index": 50, "block_size": 2000}},
            CLOCK - 3,
            "sample_index × context_length",
        ),
        (
            {"resume_state": {"datasets": MISSING}, "sample_index": 50, "max_seq_len": 2000},
            CLOCK - 3,
            "sample_index ×",
        ),
        (
            {"resume_state": {"datasets": MISSING}, "sample_index": 50},
            120,
            "those of the samples; where its clock was",
        ),
        (
            {"resume_state": {"datasets": MISSING}, "context_length": 50},
            120,
            "those of the samples",
        ),
        (
            {"resume_state": {"datasets": [entry(CODE, 3), entry(DOCS, 4)]}, "total_tokens": 0},
            0,
            "as the older checkpoint says",
        ),
        ({"sample_index": 37, "total_tokens": CLOCK}, CLOCK, "as the older checkpoint says"),
        ({"sample_index": 37, "sequence_length": 2048}, 37 * 2048, "sample_index × context_length"),
        (
            {"resume_state": {"sample_index": 37, "total_tokens": 12}},
            12,
            "as the older checkpoint says",
        ),
        (
            {"resume_state": {"datasets": ALL, "total_tokens": 9}, "total_tokens": None},
            9,
            "as the older checkpoint says",
        ),
        ({"sample_index": 37}, 37 * LENGTH, "those of the samples"),
    ],
)
def test_the_clock_is_what_the_payload_can_tell_of_it(
    order: PipelineFactory, document: dict[str, Any], tokens: int, said: str
) -> None:
    timeline = Timeline(order)
    point = import_into(timeline, document)
    assert point.total_tokens == tokens
    # Whatever the clock is, counters are the sources' own.
    assert (
        point.base is not None
        and sum(s.tokens for s in point.base.sources) == point.base.sample_index * LENGTH
    )
    assert point.notes[-1].startswith(f"resume: total_tokens={tokens} (")
    assert said in point.notes[-1]
    by_clock = timeline.with_clock(point.base.clock_offset)
    state = advanced(by_clock, point.base, point.sample_index - point.base.sample_index)
    assert (state.sample_index, state.total_tokens) == (point.sample_index, tokens)
    assert timeline.decode(timeline.encode(state)) == state


@pytest.mark.parametrize("name", ["total_tokens", "context_length", "max_seq_len"])
@pytest.mark.parametrize("value", [-1, 2**53, 1.5, "many", True])
def test_a_clock_that_is_no_count_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(SnapshotInvalid, match=f"{name}: found .*expected an integer from 0"):
        foreign_payload.read(json.dumps({"resume_state": {"datasets": ALL}, name: value}))


def test_ranks_that_bring_other_clocks_stand_at_other_places(order: PipelineFactory) -> None:
    timeline = Timeline(order)
    digests = {imported(timeline, total_tokens=tokens).digest for tokens in (136, CLOCK, CLOCK + 1)}
    assert len(digests) == 3
    assert imported(timeline, total_tokens=136).clock_offset == 0


# --- states ----------------------------------------------------------------------------------------------------------


def test_each_state_after_it_is_checked_as_linear_plus_offset(order: PipelineFactory) -> None:
    timeline = Timeline(order)
    state = imported(timeline)
    end, _ = ended(timeline, state)
    assert end.total_tokens == CLOCK + (end.sample_index - state.sample_index) * LENGTH
    for stop in range(0, end.sample_index - state.sample_index, 11):
        text = timeline.encode(advanced(timeline.with_clock(state.clock_offset), state, stop))
        between = timeline.decode(text)
        assert timeline.with_clock(between.clock_offset).encode(between) == text
        assert ended(timeline, between)[0] == end
        for field, by in (
            ("total_tokens", 8),
            ("clock_offset", 1),
            ("clock_offset", -state.clock_offset),
        ):
            document = json.loads(text)
            document[field] += by
            with pytest.raises(SnapshotInvalid, match="total_tokens: found"):
                timeline.decode(canonical(document))


# --- what follows the tokens -----------------------------------------------------------------------------------------


def test_phases_go_by_the_clock(folder: Path) -> None:
    later = node("weighted", {"source": WIKI}, {"source": PROSE})
    phases = [
        {"until_tokens": 90_000},
        {"until_tokens": CLOCK + 100},
        {"until_tokens": CLOCK + 230, "mixture": later},
    ]
    timeline = Timeline(order_of(folder, mixture(phases=phases, last_micro_step="pad")))
    state = imported(timeline)
    by_clock = timeline.with_clock(state.clock_offset)
    assert [segment.phase for segment in by_clock.segments] == [1, 2]
    begin = by_clock.segments[1].begin
    assert by_clock.tokens_at(begin - 1) < CLOCK + 100 <= by_clock.tokens_at(begin)
    end, why = ended(timeline, state)
    # To the first whole sample at the last phase's end, and the mixture of each phase until then.
    assert (end.total_tokens - CLOCK, why) == (
        29 * LENGTH,
        f"the last phase ends at {CLOCK + 230:,} tokens",
    )
    given = [now.samples - was.samples for now, was in zip(end.sources, state.sources, strict=True)]
    assert sum(given[:2]) <= begin - state.sample_index == 13
    assert by_clock.index_at(CLOCK + 230) == end.sample_index
    plan = Planner().plan(by_clock, state, None)
    assert (plan.from_tokens, plan.until_tokens, plan.until_sample_index) == (
        CLOCK,
        end.total_tokens,
        end.sample_index,
    )


def test_a_phase_of_another_length_is_the_one_that_the_clock_is_in(folder: Path) -> None:
    phases = [{"until_tokens": 99_000}, {"sequence_length": 16}]
    timeline = Timeline(order_of(folder, mixture(phases=phases, last_micro_step="pad")))
    state = imported(timeline)
    # Of the offsets 83, 44 and 17 samples of 16 tokens.
    assert (state.sample_index, state.total_tokens) == (5 + 2 + 1, CLOCK)
    end, _ = ended(timeline, state)
    assert end.total_tokens == CLOCK + (end.sample_index - 8) * 16
    assert timeline.decode(timeline.encode(end)) == end


@pytest.mark.parametrize("revise", [False, True])
def test_the_budget_of_the_mixture_is_the_runs_and_limits_below_are_the_sources_own(
    folder: Path, revise: bool
) -> None:
    document = mixture()
    document["mixture"]["max_tokens"] = CLOCK + 160
    document["mixture"]["children"][1]["max_tokens"] = 56
    timeline = Timeline(order_of(folder, document))
    state = imported(timeline)
    if revise:
        timeline = revised(
            timeline.with_clock(state.clock_offset), 21, set=[{"child": "code", "weight": 3}]
        )
    end, why = ended(timeline, state)
    assert (end.total_tokens, why) == (
        CLOCK + 160,
        f"the mixture has given its max_tokens of {CLOCK + 160:,}",
    )
    assert end.sources[1].tokens == 56
    plan = Planner().plan(timeline.with_clock(state.clock_offset), state, None)
    assert plan.until_tokens == end.total_tokens


def test_a_budget_that_the_clock_is_beyond_gives_nothing(folder: Path) -> None:
    document = mixture()
    document["mixture"]["max_tokens"] = 5_000
    timeline = Timeline(order_of(folder, document))
    end, why = ended(timeline, imported(timeline))
    assert (end.total_tokens, why) == (CLOCK, "the mixture has given its max_tokens of 5,000")


def test_scheduled_weights_go_by_the_clock(folder: Path) -> None:
    points = [[0, 1], [CLOCK + 80, 1], [CLOCK + 81, 0]]
    children = [{"source": CODE, "weight": points}, {"source": DOCS, "weight": 1}]
    timeline = Timeline(order_of(folder, mixture(mixture=node("schedule", *children))))
    state = imported(timeline)
    pipeline = timeline.with_clock(state.clock_offset).pipeline(state)
    given = []
    # Weights are made anew every so many picks.
    for samples in (10, 64, 10):
        before = pipeline.state().sources[0].samples
        pipeline.advance(samples)
        given.append(pipeline.state().sources[0].samples - before)
    assert (given[0], given[2]) == (5, 0)


def test_a_revision_is_found_by_the_clock(order: PipelineFactory) -> None:
    timeline = Timeline(order)
    state = imported(timeline)
    by_clock = timeline.with_clock(state.clock_offset)
    index = by_clock.index_at(CLOCK + 50)
    assert index == state.sample_index + 7
    after = revised(by_clock, index, set=[{"child": "code", "weight": 9}])
    assert after.clock_offset == state.clock_offset
    assert after.segments[-1].tokens == CLOCK + 56
    text = after.encode(ended(after, state)[0])
    assert Timeline(order, after.revisions).encode(after.decode(text)) == text


def test_a_clock_that_phases_cannot_have_there_is_refused(folder: Path) -> None:
    phases = [{"until_tokens": 400}, {"sequence_length": 16}]
    timeline = Timeline(order_of(folder, mixture(phases=phases, last_micro_step="pad")))
    with pytest.raises(
        SnapshotInvalid,
        match="total_tokens: found 500 at sample_index 37, before which the mixture",
    ):
        import_into(timeline, {"sample_index": 37, "total_tokens": 500})
    # Beyond the change altogether it can.
    assert import_into(timeline, {"sample_index": 37, "total_tokens": 5000}).total_tokens == 5000
