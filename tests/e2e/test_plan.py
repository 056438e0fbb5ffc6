"""`tokenloom plan` and the plan over REST, against what the run then does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import LENGTH, SPECS, Corpus, StartServer
from support.server_process import CommandLine, ServerProcess
from support.trainer import Sample, World
from tokenloom import NotFound, RemoteDataset, TokenBudget


@pytest.fixture(scope="module")
def server(corpus: Corpus, serve: StartServer) -> ServerProcess:
    """One with runs for all tests."""
    endless = {
        "policy": "weighted",
        "children": [{"source": SPECS[0], "epochs": float("inf")}, {"source": SPECS[1]}],
    }
    return serve(
        *(corpus.mixture(run) for run in ("on-its-way", "budget")),
        corpus.mixture("endless", mixture=endless),
        corpus.mixture(
            "longer", phases=[{"until_tokens": 100}, {"sequence_length": 40}], last_micro_step="pad"
        ),
    )


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
    for part in (
        "code",
        "prose",
        "docs",
        "arrow:wiki",
        "runs out at",
        "planned up to 1,008 tokens",
        "shares over",
    ):
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
    corpus: Corpus, sequence: list[Sample], server: ServerProcess, tokenloom: CommandLine
) -> None:
    path = "/v1/runs/on-its-way/plan"
    before = server.get(path)
    assert before == plan(tokenloom, corpus.mixture("on-its-way"))
    with World(server.url("on-its-way"), 1, 4) as world:
        world.steps(len(sequence) // 8)
    after = server.get(path)
    assert 0 < after["from_sample_index"] <= len(sequence) // 2
    assert after["until_sample_index"] == pytest.approx(len(sequence), abs=8)
    # The command asks the server, by the URL of either of its ports.
    assert plan(tokenloom, server.url("on-its-way")) == after
    assert plan(tokenloom, f"{server.rest_url}/on-its-way") == after
    far = server.get(path, tokens=after["from_tokens"] + LENGTH * 20)
    assert far["until_sample_index"] == after["from_sample_index"] + 20
    refused = server.request("GET", path, params={"tokens": "1"})
    assert refused.status_code == 422
    assert "counts from the run's beginning" in refused.json()["message"]
    assert server.request("GET", f"{path}.svg").content.startswith(b"<?xml")


def test_a_trainers_budget_is_made_of_the_plan_from_the_beginning(
    server: ServerProcess, sequence: list[Sample], caplog: pytest.LogCaptureFixture
) -> None:
    dataset = RemoteDataset(server.url("budget"), 4)
    before = TokenBudget.of(dataset)
    assert before.dataset_samples == len(sequence) // 4 * 4
    assert (before.context_length, before.tokens_per_sample) == (LENGTH, LENGTH - 1)
    assert before.target_total_tokens == before.dataset_samples * LENGTH

    with dataset:
        for _ in zip(range(20), dataset, strict=False):
            pass
    # A rank that asks later, or after a resume, has the same target.
    assert TokenBudget.of(RemoteDataset(server.url("budget"), 4)) == before
    assert (
        TokenBudget.of(RemoteDataset(server.url("budget"), 4, accumulate=3)).samples_per_step == 12
    )
    assert dataset.plan(1000)["until_tokens"] == 1008

    with pytest.raises(ValueError, match="this one has no end that is known: give a factor"):
        TokenBudget.of(RemoteDataset(server.url("endless"), 4))
    assert not caplog.records
    longer = TokenBudget.of(RemoteDataset(server.url("longer"), 4))
    assert (longer.context_length, longer.target_total_tokens) == (
        40,
        (longer.dataset_samples or 0) * 40,
    )
    assert "phases have other sequence lengths" in caplog.text
    with pytest.raises(NotFound, match="other"):
        RemoteDataset(server.url("other"), 4).plan()
