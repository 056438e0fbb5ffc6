"""The mixture as a tree: states, restores, exhaustion, ids."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.catalog import CATALOG
from support.corpora import flat, parsed, random_presences, random_tree
from support.mixing import Walk, config_of, node
from tokenloom_server.config.run import RunConfig
from tokenloom_server.mixing.mixer import initial_nodes, node_shape, target_shares
from tokenloom_server.mixing.node import NOTHING
from tokenloom_server.order.pipeline import initial_state

LENGTH = 8


def tree(rng: random.Random) -> RunConfig:
    specs = (f"txt:{i}:text" for i in range(1000))
    found = parsed(flat([], seed=rng.randrange(2**63)) | {"mixture": random_tree(rng, 3, specs)})
    return random_presences(rng, found) if rng.random() < 0.3 else found


def capacities(rng: random.Random, config: RunConfig) -> list[int]:
    return [rng.choice([0, 1, 2, 5, 9, 40, 40, 300]) for _ in config.sources]


def lengths_of(rng: random.Random, capacity: list[int]) -> list[list[int]]:
    """Of every second run, how long the sources' samples are, where balances count that."""
    shortest = rng.choice([0, 1, LENGTH])
    return rng.choice(
        [[], [[rng.randint(shortest, LENGTH) for _ in range(count)] for count in capacity]]
    )


