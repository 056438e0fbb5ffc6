"""`tokenloom plan` and the plan over REST, against what the run then does."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from conftest import LENGTH, Corpus, StartServer
from support.server_process import CommandLine
from support.trainer import Sample, World


def plan(tokenloom: CommandLine, *arguments: str | Path) -> dict[str, object]:
    done = tokenloom("plan", *arguments, "--json")
    assert done.status == 0, done.output
    document = json.loads(done.output[done.output.index("{") : done.output.rindex("}") + 1])
    assert isinstance(document, dict)
    return document


def test_the_command_foretells_the_whole_run(
    corpus: Corpus, tokenloom: CommandLine, sequence: list[Sample], tmp_path: Path
) -> None:
    mixture = corpus.mixture("planned")
    document = plan(tokenloom, mixture)
    assert document["ends"] is True
    assert document["until_sample_index"] == pytest.approx(len(sequence), abs=8)
    sources = document["sources"]
    assert isinstance(sources, list)
    for i, source in enumerate(sources):
        # Sources this small are read whole.
        samples = len(corpus.streams[i]) // LENGTH
        assert source["tokens"] == pytest.approx(samples * LENGTH, abs=2 * LENGTH)
    assert not (corpus.folder / "tokenloom.db").exists(), "it left a ledger"
    picture = tmp_path / "shares.png"
    done = tokenloom("plan", mixture, "--tokens", "1K", "--picture", picture)
    assert done.status == 0, done.output
    for part in ("code", "prose", "docs", "arrow:wiki", "runs out at", "planned up to 1,000 tokens", "shares over"):
        assert part in done.output, part
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_planned_is_refused_with_the_remedy(
    corpus: Corpus, tokenloom: CommandLine, tmp_path: Path
) -> None:
    mixture = corpus.mixture("refused")
    for arguments, part in (
        (("--tokens", "10Q"), "--tokens: '10Q' is no number of tokens"),
        (("--picture", "shares.jpg"), "ends with .svg or .png"),
        (("--picture", str(tmp_path / "no" / "such.svg")), "cannot be written"),
    ):
        done = tokenloom("plan", mixture, *arguments)
        assert done.status == 2
        assert part in " ".join(done.output.split())
        assert "Traceback" not in done.output


def test_a_served_run_is_planned_from_where_it_is_committed(
    corpus: Corpus, sequence: list[Sample], start_server: StartServer, tokenloom: CommandLine
) -> None:
    mixture = corpus.mixture("on-its-way")
    server = start_server(mixture)
    with httpx.Client(base_url=server.rest_url, trust_env=False, timeout=30) as rest:
        before = rest.get("/v1/runs/on-its-way/plan").json()
        assert before == plan(tokenloom, mixture)
        with World(server.url("on-its-way"), 1, 4) as world:
            world.steps(len(sequence) // 8)
        after = rest.get("/v1/runs/on-its-way/plan").json()
        assert 0 < after["from_sample_index"] <= len(sequence) // 2
        assert after["until_sample_index"] == pytest.approx(len(sequence), abs=8)
        far = rest.get("/v1/runs/on-its-way/plan", params={"tokens": str(after["from_tokens"] + LENGTH * 20)}).json()
        assert far["until_sample_index"] == after["from_sample_index"] + 20
        refused = rest.get("/v1/runs/on-its-way/plan", params={"tokens": "1"})
        assert refused.status_code == 422
        assert "counts from the run's beginning" in refused.json()["message"]
        assert rest.get("/v1/runs/on-its-way/plan.svg").content.startswith(b"<?xml")
