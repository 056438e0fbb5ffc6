"""A changed mixture goes on from what was counted: exactly, and at its new shares at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.catalog import CATALOG
from support.corpora import flat, parsed
from support.mixing import Walk, config_of, node, worst_distance
from tokenloom_server.config.run import RunConfig
from tokenloom_server.mixing.least_consumed import carried
from tokenloom_server.mixing.node import NOTHING
from tokenloom_server.mixing.policies import levelled


def changed(config: RunConfig, change: Callable[[dict[str, Any]], None]) -> RunConfig:
    document = config.model_dump()
    change(document["mixture"])
    return RunConfig.model_validate(document, context=CATALOG)


@given(
    st.lists(st.integers(1, 400), min_size=2, max_size=8),
    st.lists(st.integers(1, 400), min_size=8, max_size=8),
    st.integers(0, 300),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_shares_follow_new_weights_and_new_children_at_once(
    before: list[int], after: list[int], at: int, joins: bool
) -> None:
    config = config_of("least_consumed", *before)

    def change(root: dict[str, Any]) -> None:
        for child, weight in zip(root["children"], after, strict=False):
            child["weight"] = float(weight)
        if joins:
            root["children"].append(
                {"id": len(before), "source": "txt:new:text", "weight": float(after[-1])}
            )

    walk = Walk(config, [10**6] * len(before))
    walk.leap(at)
    revised = changed(config, change)
    walk.revise(revised, [10**6] * len(revised.sources))
    weights = [float(child.weight) for child in revised.sources if isinstance(child.weight, float)]
    # One sample of what was owed, and one of their own.
    assert worst_distance(walk.leap(400), weights) <= 2


def test_what_is_owed_is_within_a_sample_whatever_joins_or_leaves() -> None:
    owed = (-700, 300, 400, 0)
    found = carried(owed, (10, 20, 30, 0), (1, 0, 0, 1), 12)
    assert max(map(abs, found)) <= 2 * 12
    assert abs(found[0] + found[3]) <= 2
    # All paused: frozen. All were: nobody is owed anything.
    assert carried(owed, (10, 20, 30, 0), (0, 0, 0, 0), 12) == owed
    assert carried(owed, (0, 0, 0, 0), (10, 20, 30, 0), 12) == (0, 0, 0, 0)


def test_in_a_round_who_joins_has_its_first_turn_in_the_next() -> None:
    config = config_of("round_robin", {}, {}, {})
    walk = Walk(config, [100] * 3)
    assert walk.leap(7) == [0, 1, 2, 0, 1, 2, 0]
    walk.revise(
        changed(config, lambda root: root["children"].append({"id": 3, "source": "txt:new:text"})),
        [100] * 4,
    )
    found = []
    for _ in range(10):
        found += walk.leap(1)
        walk.restore()
    assert found == [1, 2, 0, 1, 2, 3, 0, 1, 2, 3]


def test_levels_of_a_round() -> None:
    assert levelled([9, 8, 0], [0, 0, 0], [True, True, False], [True, True, True]) == (0, 0, 9)
    # Nobody was there before: all begin level.
    assert levelled([9, 8, 0], [0, 0, 0], [False] * 3, [True] * 3) == (0, 1, 9)
    assert levelled([9, 8, 0], [0, 5, 9], [True, False, True], [True, False, True]) == (0, 5, 9)


@pytest.mark.parametrize("field", ["max_tokens", "epochs"])
def test_what_was_out_and_may_give_more_goes_on(field: str) -> None:
    config = config_of("least_consumed", {}, node("least_consumed", {field: 16}))
    walk = Walk(config, [100, 2])
    assert Counter(walk.leap(12)) == {0: 10, 1: 2}
    assert [child.exhausted for child in walk.present()[0]] == [False, True]

    def more(root: dict[str, Any]) -> None:
        root["children"][1]["children"][0][field] = 32

    walk.revise(changed(config, more), [100, 4])
    assert walk.mixer.exhausted(walk.mixer.mix_weights) == (False, False)
    assert Counter(walk.leap(20)) == {0: 18, 1: 2}


def test_a_new_source_revives_the_nodes_above_it() -> None:
    document = flat(["txt:0:text"])
    document["mixture"]["children"].append(
        node("weighted", node("sequential", {"source": "txt:1:text"}), {"source": "txt:2:text"})
    )
    config = parsed(document)
    walk = Walk(config, [5, 2, 2])
    while walk.step() != NOTHING:
        pass

    def grown(root: dict[str, Any]) -> None:
        root["children"][1]["children"][0]["children"].append({"id": 3, "source": "txt:new:text"})

    walk.revise(changed(config, grown), [5, 2, 2, 4])
    assert walk.leap(5) == [3, 3, 3, 3, NOTHING]
