"""One server process: what it imports, and from when on it can be reached."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.memory_service import MemoryService
from support.served import over_grpc, runs_of
from support.server_process import ServerProcess
from support.trainer import World
from tokenloom_proto import dataloader_pb2 as wire
from tokenloom_proto.dataloader_pb2_grpc import DataLoaderStub
from tokenloom_server.api import grpc as grpc_service
from tokenloom_server.api.grpc import endpoint
from tokenloom_server.api.grpc.server import GrpcServer
from tokenloom_server.errors import ConfigError

#: No run of ids with a ledger in SQLite needs any of these.
UNUSED = {
    "torch",
    "pandas.core",
    "datasets",
    "fsspec",
    "huggingface_hub",
    "redis",
    "tokenizers",
    "gigatoken",
    "awkward",
    "rich",
    "pyarrow.dataset",
}
#: What REST needs comes when somebody asks, or behind the first batch.
LATER = {"fastapi", "starlette", "uvicorn", "prometheus_client"}
#: All that is imported before a server of ids with a ledger in SQLite is ready.
READY = (
    *("api.server", "api.service", "api.grpc.servicer", "ledger.sqlite"),
    *("sources.parquet", "sources.arrow", "sources.jsonl", "sources.txt"),
)


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    pq.write_table(pa.table({"ids": [[1, 2, 3, 4]] * 64}), tmp_path / "ids.parquet")
    document = {
        "run": "ids",
        "vocab_size": 8,
        "end_of_text_id": 0,
        "sequence_length": 4,
        "mixture": {
            "policy": "least_consumed",
            "children": [{"source": "parquet:ids.parquet:ids"}],
        },
    }
    path = tmp_path / "ids.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


@pytest.mark.parametrize("further", [{}, {"peek": True}, {"stream": "evaluated"}])
def test_a_client_two_minor_versions_away_is_refused_before_anything_is_opened(
    mixture: Path, monkeypatch: pytest.MonkeyPatch, further: dict[str, Any]
) -> None:
    monkeypatch.setattr("tokenloom_server.api.grpc.servicer.own_release", lambda: "0.5.0")
    join: dict[str, Any] = {
        "run": "ids",
        "world_size": 1,
        "batch_size": 1,
        "attempt": "a",
        "nonce": "n",
    }
    with (
        runs_of(mixture.parent, mixture) as runs,
        over_grpc(runs) as address,
        grpc.insecure_channel(address) as channel,
    ):
        stub = DataLoaderStub(channel)
        with pytest.raises(
            grpc.RpcError, match=r"client is Tokenloom 0\.3\.2, and this server 0\.5\.0"
        ):
            stub.Join(wire.JoinRequest(**join | further, release="0.3.2"), timeout=120)
        assert runs.get("ids").stats.read().generation == 0
        if not further:
            assert (
                stub.Join(wire.JoinRequest(**join, release="0.4.9"), timeout=120).release == "0.5.0"
            )
            assert runs.get("ids").stats.read().ranks[0].release == "0.4.9"


def test_a_server_gets_ready_without_what_its_first_batch_does_not_need() -> None:
    modules = ", ".join(f"tokenloom_server.{name}" for name in READY)
    code = (
        f"import json, sys, tokenloom_tools.cli, {modules}; print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert (UNUSED | LATER) & set(json.loads(done.stdout)) == set()


def test_a_server_at_work_imports_nothing_that_its_run_does_not_need(mixture: Path) -> None:
    server = ServerProcess(mixture.parent, mixture, options=("-X", "importtime")).start()
    try:
        with World(server.url("ids"), batch_size=2) as world:
            world.steps(3)
    finally:
        server.terminate()
    imported = set(re.findall(r"^import time:.*\| +(\S+)$", server.log, re.MULTILINE))

    assert "tokenloom_server.api.grpc.servicer" in imported, "the log is what it seems"
    assert UNUSED & imported == set()


def test_a_call_that_comes_before_the_runs_waits_for_them(tmp_path: Path) -> None:
    server = GrpcServer("127.0.0.1:0")
    with grpc.insecure_channel(server.address) as channel:
        call = health_pb2_grpc.HealthStub(channel).Check.future(
            health_pb2.HealthCheckRequest(), timeout=120
        )
        with pytest.raises(ConfigError, match="in use"):
            GrpcServer(server.address)
        assert not call.done()
        with runs_of(tmp_path) as runs:
            server.start(runs)
            assert call.result().status == health_pb2.HealthCheckResponse.SERVING
            server.stop(0.1)


def test_the_runs_that_rest_is_tested_with_have_the_owners_of_real_ones(
    mixture: Path, tmp_path: Path
) -> None:
    with runs_of(tmp_path, mixture) as runs:
        for name, owner in vars(MemoryService().get("any")).items():
            for method in vars(owner) if isinstance(owner, SimpleNamespace) else ():
                assert hasattr(getattr(runs.get("ids"), name), method), f"{name}.{method}"


def test_a_stream_that_is_opened_and_never_begun_is_ended(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "OPEN_TIMEOUT_S", 0.2)
    silent = threading.Event()
    with runs_of(tmp_path, mixture) as runs, over_grpc(runs) as address:
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as ended:
            next(DataLoaderStub(channel).Stream(iter(silent.wait, None), timeout=120))
        assert ended.value.code() is grpc.StatusCode.CANCELLED
        silent.set()


def test_a_peer_that_gives_no_sign_of_life_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_service.server, "KEEPALIVE_S", 1)
    with runs_of(tmp_path) as runs, over_grpc(runs) as address:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=120) as peer:
            # The preface of HTTP/2 and empty settings; the server's pings are never answered.
            peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
            while peer.recv(4096):
                pass
