"""A connection to a Ray cluster, checked before any work: it is there, has these versions, and room for the tasks."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tokenloom_server.errors import ConfigError

#: For how long the machine of an address may not answer, seconds. Ray waits for minutes, and then ends the process.
ANSWER_S = 5.0
#: The private parts of Ray that are used here were looked at in all releases before this one.
KNOWN_BEFORE = "2.61"


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
    try:
        import ray
    except ImportError:
        raise ConfigError(
            f"{option} {address}: Ray is not installed here: pip install 'tokenloom[ray]'"
        ) from None
    # What Ray would tell on the terminal, which is the command's own.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray").setLevel(logging.ERROR)
    where = f"{option} {address}"
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
    quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if address == "local":
        if "RAY_AUTH_MODE" not in os.environ:
            # Ray would keep a token for all clusters in the user's home.
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        quiet |= {"include_dashboard": False, "object_store_memory": object_store_bytes}
        try:
            ray.init("local", num_cpus=cpus or os.cpu_count(), **quiet)
        except Exception as error:  # whatever its processes did not do
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"{where}: Ray does not start on this machine ({reason}); start it again"
            ) from None
        return
    try:
        _look(ray, address, where)
        ray.init(address, **quiet)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # Ray ends the process where no head answers
        raise ConfigError(
            f"{where}: no connection to Ray there ({' '.join(str(error).split())}); expected a cluster of the same Ray "
            "and Python, of which this machine is a node, or its ray://HOST:PORT; one that asks for a token needs "
            "RAY_AUTH_MODE=token here"
        ) from None


def _look(ray: Any, address: str, where: str) -> None:
    """Looks at an address before Ray does, which would try for minutes, say so in many lines, and end the process.

    Raises ``ConfigError`` where nobody listens there, and Ray's error where the cluster does not take this machine's
    token. Of Ray's parts for it none is public.
    """
    try:
        from ray._private.authentication import authentication_token_setup as tokens
        from ray._private.services import canonicalize_bootstrap_address

        client = ray._raylet.GcsClient
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{where}: Ray {ray.__version__} has no way to look at an address ({error}); install ray<{KNOWN_BEFORE}"
        ) from None
    target = address
    try:
        if address == "auto":
            target = str(canonicalize_bootstrap_address(address))
        host, _, port = target.removeprefix("ray://").rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError(f"{where}: expected auto, local, HOST:PORT or ray://HOST:PORT")
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"{where}: nothing answers at {target} ({error}); expected a Ray cluster: start one with ray start --head, "
            "name another one, or give 'local' for one of this machine's own"
        ) from None
    if not address.startswith("ray://"):
        if address == "auto":
            tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        tokens.ensure_token_if_auth_enabled(create_token_if_missing=False)
        client(address=target)


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
