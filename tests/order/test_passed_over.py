"""Samples that the order passes over: indices, tokens and digests go on without them, from every state alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import features
from support.corpora import CODE, DOCS, PROSE, WIKI, flat, mixture, order_of, write_corpus
from support.digest import digest_after
from support.mixing import node
from support.timelines import revised, skipping
from tokenloom_server.core.state import State, digest_hex
from tokenloom_server.errors import BeyondHorizon, ConfigError, SnapshotInvalid
from tokenloom_server.order.replay import Replay
from tokenloom_server.order.steps import BatchPlan
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.planning.forecast import Planner

Sample = tuple[int, bytes, list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_corpus(tmp_path_factory.mktemp("corpus"))
    features.write_features(folder)
    return folder


def given(
    timeline: Timeline, state: State | None = None, size: int = 1, group: int = 5
) -> tuple[list[Sample], State]:
    """All samples from a state on, made in groups; and the state at the end. All states on the way are looked at."""
    start = state or timeline.initial()
    pipeline = timeline.pipeline(start)
    samples: list[Sample] = []
    digest = pipeline.state().digest
    while pipeline.ended is None:
        plan = BatchPlan(
            start_index=pipeline.sample_index,
            world_size=1,
            batch_size=size,
            group_micro_steps=group,
        )
        made = pipeline.begin_group(plan)
        for step in range(group):
            pipeline.fill(made, 1)
            if len(made.marks) <= step:
                break
            starts = [] if made.of_rows else made.document_starts(0, step, step + 1)[1].tolist()
            for place, ids in enumerate(made.ids(0, step, step + 1)):
                samples.append((int(made.source_ids[0, step, place]), ids.tobytes(), starts))
                digest = digest_after(digest, *samples[-1][:2])
            after = made.state_after(step)
            assert (after.sample_index, after.digest) == (start.sample_index + len(samples), digest)
            assert after.total_tokens == timeline.tokens_at(after.sample_index)
            assert timeline.decode(timeline.encode(after)) == after
            assert pipeline.sample_index > after.sample_index or pipeline.state() == after
    return samples, pipeline.state()


def state_at(timeline: Timeline, index: int) -> State:
    return Replay(timeline, timeline.settled(timeline.initial())).forward(index)


_DRAWN = [
    {"source": CODE, "shuffle": "rows", "shuffle_window_rows": 5},
    {"source": DOCS, "epochs": 2.4, "lanes": 2},
    {"source": PROSE, "shuffle": "shards", "epochs": 2},
]
LANES = mixture(mixture=node("weighted", *_DRAWN))
CONFIGS: dict[str, dict[str, Any]] = {
    "nested": mixture(),
    "in turn, shifted": flat(
        [CODE, DOCS, WIKI], "round_robin", labels="shifted", sequence_length=6
    ),
    "lanes, shuffled": LANES,
    "best fit, lanes": LANES
    | {"packing": "best_fit", "sequence_length": 24, "pack_window_tokens": 90},
    "none, boundaries masked": mixture(
        packing="none", sequence_length=16, mask_boundaries=True, pad_id=3
    ),
    "batches of rows": features.document(),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_samples_after_a_skip_are_those_of_the_order_so_many_later(
    folder: Path, name: str
) -> None:
    document = CONFIGS[name]
    size = document.get("global_batch_size", 1)
    order = features.order_of(folder, document) if size > 1 else order_of(folder, document)
    plain = Timeline(order)
    whole, _ = given(plain, size=size)
    for begin, skipped in ((0, 3 * size), (7 * size, len(whole) // 4 // size * size)):
        timeline = skipping(plain, begin, skipped)
        samples, end = given(timeline, size=size)
        assert samples == whole[:begin] + whole[begin + skipped :]
        assert sum(source.skipped_samples for source in end.sources) == skipped
        for index in (begin, begin + 5 * size):
            for state in [
                state_at(timeline, index),
                *([state_at(plain, index)] if index <= begin else []),
            ]:
                assert given(timeline, timeline.decode(timeline.encode(state)), size, 3) == (
                    samples[index:],
                    end,
                )


def test_clock_indices_and_digest_stand_still_while_samples_are_passed_over(folder: Path) -> None:
    plain = Timeline(order_of(folder))
    before, after = state_at(plain, 20), state_at(plain, 27)
    state = state_at(skipping(plain, 20, 7), 20)
    assert state.sample_index == 20
    assert (state.total_tokens, state.digest) == (before.total_tokens, before.digest)
    assert state.nodes == after.nodes
    for was, now, passed in zip(before.sources, after.sources, state.sources, strict=True):
        assert passed.cursor == now.cursor
        counted = (passed.skipped_samples, passed.skipped_rows, passed.skipped_tokens)
        assert counted == (now.samples - was.samples, now.rows - was.rows, now.tokens - was.tokens)
    document = json.loads(plain.encode(before)) | {"skips": [[20, 3, 24]]}
    with pytest.raises(
        SnapshotInvalid,
        match=r"nodes.0: found 20; expected 23: samples up to sample_index, and what was pass",
    ):
        plain.decode(json.dumps(document))


def test_a_long_skip_says_how_far_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tokenloom_server.order.timeline.TURN_TOKENS", 8)
    with caplog.at_level("INFO", "tokenloom_server.order.timeline"):
        state_at(skipping(Timeline(order_of(folder)), 20, 7), 20)
    assert [done.message for done in caplog.records] == [
        f"test: passing over 7 samples at sample 20: {done} done" for done in (0, 5)
    ]


def test_a_skip_goes_by_the_config_at_its_sample_across_phases_revisions_and_ends(
    folder: Path,
) -> None:
    phases = [
        {"until_tokens": 200},
        {"mixture": node("sequential", {"source": WIKI})},
    ]
    phased, plain = Timeline(order_of(folder, mixture(phases=phases))), Timeline(order_of(folder))
    whole, _ = given(plain)
    samples, _ = given(skipping(phased, 21, 30))
    assert samples[21:25] == whole[51:55]
    assert {source for source, _, _ in samples[25:]} == {3}
    later = revised(plain, 20, set=[{"child": "code", "weight": 0.1}])
    assert given(skipping(later, 10, 40))[0][10:20] == whole[50:60]
    # Sources run out on the way; and a run that ends by its clock gives as many samples as without.
    assert any(source.exhausted for source in state_at(plain, 150).sources)
    out = skipping(plain, 5, 145)
    assert given(out)[0] == whole[:5] + whole[150:]
    plan = Planner().plan(out, plain.initial(), None)
    left = len(whole) - 145
    assert (plan.until_sample_index, plan.segments[-1].until_tokens) == (left, 8 * left)
    for planned, source in zip(plan.sources, given(plain)[1].sources, strict=True):
        assert planned.tokens == source.tokens
    budget = Timeline(
        order_of(folder, mixture(phases=[{"until_tokens": 80}, {"until_tokens": 800}]))
    )
    assert len(given(budget)[0]) == len(given(skipping(budget, 20, 30))[0]) == 100
    with pytest.raises(
        BeyondHorizon,
        match=r"4000 samples cannot be passed over at sample 12: the order has \d+ more",
    ):
        state_at(skipping(plain, 12, 4000), 12)


def test_two_skips_at_one_sample_add_up_and_one_before_another_leaves_its_range_where_it_lies(
    folder: Path,
) -> None:
    plain = Timeline(order_of(folder))
    whole, _ = given(plain)
    once = skipping(plain, 60, 10)
    assert given(skipping(once, 60, 3))[0] == whole[:60] + whole[73:]
    assert given(skipping(once, 60, 3), state_at(once, 60))[0] == whole[73:]
    twice = skipping(once, 20, 5)
    assert given(twice)[0] == whole[:20] + whole[25:60] + whole[70:]
    # Into the second, which then follows at once.
    assert given(skipping(once, 57, 5))[0] == whole[:57] + whole[72:]
    assert skipping(twice, 70, 0, state_at(once, 70)).skips == {60: 10}
    for state, other in ((state_at(plain, 61), once), (state_at(once, 60), plain)):
        with pytest.raises(
            SnapshotInvalid, match=r"restore to sample 60 or before, or .*restore --undo-skip"
        ):
            other.pipeline(state)


def test_a_batch_is_passed_over_as_a_whole(folder: Path) -> None:
    plain = Timeline(features.order_of(folder, features.document()))
    with pytest.raises(ConfigError, match="sample 3 lies within a global batch of 4"):
        state_at(skipping(plain, 0, 3), 0)
        plain.pipeline(plain.initial())
    assert digest_hex(state_at(skipping(plain, 4, 8), 4).digest) == digest_hex(
        state_at(plain, 4).digest
    )
