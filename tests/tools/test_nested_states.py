"""States of nested interleaved datasets: every shape of them is read from every kind of file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.corpora import CODE, DOCS, PROSE, ROWS, WIKI, mixture, order_of, parsed, write_corpus
from support.imports import import_into, state_of
from support.nested_states import OldInterleaved, Shape, in_process, in_workers, three_levels
from tokenloom_server.errors import SnapshotInvalid
from tokenloom_tools.checkpoint.content import NESTED, Content, read
from tokenloom_tools.checkpoint.faults import faults
from tokenloom_tools.checkpoint.file import find
from tokenloom_tools.checkpoint.probabilities import chances, missing
from tokenloom_tools.cli.app import app
from typer.testing import CliRunner


def tree(policy: str = "soft_sequential") -> dict[str, Any]:
    """A mixture file over the corpus with the tree of ``three_levels``."""
    inner = {"policy": policy, "alias": "inner", "children": [{"source": PROSE}, {"source": WIKI}]}
    rest = {"policy": policy, "alias": "rest", "children": [{"source": DOCS}, inner]}
    return mixture(
        mixture={"policy": policy, "children": [{"source": CODE, "alias": "code"}, rest]}
    )


def content_of(document: Any, folder: Path, policy: str | None = "soft_sequential") -> Content:
    path = folder / "state.json"
    path.write_text(json.dumps(document))
    return read(path, find(path), parsed(tree(policy)) if policy else None)


SHAPES: list[tuple[Shape, bool]] = [
    ("counts", True),
    ("counts", False),
    ("output alone", False),
    ("nothing", True),
]


@pytest.mark.parametrize(("shape", "by_child"), SHAPES)
@pytest.mark.parametrize(
    "wrapped", [dict, in_process, in_workers, lambda state: {"trainer": [0, {"data": state}]}]
)
def test_the_counts_of_every_level_are_those_that_its_loader_had(
    shape: Shape,
    by_child: bool,
    wrapped: Callable[[dict[str, Any]], dict[str, Any]],
    tmp_path: Path,
) -> None:
    loader = three_levels(30)
    content = content_of(wrapped(loader.state(shape, by_child=by_child)), tmp_path)

    assert (content.kind, content.sample_index) == (NESTED, 30)
    assert [source.spec for source in content.sources] == [CODE, DOCS, PROSE, WIKI]
    leaves = loader.leaves()
    assert [source.samples for source in content.sources] == [leaf.examples for leaf in leaves]
    rows = [leaf.rows if shape == "counts" else leaf.examples for leaf in leaves]
    assert [source.rows for source in content.sources] == rows
    (_, rest), (_, inner) = loader.children, loader.children[1].children  # type: ignore[union-attr]
    levels = [loader, rest, inner]
    assert [[child.samples for child in node.children] for node in content.nodes] == [
        [child.examples for child in level.children]
        for level in levels
        if isinstance(level, OldInterleaved)
    ]
    assert [node.name for node in content.nodes] == ["the root", "rest", "inner"]
    said = [
        "examples_per_dataset: missing: its loader would count from 0 again; here it follows from "
    ]
    assert [line.removesuffix("child_states") for line in faults(content)] == (
        [] if by_child else said
    )


def soft(remaining: list[tuple[int, int]]) -> list[float]:
    """The rule of ``soft_sequential`` in plain numbers: (rest, total) of each child."""
    left, shares = 1.0, []
    for rest, total in remaining:
        shares.append(left * rest / total)
        left *= 1 - rest / total
    return [share / sum(shares) for share in shares]


@pytest.mark.parametrize("by_child", [True, False])
def test_probabilities_are_those_of_the_counts_and_of_none(by_child: bool, tmp_path: Path) -> None:
    loader = three_levels(30)
    content = content_of(loader.state(by_child=by_child), tmp_path)
    for node, level in zip(
        content.nodes,
        [loader, loader.children[1], loader.children[1].children[1]],  # type: ignore[union-attr]
        strict=True,
    ):
        assert isinstance(level, OldInterleaved)
        found = chances(content, node)
        kept = soft([(child.total - child.examples, child.total) for child in level.children])
        lost = soft([(child.total, child.total) for child in level.children])
        assert [chance.with_counters for chance in found] == pytest.approx(kept)
        assert [chance.without_counters for chance in found] == pytest.approx(lost)
        assert missing(content, node) == []


def test_without_a_mixture_the_tree_is_shown_and_what_is_missing_is_named(tmp_path: Path) -> None:
    content = content_of(three_levels(30).state(), tmp_path, None)
    root, rest, inner = content.nodes
    assert [child.name for child in root.children] == ["child_states.0", "child_states.1"]
    assert [child.name for child in inner.children] == [
        "child_states.1.child_states.1.child_states.0",
        "child_states.1.child_states.1.child_states.1",
    ]
    # Fixed probabilities are weights; of a rule in code the state says nothing.
    assert [chance.with_counters for chance in chances(content, rest)] == pytest.approx(
        [0.25, 0.75]
    )
    assert missing(content, root) == ["policy: found None; --mixture FILE says it"]
    assert faults(content)[0].startswith("policies and specs: missing")


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_nothing_computed_ends_with_status_1_and_says_what_to_give(tmp_path: Path) -> None:
    state = three_levels(30).state("nothing")
    del state["child_states"][1]["probabilities"]
    (tmp_path / "state.json").write_text(json.dumps(state))
    status, printed = run("checkpoint", "--probabilities", tmp_path / "state.json")
    assert status == 1
    assert printed.count(": policy: found None; --mixture FILE says it") == 3
    (tmp_path / "index.json").write_text('{"sample_index": 9}')
    status, printed = run("checkpoint", "--probabilities", tmp_path / "index.json")
    assert (status, printed) == (1, "missing: the mixture; --mixture FILE says it\n")


def test_what_the_state_lacks_is_measured_from_the_data(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path)
    (folder / "mixture.yaml").write_text(yaml.safe_dump(tree()))
    loader = three_levels(30)
    (folder / "state.json").write_text(json.dumps(loader.state("nothing")))
    command = (
        "checkpoint",
        "--probabilities",
        folder / "state.json",
        "--mixture",
        folder / "mixture.yaml",
    )
    status, printed = run(*command, "--json")
    assert status == 0
    nodes = json.loads(printed)
    state = state_of(import_into(order_of(folder, tree()), loader.state("nothing")))
    for node, children in zip(nodes, state.nodes, strict=True):
        assert [child["samples"] for child in node["children"]] == [
            child.samples for child in children
        ]
        kept = soft(
            [(child["total"] - child["samples"], child["total"]) for child in node["children"]]
        )
        assert [child["with_counters"] for child in node["children"]] == pytest.approx(kept)

    # Where the data are not there, what they would have said is named, and nothing is computed.
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/mixture.yaml").write_text(yaml.safe_dump(tree()))
    status, printed = run(*command[:-1], tmp_path / "elsewhere/mixture.yaml")
    assert status == 1
    assert "its data are not measured" in printed
    assert (
        f"missing: the root: code: samples: found {loader.children[0].examples} of None in all; examples_per_dataset"
        in printed
    )


@pytest.mark.parametrize("said", [{"token_offset": 400}, {}])
def test_an_older_payload_under_a_policy_that_estimates_is_computed_from_the_data(
    said: dict[str, int], tmp_path: Path
) -> None:
    folder = write_corpus(tmp_path)
    (folder / "mixture.yaml").write_text(yaml.safe_dump(tree()))
    spec = CODE.replace("data", f"{folder}/data", 1)
    datasets = [{"spec": spec, "shard": "data/code-1.parquet", "row_offset": 3, **said}]
    (folder / "state.json").write_text(json.dumps({"dataset": {"datasets": datasets}}))
    command = (
        "checkpoint",
        "--probabilities",
        folder / "state.json",
        "--mixture",
        folder / "mixture.yaml",
        "--json",
    )
    status, printed = run(*command)
    assert status == 0
    code, rest = json.loads(printed)[0]["children"]
    rows = [*ROWS[CODE][0], *ROWS[CODE][1]]
    read, rest_tokens = (
        sum(len(row or ()) + bool(row) for row in part) for part in (rows[:17], rows[17:])
    )
    assert code["samples"] == (50 if said else pytest.approx(read // 8, abs=3))
    assert code["total"] - code["samples"] == pytest.approx(rest_tokens // 8, abs=3)
    assert code["with_counters"] == pytest.approx(1 - code["samples"] / code["total"], abs=0.01)
    assert rest["without_counters"] == pytest.approx(0)
    status, printed = run("checkpoint", *command[2:])
    assert [child["samples"] for child in json.loads(printed)["nodes"][0]["children"]] == [
        50 if said else 0,
        0,
    ]


def test_a_mixture_of_another_shape_is_refused_by_place(tmp_path: Path) -> None:
    state = three_levels(30).state()
    state["child_states"].append(None)
    with pytest.raises(
        SnapshotInvalid,
        match=r"^the state: found 3 datasets within, but the mixture file has 2 chil",
    ):
        content_of(state, tmp_path)
    state = three_levels(30).state()
    state["child_states"][0] = state["child_states"][1]
    with pytest.raises(
        SnapshotInvalid,
        match=r"^child_states\.0: found 2 datasets within, but the mixture file has 0",
    ):
        content_of(state, tmp_path)
    for _ in range(40):
        state = {"child_states": [state], "datasets_exhausted": [False]}
    with pytest.raises(SnapshotInvalid, match=r"found \d datasets within"):
        content_of(state, tmp_path, None)


def test_what_does_not_add_up_is_suspicious(tmp_path: Path) -> None:
    state = three_levels(30).state()
    state["current_example_count"], state["child_states"][0] = 12, {"output_count": "many"}
    state["examples_per_dataset"][0] = -3
    assert faults(content_of(state, tmp_path))[:2] == [
        "the root: nothing counts what code gave",
        "current_example_count: found 12, but its datasets gave "
        + str(state["examples_per_dataset"][1]),
    ]


@pytest.mark.parametrize(
    "state",
    [
        {"current_example_count": 5, "current_dataset_index": 0},
        {"child_states": [], "datasets_exhausted": {}},
    ],
)
def test_a_state_without_datasets_is_shown_with_what_is_missing(
    state: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "state.json").write_text(json.dumps(state))
    status, printed = run("checkpoint", tmp_path / "state.json")
    assert (status, "child_states: found no list" in printed) == (0, True)


def test_an_older_payload_is_not_suspicious_for_what_it_may_lack(tmp_path: Path) -> None:
    resume = {
        "datasets": [{"spec": CODE, "row_offset": 3, "token_offset": 80}],
        "total_tokens": 5000,
    }
    content = content_of({"resume_state": resume}, tmp_path, None)
    assert content.total_tokens == 5000
    assert [line for line in faults(content) if "datasets" in line] == []


# --- Folders -----------------------------------------------------------------------------------------------------


def save_folder(folder: Path, **states: Any) -> Path:
    """A checkpoint's folder with the files of a trainer beside the states of the data."""
    folder.mkdir()
    torch.save({"w": torch.zeros(4)}, folder / "pytorch_model.bin")
    torch.save({"cpu": torch.get_rng_state()}, folder / "rng_state.pth")
    (folder / "training_args.bin").write_bytes(b"\x80\x02garbage")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 9, "sample_index": 4}))
    for name, state in states.items():
        torch.save(state, folder / f"{name}.pt")
    return folder


