"""Behind a loss spike: back to a checkpoint, over the bad range, and on; what was skipped is counted apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Corpus, StartServer
from support.server_process import CommandLine
from support.trainer import Sample, World, rolling_digest
from tokenloom import ConnectionOptions, JoinRefused, RemoteDataset, SnapshotInvalid


def loaded(url: str, state: dict[str, str]) -> RemoteDataset:
    dataset = RemoteDataset(url, 1, connection=ConnectionOptions(connect_timeout_s=30.0))
    dataset.load_state_dict(state)
    return dataset


def test_a_bad_range_stays_passed_over_through_restarts_crashes_and_later_restores(
    corpus: Corpus, sequence: list[Sample], start_server: StartServer, tokenloom: CommandLine, redis_url: str,
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    run = "spike"
    server = start_server(corpus.mixture(run, window_micro_steps=3), ledger=redis_url)
    with World(server.url(run), 2, 2) as world:
        states = [world.steps(1).state() for _ in range(10)]
    early, checkpoint, later = states[1], states[4], states[9]

    for arguments, said in (
        (("--sample", 4, "--skip-samples", 1, "--skip-tokens", 1), "give at most one of"),
        (("--sample", 4, "--snapshot", "x"), "give one of --snapshot, --sample and --state"),
        (("--state", tmp_path / "nothing.json"), "nothing.json: cannot be read"),
    ):
        refused = tokenloom("restore", server.rest_url, *arguments)
        assert (refused.status, said in refused.output) == (2, True), refused.output
    pinned = tokenloom("restore", f"{server.rest_url}/{run}", "--sample", 20, "--skip-samples", 7)
    assert f"resumes from sample 20 (digest {rolling_digest(sequence[:20])})" in pinned.output
    assert "from then on, what the order passes over: 7 samples at sample 20" in pinned.output
    server.kill()
    server.start()
    shown = tokenloom("stats", f"{server.rest_url}/{run}").output
    assert (
        "pinned for the next launch: sample 20; from then on 7 samples at sample 20 are passed over"
        in shown
    )
    with pytest.raises(
        JoinRefused,
        match=r"a restore pinned sample 20 .* resumes from sample 40 .*restore --cancel",
    ):
        next(iter(loaded(server.url(run), later)))
    given = sequence[:20] + sequence[27:]
    # The trainer's own checkpoint on every rank. It dies before it saves, and loads the same one again, and others do.
    with (
        caplog.at_level("WARNING", "tokenloom"),
        World(server.url(run), 2, 2, state=checkpoint) as world,
    ):
        world.join()
        begun = world.state()
        world.steps(4)
        assert world.receipt.sequence(20) == given[20:36]
        assert world.digest == rolling_digest(given[:36])
        after = world.state()
    assert f"run {run}: at sample 20, 7 samples of the order are passed over" in caplog.text
    shown = tokenloom("stats", f"{server.rest_url}/{run}").output
    assert "skipped by restores, and not counted above: " in shown
    assert "the order passes over 7 samples at sample 20" in shown
    for state, at, ranks in ((begun, 20, 2), (after, 36, 3), (early, 8, 3)):
        server.kill()
        server.start()
        with World(server.url(run), ranks, 1, state=state) as world:
            world.steps(12)
            assert world.receipt.sequence(at) == given[at : at + 12 * ranks]
    # It is taken back by a state that was taken without it.
    file = tmp_path / "state.json"
    file.write_text(json.dumps(later), encoding="utf-8")
    pinned = tokenloom("restore", f"{server.rest_url}/{run}", "--state", file, "--undo-skip")
    assert "from then on, what the order passes over: nothing" in pinned.output
    assert (
        "nothing is pinned any more"
        in tokenloom("restore", f"{server.rest_url}/{run}", "--cancel").output
    )
    with pytest.raises(SnapshotInvalid, match="--undo-skip"):
        next(iter(loaded(server.url(run), later)))
    assert (
        tokenloom("restore", f"{server.rest_url}/{run}", "--state", file, "--undo-skip").status == 0
    )
    with World(server.url(run), 2, 2, state=later) as world:
        world.steps(2)
        assert world.receipt.sequence(40) == sequence[40:48]
    assert tokenloom("restore", f"{server.rest_url}/{run}", "--cancel").status == 2
