"""The streams of many ranks, which one thread serves: what ranks get, and how their streams end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from support.served import PATIENCE_S, Sample, over_grpc, runs_of, sequence
from support.waiting import wait_for
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.dataloader_pb2_grpc import DataLoaderStub
from tokenloom_server.api.grpc import detached_call, rank_streams
from tokenloom_server.api.grpc.detached_call import DetachedCall
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.errors import StorageError

WORLD, BATCH = 3, 2


@pytest.fixture
def served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[ServedRun, DataLoaderStub]]:
    """A run of 126 samples, its server, and a way to it."""
    monkeypatch.setattr(rank_streams, "FEWEST_RANKS", WORLD)
    pq.write_table(
        pa.table({"ids": [[n % 7 + 1, n // 7 + 1, 3] for n in range(126)]}),
        tmp_path / "ids.parquet",
    )
    document = {
        "run": "ids",
        "vocab_size": 32,
        "end_of_text_id": 0,
        "sequence_length": 4,
        "mixture": {
            "policy": "least_consumed",
            "children": [{"source": "parquet:ids.parquet:ids"}],
        },
    }
    path = tmp_path / "ids.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    with (
        runs_of(tmp_path, path) as runs,
        over_grpc(runs) as address,
        grpc.insecure_channel(address) as channel,
    ):
        yield runs.get("ids"), DataLoaderStub(channel)


class Rank:
    """A rank that joined, and its stream."""

    def __init__(self, stub: DataLoaderStub, rank: int) -> None:
        self.stub, self.rank, self.nonce = stub, rank, f"nonce-{rank}"
        self.joined = stub.Join(
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


def test_one_thread_serves_the_order_to_its_end_and_all_of_it_is_committed(
    served: tuple[ServedRun, DataLoaderStub],
) -> None:
    run, stub = served
    before = {thread.name for thread in threading.enumerate()}
    ranks = launch(stub)
    for rank in ranks:
        rank.take()
    names = {thread.name for thread in threading.enumerate()} - before
    assert {name for name in names if "ids" in name and "files" not in name} == {"ids-streams"}
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
    monkeypatch.setattr(rank_streams, "HEARTBEAT_S", 0.02)
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


def test_of_a_ranks_streams_that_nobody_reads_two_stay(
    served: tuple[ServedRun, DataLoaderStub],
) -> None:
    run, _ = served
    coordinator = run.coordinator
    streams = rank_streams.RankStreams(coordinator)
    joined = launch(served[1])[0].joined
    calls: list[UnreadCall] = []
    for number in range(5):
        session = coordinator.sessions.attach(joined.run_uid, joined.generation, 0, "nonce-0", 0, 0)
        progress = wire.Progress(credit_micro_steps=4)
        call = UnreadCall()
        streams.add(
            session, wire.StreamOpen(progress=progress), lambda: None, cast("DetachedCall", call)
        )
        calls.append(call)
        wait_for(lambda: calls[-1].sends == 1, "what is sent")
        assert [each.cancelled for each in calls] == [
            place < number - 1 for place in range(number + 1)
        ]
    assert states(run)[0] == "connected"
    streams.stop()
    wait_for(lambda: states(run)[0] == "away", "these states")


class UnreadCall:
    """A call whose client takes nothing of what is sent."""

    def __init__(self) -> None:
        self.context, self.sends, self.cancelled = self, 0, False

    def is_active(self) -> bool:
        return not self.cancelled

    def cancel(self) -> None:
        self.cancelled = True

    def receive(self, received: Callable[[Any], None]) -> bool:
        return True

    def send(self, data: bytes, sent: Callable[[], None]) -> bool:
        self.sends += 1
        return True


def test_a_stream_that_is_cancelled_as_it_begins_leaves_its_rank_away(
    served: tuple[ServedRun, DataLoaderStub], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, stub = served
    ranks = launch(stub)
    ranks[0].take()
    attached = threading.Event()

    def begun_late(context: Any, *arguments: Any) -> DetachedCall:
        attached.set()
        wait_for(lambda: not context.is_active(), "the cancellation")
        return DetachedCall(context, *arguments)

    monkeypatch.setattr(detached_call, "DetachedCall", begun_late)
    ranks[0].connect()
    assert attached.wait(PATIENCE_S)
    ranks[0].call.cancel()
    wait_for(lambda: states(run)[0] == "away", "these states")


@pytest.fixture
def other_grpcio(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A release of grpcio whose private parts take other arguments."""
    monkeypatch.setitem(detached_call._CALLED, "_send_message", 3)
    detached_call.is_supported.cache_clear()
    yield
    monkeypatch.undo()
    detached_call.is_supported.cache_clear()


def test_with_a_grpcio_that_is_not_known_each_stream_has_its_threads_and_the_log_says_so(
    other_grpcio: None, caplog: pytest.LogCaptureFixture, served: tuple[ServedRun, DataLoaderStub]
) -> None:
    said = [record.getMessage() for record in caplog.get_records("setup")]
    assert any(
        f"grpcio {grpc.__version__} is not one that this release was made for" in line
        for line in said
    )
    _, stub = served
    before = set(threading.enumerate())
    ranks = launch(stub)
    in_turn(ranks, Rank.take_all)
    assert "ids-streams" not in {thread.name for thread in {*threading.enumerate()} - before}
    assert sorted({**ranks[0].samples, **ranks[1].samples, **ranks[2].samples}) == [*range(126)]
