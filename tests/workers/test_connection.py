"""A connection to Ray is refused before any work where the cluster is not there, is another one, or has no room."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from subprocess import PIPE

import pytest
from support.ray_cluster import RAYS_PATIENCE, STORE_BYTES, ray_cluster, ray_folder
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

JOIN = (
    "import sys; from tokenloom_server.workers.cluster.connection import Needs, connect\n"
    "with connect(sys.argv[1], Needs(), option='--ray') as nodes: print(len(nodes))"
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
        import ray

        monkeypatch.setattr(ray, "__version__", "2.40.0")
        said, _, expected = refused(cluster.address).partition("; expected a cluster of the same")
        assert "2.40.0" in said
        assert expected.startswith(" Ray and Python")


def test_an_address_at_which_nobody_listens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with ray_folder(), socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{nobody.getsockname()[1]}"
        for address in (host, f"ray://{host}", "127.0.0.1:99999"):
            assert f"--ray {address}: no connection to Ray at {address} (" in refused(address)
        monkeypatch.setenv("RAY_ADDRESS", host)
        assert f"--ray auto: no connection to Ray at {host} (" in refused("auto")
        for address in ("here", "here:", ":1", "ray://:1", "host:port"):
            assert "expected auto, local, HOST:PORT or ray://HOST:PORT" in refused(address)


def test_what_is_no_cluster_is_refused_soon_though_something_listens_there_or_the_cluster_was_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Clusters of other tests are none of this machine.
    code = f"import psutil; psutil.process_iter = lambda *_, **__: iter(())\n{JOIN}"
    with (
        ray_folder() as folder,
        socket.create_server(("", 0)) as silent,
        HTTPServer(("", 0), BaseHTTPRequestHandler) as http,
        ExitStack() as commands,
    ):
        own_patience(monkeypatch)
        threading.Thread(target=http.serve_forever, daemon=True).start()
        assert "auto (Could not find any running Ray instance" in ended(joining("auto", code))[1]
        (folder / "ray/ray_current_cluster").write_text("127.0.0.1:9")
        places = [f"127.0.0.1:{each.getsockname()[1]}" for each in (silent, http.socket)]
        addresses = ["auto", *places, *(f"ray://{place}" for place in places)]
        begun = [commands.enter_context(joining(address, code)) for address in addresses]
        for address, command in zip(addresses, begun, strict=True):
            assert re.fullmatch(
                rf"(?s)(?:\[.* W .*\n)*Traceback.*ConfigError: --ray {address}: no connection to Ray at {address} "
                r"\(.*(?:Timed out while waiting|client connection timeout).*\); expected .* cluster [^\n]*\n",
                ended(command)[1],
            )
        http.shutdown()


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
    with ray_folder():
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 64)
        with subprocess.Popen(
            [sys.executable, "-c", begin], stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True
        ) as own:
            address, _, cpus = (own.stdout or sys.stdin).readline().partition(" ")
            others = []
            own_patience(monkeypatch)
            for mode, token in (("token", "a" * 64), ("token", "b" * 64), ("disabled", "")):
                monkeypatch.setenv("RAY_AUTH_MODE", mode)
                monkeypatch.setenv("RAY_AUTH_TOKEN", token)
                others.append(ended(joining(address)))
            said = own.communicate("\n", timeout=240)
    assert (own.returncode, cpus, *said) == (0, "[3.0]\n", "False\n", "")
    assert [printed for printed, _ in others] == ["1\n", "", ""]
    for _, said in others[1:]:
        assert re.search(
            f"ConfigError: --ray {address}: no connection to Ray at {address} .*token is missing or incorrect",
            said,
        )


def own_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Ray tries an address for as long as a command of ours says."""
    for name in RAYS_PATIENCE:
        monkeypatch.delenv(name)


def joining(address: str, code: str = JOIN) -> subprocess.Popen[str]:
    """A command that joins a cluster, and prints how many nodes it has."""
    return subprocess.Popen(
        [sys.executable, "-c", code, address], stdout=PIPE, stderr=PIPE, text=True
    )


def ended(command: subprocess.Popen[str]) -> tuple[str, str]:
    """What it printed, and what it said. Ray alone would try for 13 minutes."""
    with command:
        printed, said = command.communicate(timeout=240)
    return printed, said
