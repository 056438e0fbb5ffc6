"""One global sequence: for any number of ranks and any batch size, from every state, and on nodes without a ledger."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from conftest import LENGTH, Corpus, Rpc, StartServer
from support import ledger_view
from support.server_process import ServerProcess
from support.trainer import Receipt, Sample, World, rolling_digest


def assert_counted(
    server: ServerProcess, run: str, corpus: Corpus, committed: list[Sample]
) -> None:
    """The ledger holds exactly what a recount of the tensors gives."""
    found = ledger_view.committed(server.ledger, run)
    assert found is not None
    tokens, rows = corpus.tokens(committed), corpus.rows(committed)
    assert found["sample_index"] == len(committed)
    assert found["counters"] == {
        spec: {"samples": count // LENGTH, "rows": rows[spec], "tokens": count}
        for spec, count in tokens.items()
    }


def test_4_2_3_and_1_ranks_with_other_batch_sizes_get_one_sequence_with_the_server_stopped_and_killed_in_between(
    corpus: Corpus, sequence: list[Sample], start_server: StartServer, ledger: str
) -> None:
    run = "elastic"
    server = start_server(corpus.mixture(run, window_micro_steps=3), ledger=ledger)
    received = Receipt()
    state: dict[str, str] | None = None
    plan = [
        (4, 3, 3, server.terminate),  # a trainer that was stopped in order
        (2, 5, 2, server.kill),
        (3, 2, 6, server.kill),
        (1, 4, None, lambda: None),
    ]
    for world_size, batch_size, steps, stop in plan:
        with World(server.url(run), world_size, batch_size, state=state, prefetch_steps=3) as world:
            if steps is None:
                world.run()
            else:
                world.steps(steps)
                # What is fetched and not trained on is fetched again by the next one.
                time.sleep(0.1)
            state = world.state()
        received.samples.update(world.receipt.samples)
        assert len(received.samples) == world.sample_index, "a sample came twice, or is missing"
        assert_counted(server, run, corpus, received.sequence())
        stop()
        if steps is not None:
            assert_counted(server, run, corpus, received.sequence())
            server.start()
    assert received.sequence() == sequence[: len(received.samples)]
    assert len(sequence) - len(received.samples) < 4  # of an incomplete last step
    assert world.digest == rolling_digest(received.sequence())


def test_every_state_leads_to_the_rest_of_the_run_and_so_does_a_state_taken_after_it(
    corpus: Corpus, sequence: list[Sample], start_server: StartServer
) -> None:
    run = "exact"
    server = start_server(corpus.mixture(run))
    with World(server.url(run)) as world:
        world.join()
        states, digests = [world.state()], [world.digest]
        while world.step() is not None:
            states.append(world.state())
            digests.append(world.digest)
    end = len(sequence)
    assert len(states) == end + 1 > 128  # two state boundaries, and more
    for index, state in enumerate(states):
        with World(server.url(run), state=state) as once:
            once.join()
            assert once.state() == state
            assert (once.sample_index, once.digest) == (index, digests[index])
            once.run()
            assert once.receipt.sequence(index) == sequence[index:], f"resumed at sample {index}"
            assert (once.sample_index, once.digest) == (end, digests[end])
            again = index + (end - index) // 2
            second = once.state(again)
        if index % 3:
            continue
        with World(server.url(run), state=second) as twice:
            twice.run()
            assert twice.receipt.sequence(again) == sequence[again:], (
                f"resumed at {index}, then at {again}"
            )
            assert twice.digest == digests[end]


def test_a_job_goes_on_from_its_checkpoint_on_nodes_without_its_ledger_and_back_on_the_first(
    corpus: Corpus,
    sequence: list[Sample],
    start_server: StartServer,
    rpc: Callable[[ServerProcess], Rpc],
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
    for node, world_size, batch_size, steps in (
        ("node-1", 3, 1, 4),
        ("node-2", 1, 4, 5),
        ("node-0", 2, 2, 3),
    ):
        server = (
            first.start()
            if node == "node-0"
            else start_server(mixture, name=node, flags=("--liveness", 1))
        )
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
