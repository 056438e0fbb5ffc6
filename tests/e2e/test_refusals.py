"""What a trainer gets wrong: the join is refused, names what differs, and changes nothing."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from conftest import LENGTH, Corpus, Rpc, StartServer
from support.server_process import ServerProcess
from support.trainer import Sample, World, with_connection
from tokenloom import (
    NotFound,
    RemoteDataset,
    ResumePointNeeded,
    SnapshotInvalid,
    SourceError,
)
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.seal import seal, unseal

RUN, OTHER = "strict", "other"


@pytest.fixture(scope="module")
def server(corpus: Corpus, serve: StartServer) -> ServerProcess:
    """Serves a run that has progress, and one without."""
    mixtures = [corpus.mixture(RUN), corpus.mixture(OTHER, seed=8, window_micro_steps=4)]
    return serve(*mixtures)


@pytest.fixture(scope="module")
def state(server: ServerProcess) -> dict[str, str]:
    """Taken in the run's first generation, which went on beyond it."""
    with World(server.url(RUN), 2, 2) as world:
        state = world.steps(4).state()
        world.steps(2)
    return state


def join(url: str, **options: Any) -> RemoteDataset:
    """A rank that has joined."""
    loaded = options.pop("state", None)
    dataset = RemoteDataset(url, options.pop("batch_size", 2), **with_connection(options))
    if loaded is not None:
        dataset.load_state_dict(loaded)
    try:
        iter(dataset)
    finally:
        dataset.close()
    return dataset


def changed(state: dict[str, str], **fields: Any) -> dict[str, str]:
    """The state with other fields, and a checksum that fits them."""
    return {"tokenloom": seal(unseal(state["tokenloom"]) | fields)}


def test_progress_and_nothing_to_resume_from_names_the_choices(server: ServerProcess, state: dict[str, str]) -> None:
    with pytest.raises(ResumePointNeeded) as refused:
        join(server.url(RUN))
    for part in (RUN, "sample 24", "load_state_dict", "'latest'", "'fresh'", "snapshot id"):
        assert part in str(refused.value)


def test_a_run_that_is_not_served_names_those_that_are(server: ServerProcess) -> None:
    with pytest.raises(NotFound, match=r"no run 'nowhere' on this server; it serves: other, strict"):
        join(server.url("nowhere"))


def test_a_state_of_something_else_is_refused_with_both_values(server: ServerProcess, state: dict[str, str]) -> None:
    cases: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
        ({"run": "another"}, ("run is 'another'", "this run's is 'strict'", "load it into that run")),
        ({"seed": 1}, ("seed is 1", "this run's is 7", "restore the seed")),
        ({"version": 99}, ("format version 99", "this server reads 1", "release that wrote it")),
        ({"config_digest": "0" * 64}, ("config_digest", "restore the mixture file")),
        ({"manifest_digest": "0" * 64}, ("manifest_digest", "restore the data files")),
        ({"digest": "1" * 32}, ("gives digest", "1" * 32, "other data")),
        ({"sample_index": 10**9, "total_tokens": 16 * 10**9}, ("the data end at sample",)),
        ({"run_uid": "f" * 32}, ("run_uid", "f" * 32, "progress of its own", "another run name")),
    )
    for fields, parts in cases:
        with pytest.raises(SnapshotInvalid) as refused:
            join(server.url(RUN), state=changed(state, **fields))
        for part in parts:
            assert part in str(refused.value)


def test_a_state_of_another_tokeniser_engine_is_refused_with_both(server: ServerProcess, state: dict[str, str]) -> None:
    tokenizer = json.loads(state["tokenloom"])["tokenizer"]
    assert tokenizer["engine"] == "gigatoken"
    with pytest.raises(SnapshotInvalid, match=r"tokenizer is .*'tokenizers'.* this run's is .*'gigatoken'.*: restore"):
        join(server.url(RUN), state=changed(state, tokenizer=tokenizer | {"engine": "tokenizers"}))


def test_a_state_whose_checksum_does_not_fit_is_refused_before_anyone_is_asked(state: dict[str, str]) -> None:
    dataset = RemoteDataset("grpc://127.0.0.1:1/nobody", 1)
    text = state["tokenloom"]
    for torn in (text.replace('"seed":7', '"seed":8'), text[:-20], text + "x", ""):
        with pytest.raises(SnapshotInvalid):
            dataset.load_state_dict({"tokenloom": torn})
    with pytest.raises(SnapshotInvalid, match="its content gives"):
        dataset.load_state_dict({"tokenloom": text.replace('"seed":7', '"seed":8')})


def test_a_torn_state_that_reaches_the_server_is_refused_there(
    server: ServerProcess, state: dict[str, str], rpc: Callable[[ServerProcess], Rpc]
) -> None:
    request = wire.JoinRequest(run=RUN, world_size=1, batch_size=1, attempt=uuid.uuid4().hex, nonce="n")
    request.state_json = state["tokenloom"].replace('"seed":7', '"seed":8').encode()
    assert refusal(lambda: rpc(server).stub.Join(request, timeout=20))[0] == "SnapshotInvalid"


def refusal(call: Callable[[], object]) -> tuple[str, str]:
    """The error's stable name and its message, as they travel."""
    with pytest.raises(grpc.RpcError) as refused:
        call()
    error: Any = refused.value
    names = [entry.value for entry in error.trailing_metadata() if entry.key == "tokenloom-error"]
    return (names or [""])[0], error.details()


def test_a_refused_join_changes_nothing(server: ServerProcess, state: dict[str, str], rpc: Any) -> None:
    before = rpc(server).snapshot(RUN)
    for wrong in (changed(state, seed=1), changed(state, digest="1" * 32)):
        with pytest.raises(SnapshotInvalid):
            join(server.url(RUN), state=wrong)
    assert rpc(server).snapshot(RUN) == before


def test_a_bad_line_reaches_every_rank_at_one_step_with_file_and_line_and_no_other_run(
    corpus: Corpus, start_server: StartServer
) -> None:
    good = [json.dumps({"text": f"line number {number} of many"}) for number in range(60)]
    (corpus.folder / "broken.jsonl").write_bytes("\n".join(good).encode() + b'\n{"text": "b\xe4d"}\n')
    mixture = {"policy": "weighted", "children": [{"source": "jsonl:broken.jsonl:text"}]}
    server = start_server(corpus.mixture("broken", mixture=mixture, tokenizer="bytes"), corpus.mixture("beside"))
    with World(server.url("broken"), 2, 3) as world:
        world.join()
        errors, steps = [], []
        for rank in world.ranks:
            count = 0
            with pytest.raises(SourceError) as met:
                for _ in rank:
                    count += 1
            steps.append(count)
            errors.append(str(met.value))
            with pytest.raises(SourceError):  # and again: it is not an end of data
                next(iter(rank))
        assert errors[0] == errors[1]
        for part in ("broken.jsonl", "line 61", "UTF-8"):
            assert part in errors[0]
        assert steps[0] == steps[1] > 0
        length = sum(len(json.loads(line)["text"]) + 1 for line in good)
        assert steps[0] * 6 <= length // LENGTH
    assert "Traceback" not in server.log
    with World(server.url("beside")) as world:
        world.steps(3)


def test_the_samples_of_a_run_do_not_depend_on_what_was_refused_before(
    server: ServerProcess, state: dict[str, str], sequence: list[Sample]
) -> None:
    with World(server.url(RUN), state=state) as world:
        assert world.run().receipt.sequence(16) == sequence[16:]
