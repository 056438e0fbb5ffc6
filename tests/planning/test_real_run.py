"""A plan, made of headers and a sample, against the run itself, gone through to its end."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import corpora
from support.corpora import advanced
from support.mixing import node
from support.timelines import revised
from tokenloom_server.config.node import NodeConfig
from tokenloom_server.config.run import RunConfig
from tokenloom_server.core.state import State
from tokenloom_server.mixing.policies import policies
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.size_estimates import measure
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.planning.forecast import EXACT_PICKS, Part, Planner, forecast
from tokenloom_server.planning.plan import RunPlan

LENGTH = 8
DETERMINISTIC = tuple(name for name in policies() if name != "weighted")
#: A source that ran out is found to be so by the pick behind its last, which comes when it is its turn; and weights
#: that follow the run do so every 256 samples.
GRANULARITY = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven sources of two to nine thousand samples an epoch, ids and text, in one shard and in several."""
    folder = tmp_path_factory.mktemp("corpora")
    for i in range(4):
        for shard in range(1 + 3 * (i % 2)):
            rows = corpora.id_rows(2_500 + 900 * i, 10 * i + shard, 14)
            corpora.write_parquet(folder / f"ids-{i}-{shard}.parquet", rows, group=500)
    corpora.write_txt(folder / "lines-0.txt", corpora.text_rows(5_000, 71, 6))
    corpora.write_txt(folder / "lines-1.txt", corpora.text_rows(2_000, 72, 6))
    corpora.write_jsonl(folder / "objects.jsonl", corpora.text_rows(6_500, 73, 6))
    corpora.write_txt(folder / "more.txt", corpora.text_rows(4_500, 74, 6))
    return folder


def specs() -> list[str]:
    ids = [f"parquet:ids-{i}-*.parquet:ids" for i in range(4)]
    return [*ids, "txt:lines-*.txt:text", "jsonl:objects.jsonl:text", "txt:more.txt:text"]


def random_mixture(rng: random.Random, policies: tuple[str, ...]) -> dict[str, Any]:
    """A random tree over all sources, up to three deep."""
    found = [
        {"source": spec, "alias": f"s{i}", "epochs": rng.choice([1, 1, 1.5, 2.25])}
        for i, spec in enumerate(specs())
    ]
    rng.shuffle(found)
    return random_node(rng, policies, iter(found), len(found), depth=3)


def random_node(
    rng: random.Random,
    policies: tuple[str, ...],
    leaves: Iterator[dict[str, Any]],
    count: int,
    depth: int,
    may_stop: bool = True,
) -> dict[str, Any]:
    policy = rng.choice(policies)
    # Nothing ends with the last sample of a soft sequence's child, of which nobody knows when it comes.
    may_stop = may_stop and policy != "soft_sequential"
    children = []
    while count:
        below = rng.randint(2, count) if depth > 1 and count > 1 and rng.random() < 0.5 else 1
        child = (
            random_node(rng, policies, leaves, below, depth - 1, may_stop)
            if below > 1
            else next(leaves)
        )
        if below > 1 and rng.random() < 0.3:
            child["epochs"] = rng.choice([1.5, 2])
        if rng.random() < 0.15:
            child["max_tokens"] = rng.randint(4_000, 60_000)
        if below == 1 and may_stop and rng.random() < 0.15:
            child["on_exhausted"] = rng.choice(["drop", "stop"])
        if policy in ("least_consumed", "weighted"):
            child["weight"] = round(rng.uniform(0.5, 4), 3)
        elif policy == "schedule":
            points = sorted(rng.sample(range(0, 400_000, 1000), 3))
            child["weight"] = [[at, round(rng.uniform(0.2, 4), 3)] for at in points]
        children.append(child)
        count -= below
    found = node(policy, *children)
    if policy == "schedule":
        found["interpolate"] = rng.choice(["linear", "step"])
    return found | {"on_exhausted": "stop" if may_stop and rng.random() < 0.1 else "drop"}


