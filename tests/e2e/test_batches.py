"""What is in a batch: labels, documents, positions, and how the data end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import LENGTH, Corpus, StartServer
from support.server_process import ServerProcess
from support.trainer import Sample, World
from tokenloom import Batch


@pytest.fixture(scope="module")
def server(corpus: Corpus, serve: StartServer) -> ServerProcess:
    mixtures = [
        corpus.mixture("same"),
        corpus.mixture("shifted", labels="shifted"),
        corpus.mixture("padded", last_micro_step="pad"),
    ]
    return serve(*mixtures)


def batches(world: World) -> Iterator[Batch]:
    while (step := world.step()) is not None:
        yield from step


def documents(corpus: Corpus, source: int, place: int) -> tuple[list[int], list[int]]:
    """(document ids, position ids) of a source's sample: a document begins behind each end-of-text id."""
    stream = corpus.streams[source]
    number, position = 0, 0
    found: tuple[list[int], list[int]] = ([], [])
    for at in range(place * LENGTH, (place + 1) * LENGTH):
        if at % LENGTH and stream[at - 1] == corpus.end_id:
            number, position = number + 1, 0
        found[0].append(number)
        found[1].append(position)
        position += 1
    return found


def test_document_and_position_ids_follow_the_end_of_text_ids(server: ServerProcess, corpus: Corpus) -> None:
    with World(server.url("same"), 2, 3, prefetch_steps=7, columns=["document_ids", "position_ids"]) as world:
        places = [0, 0, 0, 0]
        found = {}
        for batch in batches(world):
            for i, index in enumerate(batch["sample_ids"].tolist()):
                found[index] = (
                    int(batch["source_ids"][i]),
                    batch["document_ids"][i].tolist(),
                    batch["position_ids"][i].tolist(),
                )
    assert len(found) > 128
    for index in sorted(found):
        source, numbers, positions = found[index]
        assert (numbers, positions) == documents(corpus, source, places[source]), f"sample {index} of source {source}"
        places[source] += 1


def test_shifted_labels_predict_every_token_once(server: ServerProcess, corpus: Corpus) -> None:
    inputs: dict[int, list[int]] = {source: [] for source in range(4)}
    labels: dict[int, list[int]] = {source: [] for source in range(4)}
    with World(server.url("shifted"), 1, 1, resume="fresh") as world:
        for batch in batches(world):
            source = int(batch["source_ids"][0])
            inputs[source] += batch["input_ids"][0].tolist()
            labels[source] += batch["labels"][0].tolist()
            assert world.ranks[0].total_tokens == LENGTH * world.sample_index
    for source, stream in enumerate(corpus.streams):
        count = (len(stream) - 1) // LENGTH * LENGTH
        assert inputs[source] == list(stream[:count])
        assert labels[source] == list(stream[1 : count + 1])


def test_padding_fills_the_last_step_and_counts_nothing(server: ServerProcess, sequence: list[Sample]) -> None:
    with World(server.url("padded"), 3, 4) as world:
        last: list[Batch] = []
        while (step := world.step()) is not None:
            last = step
        assert world.receipt.sequence() == sequence
        assert world.sample_index == len(sequence)
        assert world.ranks[0].total_tokens == LENGTH * len(sequence)
    padding = sum(int((batch["source_ids"] == -1).sum()) for batch in last)
    assert padding == -len(sequence) % 12 > 0
    for batch in last:
        padded = batch["source_ids"] == -1
        assert bool((batch["labels"][padded] == -100).all())
        assert bool((batch["input_ids"][padded] == 0).all())
        assert bool((batch["sample_ids"][padded] == -1).all())
        assert bool((batch["labels"][~padded] != -100).all())
