"""Bytes that are no message, and calls that ask for much and go away."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import grpc
import pytest
import yaml
from support.corpora import id_rows, mixture, write_parquet
from support.served import over_grpc, runs_of
from support.waiting import wait_for
from tokenloom import RemoteDataset
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.dataloader_pb2_grpc import DataLoaderStub
from tokenloom_proto.seal import seal, unseal
from tokenloom_server.api.grpc import endpoint
from tokenloom_server.api.rest.server import RestServer
from tokenloom_server.api.service import Runs
from tokenloom_server.order import replay, timeline
from tokenloom_server.order.pipeline import Pipeline
from tokenloom_server.order.replay import Replay

#: A field of each wire type that breaks off, one that no message has, text that is not UTF-8, a length beyond the end.
MALFORMED = [
    b"\x0a\xff",
    b"\xff" * 9,
    b"\x0a\x02\xc3\x28",
    b"\x0a\x7fx",
    b"\x08",
    b"\x0d\x00",
    b"\x09\x00",
    b"\x0f",
]
#: A position that is cheap to write down, and takes for ever to reach.
FAR = 10**8
RUN = "test"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with runs_of(tmp_path_factory.mktemp("hostile")) as runs, over_grpc(runs) as address:
        yield address


def random_bytes() -> list[bytes]:
    draw = random.Random(15)
    return [draw.randbytes(draw.randrange(1, 200)) for _ in range(40)]


@pytest.mark.parametrize("method", endpoint.rpcs())
def test_malformed_messages_are_invalid_arguments_and_leave_no_trace_in_the_log(
    address: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    with grpc.insecure_channel(address) as channel:
        for data in MALFORMED:
            with pytest.raises(grpc.RpcError) as caught:
                # As streams, every kind of method can be called.
                next(channel.stream_stream(method)(iter([data]), timeout=120))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, data
            assert "is not what its method takes" in (caught.value.details() or "")
        for data in random_bytes():
            call = channel.stream_stream(method)(iter([data]), timeout=120)
            with contextlib.suppress(StopIteration, grpc.RpcError):
                next(call)
            call.cancel()
            assert call.code() not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN), data
    assert [
        record for record in caplog.records if record.exc_info or record.levelno >= logging.WARNING
    ] == []


def test_a_malformed_message_in_the_middle_of_a_stream_ends_it(
    trained: Trained, caplog: pytest.LogCaptureFixture
) -> None:
    opened = wire.StreamOpen(
        run=RUN, run_uid=trained.runs.get(RUN).coordinator.uid, peek=True, batch_size=2
    )
    first = wire.StreamRequest(open=opened).SerializeToString()
    with grpc.insecure_channel(trained.address) as channel, pytest.raises(grpc.RpcError) as caught:
        for _ in channel.stream_stream("/tokenloom.v2.DataLoader/Stream")(
            iter([first, b"\xff"]), timeout=120
        ):
            pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not [record for record in caplog.records if record.exc_info]


class Trained(NamedTuple):
    """A run with a trainer, and a state of it that was forged: by it, the trainer went very far."""

    runs: Runs
    address: str
    batches: Iterator[Any]
    forged: str


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Trained]:
    write_parquet(tmp_path / "rows.parquet", id_rows(400, 1, 40))
    child = {"source": "parquet:rows.parquet:ids", "epochs": 10**7}
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump(mixture(run=RUN, mixture={"policy": "least_consumed", "children": [child]})),
        encoding="utf-8",
    )
    with (
        runs_of(tmp_path, tmp_path / "run.yaml") as runs,
        over_grpc(runs) as address,
        RemoteDataset(f"grpc://{address}/{RUN}", 2) as dataset,
    ):
        batches = iter(dataset)
        for _ in range(20):
            next(batches)
        state = unseal(dataset.state_dict()["tokenloom"])
        index, tokens = state["sample_index"], state["total_tokens"]
        far = {"sample_index": index + FAR, "total_tokens": tokens + FAR * tokens // index}
        yield Trained(runs, address, batches, seal(state | far))


def requests(trained: Trained) -> list[Any]:
    """Each way to have a server go forward over gRPC."""
    state = trained.forged.encode()
    join = {"run": RUN, "world_size": 1, "batch_size": 1, "state_json": state}
    return [
        wire.RestoreRequest(run=RUN, snapshot_json=trained.forged),
        wire.JoinRequest(**join, peek=True),
        wire.JoinRequest(**join, takeover=True, attempt="b", nonce="n"),
    ]


def ask(trained: Trained, request: Any, turns: list[float]) -> None:
    """A call that is given up once it is at work."""
    with grpc.insecure_channel(trained.address) as channel:
        stub = DataLoaderStub(channel)
        call = (stub.Restore if isinstance(request, wire.RestoreRequest) else stub.Join).future(
            request, timeout=60
        )
        wait_for(lambda: len(turns) > 3 or call.done(), "work")
        assert call.cancel(), call.exception()


def test_work_that_nobody_waits_for_any_more_ends(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = count_turns(monkeypatch)
    for request in requests(trained):
        turns.clear()
        ask(trained, request, turns)
        wait_until_idle(turns)
    for _ in range(20):
        next(trained.batches)
    assert trained.runs.get(RUN).restores.restore(sample_index=10).sample_index == 10


def test_passing_over_samples_ends_with_the_call_that_asked_for_it(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    advances = count_turns(monkeypatch, timeline, Pipeline, "advance")
    ask(trained, wire.RestoreRequest(run=RUN, sample_index=10, skip_tokens=2**33), advances)
    wait_until_idle(advances)


def test_eight_at_once_end_as_one_does(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = count_turns(monkeypatch)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, trained, request, turns) for request in requests(trained)[:2] * 4]
        for _ in range(20):
            next(trained.batches)
    for each in asked:
        each.result()
    wait_until_idle(turns)


def test_work_ends_when_a_connection_to_rest_is_gone(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = count_turns(monkeypatch)
    rest = RestServer("127.0.0.1", 0)
    rest.start(trained.runs)
    host, _, port = rest.address.rpartition(":")
    body = json.dumps({"snapshot": trained.forged})
    head = f"POST /v1/runs/{RUN}/restore HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        wait_for(lambda: len(turns) > 3, "work", 60)
    wait_until_idle(turns)
    assert rest.stop(), "no request goes on"


def count_turns(
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType = replay,
    owner: type = Replay,
    method: str = "turn",
) -> list[float]:
    """When somebody went a little forward, which they now do in many small turns."""
    turns: list[float] = []
    turn = getattr(owner, method)

    def counted(going: object, index: int) -> None:
        turns.append(time.monotonic())
        turn(going, index)

    monkeypatch.setattr(module, "TURN_TOKENS", 2**10)
    monkeypatch.setattr(owner, method, counted)
    return turns


def wait_until_idle(turns: list[float]) -> None:
    wait_for(lambda: time.monotonic() - turns[-1] > 0.5, "the end of the work")
