"""Strangers that connect and say nothing, to a server that may have only so many descriptors."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
import yaml
from support.corpora import id_rows, mixture, write_parquet
from support.waiting import wait_for
from tokenloom import RemoteDataset


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Of this process, whose ends of the connections count, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def limited_server(folder: Path, limit: int) -> Iterator[tuple[dict[str, str], int]]:
    """A server of 40 files, read again and again with little ahead, its addresses and its process id."""
    for number in range(40):
        write_parquet(folder / "data" / f"{number:02d}.parquet", id_rows(40, number, 40))
    document = mixture(
        mixture={
            "policy": "least_consumed",
            "children": [{"source": "parquet:data/*.parquet:ids", "epochs": 50}],
        },
        window_micro_steps=4,
    )
    (folder / "run.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    command = f"ulimit -n {limit}; exec {sys.executable} -m tokenloom_tools serve run.yaml --grpc 127.0.0.1:0 "
    command += "--rest 127.0.0.1:0 --ready-file ready.json"
    ready = folder / "ready.json"
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(["bash", "-c", command], cwd=folder, stdout=log, stderr=log)
    try:
        wait_for(ready.exists, "the server")
        yield json.loads(ready.read_text()), server.pid
    finally:
        server.terminate()
        server.wait(120)


@pytest.mark.parametrize(
    ("limit", "count"),
    [(1024, 1200), (4096, 4300)],
)
@pytest.mark.parametrize("port", ["rest", "grpc"])
def test_training_goes_on_beside_more_silent_connections_than_the_server_has_descriptors(
    tmp_path: Path, many_descriptors: None, port: str, limit: int, count: int
) -> None:
    with limited_server(tmp_path, limit) as (addresses, pid), ExitStack() as opened:
        host, _, number = addresses[port].rpartition(":")
        with RemoteDataset(f"grpc://{addresses['grpc']}/test", 2) as dataset:
            batches = iter(dataset)
            next(batches)
            for i in range(count):
                opened.enter_context(socket.create_connection((host, int(number)), timeout=120))
                if i % 20 == 0:
                    next(batches)
            for _ in range(200):
                next(batches)
        assert len(list(Path(f"/proc/{pid}/fd").iterdir())) < limit * 3 / 4
        assert "out of system resource" not in (tmp_path / "log").read_text(encoding="utf-8")
        # What is silent is let go, and whoever asks is answered again.
        wait_for(lambda: answers(addresses["rest"]), "an answer of REST")


def answers(address: str) -> bool:
    try:
        return httpx.get(f"http://{address}/readyz", trust_env=False, timeout=2).status_code == 200
    except httpx.TransportError:
        return False
