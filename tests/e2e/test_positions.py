"""Where a run's sources stand, as its stats and its log say it: while it runs, after a restart, and at its end."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import StartServer
from support.corpora import CODE, DOCS, PROSE, ROWS, WIKI, mixture, write_corpus
from support.trainer import World
from support.waiting import wait_for

#: Read in each of the ways in which rows come.
CHILDREN = [
    {"source": CODE, "alias": "code", "shuffle": "rows", "epochs": 2},
    {"source": DOCS, "alias": "docs", "lanes": 2, "epochs": 3},
    {"source": PROSE, "alias": "prose", "shuffle": "shards"},
    {"source": WIKI, "alias": "wiki"},
]


#: Samples of the whole run.
END = 262


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_corpus(tmp_path_factory.mktemp("corpus")) / "mixture.yaml"
    path.write_text(yaml.safe_dump(mixture(run="s", mixture={"policy": "least_consumed", "children": CHILDREN})))
    return path


def test_epochs_are_right_after_a_restart_and_exhausted_at_the_end(file: Path, start_server: StartServer) -> None:
    server = start_server(file, flags=("--liveness", 1))

    def stats(index: int) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def committed() -> bool:
            found.update(server.get("/v1/runs/s/stats"))
            return found["sample_index"] == index and (index < END or found["exhausted"])

        wait_for(committed, f"sample {index}")
        return found

    with World(server.url("s")) as world:
        before = stats(world.steps(30).sample_index)
        for source in before["sources"]:
            assert source["epoch"] == pytest.approx(source["rows"] / sum(map(len, ROWS[source["spec"]])))
        assert not before["exhausted"]
        server.kill()
        server.start()
        after = stats(30)
        for field in ("epoch", "rows", "remaining_samples", "exhausted"):
            values = [[source[field] for source in each["sources"]] for each in (before, after)]
            assert values[0] == values[1], field
        end = stats(world.run().sample_index)
        assert end["sample_index"] == END
    server.kill()
    server.start()
    for last in (end, stats(end["sample_index"])):
        assert last["exhausted"] and all(source["exhausted"] for source in last["sources"])
        assert [source["epoch"] for source in last["sources"]] == [2, 3, 1, 1]


def test_a_server_logs_where_the_sources_stand(file: Path, start_server: StartServer) -> None:
    server = start_server(file, flags=("--log-positions", 0.5))
    with World(server.url("s")) as world:
        world.steps(30)
        wait_for(lambda: server.log.count(f"position: spec={WIKI}") > 2, "a third line of a source")
    lines = [line.rpartition("s: position: ")[2] for line in server.log.splitlines() if ": position: " in line]
    forms = [r"window=0 offset=\d+", r"shard=data/docs\.jsonl offset=\d+", r"shard=data/prose/\d\.txt offset=\d+"]
    for spec, form in zip((CODE, DOCS, PROSE, WIKI), [*forms, r"shard=.*arrow offset=\d+"], strict=True):
        wanted = re.compile(rf"spec={re.escape(spec)} sample_row=\d+ {form} tokens=\d+")
        assert any(wanted.fullmatch(line) for line in lines), lines