@given(st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_a_mixer_built_anew_from_its_states_goes_on_identically(seed: int) -> None:
    rng = random.Random(seed)
    config = tree(rng)
    capacity, updates = capacities(rng, config), rng.choice([1, 4, 8])
    lengths = lengths_of(rng, capacity)
    whole, broken = (Walk(config, capacity, updates, lengths) for _ in range(2))
    often = rng.choice([0.02, 0.2, 1.0])
    known: tuple[bool, ...] = (False,) * len(capacity)
    for _ in range(100):
        expected, found = whole.step(), broken.step()
        assert found == expected
        assert broken.present() == whole.present()
        out = whole.mixer.exhausted(whole.mixer.mix_weights)
        # Also right behind an exhaustion, where credits were just spread anew.
        if out != known or rng.random() < often:
            broken.restore()
            assert broken.present() == whole.present()
        known = out
        if expected == NOTHING:
            assert broken.step() == whole.step() == NOTHING
            assert broken.present() == whole.present()
            break


@given(st.integers(0, 2**32))
@settings(max_examples=500, deadline=None)
def test_samples_that_are_planned_ahead_are_those_that_are_picked_one_by_one_restored_or_not(
    seed: int,
) -> None:
    rng = random.Random(seed)
    config = tree(rng)
    capacity, updates = capacities(rng, config), rng.choice([8, 32])
    lengths = lengths_of(rng, capacity)
    single, many = (Walk(config, capacity, updates, lengths) for _ in range(2))
    restores = rng.choice([0.3, 0.7])
    for _ in range(12):
        found = many.leap(rng.choice([1, 2, 7, 30, 60, 100]))
        assert found == [single.step() for _ in found]
        assert many.present() == single.present()
        if found[-1] == NOTHING:
            break
        if rng.random() < restores:
            many.restore()


@pytest.mark.parametrize("policy", ["least_consumed", "weighted"])
def test_plans_longer_than_what_is_worked_out_ahead_are_the_same_order(policy: str) -> None:
    config = config_of(policy, 0.5, 0.25, 0.2, 0.049, 0.001)
    first, second = (Walk(config, [10**6] * 5) for _ in range(2))
    assert first.leap(20_000) == [
        source for count in (1, 4_095, 4_097, 11_807) for source in second.leap(count)
    ]


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_where_nothing_stops_everything_is_given_to_the_last_sample(seed: int) -> None:
    rng = random.Random(seed)
    config = tree(rng)
    text = config.model_dump_json().replace('"on_exhausted":"stop"', '"on_exhausted":"drop"')
    text = re.sub(r'"(max_tokens|presence)":("paused"|"dropped"|[0-9]+),', "", text)
    config = RunConfig.model_validate_json(text, context=CATALOG)
    capacity = [rng.randint(0, 12) for _ in config.sources]
    walk = Walk(config, capacity)
    while walk.step() != NOTHING:
        pass
    assert walk.given == capacity
    assert walk.mixer.exhausted(walk.mixer.mix_weights) == (True,) * len(capacity)


def test_credits_of_the_rest_are_what_their_new_shares_of_all_they_had_leave_open() -> None:
    weights = (2, 3, 7, 5)
    walk = Walk(config_of("least_consumed", *weights), [100, 4, 100, 9])
    seen = set()
    for _ in range(90):
        walk.step()
        (children,) = walk.present()
        live = [i for i, child in enumerate(children) if not child.exhausted]
        total, issued = sum(weights[i] for i in live), sum(children[i].tokens for i in live)
        for i in live:
            owed = weights[i] * issued - total * children[i].tokens
            assert abs(children[i].credit - owed) <= len(weights)  # rounded once an exhaustion
        seen.add(len(live))
    assert seen == {4, 3, 2}


@pytest.mark.parametrize("steps", [1, 3, 50])
def test_round_robin_takes_one_of_each_live_child_in_turn(steps: int) -> None:
    walk = Walk(config_of("round_robin", *[{}] * 4), [9, 2, 9, 9])
    found: list[int] = []
    while len(found) < 20 and (not found or found[-1] != NOTHING):
        found += walk.leap(steps)
        walk.restore()
    # The second has two samples; its turn in the third round goes to the next.
    expected = [0, 1, 2, 3] * 2 + [0, 2, 3] * 7
    assert found[:20] == expected[:20]


@pytest.mark.parametrize("steps", [1, 3, 50])
def test_sequential_goes_from_child_to_child(steps: int) -> None:
    walk = Walk(config_of("sequential", {}, {}, {}), [4, 0, 5])
    found: list[int] = []
    while not found or found[-1] != NOTHING:
        found += walk.leap(steps)
        walk.restore()
    assert found == [0] * 4 + [2] * 5 + [NOTHING]


def test_target_shares_follow_the_policies() -> None:
    config = config_of("round_robin", {}, node("sequential", {}, {}))
    assert target_shares(config, initial_state(config)) == (0.5, 0.5, 0.0)


@pytest.mark.parametrize("policy", ["least_consumed", "weighted", "round_robin"])
def test_a_node_that_stops_ends_with_its_first_child(policy: str) -> None:
    walk = Walk(config_of(policy, {}, {}, {}, on_exhausted="stop"), [100, 5, 100])
    picks = []
    while (source := walk.step()) != NOTHING:
        picks.append(source)
    assert walk.given[1] == 5
    assert [child.exhausted for child in walk.present()[0]] == [False, True, False]
    # It ended at the pick that failed, not at the last sample of the child.
    assert picks[-1] != 1 or picks.count(1) == 5
    assert walk.step() == NOTHING


def test_an_inner_node_that_stops_is_dropped_by_its_parent() -> None:
    inner = node("least_consumed", {}, {}, on_exhausted="stop")
    walk = Walk(config_of("least_consumed", {}, inner), [50, 4, 50])
    while walk.step() != NOTHING:
        pass
    assert walk.given[:2] == [50, 4]
    assert walk.given[2] in (4, 5)
    root, inner = walk.present()
    assert [child.exhausted for child in root] == [True, True]
    # The third source has samples left; its node ended all the same.
    assert [child.exhausted for child in inner] == [True, False]


def test_a_child_is_exhausted_by_a_failed_pick_and_never_earlier() -> None:
    walk = Walk(config_of("least_consumed", {}, {}), [3, 100])
    while walk.given[0] < 3:
        walk.step()
    # The source has nothing left, but nobody has asked it.
    assert not walk.present()[0][0].exhausted
    while not walk.present()[0][0].exhausted:
        assert walk.step() == 1
    assert walk.given[0] == 3


def test_ids_are_depth_first_parents_first_and_stay() -> None:
    first = node("least_consumed", {}, node("weighted", {}), alias="a")
    config = config_of("weighted", first, {}, node("weighted", {}, alias="b"), alias="root")
    described = [
        (of.id, of.alias, of.policy, node_shape(config, of).child_ids) for of in config.nodes
    ]
    assert described == [
        (0, "root", "weighted", (3, 4, 7)),
        (1, "a", "least_consumed", (0, 5)),
        (2, None, "weighted", (2,)),
        (3, "b", "weighted", (6,)),
    ]
    assert [len(children) for children in initial_nodes(config)] == [3, 2, 1, 1]


@given(st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_where_every_sample_is_full_the_choices_are_those_by_positions(seed: int) -> None:
    rng = random.Random(seed)
    config = tree(rng)
    capacity = capacities(rng, config)
    by_length = Walk(config, capacity, lengths=[[LENGTH] * count for count in capacity])
    by_positions = Walk(config, capacity)
    assert by_length.leap(300) == by_positions.leap(300)
    assert by_length.present() == by_positions.present()


def test_a_restored_chooser_debits_what_was_given_and_not_what_was_planned() -> None:
    lengths = [[8, 1] * 50, [3] * 100, [5, 5, 1] * 40]
    config = config_of("least_consumed", 2, 1, 1)
    whole, broken = (Walk(config, list(map(len, lengths)), lengths=lengths) for _ in range(2))
    expected = whole.leap(90)
    actual: list[int] = []
    for _ in range(90):
        broken.mixer.plan(7)
        actual += broken.leap(1)
        broken.restore()
    assert actual == expected
