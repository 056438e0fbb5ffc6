"""Behind a loss spike: back to a checkpoint, over the bad range, and on; what was skipped is counted apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import LENGTH, SPECS, Corpus, Rpc, StartServer
from support.server_process import CommandLine, ServerProcess
from support.trainer import Sample, World, rolling_digest
from tokenloom import ConnectionOptions, JoinRefused, PeekDataset, RemoteDataset
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.seal import unseal


def assert_counted(
    server: ServerProcess, run: str, corpus: Corpus, sequence: list[Sample], end: int, *skips: tuple[int, int]
) -> None:
    """The figures are a recount of the tensors: of what was consumed, and of what was skipped apart."""
    found = server.get(f"/v1/runs/{run}/stats")
    assert (found["sample_index"], found["total_tokens"]) == (end, end * LENGTH)
    assert found["digest"] == rolling_digest(sequence[:end])
    assert found["skipped_tokens"] == sum(last - first for first, last in skips) * LENGTH
    consumed = end * LENGTH - found["skipped_tokens"]
    for source, spec in zip(found["sources"], SPECS, strict=True):
        skipped_tokens = skipped_rows = 0
        for first, last in skips:
            skipped_tokens += corpus.tokens(sequence[first:last])[spec]
            skipped_rows += corpus.rows(sequence[:last])[spec] - corpus.rows(sequence[:first])[spec]
        assert source["skipped_tokens"] == skipped_tokens == source["skipped_samples"] * LENGTH
        assert source["skipped_rows"] == skipped_rows
        assert source["tokens"] == corpus.tokens(sequence[:end])[spec] - skipped_tokens == source["samples"] * LENGTH
        assert source["rows"] == corpus.rows(sequence[:end])[spec] - skipped_rows
        assert source["actual_share"] == pytest.approx(source["tokens"] / consumed)


def loaded(url: str, state: dict[str, str], batch_size: int = 1) -> RemoteDataset:
    dataset = RemoteDataset(url, batch_size, connection=ConnectionOptions(connect_timeout_s=30.0))
    dataset.load_state_dict(state)
    return dataset


def test_a_bad_range_is_jumped_over_and_counted_apart_through_restarts_and_later_restores(
    corpus: Corpus, sequence: list[Sample], start_server: StartServer, tokenloom: CommandLine, tmp_path: Path
) -> None:
    run = "spike"
    server = start_server(corpus.mixture(run, window_micro_steps=3))
    with World(server.url(run), 2, 2) as world:
        states = [world.steps(1).state() for _ in range(10)]
    checkpoint, later = states[4], states[9]
    assert_counted(server, run, corpus, sequence, 40)

    pinned = tokenloom("restore", server.rest_url, "--run", run, "--sample", 20, "--skip-samples", 7)
    assert pinned.status == 0, pinned.output
    assert f"resumes from sample 20 (digest {rolling_digest(sequence[:20])})" in pinned.output
    assert "samples 20 to 26 are skipped: it begins at sample 27" in pinned.output
    assert_counted(server, run, corpus, sequence, 40)  # nothing moves until somebody joins
    server.kill()
    server.start()
    with pytest.raises(JoinRefused, match=r"a restore pinned sample 20 .* resumes from sample 40"):
        next(iter(loaded(server.url(run), later)))
    # The trainer's own checkpoint, from before the skip, on every rank.
    with World(server.url(run), 2, 2, state=checkpoint) as world:
        world.join()
        assert {rank.start_index for rank in world.ranks} == {27}
        assert world.ranks[0].total_tokens == 27 * LENGTH
        assert world.digest == rolling_digest(sequence[:27])
        begun = world.state()
        assert unseal(begun["tokenloom"])["sample_index"] == 27, "before the first batch the skip is in the state, too"
        batches = world.step()
        assert batches is not None
        assert {int(batch["total_tokens"]) for batch in batches} == {31 * LENGTH}
        world.steps(3)
        behind = world.state()
        assert world.receipt.sequence(27) == sequence[27:43]
        assert world.digest == rolling_digest(sequence[:43])
    assert_counted(server, run, corpus, sequence, 43, (20, 27))
    skipped = {entry["spec"]: entry.get("skipped_samples", 0) for entry in resume_state(behind)["datasets"]}
    assert skipped == {spec: tokens // LENGTH for spec, tokens in corpus.tokens(sequence[20:27]).items()}
    server.kill()
    server.start()
    assert_counted(server, run, corpus, sequence, 43, (20, 27))
    shown = tokenloom("stats", server.rest_url, "--run", run).output
    assert "skipped by restores, and not counted above: " in shown

    # The same launch's server was away; the next launches go on with other ranks, from each of its states.
    for state, at in ((behind, 43), (begun, 27)):
        with World(server.url(run), 3, 1, state=state) as world:
            world.steps(4)
            assert world.receipt.sequence(at) == sequence[at : at + 12]
            ahead = world.state()
        assert_counted(server, run, corpus, sequence, at + 12, (20, 27))

    # A second bad range, by its tokens, from a file.
    file = tmp_path / "state.json"
    file.write_text(json.dumps(ahead), encoding="utf-8")
    pinned = tokenloom("restore", server.rest_url, "--run", run, "--state", file, "--skip-tokens", 2 * LENGTH + 1)
    assert "samples 39 to 41 are skipped: it begins at sample 42" in pinned.output
    with World(server.url(run), 1, 2) as world:  # it brings none and takes the pin
        world.steps(2)
        assert world.receipt.sequence(42) == sequence[42:46]
    assert_counted(server, run, corpus, sequence, 46, (20, 27), (39, 42))

    # Back behind the first skip and before the second, into the first, and before it: as if there had been none.
    for at, skips in ((33, [(20, 27)]), (23, []), (10, [])):
        answer = server.request("POST", f"/v1/runs/{run}/restore", json={"sample_index": at})
        assert answer.json() == {
            "sample_index": at, "digest": rolling_digest(sequence[:at]), "skipped_samples": 0, "start_index": at
        }  # fmt: skip
        with World(server.url(run), 2, 3) as world:
            world.steps(6)
            assert world.receipt.sequence(at) == sequence[at : at + 36]
        assert_counted(server, run, corpus, sequence, at + 36, *skips)


def resume_state(state: dict[str, str]) -> Any:
    return unseal(state["tokenloom"])["resume_state"]


def test_skipped_samples_are_traced_as_such_and_can_still_be_looked_at(
    corpus: Corpus, sequence: list[Sample], start_server: StartServer
) -> None:
    run = "seen"
    server = start_server(corpus.mixture(run))
    with World(server.url(run), 2, 1) as world:
        world.steps(20)
    pinned = server.request("POST", f"/v1/runs/{run}/restore", json={"sample_index": 12, "skip_samples": 5})
    assert pinned.json()["start_index"] == 17
    with World(server.url(run), 1, 4) as world:
        world.steps(3)

    for index in (11, 12, 16, 17, 28):
        found = server.get(f"/v1/runs/{run}/samples/{index}", text=True)
        assert tuple(found["ids"]) == sequence[index].ids
        assert found["digest"] == rolling_digest(sequence[: index + 1])
        where = (found["generation"], found["status"], found["micro_step"])
        expected = {11: (1, "committed", 5), 12: (1, "skipped", 6), 16: (1, "skipped", 8), 17: (2, "committed", 0)}
        assert where == expected.get(index, (2, "committed", 2))
    assert server.get(f"/v1/runs/{run}/samples/30", generation=1)["status"] == "rewound"
    with PeekDataset(server.url(run), 1, at="13") as dataset:
        assert tuple(next(iter(dataset))["input_ids"][0].tolist()) == sequence[13].ids


def test_what_cannot_be_skipped_is_refused_before_anything_is_pinned(
    corpus: Corpus, sequence: list[Sample], start_server: StartServer, rpc: Any, tokenloom: CommandLine, tmp_path: Path
) -> None:
    run = "refused"
    server = start_server(corpus.mixture(run))
    with World(server.url(run)) as world:
        world.steps(6)
    for arguments, said in (
        (("--sample", 4, "--skip-samples", 1, "--skip-tokens", 1), "give at most one of"),
        (("--skip-samples", 1), "give one of --snapshot, --sample and --state"),
        (("--sample", 4, "--snapshot", "x"), "give one of --snapshot, --sample and --state"),
        (("--state", tmp_path / "nothing.json"), "nothing.json: cannot be read"),
        (("--sample", 10**6), "BeyondHorizon: "),
        (("--sample", 4, "--skip-samples", len(sequence)), f"the data end at sample {len(sequence)}"),
    ):
        refused_command = tokenloom("restore", server.rest_url, *arguments)
        assert refused_command.status == 2
        assert said in refused_command.output
    # Nothing of this is pinned; and over gRPC a skip travels as well.
    calls: Rpc = rpc(server)
    request = wire.RestoreRequest(run=run, sample_index=2, skip_tokens=LENGTH + 1)
    answer = calls.stub.Restore(request, timeout=30)
    assert (answer.sample_index, answer.skipped_samples, answer.start_index) == (2, 2, 4)
    assert answer.digest == rolling_digest(sequence[:2])
    with World(server.url(run)) as world:
        assert world.steps(3).receipt.sequence(4) == sequence[4:7]
    assert_counted(server, run, corpus, sequence, 7, (2, 4))
