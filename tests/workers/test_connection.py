"""A connection to Ray is refused before any work where the cluster is not there, is another one, or has no room."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from subprocess import PIPE

import pytest
from support.ray_cluster import STORE_BYTES, ray_cluster, ray_folder
from tokenloom_server.errors import ConfigError
from tokenloom_server.workers.cluster.connection import Needs, connect

#: Of a cluster of two nodes, with 2 CPUs and with 1 and two "tokens".
TOO_MUCH: tuple[tuple[Needs, dict[str, int], str], ...] = (
    (
        Needs(cpus=3),
        {},
        "found 0 CPUs of nodes that have room.*expected 3 CPUs on one, and any in all",
    ),
    (Needs(memory_mb=10**9), {}, "expected 1 CPU, 1000000000 MB of memory on one,"),
    (Needs(resources={"tokens": 3}), {}, "'tokens': 2.*; expected 1 CPU, 3 tokens on one,"),
    (
        Needs(),
        {"cpus": 4},
        "found 3 CPUs .*expected 1 CPU on one, and 4 in all: ask for less, or add",
    ),
    (Needs(cpus=2), {"cpus": 3}, "found 2 CPUs of nodes"),
    (
        Needs(),
        {"object_store_bytes": STORE_BYTES + 1},
        "has 100,000,000 bytes; expected 100,000,001: start that",
    ),
)


def refused(address: str, needs: Needs = Needs(), **expected: int) -> str:
    with pytest.raises(ConfigError) as caught, connect(address, needs, option="--ray", **expected):
        pass
    return str(caught.value)


def test_a_cluster_gives_the_nodes_with_room_for_a_task_and_is_refused_without_or_with_other_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs = Needs(cpus=0.5, memory_mb=50, resources={"tokens": 1})
    with ray_cluster({"num_cpus": 2}, {"resources": {"tokens": 2}}) as cluster:
        with connect(
            cluster.address, needs, option="--ray", cpus=1, object_store_bytes=STORE_BYTES
        ) as fitting:
            assert [(node.cpus, node.name) for node in fitting] == [(1, socket.gethostname())]
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        with connect("auto", Needs(), option="--ray") as both:
            assert sum(node.cpus for node in both) == 3
        for needs, expected, said in TOO_MUCH:
            assert re.search(f"^--ray \\S+: .*{said}", refused(cluster.address, needs, **expected))
        for key, other in (("ray_version", "2.40.0"), ("python_version", "3.10.1")):
            said = refused_with(cluster.address, key, other)
            assert other in said.partition("; expected a cluster of the same Ray and Python")[0]


def refused_with(address: str, key: str, other: str) -> str:
    """What is said of a cluster that has another version."""
    from ray._raylet import GcsClient

    store = GcsClient(address=address)
    present = store.internal_kv_get(b"CLUSTER_METADATA", b"cluster")
    store.internal_kv_put(
        b"CLUSTER_METADATA",
        json.dumps(json.loads(present) | {key: other}).encode(),
        True,
        b"cluster",
    )
    try:
        return refused(address)
    finally:
        store.internal_kv_put(b"CLUSTER_METADATA", present, True, b"cluster")


def test_an_address_at_which_no_cluster_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{nobody.getsockname()[1]}"
        for address in (host, f"ray://{host}"):
            assert f"nothing answers at {address} (" in refused(address)
        monkeypatch.setenv("RAY_ADDRESS", host)
        assert re.match(
            rf"--ray auto: nothing answers at \S+:{nobody.getsockname()[1]} \(", refused("auto")
        )
    assert "expected auto, local, HOST:PORT or ray://HOST:PORT" in refused("here")


def test_without_ray_the_message_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from tokenloom_server.workers.cluster.connection import Needs, connect\n"
        "with connect('auto', Needs(), option='--readers'): pass"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "ConfigError: --readers auto: Ray is not installed here" in ended.stderr
    assert "pip install 'tokenloom[ray]'" in ended.stderr


def test_a_cluster_of_ones_own_has_the_cpus_asked_for_takes_no_other_token_and_ends_with_the_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin = (
        "from tokenloom_server.workers.cluster.connection import Needs, connect\n"
        f"with connect('local', Needs(), option='--ray', cpus=3, object_store_bytes={STORE_BYTES}) as nodes:\n"
        "    import ray; print(ray.get_runtime_context().gcs_address, [node.cpus for node in nodes], flush=True)\n"
        "    input()\n"
        "print(ray.is_initialized())"
    )
    join = (
        "import sys; from tokenloom_server.workers.cluster.connection import Needs, connect\n"
        "with connect(sys.argv[1], Needs(), option='--ray') as nodes: print(len(nodes))"
    )
    with ray_folder():
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 64)
        with subprocess.Popen(
            [sys.executable, "-c", begin], stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True
        ) as own:
            address, _, cpus = (own.stdout or sys.stdin).readline().partition(" ")
            joined = []
            for token in ("a" * 64, "b" * 64):
                monkeypatch.setenv("RAY_AUTH_TOKEN", token)
                # Without a look at the token Ray would try for minutes.
                command = [sys.executable, "-c", join, address]
                joined.append(
                    subprocess.run(
                        command, capture_output=True, text=True, timeout=240, check=False
                    )
                )
            said = own.communicate("\n", timeout=240)
    assert (own.returncode, cpus, *said) == (0, "[3.0]\n", "False\n", "")
    assert [each.stdout for each in joined] == ["1\n", ""]
    assert re.search(
        f"ConfigError: --ray {address}: no connection to Ray there .*token is missing or incorrect",
        joined[1].stderr,
    )