def test_a_folder_is_read_wherever_a_file_is(tmp_path: Path) -> None:
    folder = save_folder(
        tmp_path / "checkpoint-9", dataset_state=in_process(three_levels(30).state())
    )
    assert find(folder).where == "dataset_state.pt:dataset_state"
    torch.save(
        three_levels(30).state(),
        save_folder(tmp_path / "of-accelerate") / "custom_checkpoint_0.pkl",
    )
    assert find(tmp_path / "of-accelerate").where == "custom_checkpoint_0.pkl"
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(tree()))
    status, printed = run("checkpoint", folder, "--mixture", tmp_path / "mixture.yaml")
    assert status == 0
    assert "sample 30" in printed
    assert "nothing is missing, and all counters add up" in printed
    assert run("checkpoint", folder, folder)[0] == 0
    status, printed = run("verify", folder, folder)
    assert (status, "of another data loader, without a digest" in printed) == (2, True)


def test_the_states_of_several_ranks_are_named(tmp_path: Path) -> None:
    ranks = {f"dataset_state_rank_{rank}": three_levels(30 + rank).state() for rank in (0, 1)}
    folder = save_folder(tmp_path / "checkpoint-9", **ranks)
    with pytest.raises(
        SnapshotInvalid,
        match=r"at 'dataset_state_rank_0\.pt'.*'dataset_state_rank_1\.pt'.*--inside",
    ):
        find(folder)
    assert find(folder, "dataset_state_rank_1.pt").document["current_example_count"] == 31
    status, _ = run("verify", folder, folder, "--inside", "dataset_state_rank_1.pt")
    assert status == 2
    workers = save_folder(tmp_path / "checkpoint-10", loader=in_workers(*ranks.values()))
    with pytest.raises(SnapshotInvalid, match=r"worker_0\.dataset_state.*worker_1\.dataset_state"):
        find(workers)


def test_a_folder_without_a_state_says_what_was_looked_into(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "checkpoint-9")
    assert find(folder).document == {"sample_index": 4}  # of all files nothing else
    (folder / "trainer_state.json").unlink()
    with pytest.raises(
        SnapshotInvalid,
        match=r"nor has it a file \(\.json, .*training_args\.bin: torch does not load",
    ):
        find(folder)
