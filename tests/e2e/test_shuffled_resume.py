"""Shuffled sources and lanes behind a real server: killed, resumed on other ranks, and from the checkpoint alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from conftest import SPECS, Corpus, StartServer
from support.trainer import World

RUN = "shuffled"


def mixture(corpus: Corpus) -> Path:
    children: list[dict[str, Any]] = [
        {"source": SPECS[0], "shuffle": "rows", "shuffle_window_rows": 20, "epochs": 2},
        {"source": SPECS[1], "shuffle": "rows", "epochs": 2},
        {"source": SPECS[2], "shuffle": "shards"},
        {"source": SPECS[3], "shuffle": "rows", "lanes": 3},
    ]
    return corpus.mixture(RUN, mixture={"policy": "least_consumed", "children": children})


def test_a_shuffled_run_goes_on_exactly_behind_a_kill_on_other_ranks_and_on_an_empty_ledger(
    corpus: Corpus, start_server: StartServer
) -> None:
    server = start_server(mixture(corpus))
    with World(server.url(RUN)) as world:
        whole = world.steps(200).receipt.sequence()
    with World(server.url(RUN), world_size=2, resume="fresh") as world:
        assert world.steps(70).receipt.sequence() == whole[:140]
        state = world.state()
    datasets = json.loads(state["tokenloom"])["resume_state"]["datasets"]
    assert [entry.get("shuffle") for entry in datasets] == ["rows", "rows", "shards", "rows"]
    assert len(datasets[3]["lanes"]) == 3

    server.kill()
    server.start()
    with World(server.url(RUN), state=state) as world:
        assert world.steps(40).receipt.sequence(140) == whole[140:180]
    # Another machine: the same files and mixture, and nothing in its ledger.
    other = start_server(mixture(corpus))
    with World(other.url(RUN), world_size=3, state=state) as world:
        assert world.steps(20).receipt.sequence(140) == whole[140:200]
