"""What a client is held to: a check for each promise of the contract, in the order in which one builds a client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.conformance.client import Broken, Client, Refused
from tests.conformance.world import CONTROL_TOKEN, World

#: All checks by name.
CHECKS: dict[str, Callable[[World], None]] = {}


def check(function: Callable[[World], None]) -> Callable[[World], None]:
    """Adds a check; its docstring's first line says what it is about."""
    CHECKS[function.__name__.replace("_", "-")] = function
    return function


def equal(what: str, actual: object, expected: object) -> None:
    if actual != expected:
        raise Broken(f"{what}: expected {_short(expected)}, got {_short(actual)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]} …"


def refused(name: str, call: Callable[[], object]) -> None:
    """That an error of a name is passed on."""
    try:
        answer = call()
    except Refused as error:
        return equal("the error's name", error.name, name)
    raise Broken(f"expected the error {name}, got {_short(answer)}")


def compare(world: World, run: str, begin: int, ranks: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Batches of all ranks, from a sample index on, with the order."""
    order = world.samples(run)
    for micro_step, batches in enumerate(zip(*ranks, strict=True)):
        # Which rank has which slice is the server's choice; padding samples (−1) are at the end.
        batches = sorted(batches, key=lambda batch: batch["sample_ids"][0] % 2**53)
        samples = [
            dict(zip(("sample", "source", "input_ids", "labels"), columns, strict=True))
            for batch in batches
            for columns in zip(
                *(batch[name] for name in ("sample_ids", "source_ids", "input_ids", "labels")),
                strict=True,
            )
        ]
        end = min(begin + len(samples), len(order))
        where = f"run {run!r}, micro-step {micro_step}, samples {begin} to {end}"
        for index, sample in zip(range(begin, begin + len(samples)), samples, strict=True):
            if index < end:
                source, input_ids, labels, *_ = order[index]
                equal(f"{where}: the sample", sample["sample"], index)
                equal(f"{where}: source_ids of sample {index}", sample["source"], source)
                equal(f"{where}: input_ids of sample {index}", sample["input_ids"], input_ids)
                equal(f"{where}: labels of sample {index}", sample["labels"], labels)
            else:
                equal(
                    f"{where}: a padding sample's source and index",
                    (sample["source"], sample["sample"]),
                    (-1, -1),
                )
                equal(f"{where}: a padding sample's labels", set(sample["labels"]), {-100})
        for batch in batches:
            last = order[end - 1]
            equal(f"{where}: sample_index", batch["sample_index"], end)
            equal(f"{where}: total_tokens", batch["total_tokens"], last.total_tokens)
            equal(f"{where}: digest", batch["digest"], last.digest)
        begin = end


def together(ranks: Sequence[Client], count: int) -> list[list[dict[str, Any]]]:
    """So many micro-steps of each rank, in turn, as a job makes them."""
    taken: list[list[dict[str, Any]]] = [[] for _ in ranks]
    for _ in range(count):
        for rank, client in enumerate(ranks):
            taken[rank] += client.batches(1)
    return taken


@check
def ids_of_one_byte(world: World) -> None:
    """input_ids, labels, source_ids and sample_ids of ids that travel as one byte."""
    with world.join("narrow", batch_size=3) as [client]:
        compare(world, "narrow", 0, [client.batches(8)])


@check
def ids_of_two_bytes(world: World) -> None:
    """The same of two bytes, with labels that are the ids one further."""
    with world.join("shifted", batch_size=3) as [client]:
        compare(world, "shifted", 0, [client.batches(8)])


@check
def ids_of_four_bytes_in_large_messages(world: World) -> None:
    """The same of four bytes, in messages above the 4 MiB that gRPC allows unless it is told."""
    with world.join("large", batch_size=4) as [client]:
        compare(world, "large", 0, [client.batches(2)])


@check
def padding_masks_and_boundaries(world: World) -> None:
    """Samples with padding right, with loss masks and with documents whose first token is no label."""
    with world.join("masked", batch_size=3) as [client]:
        compare(world, "masked", 0, [client.batches(8)])


@check
def padding_left(world: World) -> None:
    """Samples with padding left."""
    with world.join("left", batch_size=3) as [client]:
        compare(world, "left", 0, [client.batches(8)])


@check
def end_of_data(world: World) -> None:
    """All of a run that ends, with a last micro-step that padding samples fill up."""
    count = len(world.samples("short"))
    with world.join("short", batch_size=3) as [client]:
        batches = client.batches(count)
        equal("micro-steps until the end", len(batches), -(-count // 3))
        compare(world, "short", 0, [batches])


@check
def ranks_and_states(world: World) -> None:
    """Two ranks share the order, and write the same states: the server's snapshots, to the byte."""
    with world.join("shifted", ranks=2, batch_size=2) as clients:
        for client in clients:
            equal("the state before the first batch", client.state(), world.snapshot("shifted", 0))
        for step in range(12):
            for client in clients:
                client.batches(1)
            for rank, client in enumerate(clients):
                equal(
                    f"the state of rank {rank}",
                    client.state(),
                    world.snapshot("shifted", 4 * (step + 1)),
                )


@check
def resume_on_other_ranks(world: World) -> None:
    """A state goes on with other ranks and another batch size, and is itself until the first batch."""
    with world.join("masked", ranks=2, batch_size=2) as clients:
        together(clients, 3)
        state = clients[1].state()
    with world.join("masked", ranks=3, batch_size=1, state=state) as clients:
        for client in clients:
            equal("the state that was loaded", client.state(), state)
        compare(world, "masked", 12, together(clients, 4))
        equal("the state after it", clients[0].state(), world.snapshot("masked", 24))


@check
def progress(world: World) -> None:
    """What was taken is reported, so that the ledger has it after the end; a launch may go on from there."""
    with world.join("narrow", batch_size=2) as [client]:
        client.batches(5)
        client.ask("close")
    world.wait_committed("narrow", 10)
    with world.join("narrow", batch_size=5, resume="latest") as [client]:
        compare(world, "narrow", 10, [client.batches(2)])


@check
def server_restarts(world: World) -> None:
    """The server is killed and comes back: the stream goes on within the launch, nothing twice and nothing lost."""
    with world.join("shifted", batch_size=2) as [client]:
        batches = client.batches(3)
        world.restart()
        compare(world, "shifted", 0, [batches + client.batches(20)])


@check
def another_launch(world: World) -> None:
    """A launch that another has taken over from ends with Fenced, and does not try again."""
    with (
        world.join("narrow", batch_size=1) as [older],
        world.join("narrow", batch_size=1) as [newer],
    ):
        newer.batches(1)
        refused("Fenced", lambda: older.batches(len(world.samples("narrow"))))


@check
def refusals(world: World) -> None:
    """What is refused has the server's name for it: a damaged state, no resume point, a run that there is not."""
    with world.join("left", batch_size=1) as [client]:
        client.batches(2)
        state = client.state()
        client.ask("close")
    world.wait_committed("left", 2)
    damaged = state.replace('"sample_index":2', '"sample_index":3', 1)
    with world.ranks(1) as [client]:
        refused("SnapshotInvalid", lambda: world.ask_to_join(client, "left", state=damaged))
        refused("ResumePointNeeded", lambda: world.ask_to_join(client, "left", resume=None))
        refused("NotFound", lambda: world.ask_to_join(client, "nowhere"))


@check
def token(world: World) -> None:
    """A token is sent with each call, and the lack of one is passed on."""
    with world.guarded() as address, world.ranks(1) as [client]:
        refused("Unauthenticated", lambda: world.ask_to_join(client, "narrow", address=address))
        world.ask_to_join(client, "narrow", address=address, token=CONTROL_TOKEN)
        compare(world, "narrow", 0, [client.batches(3)])
