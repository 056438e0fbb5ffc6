"""What a trainer gets wrong: the join is refused, names what differs, and changes nothing."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from conftest import LENGTH, Corpus, Rpc, StartServer
from support.server_process import ServerProcess
from support.trainer import Sample, World, with_connection
from tokenloom import (
    AttemptUsed,
    JoinRefused,
    NotFound,
    RemoteDataset,
    ResumePointNeeded,
    ServerUnavailable,
    SnapshotInvalid,
    SourceError,
    TokenloomError,
)
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.seal import seal, unseal

RUN, OTHER = "strict", "other"


@pytest.fixture(scope="module")
def server(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Serves a run that has progress, and one without."""
    mixtures = [corpus.mixture(RUN), corpus.mixture(OTHER, seed=8, window_steps=4)]
    server = ServerProcess(tmp_path_factory.mktemp("strict"), *mixtures).start()
    yield server
    server.kill()


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


def test_a_snapshot_id_that_is_not_known_names_the_newest(server: ServerProcess, state: dict[str, str]) -> None:
    with pytest.raises(NotFound, match=r"resume='8-abc': .* no snapshot of that id"):
        join(server.url(RUN), resume="8-abc")


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"run": "another"}, ("run is 'another'", "this run's is 'strict'", "load it into that run")),
        ({"seed": 1}, ("seed is 1", "this run's is 7", "restore the seed")),
        ({"order_version": 99}, ("order_version is 99", "release that wrote it")),
        ({"version": 99}, ("format version 99", "this server reads 1", "release that wrote it")),
        ({"format": "other/format"}, ("format is 'other/format'", "tokenloom/snapshot")),
        ({"config_digest": "0" * 64}, ("config_digest", "restore the mixture file")),
        ({"manifest_digest": "0" * 64}, ("manifest_digest", "restore the data files")),
        ({"digest": "1" * 32}, ("gives digest", "1" * 32, "other data")),
        ({"total_tokens": 1}, ("total_tokens is 1", "16 samples of 16 tokens have 256")),
        ({"sample_index": 10**9, "total_tokens": 16 * 10**9}, ("the data end at sample",)),
        ({"sample_index": -1}, ("sample_index", "-1")),
        ({"run_uid": "f" * 32}, ("run_uid", "f" * 32, "progress of its own", "another run name")),
        ({"resume_state": None}, ("resume_state is missing",)),
    ],
)
def test_a_state_of_something_else_is_refused_with_both_values(
    server: ServerProcess, state: dict[str, str], fields: dict[str, Any], parts: tuple[str, ...]
) -> None:
    with pytest.raises(SnapshotInvalid) as refused:
        join(server.url(RUN), state=changed(state, **fields))
    for part in parts:
        assert part in str(refused.value)


def test_a_state_of_another_tokeniser_engine_is_refused_with_both(server: ServerProcess, state: dict[str, str]) -> None:
    tokenizer = json.loads(state["tokenloom"])["tokenizer"]
    assert tokenizer["engine"] == "gigatoken"
    with pytest.raises(SnapshotInvalid, match=r"tokenizer is .*'tokenizers'.* this run's is .*'gigatoken'.*: restore"):
        join(server.url(RUN), state=changed(state, tokenizer=tokenizer | {"engine": "tokenizers"}))


def test_a_state_of_another_run_of_this_server_is_refused(server: ServerProcess, state: dict[str, str]) -> None:
    with pytest.raises(SnapshotInvalid, match="run is 'strict', this run's is 'other'"):
        join(server.url(OTHER), state=state)


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


def test_ranks_that_disagree_are_refused_with_both_values(server: ServerProcess, state: dict[str, str]) -> None:
    attempt = uuid.uuid4().hex
    join(server.url(RUN), rank=0, world_size=3, attempt=attempt, state=state)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"world_size": 4, "state": state}, "rank 1 has world size 4, but rank 0 .* opened it with 3"),
        ({"world_size": 3, "state": state, "batch_size": 5}, "rank 1 has batch size 5, but rank 0 .* with 2"),
        ({"world_size": 3}, "rank 1 resumes from no state, but rank 0 .* from a loaded state at sample 16"),
        ({"world_size": 3, "resume": "latest"}, "rank 1 resumes from resume='latest', but rank 0 .* at sample 16"),
    ]
    for options, message in cases:
        with pytest.raises(JoinRefused, match=message):
            join(server.url(RUN), rank=1, attempt=attempt, **options)
    join(server.url(RUN), rank=1, world_size=3, attempt=attempt, state=state)


def test_an_attempt_is_used_once(server: ServerProcess, state: dict[str, str]) -> None:
    attempt = uuid.uuid4().hex
    join(server.url(RUN), rank=0, world_size=2, attempt=attempt, state=state)
    with pytest.raises(AttemptUsed, match=r"rank 0 .* another client process.* new attempt id"):
        join(server.url(RUN), rank=0, world_size=2, attempt=attempt, state=state)
    join(server.url(RUN), state=state)
    for rank in range(2):
        with pytest.raises(AttemptUsed, match=attempt):
            join(server.url(RUN), rank=rank, world_size=2, attempt=attempt, state=state)


