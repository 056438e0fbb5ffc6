"""Runs that go on from a state of nested interleaved datasets: each source with the row after those that were read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.corpora import CODE, DOCS, PROSE, ROWS, WIKI, mixture, order_of
from support.imports import import_into, state_of
from support.mixing import node
from support.nested_states import OldInterleaved, Shape, three_levels
from tokenloom_server.errors import SnapshotInvalid
from tokenloom_server.order.factory import PipelineFactory

SPECS = [CODE, DOCS, PROSE, WIKI]
#: Rows of an epoch of each.
LENGTHS = [sum(map(len, ROWS[spec])) for spec in SPECS]


def tree(policy: str = "least_consumed", **source: Any) -> dict[str, Any]:
    """A mixture file with the tree of ``three_levels``; ``source``: more fields of each of its sources."""
    code, docs, prose, wiki = ({"source": spec, **source} for spec in SPECS)
    inner = node(policy, prose, wiki, alias="inner")
    return mixture(mixture=node(policy, code, node(policy, docs, inner, alias="rest")))


@pytest.fixture(scope="module")
def order(folder: Path) -> PipelineFactory:
    return order_of(folder, tree())


def loader() -> OldInterleaved:
    return three_levels(18, LENGTHS)


@pytest.mark.parametrize(
    ("shape", "by_child"),
    [("counts", True), ("counts", False), ("output alone", False), ("nothing", True)],
)
def test_a_nested_state_is_the_rows_that_were_read_of_each_spec(
    order: PipelineFactory, shape: Shape, by_child: bool
) -> None:
    rows = [leaf.rows if shape == "counts" else leaf.examples for leaf in loader().leaves()]
    state = state_of(import_into(order, loader().state(shape, by_child=by_child)))
    entries = [{"spec": spec, "row_offset": count} for spec, count in zip(SPECS, rows, strict=True)]
    assert state == state_of(import_into(order, {"resume_state": {"datasets": entries}}))
    assert [source.rows for source in state.sources] == rows


def test_an_epoch_of_its_own_counts_beside_the_rows(folder: Path) -> None:
    document = loader().state()
    document["child_states"][0] |= {"input_count": 3, "epoch": 1}
    state = state_of(import_into(order_of(folder, tree(epochs=2)), document))
    assert (state.sources[0].epoch, state.sources[0].rows) == (1, LENGTHS[0] + 3)


def test_examples_of_a_known_length_are_tokens_and_the_clock(order: PipelineFactory) -> None:
    point = import_into(order, loader().state() | {"context_length": 8})
    state = state_of(point)
    assert [source.tokens for source in state.sources] == [
        8 * leaf.examples for leaf in loader().leaves()
    ]
    assert [child.samples for child in state.nodes[0]] == [
        child.examples for child in loader().children
    ]
    assert (point.sample_index, point.total_tokens) == (18, 18 * 8)
    # Without it the clock is what the payload says, or begins here.
    assert import_into(order, loader().state() | {"total_tokens": 4096}).total_tokens == 4096
    unknown = import_into(order, loader().state())
    assert (unknown.sample_index, unknown.total_tokens) == (0, 0)
    assert sum("it has no token_offset, which counts as 0" in note for note in unknown.notes) == 4


def changed(*path: Any, **fields: Any) -> dict[str, Any]:
    document = loader().state(by_child=False)
    inner = document
    for key in path:
        inner = inner["child_states"][key]
    inner |= fields
    return document


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        (
            changed(0, input_count=None, output_count=None),
            r"child_states\.0 \(spec .*: input_count: expected .* nothing",
        ),
        (
            changed(1, 1, 0, input_count="9", output_count=-1),
            r"child_states\.1\.child_states\.1\.child_states\.0 \(spec",
        ),
        (
            changed(1, 0, shuffle_seed=0),
            r"child_states\.1\.child_states\.0 .* not the first ones .* shuffle_seed is set",
        ),
        (
            changed(1, 0, split_start_idx=10),
            "split_start_idx is set; write that into the checkpoint's copy, or 0 to",
        ),
        (
            changed(1, child_states=[]),
            r"child_states\.1: found 0 datasets within, but the mixture file has 2 children",
        ),
        (
            changed(0, input_count=10**6),
            "epoch is 38461, but the mixture file reads the source for 1 epochs",
        ),
    ],
)
def test_what_does_not_say_where_to_go_on_is_refused(
    document: dict[str, Any], fault: str, order: PipelineFactory
) -> None:
    with pytest.raises(SnapshotInvalid, match=fault):
        import_into(order, document)


def test_a_shuffled_source_is_refused_and_one_that_was_not_read_is_not(folder: Path) -> None:
    with pytest.raises(
        SnapshotInvalid, match=r"row_offset are a place in file order, but .* shuffle: rows"
    ):
        import_into(order_of(folder, tree(shuffle="rows")), loader().state())
    drawn = changed(1, 0, shuffle_seed=3, input_count=0)
    assert state_of(import_into(order_of(folder, tree()), drawn)).sources[1].rows == 0
