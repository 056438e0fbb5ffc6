"""Samples that the order passes over: indices, tokens and digests go on without them, from every state alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import features
from support.corpora import CODE, DOCS, PROSE, WIKI, flat, mixture, order_of, write_corpus
from support.digest import digest_after
from support.timelines import revised, skipping
from tokenloom_server.core.state import State, digest_hex
from tokenloom_server.errors import BeyondHorizon, ConfigError, SnapshotInvalid
from tokenloom_server.order.steps import PADDING, BatchPlan
from tokenloom_server.order.timeline import Timeline


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_corpus(tmp_path_factory.mktemp("corpus"))
    features.write_features(folder)
    return folder


class Sample(NamedTuple):
    source: int
    ids: bytes
    starts: tuple[int, ...]


def given(timeline: Timeline, state: State | None = None, size: int = 1, group: int = 5) -> tuple[list[Sample], State]:
    """All samples from a state on, made in groups; and the state at the end. Every state on the way is the one that
    another pipeline finds, going forward without groups."""
    start = state or timeline.initial()
    pipeline = timeline.pipeline(start)
    samples: list[Sample] = []
    digest = pipeline.state().digest
    while pipeline.ended is None:
        plan = BatchPlan(start_index=pipeline.sample_index, world_size=1, batch_size=size, group_micro_steps=group)
        made = pipeline.begin_group(plan)
        for first in range(group):
            pipeline.fill(made, 1)
            if len(made.marks) <= first:
                break
            counts, starts = made.document_starts(0, first, first + 1) if not made.of_rows else ([0] * size, None)
            begin = 0
            for place in range(size):
                source = int(made.source_ids[0, first, place])
                assert source != PADDING
                own = tuple(starts[begin : begin + counts[place]].tolist()) if starts is not None else ()
                begin += counts[place]
                ids = made.ids(0, first, first + 1)[place].tobytes()
                samples.append(Sample(source, ids, own))
                digest = digest_after(digest, source, ids)
            after = made.state_after(first)
            assert (after.sample_index, after.digest) == (start.sample_index + len(samples), digest)
            assert after.total_tokens == timeline.tokens_at(after.sample_index)
            assert timeline.encode(after) == timeline.encode(timeline.decode(timeline.encode(after)))
            if first == len(made.marks) - 1 and pipeline.sample_index == after.sample_index:
                assert after == pipeline.state()
    return samples, pipeline.state()


def state_at(timeline: Timeline, index: int) -> State:
    pipeline = timeline.pipeline(timeline.initial())
    pipeline.advance(index)
    return pipeline.state()


LANES = mixture(
    mixture={
        "policy": "weighted",
        "children": [
            {"source": CODE, "shuffle": "rows", "shuffle_window_rows": 5},
            {"source": DOCS, "epochs": 2.4, "lanes": 2},
            {"source": PROSE, "shuffle": "shards", "epochs": 2},
            {"source": WIKI, "shuffle": "rows", "shuffle_window_rows": 4, "epochs": 1.5, "weight": 2},
        ],
    }
)
CONFIGS: dict[str, tuple[dict[str, Any], int]] = {
    "nested": (mixture(), 1),
    "in turn, shifted": (flat([CODE, DOCS, WIKI], "round_robin", labels="shifted", sequence_length=6), 1),
    "lanes, shuffled": (LANES, 1),
    "best fit": (mixture(packing="best_fit", sequence_length=16, pack_window_rows=7), 1),
    "best fit, lanes": (LANES | {"packing": "best_fit", "sequence_length": 24, "pack_window_tokens": 90}, 1),
    "none, boundaries masked": (mixture(packing="none", sequence_length=16, mask_boundaries=True, pad_id=3), 1),
    "batches of rows": (features.document(), 4),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_samples_after_a_skip_are_those_of_the_order_so_many_later(folder: Path, name: str) -> None:
    document, size = CONFIGS[name]
    order = features.order_of(folder, document) if size > 1 else order_of(folder, document)
    plain = Timeline(order)
    whole, _ = given(plain, size=size)
    for at, skipped in ((0, 3), (7, len(whole) // 4 // size)):
        at, skipped = at * size, skipped * size
        timeline = skipping(plain, at, skipped)
        samples, end = given(timeline, size=size)
        assert samples == whole[:at] + whole[at + skipped :]
        assert sum(source.skipped_samples for source in end.sources) == skipped
        assert end.sample_index + skipped == len(whole)
        # From every state, before it, at it and after it, and from one that was written without it.
        for index in {0, max(0, at - size), at, at + size, at + 5 * size}:
            states = [state_at(timeline, index), *([state_at(plain, index)] if index <= at else [])]
            for state in states:
                again = timeline.decode(timeline.encode(state))
                rest, last = given(timeline, again, size, group=3)
                assert rest == samples[index:]
                assert last == end


def test_clock_indices_and_digest_stand_still_while_samples_are_passed_over(folder: Path) -> None:
    plain = Timeline(order_of(folder))
    before, after = state_at(plain, 20), state_at(plain, 27)
    state = state_at(skipping(plain, 20, 7), 20)
    assert (state.sample_index, state.total_tokens, state.digest) == (20, before.total_tokens, before.digest)
    assert [source.cursor for source in state.sources] == [source.cursor for source in after.sources]
    assert state.nodes == after.nodes
    for was, now, passed in zip(before.sources, after.sources, state.sources, strict=True):
        counted = (passed.skipped_samples, passed.skipped_rows, passed.skipped_tokens)
        assert counted == (now.samples - was.samples, now.rows - was.rows, now.tokens - was.tokens)
    document = json.loads(plain.encode(before)) | {"skips": [[20, 3, 24]]}
    with pytest.raises(
        SnapshotInvalid, match="its children have 20 samples, but sample_index is 20, and 3 were passed"
    ):
        plain.decode(json.dumps(document))


def test_a_skip_goes_by_the_config_at_its_sample_also_across_a_phase_a_revision_and_the_end_of_a_source(
    folder: Path,
) -> None:
    phases = [{"until_tokens": 200}, {"mixture": {"policy": "sequential", "children": [{"source": WIKI}]}}]
    plain = Timeline(order_of(folder, mixture(phases=phases)))
    begin = plain.segments[1].begin
    first = Timeline(order_of(folder))
    whole, _ = given(first)
    timeline = skipping(plain, begin - 4, 30)
    samples, _ = given(timeline)
    # The phase begins at its index; what was passed over before that is the first mixture's.
    assert samples[begin - 4 : begin] == whole[begin + 26 : begin + 30]
    assert {sample.source for sample in samples[begin:]} == {3}
    later = revised(plain, 20, set=[{"child": "code", "weight": 0.1}])
    assert given(skipping(later, 10, 40))[0][10:20] == whole[50:60]
    # Sources run out on the way.
    out = [i for i, source in enumerate(state_at(first, 150).sources) if source.exhausted]
    assert out and given(skipping(first, 5, 145))[0] == whole[:5] + whole[150:]
    with pytest.raises(BeyondHorizon, match=r"4000 samples cannot be passed over at sample 12: the order has \d+ more"):
        state_at(skipping(first, 12, 4000), 12)


def test_two_skips_at_one_sample_add_up_and_one_before_another_leaves_its_range_where_it_lies(folder: Path) -> None:
    plain = Timeline(order_of(folder))
    whole, _ = given(plain)
    once = skipping(plain, 60, 10)
    assert given(skipping(once, 60, 3))[0] == whole[:60] + whole[73:]
    # A state that passed over the first of two passes over the second.
    assert given(skipping(once, 60, 3), state_at(once, 60))[0] == whole[73:]
    twice = skipping(once, 20, 5)
    assert twice.skips == {20: 5, 55: 10}
    assert given(twice)[0] == whole[:20] + whole[25:60] + whole[70:]
    # Into the second, which then follows at once; and behind it, which moves nothing.
    assert skipping(once, 57, 5).skips == {57: 15}
    assert given(skipping(once, 57, 5))[0] == whole[:57] + whole[72:]
    assert skipping(once, 80, 4).skips == {60: 10, 80: 4}
    # Taken back by a state that was taken without the one, or without both.
    assert skipping(twice, 70, 0, state_at(once, 70)).skips == {60: 10}
    assert skipping(twice, 20, 2, state_at(plain, 20)).skips == {20: 2}


def test_a_state_of_a_line_with_other_skips_is_refused_with_the_choice(folder: Path) -> None:
    plain = Timeline(order_of(folder))
    timeline = skipping(plain, 20, 5)
    for state, other in ((state_at(plain, 21), timeline), (state_at(timeline, 20), plain)):
        with pytest.raises(SnapshotInvalid, match=r"restore to sample 20 or before, or .*restore --undo-skip"):
            other.pipeline(other.decode(timeline.encode(state) if other is plain else plain.encode(state)))


def test_a_batch_is_passed_over_as_a_whole(folder: Path) -> None:
    plain = Timeline(features.order_of(folder, features.document()))
    with pytest.raises(ConfigError, match="sample 3 lies within a global batch of 4"):
        state_at(skipping(plain, 0, 3), 0)
        plain.pipeline(plain.initial())
    assert digest_hex(state_at(skipping(plain, 4, 8), 4).digest) == digest_hex(state_at(plain, 4).digest)
