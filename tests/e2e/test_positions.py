"""Where a run's sources stand, as its log says it; `run/test_coordinator.py` holds what is said."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from conftest import StartServer
from support.corpora import CODE, DOCS, PROSE, WIKI, mixture, write_corpus
from support.trainer import World
from support.waiting import wait_for

#: Read in each of the ways in which rows come.
CHILDREN = [
    {"source": CODE, "alias": "code", "shuffle": "rows", "epochs": 2},
    {"source": DOCS, "alias": "docs", "lanes": 2, "epochs": 3},
    {"source": PROSE, "alias": "prose", "shuffle": "shards"},
    {"source": WIKI, "alias": "wiki"},
]


def test_a_server_logs_where_the_sources_stand(tmp_path: Path, start_server: StartServer) -> None:
    file = write_corpus(tmp_path) / "mixture.yaml"
    file.write_text(
        yaml.safe_dump(mixture(run="s", mixture={"policy": "least_consumed", "children": CHILDREN}))
    )
    server = start_server(file, environment={"TOKENLOOM_SERVE_LOG_POSITIONS": "0.5"})
    with World(server.url("s")) as world:
        world.steps(30)
        wait_for(lambda: server.log.count(f"position: spec={WIKI}") > 2, "a third line of a source")
    lines = [
        line.rpartition("s: position: ")[2]
        for line in server.log.splitlines()
        if ": position: " in line
    ]
    forms = [
        r"window=0 offset=\d+",
        r"shard=data/docs\.jsonl offset=\d+",
        r"shard=data/prose/\d\.txt offset=\d+",
    ]
    for spec, form in zip(
        (CODE, DOCS, PROSE, WIKI), [*forms, r"shard=.*arrow offset=\d+"], strict=True
    ):
        wanted = re.compile(rf"spec={re.escape(spec)} sample_row=\d+ {form} tokens=\d+")
        assert any(wanted.fullmatch(line) for line in lines), lines
