"""A batch size that follows the run's tokens: one sequence of samples, whatever steps it comes in."""

from __future__ import annotations

from conftest import LENGTH, Corpus, StartServer
from support.trainer import Sample, World

#: By samples: 2 at first, 5 from sample 13 on, 1 from 60 on.
SCHEDULE = [(0, 2), (13 * LENGTH, 5), (60 * LENGTH, 1)]


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


def test_sizes_change_between_optimiser_steps_also_where_the_server_is_killed_in_the_middle(
    corpus: Corpus, sequence: list[Sample], start_server: StartServer
) -> None:
    server = start_server(corpus.mixture("accumulated"))
    path = "/v1/runs/accumulated"
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
    report = server.get(f"{path}/report")
    (launched,) = report["generations"]
    assert (launched["batch_size"], launched["accumulate"]) == (2, accumulate)
    assert launched["batch_sizes"] == [{"sample_index": 24, "batch_size": 5}, {"sample_index": 84, "batch_size": 1}]
    assert server.get(f"{path}/stats")["batch_size"] == 1
    # Which samples a step had, and which step a sample was of.
    step = server.get(f"{path}/micro-steps/6")
    assert (step["batch_size"], step["begin"], step["end"]) == (5, 24, 34)
    for rank in step["ranks"]:
        places = [server.get(f"{path}/samples/{sample['sample']}") for sample in rank["samples"]]
        found = [(place["micro_step"], place["rank"], place["place"]) for place in places]
        assert found == [(6, rank["rank"], i) for i in range(5)]
