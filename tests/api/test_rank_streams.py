"""The streams of ranks, which one loop serves: what ranks get, and how their streams end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from support.served import PATIENCE_S, Sample, over_grpc, runs_of, sequence
from support.waiting import wait_for
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.dataloader_pb2_grpc import DataLoaderStub
from tokenloom_server.api.grpc import stream
from tokenloom_server.api.grpc.rpc import Call
from tokenloom_server.api.grpc.servicer import DataLoader
from tokenloom_server.api.grpc.stream import ClientStream
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.errors import StorageError

WORLD, BATCH = 3, 2


@contextmanager
def serving(folder: Path, sequence_length: int) -> Iterator[tuple[ServedRun, str]]:
    """A run of the ids of a folder, and its address."""
    document = {
        "run": "ids",
        "vocab_size": 32,
        "end_of_text_id": 0,
        "sequence_length": sequence_length,
        "mixture": {
            "policy": "least_consumed",
            "children": [{"source": "parquet:ids.parquet:ids"}],
        },
    }
    path = folder / "ids.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    with runs_of(folder, path) as runs, over_grpc(runs) as address:
        yield runs.get("ids"), address


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[ServedRun, DataLoaderStub]]:
    """A run of 126 samples, its server, and a way to it."""
    pq.write_table(
        pa.table({"ids": [[n % 7 + 1, n // 7 + 1, 3] for n in range(126)]}),
        tmp_path / "ids.parquet",
    )
    with serving(tmp_path, 4) as (run, address), grpc.insecure_channel(address) as channel:
        yield run, DataLoaderStub(channel)


class Rank:
    """A rank that joined, and its stream."""

    def __init__(
        self, stub: DataLoaderStub, rank: int, joined: wire.JoinResponse | None = None
    ) -> None:
        self.stub, self.rank, self.nonce = stub, rank, f"nonce-{rank}"
        self.joined = joined or stub.Join(
            wire.JoinRequest(
                run="ids",
                rank=rank,
                world_size=WORLD,
                batch_size=BATCH,
                attempt="a",
                nonce=self.nonce,
            ),
            timeout=PATIENCE_S,
        )
        self.through = self.joined.start_index
        self.samples: dict[int, Sample] = {}
        self.connect()

    def connect(self) -> None:
        self.requests: queue.SimpleQueue[wire.StreamRequest | None] = queue.SimpleQueue()
        progress = wire.Progress(consumed_through=self.through, credit_micro_steps=4)
        opened = wire.StreamOpen(
            run="ids",
            run_uid=self.joined.run_uid,
            generation=self.joined.generation,
            rank=self.rank,
            nonce=self.nonce,
            received_through=self.through,
            progress=progress,
        )
        self.requests.put(wire.StreamRequest(open=opened))
        self.call: Any = self.stub.Stream(iter(self.requests.get, None), timeout=60)

    def take(self) -> wire.StreamResponse:
        """The next message; says that it is used up."""
        message = next(self.call)
        begin = message.batches.begin_index
        for number, step in enumerate(message.batches.micro_steps):
            for place in range(BATCH):
                at = number * BATCH + place
                if message.batches.source_ids[at] >= 0:
                    ids = message.batches.ids[at * 4 : at * 4 + 4]
                    self.samples[begin + step.slice * BATCH + place] = Sample(
                        message.batches.source_ids[at], ids
                    )
            begin = self.through = step.end_index
        if message.HasField("batches"):
            progress = wire.Progress(consumed_through=self.through, credit_micro_steps=4)
            self.requests.put(wire.StreamRequest(progress=progress))
        return message

    def take_all(self) -> None:
        while not self.take().HasField("end_of_data"):
            pass
        self.requests.put(None)
        assert all(message.HasField("heartbeat") for message in self.call)


def launch(stub: DataLoaderStub) -> list[Rank]:
    return [Rank(stub, rank) for rank in range(WORLD)]


def in_turn(ranks: list[Rank], what: Callable[[Rank], object]) -> None:
    threads = [threading.Thread(target=what, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def states(served: ServedRun) -> list[str]:
    return [rank.state for rank in served.coordinator.view().generation.ranks]


def error_of(call: Any) -> str:
    with pytest.raises(grpc.RpcError) as ended:
        for _ in call:
            pass
    return str(dict(ended.value.trailing_metadata())["tokenloom-error"])


def test_no_thread_of_a_rank_serves_the_order_to_its_end_and_all_of_it_is_committed(
    served: tuple[ServedRun, DataLoaderStub],
) -> None:
    run, stub = served
    before = {thread.name for thread in threading.enumerate()}
    ranks = launch(stub)
    for rank in ranks:
        rank.take()
    names = {thread.name for thread in threading.enumerate()} - before
    assert {name for name in names if "ids" in name and "files" not in name} == set()
    in_turn(ranks, Rank.take_all)
    got = ranks[0].samples | ranks[1].samples | ranks[2].samples
    expected = sequence(run)
    assert sum(len(rank.samples) for rank in ranks) == len(got)
    assert got == dict(enumerate(expected[: len(got)]))
    assert len(expected) - len(got) < WORLD * BATCH
    assert run.coordinator.committed_through == len(got)
    assert states(run) == ["finished"] * WORLD


def test_a_newer_stream_of_a_rank_takes_the_olders_place(
    served: tuple[ServedRun, DataLoaderStub],
) -> None:
    _, stub = served
    ranks = launch(stub)
    older = ranks[1].call
    ranks[1].take()
    ranks[1].connect()
    assert error_of(older) == "Fenced"
    in_turn(ranks, Rank.take_all)
    assert sorted({**ranks[0].samples, **ranks[1].samples, **ranks[2].samples}) == [*range(126)]


def test_a_client_that_breaks_the_protocol_or_its_call_loses_its_stream_alone(
    served: tuple[ServedRun, DataLoaderStub],
) -> None:
    run, stub = served
    ranks = launch(stub)
    for rank in ranks:
        rank.take()
    wait_for(lambda: states(run) == ["connected"] * 3, "these states")
    ranks[0].requests.put(wire.StreamRequest(open=wire.StreamOpen(run="ids")))
    assert error_of(ranks[0].call) == "JoinRefused"
    ranks[1].requests.put(wire.StreamRequest(progress=wire.Progress(consumed_through=10**6)))
    assert error_of(ranks[1].call) == "JoinRefused"
    ranks[2].call.cancel()
    wait_for(lambda: states(run) == ["away"] * 3, "these states")
    for rank in ranks:
        rank.connect()
    in_turn(ranks, Rank.take_all)


def test_a_stream_that_has_nothing_to_send_says_for_what_it_waits(
    served: tuple[ServedRun, DataLoaderStub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "HEARTBEAT_S", 0.02)
    _, stub = served
    rank = Rank(stub, 0)
    for _ in range(2):
        while not (message := rank.take()).HasField("heartbeat"):
            pass
        assert message.server_epoch == rank.joined.server_epoch


def test_a_server_that_stops_says_so(served: tuple[ServedRun, DataLoaderStub]) -> None:
    run, stub = served
    ranks = launch(stub)
    for rank in ranks:
        rank.take()
    run.coordinator.stop(1.0)
    assert {error_of(rank.call) for rank in ranks} == {"ServerStopping"}


def test_an_error_that_no_utf_8_holds_ends_streams_as_any_other(
    served: tuple[ServedRun, DataLoaderStub], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, stub = served
    ranks = launch(stub)

    def next_now(*_: object) -> None:
        raise StorageError("'\udcff.parquet' is gone")

    monkeypatch.setattr(run.coordinator.sessions, "next_now", next_now)
    for rank in ranks:
        rank.connect()
        assert error_of(rank.call) == "StorageError"
        assert rank.call.details() == "'\\udcff.parquet' is gone"


def test_a_call_that_broke_is_no_goodbye(served: tuple[ServedRun, DataLoaderStub]) -> None:
    run, stub = served
    rank = launch(stub)[0]
    for _ in range(60):
        rank.take()
        rank.call.cancel()
        wait_for(lambda: states(run)[0] != "connected", "these states")
        assert states(run)[0] == "away"
        rank.through = rank.joined.start_index
        rank.connect()


def test_of_a_ranks_streams_that_nobody_reads_two_stay(tmp_path: Path) -> None:
    # More than what the client's side takes unread.
    ids = pa.ListArray.from_arrays(
        np.arange(0, 2**25 + 1, 2**20, np.int32), np.ones(2**25, np.uint8)
    )
    pq.write_table(pa.table({"ids": ids}), tmp_path / "ids.parquet")
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
    with ExitStack() as until_end:
        run, address = until_end.enter_context(serving(tmp_path, 2**20))
        calls: list[Any] = []
        joined = None
        for _ in range(6):
            channel = until_end.enter_context(grpc.insecure_channel(address, options=options))
            rank = Rank(DataLoaderStub(channel), 0, joined)
            if joined is None:
                joined = rank.joined
                while not next(rank.call).HasField("batches"):
                    pass
                continue  # from now on there is something for each stream at once
            rank.call.initial_metadata()  # which comes as the first message is sent
            calls.append(rank.call)
            if len(calls) > 2:
                wait_for(calls[-3].done, "the end of the third newest")
        assert [call.done() for call in calls] == [True, True, True, False, False]
        assert states(run)[0] == "connected"


def test_a_stream_that_is_cancelled_as_it_begins_leaves_its_rank_away(
    served: tuple[ServedRun, DataLoaderStub], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, stub = served
    ranks = launch(stub)
    ranks[0].take()
    attached, opened = threading.Event(), DataLoader.open

    def opened_late(self: DataLoader, data: bytes, call: Call) -> ClientStream:
        began = opened(self, data, call)
        attached.set()
        wait_for(lambda: not call.active, "the cancellation")
        return began

    monkeypatch.setattr(DataLoader, "open", opened_late)
    ranks[0].connect()
    assert attached.wait(PATIENCE_S)
    ranks[0].call.cancel()
    wait_for(lambda: states(run)[0] == "away", "these states")
