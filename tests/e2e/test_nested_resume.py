"""A job that trained on nested interleaved datasets goes on here: by a loaded state, a restore, a fork, or alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import StartServer
from support.corpora import CODE, DOCS, PROSE, ROWS, WIKI, mixture, write_corpus
from support.nested_states import in_workers, three_levels
from support.server_process import CommandLine
from support.trainer import Sample, World
from tokenloom import LaunchOptions, LocalDataset, RemoteDataset

SPECS = [CODE, DOCS, PROSE, WIKI]
LENGTHS = [sum(map(len, ROWS[spec])) for spec in SPECS]
END = 256


def document(run: str) -> dict[str, Any]:
    code, docs, prose, wiki = ({"source": spec} for spec in SPECS)
    inner = {"policy": "weighted", "alias": "inner", "children": [prose, wiki]}
    rest = {"policy": "round_robin", "alias": "rest", "children": [docs, inner]}
    return mixture(run=run, mixture={"policy": "least_consumed", "children": [code, rest]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = write_corpus(tmp_path_factory.mktemp("corpus"))
    for run in ("nested", "branch"):
        (found / f"{run}.yaml").write_text(yaml.safe_dump(document(run)))
    return found


@pytest.fixture
def state() -> dict[str, Any]:
    return three_levels(18, LENGTHS).state(by_child=False)


def tokens_after(rows: int, source: int) -> list[int]:
    """The tokens of a source from a row on."""
    texts = [row for shard in ROWS[SPECS[source]] for row in shard][rows:]
    documents = [list(row.encode()) if isinstance(row, str) else row for row in texts if row]
    return [token for row in documents for token in [*row, END]]


def check(samples: list[Sample]) -> None:
    """Each source gives whole samples of what follows the rows that the old loader read."""
    for source, leaf in enumerate(three_levels(18, LENGTHS).leaves()):
        expected = tokens_after(leaf.rows, source)
        given = [token for sample in samples if sample.source == source for token in sample.ids]
        assert given == expected[: len(expected) // 8 * 8]


def test_every_way_to_begin_there_gives_the_same_data(
    folder: Path, state: dict[str, Any], start_server: StartServer, tokenloom: CommandLine
) -> None:
    server = start_server(folder / "nested.yaml", folder / "branch.yaml", flags=("--liveness", 1))
    with World(server.url("nested"), state=state) as world:
        loaded = world.run().receipt.sequence()
        digest = world.digest
    check(loaded)
    assert f"resume: spec={CODE} sample_row=" in server.log

    checkpoint = folder / "checkpoint-18"
    checkpoint.mkdir()
    torch.save(in_workers(state), checkpoint / "dataset_state.pt")
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": 18}))
    pinned = tokenloom("restore", f"{server.rest_url}/nested", "--state", checkpoint)
    assert pinned.status == 0, pinned.output
    with World(server.url("nested"), 2, takeover=True) as world:
        # The last micro-step may be incomplete, and is dropped then.
        assert world.run().receipt.sequence() == loaded[: len(loaded) // 2 * 2]
    assert tokenloom("verify", checkpoint, f"{server.rest_url}/nested").status == 2

    forked = tokenloom("fork", f"{server.rest_url}/branch", "--state", checkpoint)
    assert forked.status == 0, forked.output
    with World(server.url("branch")) as world:
        assert world.run().receipt.sequence() == loaded
        assert world.digest == digest


def test_a_fork_and_a_dataset_without_a_server_begin_there_and_another_shape_is_refused(
    folder: Path, state: dict[str, Any], start_server: StartServer
) -> None:
    server = start_server(folder / "branch.yaml", folder / "nested.yaml")
    with RemoteDataset(
        server.url("branch"), 1, launch=LaunchOptions(fork_from=state), rank=0, world_size=1
    ) as dataset:
        remote = [batch["input_ids"].tolist() for batch in dataset]
    with LocalDataset(folder / "nested.yaml", 1) as local:
        local.load_state_dict(state)
        assert [batch["input_ids"].tolist() for batch in local] == remote
    state["child_states"].append(None)
    with RemoteDataset(server.url("nested"), 1, rank=0, world_size=1) as dataset:
        dataset.load_state_dict(state)
        with pytest.raises(
            Exception, match="found 3 datasets within, but the mixture file has 2 children there"
        ):
            next(iter(dataset))
