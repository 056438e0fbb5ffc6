"""Weights that follow the run: what is left of each child, or the run's tokens."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.mixing import Walk, config_of, node
from tokenloom_server.config.run import RunConfig
from tokenloom_server.core.token_curve import TokenCurve
from tokenloom_server.mixing.mixer import Mixer, initial_nodes, target_shares
from tokenloom_server.mixing.node import NOTHING
from tokenloom_server.mixing.policies import policies
from tokenloom_server.mixing.policy import MAX_SUM
from tokenloom_server.mixing.totals import SourceTotal, rows_of
from tokenloom_server.mixing.varying import (
    UPDATE_PICKS,
    BalanceRemaining,
    Left,
    SoftSequential,
    WeightCurve,
)
from tokenloom_server.order.pipeline import initial_state

ESTIMATED = [name for name, policy in policies().items() if policy.estimates]


def mixture_of(policy: str, children: int) -> RunConfig:
    return config_of(policy, *[{}] * children)


@given(
    st.lists(
        st.integers(1, 2**53).flatmap(
            lambda total: st.tuples(st.integers(1, total), st.just(total))
        )
    )
)
def test_soft_sequential_is_the_product_as_it_is_written(children: list[tuple[int, int]]) -> None:
    found = SoftSequential().rule([Left(*child) for child in children])
    left, shares = 1.0, []
    for remaining, total in children:
        shares.append(left * remaining / total)
        left *= 1 - remaining / total
    near = 1e-6 + (1 + len(shares)) * 2**-59 / (sum(shares) or 1)  # shares are in 2^-60
    assert all(
        abs(weight / MAX_SUM - share / sum(shares)) < near
        for weight, share in zip(found, shares, strict=True)
    )
    assert sum(found) <= MAX_SUM


def test_balance_remaining_weighs_what_is_left() -> None:
    assert BalanceRemaining().rule([Left(3, 10, 3), Left(7, 7, 7), Left(1, 10**9, 1)]) == [3, 7, 1]


@pytest.mark.parametrize("policy", ESTIMATED)
def test_weights_are_constant_between_updates(policy: str) -> None:
    # Few samples, so that what is left changes much.
    walk = Walk(mixture_of(policy, 3), [400, 300, 1000], UPDATE_PICKS)
    known: dict[int, set[tuple[int, ...]]] = {}
    for at in range(1200):
        walk.step()
        known.setdefault(at // UPDATE_PICKS, set()).add(
            tuple(child.weight for child in walk.present()[0])
        )
    assert all(len(weights) == 1 for weights in known.values())
    # Once in a while what is left is what was expected, and they stay.
    assert len(set.union(*known.values())) >= len(known) - 1


def test_a_child_that_goes_out_between_updates_leaves_its_share_at_once() -> None:
    # Its total is overestimated four times over, so that it is out at the first update and has nearly all the weight.
    walk = Walk(mixture_of("soft_sequential", 3), [60, 400, 400], updates=256)
    walk.mixer = Mixer(
        walk.config,
        initial_nodes(walk.config),
        {i: TokenCurve.of([(rows, 8 * rows)]) for i, rows in enumerate((240, 400, 400))},
    )
    found = walk.leap(200)
    assert found[:60] == [0] * 60
    assert found[60:] == [1] * 140
    assert [child.total for child in walk.present()[0]] == [60, 400, 400]


def test_totals_are_what_the_rows_to_come_say() -> None:
    # Half of the rows is a fifth of the tokens.
    curve = TokenCurve.of([(500, 10_000), (500, 40_000)])
    total = SourceTotal(curve=curve, end=50_000, max_tokens=None, pick_tokens=8)
    assert total.at(0, 0, 0, 0) == 50_000 // 8
    assert total.at(3, 24, 0, 24) == 3 + (50_000 - 24) // 8
    assert total.at(1250, 10_000, 500, 0) == total.at(1251, 10_008, 500, 8) == 6250
    # The last row is not at its end: a live source has one sample left, whatever was estimated.
    assert total.at(2500, 20_000, 1000, 0) == 2501
    assert replace(total, max_tokens=801).at(0, 0, 0, 0) == 100
    endless = SourceTotal(curve=None, end=0, max_tokens=801, pick_tokens=8)
    assert endless.at(90, 720, 7, 0) == 100


def test_rows_are_those_of_all_epochs() -> None:
    assert [rows_of(11, epochs) for epochs in (1.0, 3.0, 0.5, 2.1)] == [11, 33, 6, 24]


def test_epochs_and_limits_of_nodes_decide_what_their_sources_have_left() -> None:
    limited = node("weighted", {"epochs": float("inf")}, max_tokens=88)
    config = config_of(
        "balance_remaining", {}, node("weighted", {"epochs": 0.5}, epochs=3), limited, epochs=2
    )
    assert config.epochs == (2, 3, float("inf"))
    assert config.measured_sources == (0, 1)
    sizes = {i: TokenCurve.of([(rows, 8 * rows)]) for i, rows in enumerate((100, 10))}
    mixer = Mixer(config, initial_nodes(config), sizes)
    mixer.update_weights(0, 0, lambda _: (0, 0))
    assert [child.total for child in mixer.states(mixer.mix_weights, [0, 0, 0], [0, 0, 0])[0]] == [
        200,
        30,
        11,
    ]
    assert target_shares(config, initial_state(config), sizes) == pytest.approx(
        (200 / 241, 30 / 241, 11 / 241)
    )


def test_a_schedule_is_linear_or_stepped_between_its_points_and_constant_outside() -> None:
    for linear, known in (
        (True, {0: 2, 100: 2, 200: 3, 250: 3.5, 300: 4, 10**15: 4}),
        (False, {0: 2, 100: 2, 299: 2, 300: 4, 301: 4}),
    ):
        schedule = WeightCurve([[(100, 2), (300, 4)], [(0, 1)]], linear=linear)
        for tokens, expected in known.items():
            first, second = schedule.weights(tokens)
            assert first / second == expected


def test_a_weight_on_its_way_to_0_is_not_0_before() -> None:
    schedule = WeightCurve([[(0, 1e-300), (2**50, 0)], [(0, 1e300)]], linear=True)
    assert schedule.weights(2**50 - 1)[0] > 0
    assert schedule.weights(2**50)[0] == 0


def test_a_child_of_weight_0_gets_nothing_and_is_not_out() -> None:
    walk = Walk(
        config_of("schedule", [[0, 0], [160, 0], [161, 1]], 1, interpolate="step"),
        [100, 1000],
        updates=4,
    )
    assert walk.leap(20) == [1] * 20
    assert [child.exhausted for child in walk.present()[0]] == [False, False]
    assert Counter(walk.leap(105))[0] >= 50


def test_where_every_child_that_is_left_has_weight_0_they_share_equally() -> None:
    config = config_of(
        "schedule", 1, [[0, 0], [80_000, 1]], [[0, 0], [80_000, 3]], interpolate="step"
    )
    walk = Walk(config, [5, 100, 100])
    found = walk.leap(25)
    assert found[:5] == [0] * 5
    assert Counter(found[5:]) == {1: 10, 2: 10}


@pytest.mark.parametrize("weights", [(0.001, 1), ([[0, 0.001], [10**9, 0.002]], 1)])
def test_a_weight_of_a_thousandth_does_not_starve(weights: Any) -> None:
    walk = Walk(config_of("schedule", *weights), [10**6, 10**6])
    found = walk.leap(4004)
    assert found.count(0) == 4
    assert all(0 in found[at : at + 1100] for at in range(0, 2900, 100))


def test_a_schedule_needs_the_runs_tokens_and_not_its_nodes() -> None:
    schedule = node("schedule", [[0, 1], [800, 0]], [[0, 0], [800, 1]], interpolate="step")
    found = Walk(config_of("least_consumed", 1, schedule), [1000] * 3, updates=4).leap(200)
    # 100 samples of the run, of which the node has half.
    assert set(found[:100]) == {0, 1}
    assert set(found[101:]) == {0, 2}


@given(
    st.sampled_from([name for name, policy in policies().items() if policy.makes_weights]),
    st.lists(st.integers(200, 3000), min_size=2, max_size=7),
    st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_every_child_is_within_one_sample_of_what_the_weights_in_force_give_it(
    policy: str, capacity: list[int], seed: int
) -> None:
    rng = random.Random(seed)
    if policy == "schedule":
        config = config_of(
            "schedule", *([[0, rng.uniform(0.1, 3)], [8_000, rng.uniform(0, 3)]] for _ in capacity)
        )
    else:
        config = mixture_of(policy, len(capacity))
    walk = Walk(config, capacity)
    due = [Fraction(0)] * len(capacity)
    for _ in range(600):
        walk.begin()
        weights = walk.mixer.weights()[0]
        due = [
            was + Fraction(weight, sum(weights)) for was, weight in zip(due, weights, strict=True)
        ]
        walk.step()
        if any(child.exhausted for child in walk.present()[0]):
            break
        assert all(abs(target - given) <= 1 for target, given in zip(due, walk.given, strict=True))


@pytest.mark.parametrize("capacity", [[300, 1000, 50], [2000, 100, 900], [7, 1500, 800]])
def test_what_is_balanced_ends_together_within_an_update(capacity: list[int]) -> None:
    walk = Walk(mixture_of("balance_remaining", 3), capacity, updates=32)
    found = walk.leap(sum(capacity) + 1)
    assert found.pop() == NOTHING
    last = {source: at for at, source in enumerate(found)}
    assert sorted(walk.given) == sorted(capacity)
    # A child of a few samples in thousands is due once in so many.
    rarest = sum(capacity) / min(capacity)
    assert max(last.values()) - min(last.values()) <= 32 + rarest
