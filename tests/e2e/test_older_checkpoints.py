"""A job that trained with an older data loader goes on here, and from then on exactly."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from conftest import LENGTH, SPECS, Corpus, Rpc, StartServer
from support.server_process import ServerProcess
from support.trainer import Receipt, Sample, World
from tokenloom import BeyondHorizon, JoinRefused, PeekDataset, RemoteDataset

OLD = {
    "spec": "parquet:gone-*.parquet:text",
    "shard": "gone-3.parquet",
    "row_offset": 12,
    "token_offset": 5000,
}


def older(corpus: Corpus) -> dict[str, Any]:
    """What an older loader would have saved: a few rows into each source but the last, which it did not have."""
    rows = {
        SPECS[0]: ("code-1.parquet", 4, 34),
        SPECS[1]: ("prose.txt", 3, 3),
        SPECS[2]: ("docs.jsonl", 8, 8),
    }
    datasets = [OLD]
    for source, (spec, (shard, row, passed)) in enumerate(rows.items()):
        entry = {"spec": spec, "shard": str(corpus.folder / shard), "row_offset": row}
        datasets.append(entry | {"token_offset": corpus.ends[source][passed - 1]})
    return {"resume_state": {"datasets": datasets}, "model": "beside it"}


def expected(corpus: Corpus) -> dict[int, list[tuple[int, ...]]]:
    """Each source's samples from there to its end."""
    found = {}
    for source, passed in enumerate((34, 3, 8, 0)):
        begin = corpus.ends[source][passed - 1] if passed else 0
        stream = corpus.streams[source][begin:]
        found[source] = [
            stream[at : at + LENGTH] for at in range(0, len(stream) - LENGTH + 1, LENGTH)
        ]
    return found


def by_source(samples: list[Sample]) -> dict[int, list[tuple[int, ...]]]:
    return {
        source: [sample.ids for sample in samples if sample.source == source]
        for source in range(len(SPECS))
    }


def datasets_of(state: dict[str, str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(state["tokenloom"])["resume_state"]["datasets"]
    return found


def start_of(corpus: Corpus) -> int:
    """Samples that the counters begin with."""
    return sum(
        corpus.ends[source][passed - 1] // LENGTH for source, passed in enumerate((34, 3, 8))
    )


def test_a_job_goes_on_from_an_older_checkpoint_and_then_exactly(
    corpus: Corpus, start_server: StartServer, rpc: Callable[[ServerProcess], Rpc], redis_url: str
) -> None:
    run = "older"
    server = start_server(corpus.mixture(run), ledger=redis_url, flags=("--liveness", 1))
    payload, begin = older(corpus), start_of(corpus)
    with World(server.url(run), state=payload) as world:
        whole = world.run().receipt.sequence(begin)
        end, digest = world.sample_index, world.digest
    assert by_source(whole) == expected(corpus)
    # Its token clock is the sum of all that the older loader counted, of the source that is gone, too.
    clock = OLD["token_offset"] + sum(
        corpus.ends[source][passed - 1] for source, passed in enumerate((34, 3, 8))
    )
    assert world.ranks[0].total_tokens == clock + (end - begin) * LENGTH

    # The same from the older checkpoint once more, on other ranks; saved, killed, and gone on from what was saved.
    received = Receipt()
    with World(server.url(run), 2, 3, state=payload) as world:
        world.join()
        assert world.sample_index == begin
        state = world.steps(3).state()
        received.samples.update(world.receipt.samples)
        assert datasets_of(state)[-1] == {**OLD, "unknown": True}
        server.kill()
    server.start()
    with World(server.url(run), 1, 2, state=state) as world:
        second = world.steps(4).state()
        received.samples.update(world.receipt.samples)
    # A node without the ledger: the order still begins where the older checkpoint stood.
    other = start_server(corpus.mixture(run))
    with World(other.url(run), 1, 1, state=second) as world:
        last = world.run().state()
        received.samples.update(world.receipt.samples)
        assert (world.sample_index, world.digest) == (end, digest)
    assert received.sequence(begin) == whole
    assert datasets_of(last)[-1] == {**OLD, "unknown": True}
    assert rpc(other).snapshot(run) == last["tokenloom"]
    with pytest.raises(BeyondHorizon, match="began at sample"):
        next(iter_peek(other, run, str(begin - 1)))


def iter_peek(server: ServerProcess, run: str, resume: str | None = None, state: Any = None) -> Any:
    return iter(PeekDataset(server.url(run), 1, at=resume if state is None else state))


def test_what_a_dataset_says_before_it_joined_and_that_a_peek_begins_no_order_of_its_own(
    corpus: Corpus, start_server: StartServer
) -> None:
    run, payload, begin = "older-client", older(corpus), start_of(corpus)
    server = start_server(corpus.mixture(run))
    with pytest.raises(JoinRefused, match="begins an order of its own"):
        iter_peek(server, run, state=payload)
    # What is remembered of the order as it was must not be taken for the one that begins now.
    next(iter_peek(server, run, str(begin + 9)))
    dataset = RemoteDataset(server.url(run), 1)
    dataset.load_state_dict(payload)
    with pytest.raises(RuntimeError, match="known once the run is joined"):
        _ = dataset.sample_index
    # Saved before the first batch: still the older checkpoint, in the place of a state.
    with World(server.url(run), state=dataset.state_dict()) as world:
        whole = world.run().receipt.sequence(begin)
    assert (
        tuple(next(iter_peek(server, run, str(begin + 12)))["input_ids"][0].tolist())
        == whole[12].ids
    )
    assert (
        tuple(next(iter_peek(server, run, state=payload))["input_ids"][0].tolist()) == whole[0].ids
    )
