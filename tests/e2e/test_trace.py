"""Where the tokens came from, as the command shows it; `replay/test_traces.py` holds traces against the corpus."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conftest import Corpus, StartServer
from support.server_process import CommandLine
from support.trainer import Sample, World, rolling_digest


def test_what_cannot_be_traced_is_refused_with_the_limits(
    corpus: Corpus, start_server: StartServer, tokenloom: CommandLine
) -> None:
    server = start_server(corpus.mixture("one"), corpus.mixture("two"))
    with World(server.url("one")) as world:
        world.steps(5)
    for arguments, said in (
        (("--sample", 99999, "--run", "one"), "BeyondHorizon: "),
        (("--sample", 0, "--run", "two"), "no trainer has joined"),
        (("--sample", 0), "serves 2 runs: one, two; name one by --run"),
        (("--run", "one"), "give one of --sample and --micro-step"),
        (("--sample", 0, "--micro-step", 0, "--run", "one"), "give one of --sample and --micro-step"),
        (("--sample", 0, "--rank", 0, "--run", "one"), "--rank goes with --micro-step"),
        (("--sample", 0, "--generation", 7, "--run", "one"), "NotFound: "),
    ):
        refused = tokenloom("trace", server.rest_url, *arguments)
        assert refused.status == 2
        assert said in refused.output


def test_the_command_shows_documents_steps_and_text(
    corpus: Corpus, sequence: list[Sample], start_server: StartServer, tokenloom: CommandLine
) -> None:
    run = "shown"
    server = start_server(corpus.mixture(run))
    with World(server.url(run), 2, 1) as world:
        world.steps(8)
    server.kill()
    server.start()
    told = json.loads(tokenloom("trace", server.rest_url, "--sample", 9, "--json").output)
    assert told == server.get(f"/v1/runs/{run}/samples/9")
    assert told["digest"] == rolling_digest(sequence[:10])
    shown = tokenloom("trace", server.rest, "--sample", 9).output
    assert (
        f"shown: sample 9 (committed) in generation 1, micro-step {told['micro_step']}: place 0 of rank {told['rank']}"
        in shown
    )
    assert all(part in shown for part in (told["hash"], told["digest"], told["spec"]))
    for document in told["documents"]:
        assert f"{document['begin']} to {document['end'] - 1}" in shown
        assert Path(document["shard"]).name in shown
    text = tokenloom("trace", server.rest_url, "--sample", 9, "--text", "--run", run).output
    with_text = json.loads(tokenloom("trace", server.rest_url, "--sample", 9, "--text", "--json").output)
    assert tuple(with_text["ids"]) == sequence[9].ids
    assert all(document["text"].split()[0] in text for document in with_text["documents"] if document["text"].strip())
    step = tokenloom("trace", server.rest_url, "--micro-step", 3).output
    assert "shown: micro-step 3 of generation 1 (2 ranks × 1): samples 6 to 7" in step
    one = json.loads(tokenloom("trace", server.rest_url, "--micro-step", 3, "--rank", 1, "--json").output)
    assert [rank["rank"] for rank in one["ranks"]] == [1]
    both: Sequence[Any] = json.loads(tokenloom("trace", server.rest_url, "--micro-step", 3, "--json").output)["ranks"]
    assert both[1] == one["ranks"][0]
