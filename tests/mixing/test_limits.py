"""What ends a child or a node, or keeps it out: limits, pauses, what an end does to the others."""

from __future__ import annotations

from collections import Counter

import pytest
from support.catalog import CATALOG
from support.mixing import Walk, config_of, node
from tokenloom_server.config.run import RunConfig
from tokenloom_server.mixing.node import NOTHING
from tokenloom_server.mixing.policies import policies

POLICIES = tuple(policies())


def present_as(config: RunConfig, *presences: str) -> RunConfig:
    """The root's children paused or dropped, as by a revision."""
    document = config.model_dump()
    for child, presence in zip(document["mixture"]["children"], presences, strict=True):
        child["presence"] = presence
    return RunConfig.model_validate(document, context=CATALOG)


def to_the_end(walk: Walk, steps: int = 7) -> list[int]:
    """All picks, restored every few samples."""
    found: list[int] = []
    while not found or found[-1] != NOTHING:
        found += walk.leap(steps)
        if found[-1] != NOTHING:
            walk.restore()
    assert walk.step() == NOTHING
    return found[:-1]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("max_tokens", "samples"), [(8, 1), (15, 1), (80, 10), (87, 10)])
def test_a_source_gives_whole_samples_up_to_its_max_tokens(
    policy: str, max_tokens: int, samples: int
) -> None:
    walk = Walk(config_of(policy, {"max_tokens": max_tokens}, {}), [50, 50])
    found = to_the_end(walk)
    assert Counter(found) == {0: samples, 1: 50}
    assert [child.exhausted for child in walk.present()[0]] == [True, True]
    assert walk.mixer.why_over() == "every source is exhausted (max_tokens reached: txt:0:text)"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_node_gives_whole_samples_up_to_its_max_tokens(policy: str) -> None:
    walk = Walk(config_of("least_consumed", {}, node(policy, {}, {}, max_tokens=100)), [50, 50, 50])
    found = Counter(to_the_end(walk))
    assert found[0] == 50
    assert found[1] + found[2] == 12
    root, inner = walk.present()
    assert [child.exhausted for child in root] == [True, True]
    # The node is at its end, its sources are not.
    assert not any(child.exhausted for child in inner)
    assert "max_tokens reached: node 1" in walk.mixer.why_over()


def test_the_roots_max_tokens_end_the_run() -> None:
    walk = Walk(config_of("least_consumed", {}, {}, max_tokens=40), [50, 50])
    assert len(to_the_end(walk)) == 5
    assert walk.mixer.why_over() == "the mixture has given its max_tokens of 40"


def test_a_limit_with_stop_ends_the_node_at_the_pick_beyond_it() -> None:
    walk = Walk(config_of("least_consumed", {"max_tokens": 80}, {}, on_exhausted="stop"), [50, 50])
    to_the_end(walk)
    assert walk.given in ([10, 10], [10, 11])
    assert walk.mixer.why_over() == (
        "exhausted, and its node stops: txt:0:text (max_tokens reached: txt:0:text)"
    )


@pytest.mark.parametrize(
    ("parent", "source", "ends"), [("drop", "stop", True), ("stop", "drop", False)]
)
def test_a_source_says_what_its_end_does_to_its_node(parent: str, source: str, ends: bool) -> None:
    children = {"on_exhausted": source}, {"on_exhausted": "drop"}
    walk = Walk(config_of("least_consumed", *children, on_exhausted=parent), [5, 50])
    to_the_end(walk)
    assert walk.given in ([5, 5], [5, 6]) if ends else walk.given == [5, 50]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("presence", ["paused", "dropped"])
def test_who_is_paused_or_dropped_gets_nothing_and_is_not_out(policy: str, presence: str) -> None:
    config = present_as(config_of(policy, {}, {}, {}), "live", presence, "live")
    walk = Walk(config, [20, 20, 20])
    assert Counter(to_the_end(walk)) == {0: 20, 2: 20}
    assert [child.exhausted for child in walk.present()[0]] == [True, False, True]
    if presence == "paused":
        assert walk.mixer.why_over() == "only paused sources are left: txt:1:text"
    else:
        assert walk.mixer.why_over() == "every source is exhausted"


def test_a_dropped_child_that_was_out_stops_nothing() -> None:
    config = config_of("least_consumed", {}, {}, on_exhausted="stop")
    walk = Walk(config, [5, 50])
    to_the_end(walk)
    walk.revise(present_as(config, "dropped", "live"), [5, 50])
    to_the_end(walk)
    assert walk.given == [5, 50]
    # A paused one that was out still does.
    walk = Walk(config, [5, 50])
    to_the_end(walk)
    walk.revise(present_as(config, "paused", "live"), [5, 50])
    assert walk.step() == NOTHING


def test_a_node_of_which_only_paused_sources_are_left_waits_and_goes_on_with_them() -> None:
    config = config_of("least_consumed", {}, node("round_robin", {}, {}))
    document = config.model_dump()
    document["mixture"]["children"][1]["children"][0]["presence"] = "paused"
    paused = RunConfig.model_validate(document, context=CATALOG)
    walk = Walk(paused, [40, 20, 5])
    assert Counter(walk.leap(30)) == {0: 25, 2: 5}
    root, inner = walk.present()
    assert [child.exhausted for child in root] == [False, False]
    assert [child.exhausted for child in inner] == [False, True]
    walk.restore()
    assert Counter(walk.leap(5)) == {0: 5}
    walk.revise(config, walk.capacity)
    # From now on each has its half again, and nothing is made up for.
    assert Counter(walk.leap(10)) == {0: 5, 1: 5}
