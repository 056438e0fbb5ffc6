"""A connection to Ray is refused before any work where the cluster is not there, is another one, or has no room."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support.ray_cluster import STORE_BYTES, ray_cluster, ray_folder
from tokenloom_server.cluster.connection import Needs, connect
from tokenloom_server.errors import ConfigError

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_cluster({"num_cpus": 2}, {"resources": {"tokens": 2}}) as cluster:
        yield cluster


def refused(address: str, needs: Needs = Needs(), **expected: int) -> str:
    with pytest.raises(ConfigError) as caught, connect(address, needs, option="--ray", **expected):
        pass
    return str(caught.value)


def test_the_nodes_are_those_with_room_for_a_task(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = Needs(cpus=0.5, memory_mb=50, resources={"tokens": 1})
    with connect(cluster.address, needs, option="--ray", cpus=1, object_store_bytes=STORE_BYTES) as fitting:
        assert [(node.cpus, node.name) for node in fitting] == [(1, socket.gethostname())]
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    with connect("auto", Needs(), option="--ray") as both:
        assert sum(node.cpus for node in both) == 3


@pytest.mark.parametrize(
    ("needs", "expected", "said"),
    [
        (Needs(cpus=3), {}, "found 0 CPUs of nodes that have room.*expected 3 CPUs on one, and any in all"),
        (Needs(memory_mb=10**9), {}, "expected 1 CPU, 1000000000 MB of memory on one,"),
        (Needs(resources={"tokens": 3}), {}, "'tokens': 2.*; expected 1 CPU, 3 tokens on one,"),
        (
            Needs(),
            {"cpus": 4},
            "found 3 CPUs .*expected 1 CPU on one, and 4 in all: ask for less, or add",
        ),
        (Needs(cpus=2), {"cpus": 3}, "found 2 CPUs of nodes"),
        (Needs(), {"object_store_bytes": STORE_BYTES + 1}, "has 100,000,000 bytes; expected 100,000,001: start that"),
    ],
)
def test_too_little_of_anything_is_refused(cluster: Any, needs: Needs, expected: dict[str, int], said: str) -> None:
    assert re.search(f"^--ray \\S+: .*{said}", refused(cluster.address, needs, **expected))


@pytest.mark.parametrize(("key", "other"), [("ray_version", "2.40.0"), ("python_version", "3.10.1")])
def test_other_versions_are_refused(cluster: Any, key: str, other: str) -> None:
    from ray._raylet import GcsClient

    store = GcsClient(address=cluster.address)
    present = store.internal_kv_get(b"CLUSTER_METADATA", b"cluster")
    store.internal_kv_put(
        b"CLUSTER_METADATA", json.dumps(json.loads(present) | {key: other}).encode(), True, b"cluster"
    )
    try:
        said = refused(cluster.address)
    finally:
        store.internal_kv_put(b"CLUSTER_METADATA", present, True, b"cluster")
    assert other in said.partition("; expected a cluster of the same Ray and Python")[0]


def test_an_address_at_which_no_cluster_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{nobody.getsockname()[1]}"
        for address in (host, f"ray://{host}"):
            assert f"nothing answers at {address} (" in refused(address)
        monkeypatch.setenv("RAY_ADDRESS", host)
        assert re.match(rf"--ray auto: nothing answers at \S+:{nobody.getsockname()[1]} \(", refused("auto"))
    assert "expected auto, local, HOST:PORT or ray://HOST:PORT" in refused("here")


def test_without_ray_the_message_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from tokenloom_server.cluster.connection import Needs, connect\n"
        "with connect('auto', Needs(), option='--readers'): pass"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ConfigError: --readers auto: Ray is not installed here" in ended.stderr
    assert "pip install 'tokenloom[ray]'" in ended.stderr


def test_a_cluster_of_ones_own_has_the_cpus_asked_for_and_ends_with_the_block() -> None:
    code = (
        "from tokenloom_server.cluster.connection import Needs, connect\n"
        f"with connect('local', Needs(), option='--ray', cpus=3, object_store_bytes={STORE_BYTES}) as nodes:\n"
        "    print([node.cpus for node in nodes])\n"
        "import ray; print(ray.is_initialized())"
    )
    with ray_folder():
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[3.0]\nFalse\n", "")