def order_of(folder: Path, root: dict[str, Any], seed: int) -> PipelineFactory:
    return corpora.order_of(
        folder, corpora.mixture(mixture=root, sequence_length=LENGTH, seed=seed)
    )


def plan_of(order: PipelineFactory, state: State, exact_picks: int = EXACT_PICKS) -> RunPlan:
    curves = [measure(order, i) for i in range(len(order.record.specs))]
    part = Part(config=order.config, curves=curves, size_estimates=order.record.size_estimates)
    return forecast([part], state, exact_picks=exact_picks)


def run_out(order: PipelineFactory, state: State) -> tuple[State, dict[int, int]]:
    """The state at the end, and by source id the sample index at which it turned out to be out."""
    pipeline = order.pipeline(state)
    found: dict[int, int] = {}
    while pipeline.ended is None:
        pipeline.advance(64)
        now = pipeline.state()
        for i, source in enumerate(now.sources):
            if source.exhausted and i not in found:
                found[i] = now.sample_index
    return pipeline.state(), found


def tails(config: RunConfig, end: State) -> dict[int, float]:
    """By source id, how many samples of the run the last one of a child of ``soft_sequential`` may come sooner or
    later: it has a chance of 1 in T at each sample of its node, and whether one or two are left is an estimate."""
    found: dict[int, float] = {}

    def visit(node: NodeConfig, tail: float) -> None:
        states = end.nodes[node.id]
        given = sum(child.samples for child in states)
        for child, was in zip(node.children, states, strict=True):
            own = tail
            if node.policy == "soft_sequential" and given:
                own = max(tail, 1.5 * was.samples * end.sample_index / given)
            if isinstance(child, NodeConfig):
                visit(child, own)
            else:
                found[child.id] = own

    visit(config.mixture, 0.0)
    return found


def check(
    order: PipelineFactory,
    start: State,
    plan: RunPlan,
    end: State,
    out: dict[int, int],
    drawn: bool = False,
) -> None:
    slack = tails(order.config, end)
    for i, (source, was) in enumerate(zip(plan.sources, end.sources, strict=True)):
        share = max(was.samples, 1) / end.sample_index
        # Of a drawn share: four times the standard deviation of the sample at which the last one comes.
        luck = GRANULARITY + slack[i] + (4 * math.sqrt(end.sample_index / share) if drawn else 0.0)
        samples = 64 + (4 * math.sqrt(end.sample_index * share) if drawn else 0.0)
        assert source.tokens == pytest.approx(was.tokens, rel=0.005, abs=samples * LENGTH), (
            source.alias
        )
        if source.exhausted and was.exhausted and not start.sources[i].exhausted:
            assert source.exhausted_at_sample == pytest.approx(out[i], rel=0.005, abs=luck), (
                source.alias
            )
        elif source.exhausted != was.exhausted:
            # On the one side its last sample is given, too, but the pick that would find it out is never made: its node
            # stops, or the run ends.
            last = max(out.get(i, 0), source.exhausted_at_sample or 0)
            stopped = {
                ending.sample_index for ending in plan.endings if ending.why.startswith("stops")
            }
            ends = [plan.until_sample_index, end.sample_index, *stopped]
            assert any(last == pytest.approx(at, rel=0.005, abs=luck) for at in ends), source.alias
    luck = 4 * math.sqrt(end.sample_index * len(plan.sources)) if drawn else 0.0
    assert plan.until_sample_index == pytest.approx(
        end.sample_index, rel=0.005, abs=GRANULARITY + luck
    )
    assert plan.ends


