"""What becomes of a mixture, against what can be worked out by hand."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from support import corpora
from support.corpora import advanced
from support.mixing import node
from tokenloom_server.config.node import NodeConfig
from tokenloom_server.config.run import RunConfig
from tokenloom_server.core.token_curve import TokenCurve
from tokenloom_server.errors import ConfigError
from tokenloom_server.mixing.policies import policies
from tokenloom_server.order.pipeline import initial_state
from tokenloom_server.order.size_estimates import measure
from tokenloom_server.planning.forecast import Part, forecast
from tokenloom_server.planning.plan import RunPlan
from tokenloom_server.planning.segments import MAX_SEGMENTS, PlanSegment, merged
from tokenloom_tools.reports.picture import draw

LENGTH = 8
#: That a source has nothing left is found by the pick after its last, when its turn comes.
A_TURN = 1


def leaf(name: str, **fields: Any) -> dict[str, Any]:
    return {"source": f"parquet:{name}.parquet:ids", "alias": name, **fields}


def config_of(root: dict[str, Any], **fields: Any) -> RunConfig:
    return corpora.parsed(corpora.mixture(mixture=root, sequence_length=LENGTH, **fields))


def rows_of_one_sample(count: int) -> TokenCurve:
    return TokenCurve.of([(count, count * LENGTH)])


def planned(
    root: dict[str, Any], samples: dict[str, int], until: int | None = None, **fields: Any
) -> RunPlan:
    """The plan of a mixture whose sources have so many samples in an epoch, of one row each."""
    config = config_of(root, **fields)
    curves = [rows_of_one_sample(samples[source.name]) for source in config.sources]
    return forecast([Part(config=config, curves=curves)], initial_state(config), until)


def out_at(plan: RunPlan) -> dict[str, int | None]:
    return {source.alias: source.exhausted_at_sample for source in plan.sources}


def shares_at(plan: RunPlan, tokens: int) -> list[float]:
    return next(s.shares for s in plan.segments if s.from_tokens <= tokens < s.until_tokens)


def test_a_source_that_stops_its_node_ends_the_run_and_one_that_drops_leaves_it_the_rest() -> None:
    # The figures: 80,000 and 1,000,000 samples at 0.9 and 0.1.
    samples = {"a": 80_000, "b": 1_000_000}
    children = leaf("a", weight=0.9), leaf("b", weight=0.1)
    stops = planned(node("least_consumed", *children, on_exhausted="stop"), samples)
    assert stops.until_sample_index == pytest.approx(88_889, abs=1)
    assert stops.ends
    assert stops.reason == "exhausted, and its node stops: a"
    assert out_at(stops) == {"a": stops.until_sample_index, "b": None}
    assert stops.sources[1].epochs_read == pytest.approx(8_889 / 1_000_000, rel=1e-3)
    drops = planned(node("least_consumed", *children), samples)
    assert drops.until_sample_index == 1_080_000
    assert drops.reason == "every source is exhausted"
    assert [source.tokens for source in drops.sources] == [80_000 * LENGTH, 1_000_000 * LENGTH]
    assert [source.epochs_read for source in drops.sources] == [1, 1]
    assert shares_at(drops, 0) == pytest.approx([0.9, 0.1], abs=1e-5)
    assert shares_at(drops, drops.until_tokens - 1) == pytest.approx([0, 1])


def test_the_end_of_a_nested_node_is_its_parents_business() -> None:
    inner = node("least_consumed", leaf("a"), leaf("b"), on_exhausted="stop", alias="inner")
    plan = planned(node("least_consumed", inner, leaf("c")), {"a": 100, "b": 1000, "c": 1000})
    assert out_at(plan) == {"a": 402, "b": None, "c": 1201}
    assert [(end.name, end.why, end.sample_index) for end in plan.endings] == [
        ("a", "is exhausted", 402),
        ("inner", "stops, as a is exhausted", 402),
        ("c", "is exhausted", 1201),
    ]
    assert plan.ends
    assert plan.reason == "exhausted, and its node stops: a, c"


def test_limits_in_tokens_are_ends_in_whole_samples() -> None:
    inner = node("round_robin", leaf("b"), leaf("c"), max_tokens=200 * LENGTH, alias="inner")
    root = node(
        "round_robin", leaf("a", max_tokens=50 * LENGTH + 3), inner, max_tokens=10_000 * LENGTH
    )
    plan = planned(root, {"a": 1000, "b": 1000, "c": 1000})
    assert [source.tokens // LENGTH for source in plan.sources] == [50, 100, 100]
    assert [(end.name, end.why) for end in plan.endings] == [
        ("a", "has its max_tokens"),
        ("inner", "has its max_tokens"),
    ]
    assert out_at(plan) == {"a": 100, "b": None, "c": None}
    root["max_tokens"] = 120 * LENGTH
    plan = planned(root, {"a": 1000, "b": 1000, "c": 1000})
    assert (plan.until_sample_index, plan.reason) == (
        120,
        "the mixture has given its max_tokens of 960",
    )


def test_a_plan_goes_as_far_as_it_is_asked_to() -> None:
    root = node("least_consumed", leaf("a", epochs=math.inf), leaf("b"))
    plan = planned(root, {"a": 100, "b": 1000}, until=8000 * LENGTH)
    assert (plan.ends, plan.until_tokens) == (False, 8000 * LENGTH)
    assert plan.reason == "the run has the 64,000 tokens that were asked for"
    assert plan.sources[0].epochs is None
    assert plan.sources[0].epochs_read == pytest.approx(70)
    short = planned(root, {"a": 100, "b": 1000}, until=1000 * LENGTH)
    assert out_at(short) == {"a": None, "b": None}
    assert [source.share for source in short.sources] == [0.5, 0.5]
    # Without a number it goes to where nothing ends any more.
    endless = planned(root, {"a": 100, "b": 1000})
    assert (endless.ends, endless.until_sample_index) == (False, 2000 + A_TURN)
    assert "a is read for ever" in endless.reason
    most = planned(
        node("least_consumed", leaf("a", epochs=1e300), leaf("b")),
        {"a": 100, "b": 1000},
        until=8000 * LENGTH,
    )
    assert most.until_tokens == 8000 * LENGTH


def test_where_nothing_ever_ends_a_plan_goes_as_far_as_the_sources_reach_once() -> None:
    root = node("weighted", leaf("a", epochs=math.inf), leaf("b", epochs=math.inf, weight=3))
    plan = planned(root, {"a": 100, "b": 300})
    assert (plan.ends, plan.until_tokens, len(plan.segments)) == (False, 400 * LENGTH, 1)
    assert (
        plan.reason
        == "nothing ends any more: a, b is read for ever; say how many tokens to plan further"
    )
    assert [source.epochs_read for source in plan.sources] == pytest.approx([1, 1], abs=0.3)


def test_a_total_that_the_run_has_already_is_refused() -> None:
    config = config_of(node("sequential", leaf("a")))
    with pytest.raises(
        ConfigError, match="tokens: 0 tokens are asked for, but the run has 0 already"
    ):
        forecast([Part(config=config, curves=[rows_of_one_sample(10)])], initial_state(config), 0)


@pytest.mark.parametrize("policy", policies())
def test_mean_shares_are_those_of_the_policys_own_choices(policy: str) -> None:
    rng = random.Random(policy)
    for _ in range(4):
        names = [f"s{i}" for i in range(rng.randint(2, 6))]
        inner = node("round_robin", leaf("x"), leaf("y", max_tokens=3_000 * LENGTH), alias="inner")
        children = [*(leaf(name) for name in names), inner]
        for child in children:
            if policies()[policy].takes == "numbers":
                child["weight"] = round(rng.uniform(0.2, 5), 2)
            elif policies()[policy].takes == "points":
                child["weight"] = [
                    [at, round(rng.uniform(0.2, 5), 2)] for at in (0, 200_000, 450_000)
                ]
        samples = {name: rng.randint(2_000, 25_000) for name in [*names, "x", "y"]}
        config = config_of(node(policy, *children))
        parts = [
            Part(
                config=config,
                curves=[rows_of_one_sample(samples[of.name]) for of in config.sources],
            )
        ]
        one_by_one = forecast(parts, initial_state(config))
        at_once = forecast(parts, initial_state(config), exact_picks=0)
        end = one_by_one.until_sample_index
        assert (at_once.until_sample_index, at_once.reason) == (end, one_by_one.reason)
        # Of draws: four times the standard deviation; of the last sample of a soft sequence, when its turn comes.
        luck = 4 * math.sqrt(end) if policy == "weighted" else 0.0
        for mean, own in zip(at_once.sources, one_by_one.sources, strict=True):
            tail = 1.5 * own.tokens / LENGTH if policy == "soft_sequential" else 0.0
            assert mean.tokens == own.tokens
            assert mean.exhausted_at_sample == pytest.approx(
                own.exhausted_at_sample, rel=0.005, abs=300 + luck + tail
            )
        for share in (0.25, 0.5, 0.75):
            here = [read_until(plan, round(end * LENGTH * share)) for plan in (at_once, one_by_one)]
            assert here[0] == pytest.approx(here[1], abs=(0.002 * end + luck) * LENGTH)


def read_until(plan: RunPlan, tokens: int) -> list[float]:
    """The tokens that each source gave by then."""
    spans = [(max(0, min(s.until_tokens, tokens) - s.from_tokens), s.shares) for s in plan.segments]
    return [sum(length * shares[i] for length, shares in spans) for i in range(len(plan.sources))]


def test_weights_follow_a_schedule_between_points_and_in_steps() -> None:
    rising = leaf("a", weight=[[0, 0], [8_000_000, 1]], epochs=math.inf)
    other = leaf("b", weight=1, epochs=math.inf)
    plan = planned(node("schedule", rising, other), {"a": 10, "b": 10}, until=16_000_000)
    # w / (1 + w) on average over w from 0 to 1 is 1 - ln 2, and a half behind it.
    expected = 8_000_000 * (1 - math.log(2)) + 4_000_000
    # Every 256 samples, and so half of these late.
    assert plan.sources[0].tokens == pytest.approx(expected, rel=1e-3)
    assert shares_at(plan, 0)[0] < 0.02
    assert shares_at(plan, 15_000_000) == pytest.approx([0.5, 0.5], abs=1e-3)
    steps = node(
        "schedule",
        leaf("a", weight=[[0, 1], [4_000_000, 3]]),
        leaf("b", weight=[[0, 1], [4_000_000, 0]]),
    )
    plan = planned(steps | {"interpolate": "step"}, {"a": 10**9, "b": 10**9}, until=8_000_000)
    assert [source.tokens for source in plan.sources] == pytest.approx(
        [6_000_000, 2_000_000], abs=128 * LENGTH
    )
    # What is left has the weight 0: it goes on rather than end.
    plan = planned(steps | {"interpolate": "step"}, {"a": 500_000, "b": 10**6})
    assert (plan.reason, plan.until_sample_index) == ("every source is exhausted", 1_500_000)


def test_tokens_are_conserved_and_segments_have_no_gaps() -> None:
    inner = node("soft_sequential", *(leaf(f"s{i}") for i in range(12)))
    curve = leaf("c", weight=[[0, 5], [200_000, 1], [900_000, 2]])
    plan = planned(
        node("schedule", curve, inner),
        {"c": 40_000} | {f"s{i}": 3_000 * (i + 1) for i in range(12)},
    )
    assert len(plan.segments) <= MAX_SEGMENTS
    assert plan.segments[0].from_tokens == 0
    assert all(
        a.until_tokens == b.from_tokens
        for a, b in zip(plan.segments, plan.segments[1:], strict=False)
    )
    assert plan.segments[-1].until_tokens == plan.until_tokens
    assert sum(source.tokens for source in plan.sources) == pytest.approx(
        plan.until_tokens, abs=len(plan.sources)
    )
    for source in plan.sources:
        given = sum(s.shares[source.id] * (s.until_tokens - s.from_tokens) for s in plan.segments)
        assert given == pytest.approx(source.tokens, rel=1e-4, abs=1000)


def test_joined_segments_keep_what_each_source_gets_and_where_shares_jump() -> None:
    rng = np.random.default_rng(5)
    raw = rng.random((50, 3)) * 0.01 + np.repeat(
        [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0], [0, 1, 1]], 10, axis=0
    )
    ends = np.cumsum(rng.random(50) + 0.5)
    shares = raw / raw.sum(axis=1, keepdims=True)
    before = [PlanSegment(b, e, s) for b, e, s in zip([0.0, *ends[:-1]], ends, shares, strict=True)]
    after = merged(before, 5)
    assert [segment.end for segment in after] == [before[i].end for i in (9, 19, 29, 39, 49)]
    tokens = sum((segment.end - segment.begin) * segment.shares for segment in after)
    assert tokens == pytest.approx(
        sum((segment.end - segment.begin) * segment.shares for segment in before)
    )


@pytest.mark.parametrize("on_exhausted", ["drop", "stop"])
def test_a_run_that_is_over_is_planned_as_over(tmp_path: Any, on_exhausted: str) -> None:
    for i in range(2):
        corpora.write_parquet(
            tmp_path / f"{i}.parquet", corpora.id_rows(200 + 300 * i, i, 40), group=100
        )
    root = node("sequential", node("round_robin", leaf("0"), leaf("1"), on_exhausted=on_exhausted))
    order = corpora.order_of(tmp_path, corpora.mixture(mixture=root))
    reached = advanced(order, order.initial(), 10**6)
    plan = forecast(
        [Part(config=order.config, curves=[measure(order, i) for i in range(2)])], reached
    )
    assert plan.ends
    assert plan.until_sample_index == plan.from_sample_index == reached.sample_index
    assert (plan.segments, plan.endings) == ([], [])
    assert [source.exhausted for source in plan.sources] == [True, on_exhausted == "drop"]
    expected = {"drop": "every source is exhausted", "stop": "exhausted, and its node stops: 0"}
    assert plan.reason == expected[on_exhausted]
    assert b"<svg" in draw(plan, "svg")


def test_what_is_paused_waits_and_what_was_dropped_is_gone() -> None:
    config = config_of(
        node("least_consumed", leaf("a"), node("round_robin", leaf("b"), leaf("c")), leaf("d"))
    )
    samples = [100, 200, 300, 400]

    def under(**presence: str) -> RunPlan:
        def visit(child: Any) -> Any:
            if isinstance(child, NodeConfig):
                return child.model_copy(
                    update={"children": [visit(below) for below in child.children]}
                )
            return child.model_copy(update={"presence": presence.get(child.name, "live")})

        found = config.model_copy(update={"mixture": visit(config.mixture)})
        # What the other config had worked out of its own mixture is not this one's.
        for name in ("sources", "nodes", "epochs"):
            found.__dict__.pop(name, None)
        curves = [
            None if presence.get(name) == "dropped" else rows_of_one_sample(count)
            for name, count in zip("abcd", samples, strict=True)
        ]
        return forecast([Part(config=found, curves=curves)], initial_state(found))

    plan = under(b="paused", d="dropped")
    assert [source.tokens // LENGTH for source in plan.sources] == [100, 0, 300, 0]
    assert plan.reason == "only paused sources are left: b"
    assert [source.rows for source in plan.sources] == [100, 200, 300, None]
    assert under(d="dropped").reason == "every source is exhausted"


def test_ten_to_the_twelve_tokens_through_two_hundred_sources_take_seconds() -> None:
    number, inner = 0, []
    for policy in set(policies()) - {"schedule"}:
        children = []
        for _ in range(33):
            children.append(leaf(f"s{number}", epochs=1 + number % 3))
            number += 1
        inner.append(
            node(policy, *children, weight=[[0, 1], [4 * 10**11, 1 + number % 4], [10**12, 0.2]])
        )
    root = node("schedule", *inner)
    samples = {f"s{i}": 10**8 + 5 * 10**7 * (i % 17) for i in range(number)}
    # Seconds; sample by sample it would be days.
    plan = planned(root, samples, until=10**12)
    assert plan.until_tokens == 10**12
    assert sum(source.exhausted_at_tokens is not None for source in plan.sources) > 30
    assert sum(source.tokens for source in plan.sources) == pytest.approx(
        plan.until_tokens, rel=1e-9
    )
