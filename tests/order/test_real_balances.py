"""A run that counts real tokens: padding is no part of a balance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.corpora import flat, order_of, order_under_version_1, parsed, reread, write_txt
from tokenloom_server.core.state import State
from tokenloom_server.errors import ConfigError
from tokenloom_server.order import builder
from tokenloom_server.order.factory import PipelineFactory

SHORT, LONG, MIXED = (f"txt:{name}.txt:text" for name in ("short", "long", "mixed"))
LENGTH = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 11 tokens, of 61, and of 1 to 64, with their end of text."""
    path = tmp_path_factory.mktemp("lengths")
    write_txt(path / "short.txt", ["s" * 10] * 400)
    write_txt(path / "long.txt", ["l" * 60] * 400)
    write_txt(path / "mixed.txt", ["m" * (row * 37 % 64) for row in range(400)])
    return path


def document(packing: str = "none", *children: dict[str, Any], **fields: Any) -> dict[str, Any]:
    given = list(children) or [{"source": SHORT}, {"source": LONG}]
    return flat([], packing=packing, sequence_length=LENGTH, **fields) | {
        "mixture": {"policy": "least_consumed", "children": given}
    }


NESTED: list[dict[str, Any]] = [
    {"source": LONG, "weight": 2},
    {
        "policy": "least_consumed",
        "weight": 1,
        "children": [{"source": SHORT, "weight": 3}, {"source": MIXED, "max_tokens": 40 * LENGTH}],
    },
]


def real_tokens(state: State) -> list[int]:
    return [source.tokens - source.row_counts.padding_tokens for source in state.sources]


def states(order: PipelineFactory, samples: int) -> list[State]:
    """Those before each sample, and after the last."""
    pipeline = order.pipeline(order.initial())
    found = [pipeline.state()]
    for _ in range(samples):
        pipeline.advance(1)
        if pipeline.ended is not None:
            break
        found.append(pipeline.state())
    return found


@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_sources_of_equal_weight_give_equally_many_real_tokens(folder: Path, packing: str) -> None:
    order = order_of(folder, document(packing, {"source": SHORT}, {"source": LONG}, {"source": MIXED}))
    for state in states(order, 160):
        tokens = real_tokens(state)
        assert max(tokens) - min(tokens) <= LENGTH


def test_by_positions_padding_counts_as_before(folder: Path) -> None:
    for order in (order_of(folder, document(count="positions")), order_under_version_1(folder, document())):
        assert real_tokens(states(order, 100)[-1]) == [550, 3050]
    fewer, more = sorted(real_tokens(states(order_of(folder, document()), 100)[-1]))
    assert more - fewer <= LENGTH


def test_sources_with_weights_stay_within_one_longest_sample_of_their_share(folder: Path) -> None:
    weights = [5, 1, 3]
    sources = [{"source": of, "weight": weight} for of, weight in zip((SHORT, LONG, MIXED), weights, strict=True)]
    for state in states(order_of(folder, document("none", *sources)), 300):
        tokens = real_tokens(state)
        for own, weight in zip(tokens, weights, strict=True):
            assert abs(own - weight / sum(weights) * sum(tokens)) < LENGTH


def test_nodes_are_balanced_by_the_real_tokens_of_all_below_them(folder: Path) -> None:
    for state in states(order_of(folder, document("none", *NESTED)), 200):
        long, short, mixed = real_tokens(state)
        assert abs(long - 2 / 3 * (long + short + mixed)) < LENGTH
        if not state.sources[2].exhausted:
            assert abs(short - 3 / 4 * (short + mixed)) < LENGTH


@pytest.mark.parametrize("packing", ["none", "best_fit"])
@pytest.mark.parametrize("policy", ["least_consumed", "soft_sequential", "balance_remaining", "schedule"])
def test_a_run_goes_on_identically_from_every_sample_index(folder: Path, packing: str, policy: str) -> None:
    below = NESTED[1] if policy == "least_consumed" else {key: NESTED[1][key] for key in ("policy", "children")}
    children = [{"source": LONG}, {"source": MIXED, "epochs": 0.25}, below | {"children": [{"source": SHORT}]}]
    order = order_of(folder, document(packing) | {"mixture": {"policy": policy, "children": children}})
    whole = states(order, 330)
    assert len(whole) > 60
    for state, later in zip(whole[::7], whole[5::7], strict=False):
        pipeline = order.pipeline(reread(order, state))
        pipeline.advance(5)
        assert pipeline.state() == later


def test_a_group_of_steps_is_what_single_samples_are(folder: Path) -> None:
    order = order_of(folder, document("best_fit", *NESTED))
    whole = states(order, 100)
    for jump in (3, 50, 100):
        pipeline = order.pipeline(order.initial())
        for _ in range(100 // jump):
            pipeline.advance(jump)
            assert pipeline.state() == whole[pipeline.sample_index]


def test_a_record_says_what_a_run_counts_and_a_file_that_says_nothing_keeps_it(folder: Path) -> None:
    for made, count in ((order_of(folder, document()), "real"), (order_under_version_1(folder, document()), None)):
        record = made.record.to_json()
        assert json.loads(record)["config"].get("count") == count
        assert builder.load(parsed(document()), folder, None, record).record.to_json() == record
        same, other = ("real", "positions") if count else ("positions", "real")
        assert builder.load(parsed(document(count=same)), folder, None, record).record.to_json() == record
        with pytest.raises(ConfigError, match=f'count: the run began with "{same}", the file has "{other}"'):
            builder.load(parsed(document(count=other)), folder, None, record)


def test_where_every_sample_is_full_both_counts_give_the_same_order(folder: Path) -> None:
    by_count = [
        states(order_of(folder, document("concat", *NESTED, count=count)), 120)[-1] for count in ("real", "positions")
    ]
    assert by_count[0] == by_count[1]
