"""Samples that are packed by best fit, or are rows of their own, from a real server: the same after kills and on other
ranks, traced to their rows, shown by a peek."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest
from conftest import LENGTH, Corpus, StartServer
from support.server_process import ServerProcess
from support.trainer import World
from tokenloom import Batch, PeekDataset
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


@pytest.mark.parametrize("run", RUNS)
def test_a_packed_run_is_the_same_after_a_kill_and_on_other_ranks(
    corpus: Corpus, start_server: StartServer, run: str
) -> None:
    server = start_server(corpus.mixture(run, **RUNS[run], last_micro_step="pad"))
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

    stats = httpx.get(f"{server.rest_url}/v1/runs/{run}/stats", trust_env=False).json()
    padding = sum(source["padding_tokens"] for source in stats["sources"])
    width = LENGTH + (run == "alone")
    assert len(whole) * width - padding == tokens
    assert all(0 < source["fill_rate"] <= 1 and source["cut_rate"] is not None for source in stats["sources"])
    check_what_is_told(server, run, whole)


def check_what_is_told(server: ServerProcess, run: str, whole: Seen) -> None:
    """A trace and a peek show what the ranks got."""
    for index in (0, 7, 30):
        trace = httpx.get(
            f"{server.rest_url}/v1/runs/{run}/samples/{index}", params={"text": "true"}, trust_env=False
        ).json()
        source, tokens, _ = whole[index]
        assert trace["source_id"] == source
        assert tuple(trace["ids"][: len(tokens)]) == tokens
        lengths = [document["end"] - document["begin"] for document in trace["documents"]]
        assert sum(lengths) == len(trace["ids"])
        first = trace["documents"][0]["position"]
        places = [document["position"] for document in trace["documents"]]
        assert places == (first + np.cumsum([0, *lengths[:-1]])).tolist()
    shown = peek(Servers(server.url(run), {}), 5, 12).samples
    assert [tuple(sample.ids.tolist()) for sample in shown] == [whole[index][1] for index in range(5, 17)]
    peeked: Seen = {}
    with PeekDataset(server.url(run), 4, at="8", columns=["attention_mask"]) as dataset:
        batches = iter(dataset)
        for _ in range(3):
            add(peeked, next(batches))
    assert peeked == {index: whole[index] for index in range(8, 20)}
