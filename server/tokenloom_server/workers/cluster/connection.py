"""A connection to a Ray cluster, checked before any work: it is there, has these versions, and room for the tasks."""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tokenloom_server.errors import ConfigError

#: What Ray takes from the environment. It is quiet, for the terminal is the command's own.
QUIET = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_USAGE_STATS_ENABLED": "0"}
#: How long Ray tries an address: 12 s, not 13 minutes. A head has two tries, each of two connections, a question and a
#: pause, for one that has only just begun to listen does not know its session yet; ``ray://`` has three.
PATIENCE = {
    "RAY_NUM_REDIS_GET_RETRIES": "2",
    "RAY_gcs_rpc_server_connect_timeout_s": "1",
    "RAY_py_gcs_connect_timeout_s": "3",
    "RAY_CLIENT_INITIAL_CONNECTION_TIMEOUT_S": "4",
    "RAY_CLIENT_MAX_CONNECTION_TIMEOUT_S": "4",
}
#: For how long the machine of an address may not answer at all, seconds.
ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class Needs:
    """What one task takes of a node: CPUs, memory in MB (10^6 bytes), custom resources by name."""

    cpus: float = 1.0
    memory_mb: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)

    def options(self, excluded: Collection[str] = ()) -> dict[str, Any]:
        """As the options of a remote function of Ray's, for nodes but those with the ids that are ``excluded``."""
        labels = (
            {"label_selector": {"ray.io/node-id": f"!in({','.join(excluded)})"}} if excluded else {}
        )
        memory = self.memory_mb * 1_000_000 or None
        return {
            "num_cpus": self.cpus,
            "memory": memory,
            "resources": dict(self.resources),
            **labels,
        }

    def fit(self, node: Node) -> bool:
        """Whether a node that has nothing else to do has room for a task."""
        amounts = {"CPU": self.cpus, "memory": self.memory_mb * 1e6, **self.resources}
        return all(node.resources.get(name, 0.0) >= amount for name, amount in amounts.items())

    def __str__(self) -> str:
        memory = f", {self.memory_mb} MB of memory" * (self.memory_mb > 0)
        custom = "".join(f", {amount:g} {name}" for name, amount in self.resources.items())
        return f"{self.cpus:g} CPU{'s' * (self.cpus != 1)}{memory}{custom}"


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of a cluster. ``resources``: by Ray's names, memory in bytes."""

    id: str
    name: str
    resources: Mapping[str, float]

    @property
    def cpus(self) -> float:
        return self.resources.get("CPU", 0.0)


@contextmanager
def connect(
    address: str,
    needs: Needs,
    *,
    option: str,
    cpus: int | None = None,
    object_store_bytes: int | None = None,
) -> Iterator[tuple[Node, ...]]:
    """Until the end of the block, this process is a driver of the cluster at ``auto``, ``HOST:PORT`` or
    ``ray://HOST:PORT``, or of one of its own with ``local``; gives the nodes that have room for one of the tasks.

    ``option`` is what gave the address, for messages. ``cpus``: of all nodes together; a local cluster has so many, or
    as many as the machine. ``object_store_bytes``: what the object store of each node has to hold.

    Raises ``ConfigError`` where Ray is not installed, nothing answers, versions differ, or there is too little of
    anything.
    """
    where = f"{option} {address}"
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or address
    # Ray reads it as it is imported; what the user says stands.
    for name, value in (QUIET if address == "local" else QUIET | PATIENCE).items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise ConfigError(
            f"{where}: Ray is not installed here: pip install 'tokenloom[ray]'"
        ) from None
    logging.getLogger("ray").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="ray\\.")
    try:
        _start(ray, address, where, cpus, object_store_bytes)
        yield _checked(needs, where, cpus, object_store_bytes)
    finally:
        # Without a raylet Ray would end the process there, before anything is said; what it started ends with it.
        if not ray.is_initialized() or is_node():
            ray.shutdown()


def nodes() -> tuple[Node, ...]:
    """The nodes that are there now, while connected."""
    import ray

    present = [node for node in ray.nodes() if node["Alive"]]
    return tuple(
        Node(node["NodeID"], node["NodeManagerHostname"], node["Resources"]) for node in present
    )


def is_node() -> bool:
    """Whether this machine is still a node of the cluster: a driver does not come back from the end of its raylet, and
    Ray ends its process soon."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    return any(node.id == here for node in nodes())


def fitting(needs: Needs) -> tuple[Node, ...]:
    """Those that have room for one of the tasks."""
    return tuple(node for node in nodes() if needs.fit(node))


def _start(
    ray: Any, address: str, where: str, cpus: int | None, object_store_bytes: int | None
) -> None:
    place = re.fullmatch(r"auto|local|(?:ray://)?\[?([^/]+?)\]?:(\d+)", address)
    if place is None:
        raise ConfigError(
            f"{where}: expected auto, local, HOST:PORT or ray://HOST:PORT, not {address!r}"
        )
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    fault = f"no connection to Ray at {address}"
    remedy = (
        "expected a cluster of the same Ray and Python, of which this machine is a node, or its ray://HOST:PORT; one "
        "that asks for a token needs RAY_AUTH_MODE=token and its RAY_AUTH_TOKEN here. Start one with ray start --head, "
        "name another one, or give 'local' for one of this machine's own"
    )
    if address == "local":
        fault, remedy = "Ray does not start on this machine", "start it again"
        options |= {"num_cpus": cpus or os.cpu_count(), "object_store_memory": object_store_bytes}
        options["include_dashboard"] = False
        if "RAY_AUTH_MODE" not in os.environ:
            # Ray would keep a token for all clusters in the user's home.
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    try:
        if place[2]:
            # Where nobody listens Ray would take its time all the same.
            socket.create_connection((place[1], int(place[2])), ANSWER_S).close()
        ray.init(address, **options)
    except Exception as error:  # whatever Ray or its processes did not do
        # What Ray met, without where in its code that was.
        said = re.sub(r"(?s)Traceback .*\n  .*?\n", "", str(error.__context__ or "") or str(error))
        raise ConfigError(f"{where}: {fault} ({' '.join(said.split())}); {remedy}") from None


def _checked(
    needs: Needs, where: str, cpus: int | None, object_store_bytes: int | None
) -> tuple[Node, ...]:
    there = fitting(needs)
    shown = "; ".join(f"{node.name} with {dict(node.resources)}" for node in nodes()[:5])
    in_all = sum(node.cpus for node in there)
    if not there or in_all < (cpus or 0):
        raise ConfigError(
            f"{where}: found {in_all:g} CPUs of nodes that have room for a task ({shown}); expected {needs} on one, "
            f"and {cpus or 'any'} in all: ask for less, or add nodes"
        )
    for node in there:
        if (store_bytes := int(node.resources.get("object_store_memory", 0))) < (
            object_store_bytes or 0
        ):
            raise ConfigError(
                f"{where}: the object store of {node.name} has {store_bytes:,} bytes; expected {object_store_bytes:,}: "
                "start that node with more (ray start --object-store-memory)"
            )
    return there