@pytest.fixture(scope="module")
def trends(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four sources whose rows become longer, or shorter, by thirty times from the first to the last, or swing."""
    folder = tmp_path_factory.mktemp("trends")
    rising = [1 + i * 29 // 4_000 for i in range(4_000)]
    swinging = [round(16 + 14 * math.sin(i / 300)) for i in range(4_000)]
    for i, lengths in enumerate((rising, rising[::-1], swinging, [16] * 4_000)):
        corpora.write_parquet(
            folder / f"{i}.parquet", [[7] * length for length in lengths], group=500
        )
    return folder


@pytest.mark.parametrize("policy", DETERMINISTIC)
def test_a_plan_is_as_near_where_the_lengths_of_rows_trend(trends: Path, policy: str) -> None:
    children = [{"source": f"parquet:{i}.parquet:ids", "epochs": 1 + i / 2} for i in range(4)]
    order = order_of(trends, node(policy, *children), 3)
    end, out = run_out(order, order.initial())
    for start in (order.initial(), advanced(order, order.initial(), 9_001)):
        check(order, start, plan_of(order, start), end, out)
        # What a policy makes of rows so far moves its weights; by how much, leaps tell as well.
        check(order, start, plan_of(order, start, exact_picks=0), end, out)


@pytest.mark.parametrize("seed", range(24))
def test_a_plan_is_within_half_a_percent_of_the_run(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    order = order_of(folder, random_mixture(rng, DETERMINISTIC), seed)
    end, out = run_out(order, order.initial())
    check(order, order.initial(), plan_of(order, order.initial()), end, out)
    # From somewhere on its way, too.
    reached = advanced(order, order.initial(), rng.randrange(1, end.sample_index))
    check(order, reached, plan_of(order, reached), end, out)


@pytest.mark.parametrize("seed", range(6))
def test_a_plan_of_drawn_shares_is_within_their_luck_of_the_run(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    order = order_of(folder, random_mixture(rng, ("weighted", "least_consumed")), seed)
    end, out = run_out(order, order.initial())
    check(order, order.initial(), plan_of(order, order.initial()), end, out, drawn=True)


def test_phases_and_revisions_that_lie_ahead_are_planned_as_they_will_be(folder: Path) -> None:
    def source(i: int, **fields: Any) -> dict[str, Any]:
        return {"source": specs()[i], "alias": f"s{i}", **fields}

    later = node(
        "least_consumed", source(0, epochs=2), source(2, weight=2), source(3), source(4, epochs=0.5)
    )
    document = corpora.mixture(
        mixture=node("weighted", source(0), source(1, weight=2), source(2)),
        sequence_length=8,
        last_micro_step="pad",
        phases=[
            {"until_tokens": 100_004},
            {"until_tokens": 240_000, "mixture": later},
            {"sequence_length": 16},
        ],
    )
    order = corpora.order_of(folder, document)
    change: dict[str, Any] = {"set": [{"child": "s3", "weight": 4}], "drop": ["s2"]}
    timeline = revised(Timeline(order), 20_000, **change)
    assert len(timeline.segments) == 4

    start = timeline.initial()
    plan = Planner().plan(timeline, start, None)
    pipeline = timeline.pipeline(start)
    while pipeline.ended is None:
        pipeline.advance(4096)
    end = pipeline.state()
    assert plan.until_tokens == pytest.approx(end.total_tokens, rel=0.005)
    assert plan.until_sample_index == pytest.approx(end.sample_index, rel=0.005)
    assert plan.sequence_length == 16
    for source_plan, was in zip(plan.sources, end.sources, strict=True):
        assert source_plan.tokens == pytest.approx(was.tokens, rel=0.02), source_plan.alias
        assert source_plan.exhausted == was.exhausted
    # What was dropped is not looked at, and what came later had no share before.
    assert plan.sources[2].epochs_read is None
    assert all(len(segment.shares) == 5 for segment in plan.segments)
    assert plan.segments[0].shares[3:] == [0, 0]
    assert {100_008, 20_000 * 8} <= {segment.from_tokens for segment in plan.segments}
    # From behind the revision on.
    rest = Planner().plan(timeline, advanced(timeline, start, 21_000), None)
    assert rest.until_tokens == pytest.approx(end.total_tokens, rel=0.005)
