"""The state at every sample index of a small run leads to the rest of it, to the byte."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
from conftest import Corpus, Rpc, StartServer
from support.server_process import ServerProcess
from support.trainer import Sample, World, rolling_digest
from tokenloom import ConnectionOptions

RUN = "exact"


@dataclass(frozen=True)
class Whole:
    """An uninterrupted run of one rank: its samples, and the state and digest at every sample index."""

    samples: list[Sample]
    states: list[dict[str, str]]
    digests: list[str]


@pytest.fixture(scope="module")
def server(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("exact"), corpus.mixture(RUN)).start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def whole(server: ServerProcess) -> Whole:
    with World(server.url(RUN)) as world:
        world.join()
        states, digests = [world.state()], [world.digest]
        while world.step() is not None:
            states.append(world.state())
            digests.append(world.digest)
        return Whole(world.receipt.sequence(), states, digests)


def test_the_run_holds_every_token_of_every_source_once_an_epoch(corpus: Corpus, whole: Whole) -> None:
    for source in range(4):
        assert [sample.ids for sample in whole.samples if sample.source == source] == corpus.expected(source)
    assert len(whole.samples) > 128  # two state boundaries, and more


def test_the_run_mixes_all_sources_and_outlives_the_exhaustion_of_most(whole: Whole) -> None:
    last = {sample.source: index for index, sample in enumerate(whole.samples)}
    assert sorted(last) == [0, 1, 2, 3]
    assert min(last.values()) < len(whole.samples) - 10
    exhausted = [
        sum(entry.get("exhausted", False) for entry in json.loads(state["tokenloom"])["resume_state"]["datasets"])
        for state in whole.states
    ]
    assert exhausted[0] == 0
    assert exhausted[-1] >= 1


def test_a_digest_is_the_documented_function_of_the_samples_before_it(whole: Whole) -> None:
    digest = whole.digests[0]
    assert digest == "0" * 32
    for index, sample in enumerate(whole.samples):
        digest = rolling_digest([sample], digest=digest)
        assert whole.digests[index + 1] == digest


def test_the_snapshot_call_gives_the_text_of_state_dict_at_every_sample_index(
    server: ServerProcess, corpus: Corpus, rpc: Callable[[ServerProcess], Rpc], start_server: StartServer
) -> None:
    # A run of its own, whose only generation is the one that was read.
    run = "exact-texts"
    fresh = start_server(corpus.mixture(run))
    with World(fresh.url(run)) as world:
        world.join()
        streaming = rpc(fresh)
        states = [world.state()]
        asked_at_once = {}
        while world.step() is not None:
            states.append(world.state())
            if len(states) % 7 == 0:
                asked_at_once[len(states) - 1] = streaming.snapshot(run, len(states) - 1)
    for index, text in asked_at_once.items():
        assert text == states[index]["tokenloom"], f"at sample {index}, asked while it streamed"
    calls = rpc(fresh)
    for index, state in enumerate(states):
        assert calls.snapshot(run, index) == state["tokenloom"], f"at sample {index}, asked afterwards"
    assert calls.snapshot(run) == states[-1]["tokenloom"]
    fresh.kill()
    fresh.start()
    calls = rpc(fresh)
    for index in {*range(0, len(states), 7), 1, 63, 64, 65, 127, 128, 129}:
        assert calls.snapshot(run, index) == states[index]["tokenloom"], f"at sample {index}, asked after a restart"


def test_every_state_leads_to_the_rest_of_the_run_and_so_does_a_state_taken_behind_it(
    server: ServerProcess, whole: Whole
) -> None:
    end = len(whole.samples)
    for index, state in enumerate(whole.states):
        with World(server.url(RUN), state=state) as once:
            once.join()
            assert once.state() == state
            assert (once.sample_index, once.digest) == (index, whole.digests[index])
            once.run()
            assert once.receipt.sequence(index) == whole.samples[index:], f"resumed at sample {index}"
            assert (once.sample_index, once.digest) == (end, whole.digests[end])
            again = index + (end - index) // 2
            second = once.state(again)
        with World(server.url(RUN), state=second) as twice:
            twice.run()
            assert twice.receipt.sequence(again) == whole.samples[again:], f"resumed at {index}, then at {again}"
            assert twice.digest == whole.digests[end]


def test_a_saved_snapshot_of_any_sample_index_is_as_good_as_a_trainers_state(
    server: ServerProcess, whole: Whole, rpc: Callable[[ServerProcess], Rpc]
) -> None:
    with World(server.url(RUN), resume="fresh") as world:
        world.run()
    for index in range(0, len(whole.samples), 13):
        text = rpc(server).snapshot(RUN, index)
        with World(server.url(RUN), state={"tokenloom": text}) as resumed:
            assert resumed.run().receipt.sequence(index) == whole.samples[index:]


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_a_state_goes_on_at_an_empty_ledger(
    corpus: Corpus, whole: Whole, start_server: StartServer, redis_url: str, kind: str
) -> None:
    ledger = redis_url if kind == "redis" else "sqlite:///ledger.db"
    elsewhere = start_server(corpus.mixture(RUN), ledger=ledger)
    end = len(whole.samples)
    for index in (37, 0, 1, 64, 65, 128, end - 1, end):
        with World(elsewhere.url(RUN), state=whole.states[index]) as world:
            world.run()
            assert world.receipt.sequence(index) == whole.samples[index:]
            assert world.digest == whole.digests[end]


def test_ranks_of_any_number_write_one_state_whatever_each_has_buffered(
    server: ServerProcess, whole: Whole, rpc: Callable[[ServerProcess], Rpc]
) -> None:
    with World(server.url(RUN), 3, 2, resume="fresh") as world:
        for rank, prefetch in zip(world.ranks, (1, 4, 300), strict=True):
            rank._request = replace(rank._request, options=ConnectionOptions(prefetch_steps=prefetch))
        world.join()
        texts = [world.state()]
        while world.step() is not None:
            texts.append(world.state())
        earlier = [world.state(6 * step) for step in range(len(texts))]
    assert earlier == texts
    for step, state in enumerate(texts):
        assert rpc(server).snapshot(RUN, 6 * step) == state["tokenloom"]
    with World(server.url(RUN), state=texts[11]) as resumed:
        assert resumed.run().receipt.sequence(66) == whole.samples[66:]


def test_an_earlier_state_leads_back_to_where_it_was_taken(server: ServerProcess, whole: Whole) -> None:
    with World(server.url(RUN), 2, 2, resume="fresh") as world:
        world.steps(12)
        ahead, trained = world.state(), world.state(at=36)
        with pytest.raises(ValueError, match="no state at sample index 35"):
            world.state(at=35)
    assert ahead != trained
    with World(server.url(RUN), state=trained) as resumed:
        assert resumed.run().receipt.sequence(36) == whole.samples[36:]


def test_a_state_from_before_the_first_batch_leads_to_the_beginning(server: ServerProcess, whole: Whole) -> None:
    with World(server.url(RUN), 2) as world:  # not joined: nobody was asked
        state = world.state()
    with World(server.url(RUN), 1, 1, state=state) as world:
        assert world.run().receipt.sequence() == whole.samples
