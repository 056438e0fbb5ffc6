"""The state at every sample index of a small run leads to the rest of it, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from conftest import Corpus, Rpc, StartServer
from support.server_process import ServerProcess
from support.trainer import Sample, World

RUN = "exact"


@dataclass(frozen=True)
class Whole:
    """An uninterrupted run of one rank: its samples, and the state and digest at every sample index."""

    samples: list[Sample]
    states: list[dict[str, str]]
    digests: list[str]


@pytest.fixture(scope="module")
def server(corpus: Corpus, serve: StartServer) -> ServerProcess:
    return serve(corpus.mixture(RUN))


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
