"""A job that moves to a node without its ledger: the trainer's state is enough, and counts go on from it."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from conftest import Corpus, Rpc, StartServer
from support.server_process import ServerProcess
from support.trainer import Receipt, Sample, World
from test_elastic_resume import assert_counted
from tokenloom import ResumePointNeeded, SnapshotInvalid


def test_a_job_goes_on_from_its_checkpoint_on_nodes_without_its_ledger_and_back_on_the_first(
    corpus: Corpus, sequence: list[Sample], start_server: StartServer, rpc: Callable[[ServerProcess], Rpc]
) -> None:
    run = "moved"
    mixture = corpus.mixture(run, window_micro_steps=4)
    received = Receipt()
    first = start_server(mixture, name="node-0", flags=("--liveness", 1))
    with World(first.url(run), 2, 3) as world:
        checkpoint = world.steps(5).state()
        received.samples.update(world.receipt.samples)
        world.steps(2)  # beyond the checkpoint: these come again
        first.kill()
    uids = [json.loads(checkpoint["tokenloom"])["run_uid"]]

    # Other numbers of ranks, and nodes that have nothing; the last is the first again, with its old ledger.
    for node, world_size, batch_size, steps in (("node-1", 3, 1, 4), ("node-2", 1, 4, 5), ("node-0", 2, 2, 3)):
        server = first.start() if node == "node-0" else start_server(mixture, name=node, flags=("--liveness", 1))
        at = len(received.samples)
        with World(server.url(run), world_size, batch_size, state=checkpoint) as world:
            world.join()
            assert_counted(server, run, corpus, sequence[:at])
            # Known on this node, though it has never seen what lies before.
            assert json.loads(rpc(server).snapshot(run))["sample_index"] == at
            checkpoint = world.steps(steps).state()
            received.samples.update(world.receipt.samples)
        assert received.sequence() == sequence[: at + steps * world_size * batch_size]
        assert_counted(server, run, corpus, received.sequence())
        uids.append(json.loads(checkpoint["tokenloom"])["run_uid"])
        server.kill()
        if node != "node-0":
            # The same node once more: its ledger has what the trainer's state says.
            server.start()
            assert rpc(server).snapshot(run) == checkpoint["tokenloom"]
            server.kill()
    assert len(set(uids)) == 1

    server = start_server(mixture, name="node-3")
    with World(server.url(run), 2, 2, state=checkpoint) as world:
        world.run()
        received.samples.update(world.receipt.samples)
    kept = world.sample_index
    assert received.sequence() == sequence[:kept]
    assert len(sequence) - kept < 4
    assert_counted(server, run, corpus, sequence[:kept])


def test_a_ledger_that_began_the_run_anew_is_not_overwritten_by_another_ones_state(
    corpus: Corpus, start_server: StartServer
) -> None:
    run = "doubled"
    mixture = corpus.mixture(run)
    first, second = start_server(mixture), start_server(mixture)
    with World(first.url(run), 1, 2) as world:
        checkpoint = world.steps(3).state()
    with World(second.url(run), 1, 2) as world:
        world.steps(5)
    with pytest.raises(SnapshotInvalid, match="has progress of its own: use the ledger of that run, an empty one"):
        World(second.url(run), 1, 2, state=checkpoint).join()
    # Without a state the job is told so, and not begun again in silence.
    with pytest.raises(ResumePointNeeded, match="sample 10"):
        World(second.url(run), 1, 2).join()
