"""Where the tokens came from, as the command shows it; `replay/test_traces.py` holds traces against the corpus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from conftest import Corpus, StartServer
from support.server_process import CommandLine
from support.trainer import Sample, World, rolling_digest


def test_the_command_shows_documents_steps_and_text(
    corpus: Corpus, sequence: list[Sample], start_server: StartServer, tokenloom: CommandLine
) -> None:
    run = "shown"
    server = start_server(corpus.mixture(run), corpus.mixture("other"))
    with World(server.url(run), 2, 1) as world:
        world.steps(8)
    server.kill()
    server.start()
    url, documents = f"{server.rest_url}/{run}", ("--documents", "--at")
    for arguments, said in (
        ((url, *documents, 99999), "BeyondHorizon: "),
        ((f"{server.rest_url}/other", *documents, 0), "no trainer has joined"),
        ((server.rest_url, *documents, 0), "serves 2 runs: other, shown; name one: http://"),
        ((url, "--documents"), "give one of --at and --micro-step"),
        ((url, *documents, 0, "--micro-step", 0), "give one of --at and --micro-step"),
        ((url, *documents, 0, "--rank", 0), "--rank goes with --micro-step"),
        ((url, "--micro-step", 0, "--stream", "x"), "--stream goes with --documents"),
        ((url, "--generation", 1), "--generation goes with --documents or --micro-step"),
        ((url, *documents, 0, "--out", "x"), "--out writes samples, not their documents"),
        ((url, *documents, 0, "--generation", 7), "NotFound: "),
    ):
        refused = tokenloom("peek", *arguments)
        assert refused.status == 2
        assert said in refused.output

    def traced(*arguments: object) -> Any:
        return json.loads(tokenloom("peek", url, *arguments, "--json").output)

    told = traced(*documents, 9)
    assert told == server.get(f"/v1/runs/{run}/samples/9")
    assert told["digest"] == rolling_digest(sequence[:10])
    shown = tokenloom("peek", f"{server.rest}/{run}", *documents, 9).output
    assert (
        f"shown: sample 9 (committed) in generation 1, micro-step {told['micro_step']}: place 0 of rank {told['rank']}"
        in shown
    )
    assert all(part in shown for part in (told["hash"], told["digest"], told["spec"]))
    for document in told["documents"]:
        assert f"{document['begin']} to {document['end'] - 1}" in shown
        assert Path(document["shard"]).name in shown
    text = tokenloom("peek", url, *documents, 9, "--text").output
    with_text = traced(*documents, 9, "--text")
    assert tuple(with_text["ids"]) == sequence[9].ids
    assert all(
        document["text"].split()[0] in text
        for document in with_text["documents"]
        if document["text"].strip()
    )
    step = tokenloom("peek", url, "--micro-step", 3).output
    assert "shown: micro-step 3 of generation 1 (2 ranks × 1): samples 6 to 7" in step
    one = traced("--micro-step", 3, "--rank", 1)
    assert [rank["rank"] for rank in one["ranks"]] == [1]
    assert traced("--micro-step", 3)["ranks"][1] == one["ranks"][0]
