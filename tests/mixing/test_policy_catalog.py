"""A policy is its module: one that only the catalog knows is checked, mixed, planned, revised and inspected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.catalog import CATALOG
from support.corpora import flat
from tokenloom_server.config import mixture_file
from tokenloom_server.config.catalog import Catalog
from tokenloom_server.config.run import RunConfig
from tokenloom_server.core.state import SourceState
from tokenloom_server.core.token_curve import TokenCurve
from tokenloom_server.errors import ConfigError
from tokenloom_server.mixing import elsewhere
from tokenloom_server.mixing.mixer import Mixer, initial_nodes
from tokenloom_server.mixing.policies import BUILT_IN, policies
from tokenloom_server.mixing.policy import Choices, Chooser, NodeStart, Policy
from tokenloom_server.order.carry_over import carry
from tokenloom_server.order.pipeline import initial_state
from tokenloom_server.planning.forecast import Part, forecast

LENGTH = 8


class LastFirst(Policy):
    """The last live child is next."""

    name = "last_first"

    def chooser(self, node: NodeStart) -> Chooser:
        return LastFirstChooser(node)


class LastFirstChooser(Chooser):
    def work_out(self, count: int) -> Choices:
        return np.full(count, self._children.live[-1], np.intp)

    def weights(self) -> Sequence[int]:
        live = self._children.live
        return [
            int(bool(live) and position == live[-1]) for position in range(len(self._children.out))
        ]


def config_of(policy: str, **child: Any) -> RunConfig:
    catalog = Catalog(CATALOG.sources, {**policies(), LastFirst.name: LastFirst()})
    document = flat([f"txt:{i}:text" for i in range(3)], policy)
    document["mixture"]["children"][0] |= child
    return mixture_file.parse(document, where="mixture.yaml", catalog=catalog)


def test_what_a_catalog_has_is_mixed_and_planned() -> None:
    config = config_of(LastFirst.name)
    left = [4, 2, 3]
    mixer = Mixer(config, initial_nodes(config))
    picks = []
    while (source := mixer.decide_one(lambda source: left[source] > 0)) >= 0:
        left[source] -= 1
        picks.append(source)
    assert picks == [2] * 3 + [1] * 2 + [0] * 4
    curves = [TokenCurve.of([(rows, rows * LENGTH)]) for rows in (4, 2, 3)]
    for exact_picks in (100, 0):
        plan = forecast(
            [Part(config=config, curves=curves)], initial_state(config), exact_picks=exact_picks
        )
        assert [source.exhausted_at_sample for source in plan.sources] == [9, 5, 3]


def test_what_a_catalog_has_is_checked_revised_and_forked() -> None:
    with pytest.raises(
        ConfigError, match="weight: found 2, but the policy 'last_first' knows no weights"
    ):
        config_of(LastFirst.name, weight=2)
    with pytest.raises(
        ConfigError, match="'balance_remaining', 'schedule' or 'last_first'; found 'first_last'"
    ):
        config_of("first_last")
    old, new = config_of("round_robin"), config_of(LastFirst.name)
    revised = carry(initial_state(old), old, new)
    assert Mixer(new, revised.nodes).decide_one(lambda _: True) == 2
    sources = [SourceState(samples=count, tokens=count * LENGTH) for count in (5, 0, 1)]
    assert [child.samples for child in elsewhere.forked(new, sources)[0]] == [5, 0, 1]
    assert elsewhere.imported(new, sources, [5, 0, 1], [True, False, True]).baselines == (
        None,
        None,
        None,
    )


def test_names_are_distinct_and_there_is_one_of_each() -> None:
    assert len(policies()) == len(BUILT_IN)
    assert policies() is policies(), "configs of equal fields are equal"
