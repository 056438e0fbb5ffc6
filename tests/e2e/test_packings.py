"""Samples that are packed by best fit, or rows of their own, from a real server: the same after a kill and on other
ranks."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import LENGTH, Corpus, StartServer
from support.server_process import ServerProcess
from support.trainer import World
from tokenloom import Batch

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
    return serve(*packed)


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
    assert all(
        0 < source["fill_rate"] <= 1 and source["cut_rate"] is not None
        for source in stats["sources"]
    )
