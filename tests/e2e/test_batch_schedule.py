"""A batch size that follows the run's tokens: one sequence of samples, whatever steps it comes in."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from conftest import LENGTH, Corpus, StartServer
from support.server_process import ServerProcess
from support.trainer import Sample, World

#: By samples: 2 at first, 5 from sample 13 on, 1 from 60 on.
SCHEDULE = [(0, 2), (13 * LENGTH, 5), (60 * LENGTH, 1)]
RUNS = ("scheduled", "accumulated", "refused")


@pytest.fixture(scope="module")
def server(corpus: Corpus, serve: StartServer) -> ServerProcess:
    return serve(*(corpus.mixture(run) for run in RUNS))


def size_at(sample_index: int) -> int:
    """What the schedule says, of this many samples."""
    return [size for tokens, size in SCHEDULE if tokens <= sample_index * LENGTH][-1]


def sizes_of(begin: int, world_size: int, total: int, accumulate: int = 1) -> list[int]:
    """The batch size of each whole step of a launch that begins at a sample index."""
    sizes: list[int] = []
    at, size = begin, 0
    while True:
        if len(sizes) % accumulate == 0:
            size = size_at(at)
        at += size * world_size
        if at > total:
            return sizes
        sizes.append(size)


def step_of(world: World, labels: list[int] | None = None) -> int | None:
    """Takes a step; its batch size, on every rank. None at the end of the data. ``labels`` gets how many its optimiser
    step has."""
    begin = world.sample_index
    batches = world.step()
    if batches is None:
        return None
    (size,) = {len(batch["input_ids"]) for batch in batches}
    end = begin + size * len(batches)
    assert {(batch["sample_index"], batch["total_tokens"]) for batch in batches} == {(end, end * LENGTH)}
    if labels is not None:
        labels += {batch["global_label_tokens"] for batch in batches}
    return size


def told(server: ServerProcess, path: str) -> dict[str, Any]:
    """What the server says over REST of the run that accumulates."""
    answer = httpx.get(f"{server.rest_url}/v1/runs/accumulated/{path}", trust_env=False, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_sizes_change_between_optimiser_steps_also_where_the_server_is_killed_in_the_middle(
    server: ServerProcess, sequence: list[Sample]
) -> None:
    world_size, accumulate = 2, 3
    sizes: list[int] = []
    labels: list[int] = []
    with World(server.url("accumulated"), world_size, SCHEDULE, accumulate=accumulate) as world:
        while (size := step_of(world.join(), labels)) is not None:
            sizes.append(size)
            if len(sizes) in (4, 5, 10):
                server.kill()
                server.start()
    assert sizes == sizes_of(0, world_size, len(sequence), accumulate)
    assert [sizes[at] for at in (5, 6, 11, 12)] == [2, 5, 5, 1]
    # A sample's first token is no label.
    counts = [size * world_size * (LENGTH - 1) for size in sizes]
    assert labels == [sum(counts[at - at % accumulate :][:accumulate]) for at in range(len(counts))]
    assert world.receipt.sequence() == sequence[: world.sample_index]
    report = told(server, "report")
    (launched,) = report["generations"]
    assert (launched["batch_size"], launched["accumulate"]) == (2, accumulate)
    assert launched["batch_sizes"] == [{"sample_index": 24, "batch_size": 5}, {"sample_index": 84, "batch_size": 1}]
    assert told(server, "stats")["batch_size"] == 1
    # Which samples a step had, and which step a sample was of.
    step = told(server, "steps/6")
    assert (step["batch_size"], step["begin"], step["end"]) == (5, 24, 34)
    for rank in step["ranks"]:
        places = [told(server, f"samples/{sample['sample']}") for sample in rank["samples"]]
        assert [(at["micro_step"], at["rank"], at["place"]) for at in places] == [
            (6, rank["rank"], i) for i in range(5)
        ]