def test_ranks_that_wait_hear_why_rank_0_was_refused_and_may_try_again(
    server: ServerProcess, state: dict[str, str]
) -> None:
    attempt = uuid.uuid4().hex
    heard: list[TokenloomError] = []

    def wait() -> None:
        try:
            join(server.url(RUN), rank=1, world_size=2, attempt=attempt)
        except TokenloomError as error:
            heard.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    with pytest.raises(ResumePointNeeded):
        join(server.url(RUN), rank=0, world_size=2, attempt=attempt)
    waiting.join(20)
    assert [type(error) for error in heard] == [ResumePointNeeded]
    # The id opened nothing, so it is still good.
    with World(server.url(RUN), 2, 2, attempt=attempt, state=state) as world:
        assert world.steps(1).sample_index == 20


def test_a_rank_beyond_its_world_is_refused_by_client_and_server(
    server: ServerProcess, rpc: Callable[[ServerProcess], Rpc]
) -> None:
    with pytest.raises(ValueError, match="rank 2 is not below world_size 2"):
        RemoteDataset(server.url(OTHER), 1, rank=2, world_size=2, attempt="a")
    request = wire.JoinRequest(run=OTHER, rank=2, world_size=2, batch_size=1, attempt="a", nonce="n")
    assert refusal(lambda: rpc(server).stub.Join(request, timeout=20)) == (
        "JoinRefused",
        "rank 2 is not below the world size 2",
    )


def test_several_ranks_without_a_shared_attempt_are_refused_with_the_three_ways(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError) as refused:
        RemoteDataset(server.url(OTHER), 1)
    for part in ("rank 1 of 2", "init_process_group", "SLURM", "attempt="):
        assert part in str(refused.value)


def test_a_snapshot_beyond_the_horizon_names_it_and_one_within_does_not_wait(
    server: ServerProcess, rpc: Callable[[ServerProcess], Rpc]
) -> None:
    calls = rpc(server)
    name, message = refusal(lambda: calls.snapshot(OTHER, 1))
    assert name == "BeyondHorizon"
    assert "no trainer has joined" in message
    with World(server.url(OTHER), 2, 2, prefetch_steps=1) as world:
        world.steps(2)
    committed = json.loads(calls.snapshot(OTHER))["sample_index"]
    assert committed == 8
    horizon = committed + 4 * 4
    assert json.loads(calls.snapshot(OTHER, horizon))["sample_index"] == horizon
    for index in (horizon + 1, 10**15):
        name, message = refusal(lambda: calls.snapshot(OTHER, index))  # noqa: B023
        assert name == "BeyondHorizon"
        assert f"sample {index} is beyond the horizon {horizon}" in message
        assert "8 is committed" in message
    assert refusal(lambda: calls.snapshot(OTHER, -2))[0] == "ConfigError"


def test_a_server_that_is_not_there_is_named(server: ServerProcess) -> None:
    with pytest.raises(ServerUnavailable, match=r"127\.0\.0\.1:1"):
        join("grpc://127.0.0.1:1/nobody", connect_timeout_s=0.5)


@pytest.mark.parametrize("fault", ["malformed JSON", "UTF-8"])
def test_a_bad_line_met_while_serving_reaches_every_rank_at_one_step_with_file_and_line(
    corpus: Corpus, start_server: StartServer, fault: str
) -> None:
    good = [json.dumps({"text": f"line number {number} of many"}) for number in range(60)]
    name = f"broken-{len(fault)}"
    bad = b'{"text": "no end}' if fault == "malformed JSON" else b'{"text": "b\xe4d"}'
    (corpus.folder / f"{name}.jsonl").write_bytes("\n".join(good).encode() + b"\n" + bad + b"\n")
    mixture = corpus.mixture(
        name, mixture={"policy": "weighted", "children": [{"source": f"jsonl:{name}.jsonl:text"}]}, tokenizer="bytes"
    )
    server = start_server(mixture)
    with World(server.url(name), 2, 3) as world:
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
        for part in (f"{name}.jsonl", "line 61", fault):
            assert part in errors[0]
        assert steps[0] == steps[1] > 0
        length = sum(len(json.loads(line)["text"]) + 1 for line in good)
        assert steps[0] * 6 <= length // LENGTH
    assert "Traceback" not in server.log


def test_the_samples_of_a_run_do_not_depend_on_what_was_refused_before(
    server: ServerProcess, state: dict[str, str], sequence: list[Sample]
) -> None:
    with World(server.url(RUN), state=state) as world:
        assert world.run().receipt.sequence(16) == sequence[16:]
