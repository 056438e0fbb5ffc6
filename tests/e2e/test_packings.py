"""Samples that are joined, packed by best fit, or rows of their own, from a real server: their documents; the same
after kills and on other ranks, traced to their rows, shown by a peek."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import LENGTH, Corpus, StartServer
from support.server_process import ServerProcess
from support.trainer import World
from tokenloom import Batch, PeekDataset
from tokenloom_proto.address import Address
from tokenloom_server.tools.peek.servers import Servers
from tokenloom_server.tools.peek.view import peek

RUNS: dict[str, dict[str, Any]] = {
    "best-fit": {"packing": "best_fit", "pack_window_rows": 16, "mask_boundaries": True},
    "alone": {"packing": "none", "padding": "left", "labels": "shifted", "long_rows": "split"},
}
Seen = dict[int, tuple[int, tuple[int, ...], tuple[int, ...]]]


def add(seen: Seen, batch: Batch) -> None:
    """By sample index: source, the tokens that are attended to, and the labels."""
    attended = batch["attention_mask"].bool()
    for i, index in enumerate(batch["sample_ids"].tolist()):
        if index >= 0:
            tokens = tuple(batch["input_ids"][i][attended[i]].tolist())
            assert index not in seen
            seen[index] = int(batch["source_ids"][i]), tokens, tuple(batch["labels"][i].tolist())


def samples(world: World, steps: int | None = None) -> Seen:
    found: Seen = {}
    while steps is None or steps > 0:
        batches = world.step()
        if batches is None:
            break
        for batch in batches:
            add(found, batch)
        steps = None if steps is None else steps - 1
    return found


@pytest.fixture(scope="module")
def server(corpus: Corpus, serve: StartServer) -> ServerProcess:
    packed = (corpus.mixture(run, **fields, last_micro_step="pad") for run, fields in RUNS.items())
    return serve(corpus.mixture("joined"), *packed)


@pytest.mark.parametrize("run", RUNS)
def test_a_packed_run_is_the_same_after_a_kill_and_on_other_ranks(
    corpus: Corpus, server: ServerProcess, run: str
) -> None:
    with World(server.url(run), 2, 3, columns=["attention_mask"]) as world:
        whole = samples(world, 4)
        state = world.state()
        server.kill()
        server.start()
        whole |= samples(world)
    assert len(whole) > 60
    with World(server.url(run), 3, 2, state=state, columns=["attention_mask"]) as world:
        again = samples(world)
    assert again == {index: sample for index, sample in whole.items() if index >= 24}

    # Every token of a document is attended to once; where labels are shifted and padding is on the left, the last of
    # each sample is only a label.
    tokens = sum(len(stream) for stream in corpus.streams)
    only_labels = len(whole) if run == "alone" else 0
    assert sum(len(tokens) for _, tokens, _ in whole.values()) == tokens - only_labels

    stats = server.get(f"/v1/runs/{run}/stats")
    padding = sum(source["padding_tokens"] for source in stats["sources"])
    width = LENGTH + (run == "alone")
    assert len(whole) * width - padding == tokens
    assert all(0 < source["fill_rate"] <= 1 and source["cut_rate"] is not None for source in stats["sources"])
    check_what_is_told(server, run, whole)


def check_what_is_told(server: ServerProcess, run: str, whole: Seen) -> None:
    """A trace and a peek show what the ranks got."""
    for index in (0, 7, 30):
        trace = server.get(f"/v1/runs/{run}/samples/{index}", text="true")
        source, tokens, _ = whole[index]
        assert trace["source_id"] == source
        assert tuple(trace["ids"][: len(tokens)]) == tokens
        lengths = [document["end"] - document["begin"] for document in trace["documents"]]
        assert sum(lengths) == len(trace["ids"])
        first = trace["documents"][0]["position"]
        places = [document["position"] for document in trace["documents"]]
        assert places == (first + np.cumsum([0, *lengths[:-1]])).tolist()
    shown = peek(Servers(Address.parse(server.url(run)), {}), 5, 12).samples
    assert [tuple(sample.ids.tolist()) for sample in shown] == [whole[index][1] for index in range(5, 17)]
    peeked: Seen = {}
    with PeekDataset(server.url(run), 4, at="8", columns=["attention_mask"]) as dataset:
        batches = iter(dataset)
        for _ in range(3):
            add(peeked, next(batches))
    assert peeked == {index: whole[index] for index in range(8, 20)}


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


def test_document_and_position_ids_follow_the_end_of_text_ids(corpus: Corpus, server: ServerProcess) -> None:
    with World(server.url("joined"), 2, 3, prefetch_steps=7, columns=["document_ids", "position_ids"]) as world:
        places = [0, 0, 0, 0]
        found = {}
        while (step := world.step()) is not None:
            columns = ("sample_ids", "source_ids", "document_ids", "position_ids")
            for batch in step:
                for index, *rest in zip(*(batch[name].tolist() for name in columns), strict=True):
                    found[index] = rest
    assert len(found) > 128
    for index in sorted(found):
        source, numbers, positions = found[index]
        assert (numbers, positions) == documents(corpus, source, places[source]), f"sample {index} of source {source}"
        places[source] += 1
