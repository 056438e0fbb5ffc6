"""Policies whose weights follow the run, over real files: what records and states hold of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.corpora import (
    advanced,
    decode_state,
    encode_state,
    flat,
    id_rows,
    mixture,
    order_of,
    write_parquet,
)
from support.mixing import node
from tokenloom_server.errors import SnapshotInvalid
from tokenloom_server.order import builder
from tokenloom_server.order.factory import PipelineFactory

#: Rows, and the tokens of the longest: about 2,100, 5,400 and 900 samples of 4 tokens.
SIZES = {"a": (420, 40), "b": (270, 160), "c": (1200, 6)}
SPECS = {name: f"parquet:{name}-*.parquet:ids" for name in SIZES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("policies")
    for name, (rows, longest) in SIZES.items():
        found = id_rows(rows, ord(name), longest)
        for shard in range(2):
            write_parquet(made / f"{name}-{shard}.parquet", found[shard::2], group=32)
    return made


def under(policy: str) -> dict[str, Any]:
    return flat([*SPECS.values()], policy, sequence_length=4)


@pytest.fixture(scope="module")
def order(folder: Path) -> PipelineFactory:
    return order_of(folder, under("balance_remaining"))


def test_size_estimates_are_in_the_record_where_a_policy_needs_them_and_are_kept(
    folder: Path, order: PipelineFactory
) -> None:
    record = json.loads(order.record.to_json())
    assert len(record["size_estimates"]) == 3
    record["size_estimates"] = {
        key: [2 * rows, round(500 * tokens[-1] / rows), [0, 2 * rows], [0, tokens[-1]]]
        for key, (rows, _, _, tokens) in record["size_estimates"].items()
    }
    again = builder.load(order.config, folder, None, json.dumps(record))
    assert [estimate.epoch_rows for estimate in again.record.size_estimates.values()] == [
        2 * rows for rows, _ in SIZES.values()
    ]
    assert json.loads(again.record.to_json()) == record
    assert "size_estimates" not in json.loads(
        order_of(folder, under("least_consumed")).record.to_json()
    )


def test_states_hold_weights_only_where_a_policy_makes_them(folder: Path) -> None:
    root = under("balance_remaining")["mixture"]
    root["children"] += [node("weighted", root["children"].pop())]
    order = order_of(folder, mixture(mixture=root))
    nodes = json.loads(encode_state(order, advanced(order, order.initial(), 100)))["nodes"]
    assert [{len(child) for child in children} for children in nodes] == [{6}, {4}]
    assert json.loads(encode_state(order, order.initial()))["nodes"][0] == [[0, 0, 0, 0]] * 3


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ((0, 0, 4), -1, "nodes.0.0.4"),
        ((0, 0, 4), 2**28 + 1, "nodes.0.0.4"),
        ((0, 0, 5), "9", "nodes.0.0.5"),
        ((0, 0), [0, 0, 0, 0, 1], "nodes.0.0"),
    ],
)
def test_a_state_with_other_weights_than_there_can_be_is_refused(
    order: PipelineFactory, path: tuple[int, ...], value: Any, says: str
) -> None:
    document = json.loads(encode_state(order, advanced(order, order.initial(), 10)))
    at = document["nodes"]
    for part in path[:-1]:
        at = at[part]
    at[path[-1]] = value
    with pytest.raises(SnapshotInvalid, match=says):
        decode_state(order, json.dumps(document))
