"""``weighted``: seeded draws in exact proportions, nothing to save."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from support.mixing import config_of, node_start
from tokenloom_server.core.hashing import Purpose, draw, draws, slice_rotation
from tokenloom_server.mixing.mixer import Mixer, initial_nodes
from tokenloom_server.mixing.policies import WeightedChooser


def picks(
    weights: list[float], seed: int, count: int, out: frozenset[int] = frozenset()
) -> list[int]:
    config = config_of("weighted", *weights, seed=seed)
    mixer = Mixer(config, initial_nodes(config))
    return [mixer.decide_one(lambda source: source not in out) for _ in range(count)]


@pytest.mark.parametrize("weights", [[1, 1], [0.1, 0.9], [1, 2, 3, 4], [0.001, 0.999]])
@pytest.mark.parametrize("seed", [0, 1])
def test_shares_are_within_four_standard_deviations(weights: list[float], seed: int) -> None:
    count = 10_000
    found = Counter(picks(weights, seed, count))
    for child, weight in enumerate(weights):
        share = weight / sum(weights)
        assert abs(found[child] - count * share) < 4 * (count * share * (1 - share)) ** 0.5


def test_a_draw_follows_a_draw_without_memory() -> None:
    # Pairs of draws, so that a counter that leaks into the next draw would show.
    found = picks([1, 1], 5, 10_001)
    pairs = Counter(itertools.pairwise(found))
    assert all(abs(count - 2500) < 4 * (10_000 * 0.25 * 0.75) ** 0.5 for count in pairs.values())


@pytest.mark.parametrize(
    ("drawn", "expected"), [(0, 0), (2**62 - 1, 0), (2**62, 1), (2**63, 2), (2**64 - 1, 2)]
)
def test_the_bounds_of_a_draw_fall_to_the_right_child(
    monkeypatch: pytest.MonkeyPatch, drawn: int, expected: int
) -> None:
    monkeypatch.setattr("tokenloom_server.mixing.policies.draw", lambda *_: drawn)
    monkeypatch.setattr("tokenloom_server.mixing.policies.draws", lambda *_: [drawn])
    chooser = WeightedChooser(node_start([1, 1, 2]))
    assert chooser.choose(1) == chooser.upcoming(1)[0] == expected


def test_draws_of_different_purpose_node_index_and_retry_are_different() -> None:
    found = {
        draw(seed, purpose, stable_id, index, retry)
        for seed in (0, 1, 2**63 - 1)
        for purpose in Purpose
        for stable_id in (0, 1)
        for index in (0, 1, 2**53)
        for retry in (0, 1)
    }
    assert len(found) == 3 * len(Purpose) * 2 * 3 * 2


def test_many_draws_are_those_drawn_one_by_one() -> None:
    seed, ids, indices = 2**63 + 5, [0, 7, 2**40, 3], [0, 2**53, 1, 9]
    found = draws(seed, Purpose.TIE, np.array(ids, np.uint64), np.array(indices, np.uint64))
    assert found == [
        draw(seed, Purpose.TIE, i, index) for i, index in zip(ids, indices, strict=True)
    ]


def test_the_hash_is_what_it_was() -> None:
    # When this fails, ORDER_VERSION must change: every order is made of these.
    assert draw(7, Purpose.TIE, 2, 3) == 6638358752320652078
    assert [slice_rotation(7, index, 4) for index in range(0, 64, 8)] == [1, 0, 0, 0, 0, 2, 1, 3]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_rotations_are_uniform(world_size: int) -> None:
    found = Counter(slice_rotation(7, 8 * step, world_size) for step in range(4000))
    share = 1 / world_size
    assert set(found) == set(range(world_size))
    assert all(
        abs(n - 4000 * share) <= 4 * (4000 * share * (1 - share)) ** 0.5 for n in found.values()
    )


def test_behind_an_exhaustion_shares_are_those_of_the_rest() -> None:
    found = Counter(picks([5, 1, 3], 3, 8000, frozenset({0})))
    assert found[0] == 0
    assert abs(found[1] - 2000) < 4 * (8000 * 0.25 * 0.75) ** 0.5
