"""Policies whose weights follow the run, over real files: exact from every state, and at the end what they are for."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.corpora import (
    decode_state,
    encode_state,
    id_rows,
    mixture,
    order_of,
    parsed,
    reread,
    write_jsonl,
    write_parquet,
)
from tokenloom_server.core.state import State
from tokenloom_server.errors import ConfigError, SnapshotInvalid, SourceError
from tokenloom_server.mixing.varying import UPDATE_PICKS
from tokenloom_server.order import builder
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.steps import BatchPlan

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


def under(policy: str, **node: Any) -> dict[str, Any]:
    children: list[dict[str, Any]] = [{"source": spec} for spec in SPECS.values()]
    return mixture(mixture={"policy": policy, "children": children} | node, sequence_length=4)


NESTED: dict[str, Any] = {
    "policy": "balance_remaining",
    "children": [
        {"source": SPECS["a"], "on_exhausted": "drop"},
        {
            "policy": "schedule",
            "max_tokens": 9_000,
            "children": [
                {
                    "policy": "soft_sequential",
                    "epochs": 0.5,
                    "weight": [[0, 1], [4_000, 0], [8_000, 2]],
                    "children": [{"source": SPECS["b"], "epochs": 2}, {"source": SPECS["c"]}],
                },
                {
                    "policy": "weighted",
                    "weight": [[2_000, 1], [6_000, 0.25]],
                    "children": [{"source": "jsonl:d.jsonl:text", "max_tokens": 1_000}],
                },
            ],
        },
    ],
}

DOCUMENTS: dict[str, dict[str, Any]] = {
    "soft_sequential": under("soft_sequential"),
    "balance_remaining": under("balance_remaining"),
    "nested": mixture(mixture=NESTED, sequence_length=4),
}


def order_named(folder: Path, name: str) -> PipelineFactory:
    if name == "nested":
        write_jsonl(folder / "d.jsonl", [f"document {i} of a few" for i in range(60)])
    return order_of(folder, DOCUMENTS[name])


def run(order: PipelineFactory, state: State, burst: int = 50) -> tuple[list[int], list[State], str | None]:
    """All samples' sources from a state on, the state behind each, and why they ended."""
    pipeline = order.pipeline(state)
    plan = BatchPlan(start_index=state.sample_index, world_size=1, batch_size=1, group_micro_steps=400)
    sources: list[int] = []
    states: list[State] = []
    while pipeline.ended is None:
        group = pipeline.begin_group(plan)
        while len(group.marks) < 400 and pipeline.ended is None:
            pipeline.fill(group, burst)
        sources += group.source_ids[0, : len(group.marks), 0].tolist()
        states += [group.state_after(step) for step in range(len(group.marks))]
    return sources, states, pipeline.ended


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_run_goes_on_identically_from_every_kind_of_state(folder: Path, name: str) -> None:
    order = order_named(folder, name)
    sources, states, ended = run(order, order.initial())
    assert len(sources) > 3 * UPDATE_PICKS
    changes = [k for k in range(1, len(states)) if flags(states[k]) != flags(states[k - 1])]
    assert changes
    at_updates = [k * UPDATE_PICKS for k in range(1, len(states) // UPDATE_PICKS, 9)]
    # State k is behind sample k, so that k + 1 samples lie before it: on an update, beside it, and where one goes out.
    for k in sorted({0, 100, *changes, *(at + by for at in at_updates for by in (-2, -1, 0)), len(states) - 2}):
        again = reread(order, states[k])
        assert again == states[k]
        rest, rest_states, reason = run(order, again, burst=1 + k % 97)
        assert rest == sources[k + 1 :]
        assert rest_states == states[k + 1 :]
        assert reason == ended


def flags(state: State) -> list[bool]:
    return [child.exhausted for children in state.nodes for child in children]


def test_what_is_balanced_ends_within_an_update(folder: Path) -> None:
    order = order_named(folder, "balance_remaining")
    sources, states, ended = run(order, order.initial())
    assert ended == "every source is exhausted"
    lasts = [max(at for at, source in enumerate(sources) if source == i) for i in range(3)]
    assert max(lasts) - min(lasts) <= UPDATE_PICKS
    # Half-way, each has given half.
    behind = states[len(states) // 2].sources
    total = Counter(sources)
    assert all(abs(source.samples / total[i] - 0.5) < 0.05 for i, source in enumerate(behind))


def test_soft_sequential_reads_one_after_the_other_without_an_edge(folder: Path) -> None:
    order = order_named(folder, "soft_sequential")
    sources, _, _ = run(order, order.initial())
    firsts = [sources.index(i) for i in range(3)]
    lasts = [max(at for at, source in enumerate(sources) if source == i) for i in range(3)]
    assert firsts == sorted(firsts)
    assert firsts[1] < lasts[0]
    quarter = len(sources) // 4
    assert Counter(sources[:quarter])[0] > 0.6 * quarter
    # Once it is nearly read, hardly anything of the first is left for the rest.
    assert Counter(sources[2 * quarter :])[0] < 0.15 * quarter


def test_estimates_come_to_what_there_is(folder: Path) -> None:
    order = order_named(folder, "balance_remaining")
    sources, states, _ = run(order, order.initial())
    total = Counter(sources)
    for at in range(8 * UPDATE_PICKS, len(states), UPDATE_PICKS):
        for i, child in enumerate(states[at].nodes[0]):
            assert abs(child.total - total[i]) <= 0.12 * total[i]
    # From the footers and a sample, before anything is read: this small it is all of it.
    assert all(abs(child.total - total[i]) <= 1 for i, child in enumerate(states[0].nodes[0]))


def test_size_estimates_are_in_the_record_where_a_policy_needs_them_and_are_kept(folder: Path) -> None:
    order = order_named(folder, "balance_remaining")
    record = json.loads(order.record.to_json())
    assert len(record["size_estimates"]) == 3
    record["size_estimates"] = {
        key: [2 * rows, tokens] for key, (rows, tokens, _, _) in record["size_estimates"].items()
    }
    again = builder.load(order.config, folder, None, json.dumps(record))
    assert [estimate.rows for estimate in again.record.size_estimates.values()] == [
        2 * rows for rows, _ in SIZES.values()
    ]
    assert json.loads(again.record.to_json()) == record
    assert "size_estimates" not in json.loads(order_of(folder, under("least_consumed")).record.to_json())


def test_states_hold_weights_only_where_a_policy_makes_them(folder: Path) -> None:
    order = order_named(folder, "nested")
    pipeline = order.pipeline(order.initial())
    pipeline.advance(100)
    nodes = json.loads(encode_state(order, pipeline.state()))["nodes"]
    assert [{len(child) for child in children} for children in nodes] == [{6}, {6}, {6}, {4}]
    assert json.loads(encode_state(order, order.initial()))["nodes"][0] == [[0, 0, 0, 0]] * 2


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
    folder: Path, path: tuple[int, ...], value: Any, says: str
) -> None:
    order = order_named(folder, "balance_remaining")
    pipeline = order.pipeline(order.initial())
    pipeline.advance(10)
    document = json.loads(encode_state(order, pipeline.state()))
    at = document["nodes"]
    for part in path[:-1]:
        at = at[part]
    at[path[-1]] = value
    with pytest.raises(SnapshotInvalid, match=says):
        decode_state(order, json.dumps(document))


@pytest.mark.parametrize("scheme", ["parquet", "jsonl"])
def test_an_empty_source_is_refused_at_start_by_name(folder: Path, tmp_path: Path, scheme: str) -> None:
    write_parquet(tmp_path / "empty.parquet", [])
    write_jsonl(tmp_path / "empty.jsonl", [])
    write_parquet(tmp_path / "full.parquet", [[1, 2, 3]])
    spec = f"{scheme}:empty.{scheme}:ids"
    document = mixture(
        mixture={"policy": "least_consumed", "children": [{"source": "parquet:full.parquet:ids"}, {"source": spec}]}
    )
    with pytest.raises(SourceError, match=f"source '{spec}' has no rows: its 1 files"):
        order_of(tmp_path, document)


def test_a_run_without_an_end_has_nothing_to_estimate() -> None:
    endless = under("soft_sequential")
    endless["mixture"]["children"][1]["epochs"] = float("inf")
    with pytest.raises(ConfigError, match=r"children\.1\.epochs: found \.inf, but the policy 'soft_sequential' above"):
        parsed(endless)
    endless["mixture"]["children"][1]["max_tokens"] = 1000
    assert parsed(endless).measured_sources == (0, 2)


def test_epochs_of_a_node_multiply_those_of_its_sources(folder: Path) -> None:
    once = Counter(run(order := order_of(folder, under("round_robin")), order.initial())[0])
    thrice = order_of(folder, under("round_robin", epochs=1.5))
    given = Counter(run(thrice, thrice.initial())[0])
    assert all(abs(given[i] / once[i] - 1.5) < 0.1 for i in range(3))
