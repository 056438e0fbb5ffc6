"""``least_consumed``: every child within one sample of its share, at every sample."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.mixing import Walk, config_of, node_start, worst_distance
from tokenloom_server.config.run import RunConfig
from tokenloom_server.core.hashing import Purpose, draw
from tokenloom_server.core.state import ChildState
from tokenloom_server.mixing.least_consumed import LeastConsumedChooser
from tokenloom_server.mixing.mixer import Mixer, initial_nodes
from tokenloom_server.mixing.node import NOTHING
from tokenloom_server.mixing.policy import MAX_SUM, integer_weights

LENGTH = 8


def weighted(weights: Sequence[float], seed: int = 7) -> RunConfig:
    return config_of("least_consumed", *weights, seed=seed)


def picks(config: RunConfig, count: int, capacity: Mapping[int, int] | None = None) -> list[int]:
    """The first picks, where ``capacity`` says how many samples a source has."""
    mixer = Mixer(config, initial_nodes(config))
    given: Counter[int] = Counter()
    found = []
    for _ in range(count):
        source = mixer.decide_one(lambda s: capacity is None or given[s] < capacity.get(s, count))
        if source == NOTHING:
            break
        given[source] += 1
        found.append(source)
    return found


@pytest.mark.parametrize(
    "weights",
    [
        [0.5] + [0.5 / 200] * 200,
        [0.5] + [0.002513] * 199,
        [0.001, 0.999],
        [0.001, 1],
        [1e-6, 1, 1],
        [3, 2, 1],
        [1, 1000],
        [0.1, 0.2, 0.3, 0.4],
        [1 / 3, 1 / 7, 1 / 11],
    ],
)
def test_every_child_keeps_tijdemans_bound_of_less_than_a_sample(weights: list[float]) -> None:
    bound = 1 - 1 / (2 * len(weights) - 2)
    # Deadlines are kept in 2^-20 tokens, hence the hair.
    assert worst_distance(picks(weighted(weights), 3000), weights) <= bound + 1e-4


class Reference:
    """The rule one pick after the other, in fractions: of those that are due the earliest deadline, its own length
    debited once it is chosen."""

    def __init__(self, weights: Sequence[int], seed: int, longest: int = LENGTH) -> None:
        self.shares = [Fraction(weight, sum(weights)) for weight in weights]
        self.seed, self.longest = seed, longest
        self.tokens, self.picks = [0] * len(weights), [0] * len(weights)

    def ahead(self) -> list[Fraction]:
        """By child, how many tokens it has more than its share."""
        return [
            own - share * sum(self.tokens)
            for own, share in zip(self.tokens, self.shares, strict=True)
        ]

    def choose(self) -> int:
        margin, ahead = Fraction(self.longest, 2 * len(self.shares) - 2), self.ahead()
        due = [
            i for i, share in enumerate(self.shares) if share * self.longest - ahead[i] >= margin
        ]
        deadlines = [
            (self.longest - margin + own) / share
            for own, share in zip(ahead, self.shares, strict=True)
        ]
        return min(
            due,
            key=lambda i: (
                deadlines[i] * 2**20 // 1,
                draw(self.seed, Purpose.TIE, 2 * i, self.picks[i]),
                i,
            ),
        )

    def take(self, child: int, length: int) -> None:
        self.tokens[child] += length
        self.picks[child] += 1


@given(
    st.one_of(
        st.lists(st.integers(1, 12), min_size=2, max_size=9),
        st.lists(st.sampled_from([1, 2**20, 2**27 + 1, 2**27 - 1]), min_size=2, max_size=2),
        st.lists(st.sampled_from([1, 3, 10**4, 10**7]), min_size=2, max_size=6),
    ),
    st.sampled_from([1, 8, 2048, 10**6, 2**24]),
    st.integers(0, 2**63 - 1),
)
@settings(max_examples=200, deadline=None)
def test_choices_are_those_of_the_rule_as_it_is_written(
    weights: list[int], length: int, seed: int
) -> None:
    chooser, reference = (
        LeastConsumedChooser(node_start(weights, length, seed)),
        Reference(weights, seed, length),
    )
    for child in chooser.upcoming(300).tolist():
        assert child == reference.choose()
        reference.take(child, length)


@given(
    st.one_of(
        st.lists(st.integers(1, 12), min_size=2, max_size=9),
        st.lists(st.sampled_from([1, 3, 10**4, 10**7]), min_size=2, max_size=6),
        st.integers(2, 9).map(lambda children: [1] * children),
    ),
    st.integers(0, 2**63 - 1),
    st.integers(0, LENGTH),
    st.randoms(use_true_random=False),
)
@settings(max_examples=100, deadline=None)
def test_of_samples_that_differ_in_length_every_child_is_within_one_longest_of_its_share(
    weights: list[int], seed: int, shortest: int, rng: random.Random
) -> None:
    lengths = [[rng.randint(shortest, LENGTH) for _ in range(200)] for _ in weights]
    walk = Walk(
        config_of("least_consumed", *weights, seed=seed), [200] * len(weights), lengths=lengths
    )
    reference, bound = Reference(weights, seed), LENGTH * (1 - Fraction(1, 2 * len(weights) - 2))
    for child in walk.leap(200):
        assert child == reference.choose()
        assert len(set(weights)) > 1 or reference.tokens[child] == min(reference.tokens)
        reference.take(child, lengths[child][reference.picks[child]])
        assert max(map(abs, reference.ahead())) <= bound + Fraction(1, 1000)
    # Nothing is looked into that was not picked.
    assert all(number < reference.picks[source] for source, number in walk.looked_at)


def test_two_children_whose_credits_sum_to_a_hair_below_zero_go_on_in_turn() -> None:
    # What rounding leaves behind an exhaustion: neither child is due, and the rule has no answer.
    node = node_start([1, 1], owed=[0, -1])
    found = LeastConsumedChooser(node).upcoming(1000).tolist()
    again = []
    for _ in range(1000):
        # Built anew from its credits each time, as after a restart.
        chooser = LeastConsumedChooser(node)
        child = chooser.choose(0)
        node.children.picks[child] += 1
        node.children.balances[child] += 8
        node = node._replace(
            states=[
                ChildState(credit=own) for own in chooser.mark.credits_at(node.children.balances)
            ]
        )
        again.append(child)
    assert found == again
    assert worst_distance(found, [1, 1]) < 1


def test_ties_go_by_a_seeded_hash_and_not_by_position() -> None:
    found = {seed: tuple(picks(weighted([1] * 5, seed), 100)) for seed in range(20)}
    assert len(set(found.values())) == 20
    assert len({order[0] for order in found.values()}) == 5
    # Within one run, too, the order of a round changes from round to round.
    assert len({found[0][i : i + 5] for i in range(0, 100, 5)}) > 10


@given(st.lists(st.decimals("0.01", "10", places=2).map(float), min_size=2, max_size=10), st.data())
@settings(max_examples=80, deadline=None)
def test_behind_an_exhaustion_the_rest_keep_to_their_new_shares(
    weights: list[float], data: st.DataObject
) -> None:
    config = weighted(weights)
    first = picks(config, 120)
    victim = data.draw(st.sampled_from(sorted(set(first))))
    last = data.draw(st.integers(0, first.count(victim) - 1))
    found = picks(config, 400, {victim: last})
    assert found.count(victim) == last
    # Up to the failed pick, which is where the victim would have had one more, nothing is different.
    failed = next(
        k for k, source in enumerate(first) if source == victim and first[:k].count(victim) == last
    )
    assert found[:failed] == first[:failed]
    rest = [weight for child, weight in enumerate(weights) if child != victim]
    renumbered = [child - (child > victim) for child in found[failed:]]
    # One sample of their own, and one that the victim had had in advance or was owed.
    assert worst_distance(renumbered, rest) < 2


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1, 1, 1], (1, 1, 1)),
        ([0.1, 0.2], (1, 2)),
        ([2, 4, 6], (1, 2, 3)),
        ([0.001, 1], (1, 1000)),
        ([1e300], (1,)),
        ([5e-324, 5e-324], (1, 1)),
    ],
)
def test_weights_become_the_smallest_integers_in_their_proportion(
    weights: list[float], expected: tuple[int, ...]
) -> None:
    assert integer_weights(weights) == expected


@given(st.lists(st.floats(min_value=5e-324, max_value=1e308), min_size=1, max_size=200))
def test_weights_never_become_zero_and_credits_never_pass_2_to_the_53(weights: list[float]) -> None:
    found = integer_weights(weights)
    assert min(found) >= 1
    assert sum(found) <= MAX_SUM
    largest = max(range(len(weights)), key=weights.__getitem__)
    assert found[largest] == max(found)


def test_the_rarest_child_of_the_longest_samples_is_planned_as_it_is_picked() -> None:
    chooser = LeastConsumedChooser(node_start(integer_weights([4e-9, 1]), 2**24))
    assert chooser.upcoming(4096).tolist() == [1] * 4096
