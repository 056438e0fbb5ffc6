"""A rank that stops reading: what the server holds stays below the formula of docs/limits.md, however long."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from conftest import StartServer
from support.server_process import ServerProcess
from support.trainer import World, with_connection
from support.waiting import wait_for
from tokenloom import RemoteDataset
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.dataloader_pb2_grpc import DataLoaderStub

LENGTH, SAMPLE_BYTES, SOURCES = 2048, 4096, 2
MIB = 2**20
#: 128 MiB for two ranks with batches of 8: large enough to stand out, and to see another copy of a rank's part of it.
WINDOW = 2048
#: How long the memory is looked at once it no longer grows, seconds.
LOOK_S = 2.0


def bound(window_micro_steps: int, world_size: int, batch_size: int) -> int:
    """Bytes beyond an idle server's: the formula of docs/limits.md, as it stands there."""
    message_steps = max(1, min(2 * MIB // (batch_size * SAMPLE_BYTES), 64))
    group_micro_steps = message_steps  # so few sources and ranks
    held = (
        (window_micro_steps + group_micro_steps)
        * world_size
        * batch_size
        * (4 * SAMPLE_BYTES // 3 + 320)
    )
    streams = world_size * (3 * message_steps * batch_size * SAMPLE_BYTES + MIB // 4)
    return held + streams + SOURCES * 4 * MIB + 16 * MIB


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources of ids without end."""
    folder = tmp_path_factory.mktemp("ids")
    draw = np.random.default_rng(7)
    for name in "ab":
        ids = draw.integers(0, 2**15, 8 * MIB, np.uint16)
        rows = pa.ListArray.from_arrays(np.arange(0, len(ids) + 1, 1024, dtype=np.int32), ids)
        pq.write_table(
            pa.table({"ids": rows}),
            folder / f"{name}.parquet",
            compression="none",
            use_dictionary=False,
        )
    return folder


def mixture(folder: Path, run: str, window_micro_steps: int) -> Path:
    children = [{"source": f"parquet:{name}.parquet:ids", "epochs": float("inf")} for name in "ab"]
    document = {
        "run": run,
        "vocab_size": 2**15,
        "end_of_text_id": 0,
        "sequence_length": LENGTH,
        "window_micro_steps": window_micro_steps,
        "mixture": {"policy": "least_consumed", "children": children},
    }
    path = folder / f"{run}.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


class Watched:
    """A server whose memory is looked at, from when it had served a first trainer."""

    def __init__(self, server: ServerProcess, warm_up: str) -> None:
        self._server = server
        with World(server.url(warm_up)) as world:
            world.steps(1)
        self.stats(warm_up)  # REST's packages
        assert server._process is not None
        self._process = psutil.Process(server._process.pid)
        self._idle = self._anonymous()

    def _anonymous(self) -> int:
        lines = (
            Path(f"/proc/{self._process.pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
        )
        return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) * 1024

    def stats(self, run: str) -> Any:
        return self._server.get(f"/v1/runs/{run}/stats")

    def fill(self, run: str) -> None:
        """Waits until the window is full."""
        wait_for(lambda: self.stats(run)["window_fill"] >= 1, "a full window")

    def growth(self) -> int:
        """The most that it took beyond the idle server, over some time."""
        most, until = 0, time.monotonic() + LOOK_S
        while time.monotonic() < until:
            most = max(most, self._anonymous() - self._idle)
            time.sleep(0.1)
        return most


@contextmanager
def reading(url: str, **slot: Any) -> Iterator[threading.Thread]:
    """A rank that takes what it gets, as fast as it can."""
    dataset = RemoteDataset(
        url, **with_connection({"connect_timeout_s": 300.0, "prefetch_steps": 64, **slot})
    )

    def read() -> None:
        try:
            for _ in dataset:
                pass
        except RuntimeError:  # closed, while it waited for the other one
            pass

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield thread
    finally:
        dataset.close()
        thread.join(240)


@contextmanager
def not_reading(
    server: ServerProcess, run: str, rank: int, credit_micro_steps: int, **slot: Any
) -> Iterator[None]:
    """A rank that joins, grants credit and never takes a message from its call."""
    # Connections of their own, and room for whatever the server would push.
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    over = threading.Event()
    with grpc.insecure_channel(server.grpc, options=options) as channel:
        stub, nonce = DataLoaderStub(channel), uuid.uuid4().hex
        joined = stub.Join(wire.JoinRequest(run=run, rank=rank, nonce=nonce, **slot), timeout=120)

        def requests() -> Iterator[wire.StreamRequest]:
            progress = wire.Progress(
                consumed_through=joined.start_index, credit_micro_steps=credit_micro_steps
            )
            opened = wire.StreamOpen(
                run=run,
                run_uid=joined.run_uid,
                generation=joined.generation,
                rank=rank,
                nonce=nonce,
                progress=progress,
            )
            yield wire.StreamRequest(open=opened)
            over.wait()

        call = stub.Stream(requests())
        try:
            yield
        finally:
            over.set()
            call.cancel()


def test_a_rank_that_never_reads_costs_no_more_than_the_formula_whatever_credit_it_asks_for(
    start_server: StartServer, folder: Path
) -> None:
    server = start_server(mixture(folder, "small", 2), mixture(folder, "big", WINDOW), options=())
    watched = Watched(server, "small")
    attempt = uuid.uuid4().hex
    with (
        reading(server.url("big"), batch_size=8, rank=0, world_size=2, attempt=attempt),
        not_reading(server, "big", 1, 2**32 - 1, batch_size=8, world_size=2, attempt=attempt),
    ):
        watched.fill("big")
        growth, found = watched.growth(), watched.stats("big")
    window = found["produced_index"] - found["sample_index"]
    assert WINDOW * 16 <= window <= (WINDOW + 64) * 16
    assert found["waiting_for"].startswith("rank 1 to go on from sample 0")
    # It holds the window indeed, and no copy of it.
    assert window * SAMPLE_BYTES <= growth <= bound(WINDOW, 2, 8), f"{growth / MIB:.1f} MiB"


def test_many_ranks_that_never_read_cost_no_more_than_the_formula(
    start_server: StartServer, folder: Path
) -> None:
    server = start_server(mixture(folder, "small", 2), mixture(folder, "wide", 16), options=())
    watched = Watched(server, "small")
    slot = {"batch_size": 16, "world_size": 24, "attempt": uuid.uuid4().hex}
    with ExitStack() as stack:
        for rank in range(24):
            stack.enter_context(not_reading(server, "wide", rank, 2**32 - 1, **slot))
        wait_for(
            lambda: watched.stats("wide")["produced_index"] >= 16 * 16 * 24,
            "what the window has room for",
        )
        growth = watched.growth()
    assert growth <= bound(16, 24, 16), f"{growth / MIB:.1f} MiB"
