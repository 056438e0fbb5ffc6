"""The keyed permutation: one to one, near to all permutations alike, and the same for ever."""

from __future__ import annotations

from collections import Counter
from math import factorial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenloom_server.core.hashing import Permutation, Purpose

KEYS = st.integers(0, 2**64 - 1)


@settings(max_examples=60, deadline=None)
@given(KEYS, st.integers(1, 3000))
def test_every_place_has_one_value_and_any_of_them_is_computed_by_itself(
    key: int, count: int
) -> None:
    permutation = Permutation(Purpose.ROWS, key, count)
    found = permutation.all()
    assert sorted(found.tolist()) == list(range(count))
    some = np.array([count - 1, 0, count // 2])
    assert permutation(some).tolist() == found[some].tolist()


@settings(max_examples=20, deadline=None)
@given(KEYS, st.integers(2**40, 2**61))
def test_places_of_a_domain_that_is_never_laid_out_differ(key: int, count: int) -> None:
    found = Permutation(Purpose.BLOCKS, key, count)(np.arange(1000))
    assert len(set(found.tolist())) == 1000
    assert found.min() >= 0
    assert found.max() < count


def test_it_is_the_same_for_ever() -> None:
    # A part of the order: another permutation is another ORDER_VERSION.
    assert Permutation(Purpose.ROWS, 7, 12).all().tolist() == PINNED
    assert Permutation(Purpose.BLOCKS, 7, 12).all().tolist() != PINNED
    assert Permutation(Purpose.ROWS, 8, 12).all().tolist() != PINNED
    assert (
        Permutation(Purpose.ROWS, 2**64 - 1, 10**15)(np.array([0, 1, 10**15 - 1])).tolist()
        == PINNED_WIDE
    )


PINNED = [1, 9, 11, 7, 5, 4, 10, 6, 0, 8, 2, 3]
PINNED_WIDE = [562856059802215, 707446856552677, 106786316187027]


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_all_permutations_of_a_few_places_are_equally_likely(count: int) -> None:
    draws = 40 * factorial(count)
    found = Counter(
        tuple(Permutation(Purpose.ROWS, key, count).all().tolist()) for key in range(draws)
    )
    expected = draws / factorial(count)
    chi2 = sum((n - expected) ** 2 / expected for n in found.values())
    chi2 += expected * (factorial(count) - len(found))
    degrees = factorial(count) - 1
    # Five standard deviations; these keys are fixed, so it never comes by chance.
    assert chi2 < degrees + 5 * (2 * degrees) ** 0.5


def test_values_of_a_large_domain_are_spread_evenly_and_independently_of_their_places() -> None:
    count = 100_000
    found = Permutation(Purpose.ROWS, 3, count).all()
    assert abs(np.corrcoef(np.arange(count), found)[0, 1]) < 4 / count**0.5
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 4 / count**0.5
    # How many of every thousand places get a value of each tenth.
    table = np.bincount(np.arange(count) // 1000 * 10 + found // (count // 10), minlength=1000)
    chi2 = float(((table - 100) ** 2 / 100).sum())
    assert abs(chi2 - 999) < 6 * (2 * 999) ** 0.5
