"""Balances by the real length of samples: what was chosen is debited as it is, and nothing else is looked into."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import flat, parsed, random_presences, random_tree
from support.mixing import Walk, config_of, node
from tokenloom_server.config.run import RunConfig
from tokenloom_server.core.hashing import Purpose, draw
from tokenloom_server.mixing.node import NOTHING

#: Tokens of a full sample.
LONGEST = 8


def walk_of(config: RunConfig, lengths: Sequence[Sequence[int]], updates: int = 8) -> Walk:
    return Walk(config, [len(own) for own in lengths], updates, lengths)


def random_walk(rng: random.Random) -> tuple[Walk, Walk]:
    """Two equal ones, over a random tree whose samples differ in length."""
    specs = (f"txt:{i}:text" for i in range(1000))
    config = parsed(flat([], seed=rng.randrange(2**63)) | {"mixture": random_tree(rng, 3, specs)})
    config = random_presences(rng, config) if rng.random() < 0.3 else config
    shortest = rng.choice([0, 1, LONGEST])
    lengths = [
        [rng.randint(shortest, LONGEST) for _ in range(rng.choice([0, 1, 2, 5, 9, 40, 40, 300]))]
        for _ in config.sources
    ]
    updates = rng.choice([8, 32])
    return walk_of(config, lengths, updates), walk_of(config, lengths, updates)


class Reference:
    """The rule one pick after the other, in fractions: of those that are due the earliest deadline, its own length
    debited once it is chosen."""

    def __init__(self, weights: Sequence[int], seed: int) -> None:
        self.shares = [Fraction(weight, sum(weights)) for weight in weights]
        self.seed = seed
        self.given = [0] * len(weights)
        self.picks = [0] * len(weights)

    def distances(self) -> list[Fraction]:
        """By child, how many tokens it has more than its share."""
        total = sum(self.given)
        return [own - share * total for own, share in zip(self.given, self.shares, strict=True)]

    def choose(self) -> int:
        children = range(len(self.shares))
        margin = Fraction(LONGEST, 2 * len(self.shares) - 2)
        ahead = self.distances()
        due = [i for i in children if self.shares[i] * LONGEST - ahead[i] >= margin]
        deadlines = [(LONGEST - margin + ahead[i]) / self.shares[i] + sum(self.given) for i in children]
        return min(
            due or children,
            key=lambda i: (deadlines[i] * 2**20 // 1, draw(self.seed, Purpose.TIE, 2 * i, self.picks[i]), i),
        )

    def take(self, child: int, length: int) -> None:
        self.given[child] += length
        self.picks[child] += 1


WEIGHTS = st.one_of(
    st.lists(st.integers(1, 12), min_size=2, max_size=9),
    st.lists(st.sampled_from([1, 3, 10**4, 10**7]), min_size=2, max_size=6),
    st.integers(2, 9).map(lambda children: [1] * children),
)


@given(WEIGHTS, st.integers(0, 2**63 - 1), st.integers(0, LONGEST), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_every_child_is_within_one_longest_sample_of_its_share(
    weights: list[int], seed: int, shortest: int, rng: random.Random
) -> None:
    lengths = [[rng.randint(shortest, LONGEST) for _ in range(400)] for _ in weights]
    walk = walk_of(config_of("least_consumed", *weights, seed=seed), lengths)
    reference, bound = Reference(weights, seed), LONGEST * (1 - Fraction(1, 2 * len(weights) - 2))
    for child in walk.leap(200):
        assert child == reference.choose()
        reference.take(child, lengths[child][reference.picks[child]])
        assert max(map(abs, reference.distances())) <= bound + Fraction(1, 1000)


@given(st.integers(2, 9), st.integers(0, 2**63 - 1), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_with_equal_weights_the_child_with_the_fewest_real_tokens_is_next(
    children: int, seed: int, rng: random.Random
) -> None:
    lengths = [[rng.randint(0, LONGEST) for _ in range(300)] for _ in range(children)]
    walk = walk_of(config_of("least_consumed", *[1] * children, seed=seed), lengths)
    tokens, picks = [0] * children, [0] * children
    for child in walk.leap(300):
        assert tokens[child] == min(tokens)
        tokens[child] += lengths[child][picks[child]]
        picks[child] += 1
        assert max(tokens) - min(tokens) <= LONGEST


@given(st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_an_interrupted_run_gives_what_the_uninterrupted_one_gives(seed: int) -> None:
    rng = random.Random(seed)
    whole, broken = random_walk(rng)
    expected = whole.leap(rng.randint(1, 300))
    actual: list[int] = []
    while len(actual) < len(expected):
        actual += broken.leap(min(rng.choice([1, 7, 30, 90]), len(expected) - len(actual)))
        if rng.random() < 0.7:
            broken.restore()
    assert actual == expected
    assert broken.present() == whole.present()


@given(st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_what_is_planned_is_what_is_decided_pick_by_pick_and_a_mixer_built_anew_goes_on(seed: int) -> None:
    rng = random.Random(seed)
    planned, stepwise = random_walk(rng)
    often = rng.choice([0.02, 0.2, 1.0])
    for _ in range(100):
        expected = stepwise.step()
        assert planned.leap(1) == [expected]
        assert planned.present() == stepwise.present()
        if rng.random() < often:
            stepwise.restore()
        if expected == NOTHING:
            break


@given(st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_where_every_sample_is_full_the_choices_are_those_by_positions(seed: int) -> None:
    rng = random.Random(seed)
    config = parsed(
        flat([], seed=rng.randrange(2**63)) | {"mixture": random_tree(rng, 3, (f"txt:{i}:text" for i in range(1000)))}
    )
    capacity = [rng.choice([0, 1, 2, 5, 40, 300]) for _ in config.sources]
    by_length = walk_of(config, [[LONGEST] * count for count in capacity])
    by_positions = Walk(config, capacity)
    assert by_length.leap(300) == by_positions.leap(300)
    assert by_length.present() == by_positions.present()


def test_a_source_that_was_not_picked_is_not_looked_into() -> None:
    config = config_of("least_consumed", 1000, 1, node("least_consumed", 1, 1, weight=1))
    walk = walk_of(config, [[3, 8, 5] * 100, [8] * 100, [2] * 100, [2] * 100])
    order = walk.leap(200)
    assert {source for source, _ in walk.looked_at} == set(order)
    assert len(set(order)) < 4, "the rare ones come later"
    picked = {source: order.count(source) for source in order}
    assert all(number < picked[source] for source, number in walk.looked_at)
