"""A mixture file in place of a server's address: rank 0 starts the server, and all ranks of the launch join it.

Where it is, its token, and what kept it from starting travel through the process group's store, under the launch's
attempt id, which is used once.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenloom_proto.address import Address
from tokenloom_proto.credentials import Credentials

from tokenloom.connection.server import RunServer
from tokenloom.connection.topology import Topology, default_store, value_of
from tokenloom.errors import ServerUnavailable, TokenloomError, named
from tokenloom.job_server.child_process import ChildServer, ChildServers

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

log = logging.getLogger("tokenloom")

#: The address of this machine at which ranks on others reach the server.
HOST_VARIABLE = "TOKENLOOM_HOST"
#: Rank 0 ends the server once the other ranks have closed their datasets, or after this.
LINGER_S = 5.0
_POLL_S = 0.02
_LOOPBACK = "127.0.0.1"

#: A process has its children, whichever dataset started them.
_SERVERS = ChildServers()


class LaunchServer(RunServer):
    """A rank's part in the server of a launch: rank 0 starts it, and gives the others its address."""

    in_job = True

    def __init__(self, mixture: Path, stream: str, topology: Topology, timeout_s: float) -> None:
        """Raises on every rank what kept the server from starting, as it says it."""
        self._rank, self._world_size = topology.rank, topology.world_size
        self._prefix = f"tokenloom/{mixture}/{stream}/{topology.attempt}"
        self._store = _store(topology)
        self._server: ChildServer | None = None
        self._pid = os.getpid()
        entry = (
            self._serve(mixture, timeout_s)
            if topology.rank == 0
            else self._await_entry(mixture, timeout_s)
        )
        # Without TLS, to other machines, too: it went there through the store already, and serves this launch alone.
        super().__init__(Address.parse(entry["url"]), Credentials(token=entry["token"]))

    def watch(self, fail: Callable[[BaseException], None]) -> None:
        """Has ``fail`` called where the server ended for good; on rank 0, which would start it again."""
        if self._server is not None:
            self._server.watch(fail)

    def close(self) -> None:
        """Says that this rank is done. Rank 0 waits for the others, bounded, and ends the server."""
        if self._pid != os.getpid():
            return  # a forked child's: the server is its parent's
        store, self._store = self._store, None
        server, self._server = self._server, None
        try:
            if store is not None and self._rank:
                store.set(f"{self._prefix}/closed-{self._rank}", "closed")
            elif store is not None and server is not None and server.users == 1:
                self._linger(store)
        except RuntimeError as error:  # the store is gone, and with it the launch
            log.debug("closing: %s", error)
        if server is not None:
            _SERVERS.give_back(server)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {
            "_store": None,
            "_server": None,
        }  # of another process: it only reads

    def _serve(self, mixture: Path, timeout_s: float) -> dict[str, str]:
        """Starts the server, and tells the other ranks its URL and token, or why there is none."""
        key = f"{self._prefix}/server"
        try:
            host = self._host(timeout_s) if self._store is not None else _LOOPBACK
            self._server = _SERVERS.take(mixture, host, timeout_s)
        except Exception as error:
            if self._store is not None:
                self._store.set(
                    key, json.dumps({"error": type(error).__name__, "message": str(error)})
                )
            raise
        entry = {"url": self._server.url, "token": self._server.token}
        if self._store is not None:
            self._store.set(key, json.dumps(entry))
        return entry

    def _await_entry(self, mixture: Path, timeout_s: float) -> dict[str, str]:
        assert self._store is not None
        key = f"{self._prefix}/server"
        self._store.set(f"{self._prefix}/machine-{self._rank}", machine())
        try:
            # Rank 0 waits for the machines first, and then for the server.
            self._store.wait([key], datetime.timedelta(seconds=2 * timeout_s))
        except RuntimeError as error:
            raise ServerUnavailable(
                f"rank {self._rank} waited {2 * timeout_s:g} s (twice connect_timeout_s) for rank 0 to start the "
                f"server of {mixture}, in vain: see rank 0's output"
            ) from error
        entry: dict[str, str] = json.loads(self._store.get(key))
        if "error" not in entry:
            return entry
        if entry["error"] == ModuleNotFoundError.__name__:
            raise ModuleNotFoundError(entry["message"])
        raise named(entry["error"], entry["message"])

    def _host(self, timeout_s: float) -> str:
        """Where the server is to listen: reached by all ranks, and by nobody else where they are all here."""
        assert self._store is not None
        keys = [f"{self._prefix}/machine-{rank}" for rank in range(1, self._world_size)]
        try:
            self._store.wait(keys, datetime.timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise ServerUnavailable(
                f"rank 0 waited {timeout_s:g} s (connect_timeout_s) for the other ranks to make their dataset of "
                "the same mixture file, in vain"
            ) from error
        here = machine()
        if all(self._store.get(key).decode() == here for key in keys):
            return _LOOPBACK
        return reachable_host(os.environ)

    def _linger(self, store: Store) -> None:
        """A server that ended before its last reader would leave that one waiting for it."""
        deadline = time.monotonic() + LINGER_S
        waiting = [f"{self._prefix}/closed-{rank}" for rank in range(1, self._world_size)]
        while waiting := [key for key in waiting if not value_of(store, key)]:
            if time.monotonic() > deadline:
                log.warning(
                    "%d of %d ranks have not closed their dataset within %g s; the server is ended all the same",
                    len(waiting), self._world_size, LINGER_S,
                )  # fmt: skip
                return
            time.sleep(_POLL_S)


def machine() -> str:
    """Equal for two processes that have one loopback between them: one start of one kernel, one network namespace.
    Where a system does not tell, its host name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return socket.gethostname()


def reachable_host(environment: Mapping[str, str]) -> str:
    """An address of this machine that the others know it by: what ``TOKENLOOM_HOST`` says, else the launcher's
    ``MASTER_ADDR`` where that is here, else the host name's. IPv6 in brackets. Raises ``TokenloomError``."""
    names = [environment[HOST_VARIABLE]] if HOST_VARIABLE in environment else []
    names = names or [
        name for name in (environment.get("MASTER_ADDR"), socket.gethostname()) if name
    ]
    for name in names:
        if (host := _own_address(name)) is not None:
            return host
    raise TokenloomError(
        f"the ranks are on several machines, and {' and '.join(map(repr, names))} is no address of rank 0's "
        f"({socket.gethostname()}) that others can reach: set {HOST_VARIABLE} to one, or start the server yourself and "
        "give its address, grpc://HOST:PORT/RUN"
    )


def _own_address(name: str) -> str | None:
    """The address of a name, where this machine has it and it is not the loopback's."""
    try:
        entries = socket.getaddrinfo(name.strip("[]"), 0, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, _, _, _, address in sorted(entries, key=lambda entry: entry[0] != socket.AF_INET):
        host = str(address[0])
        if host.startswith("127.") or host == "::1":
            continue
        try:
            socket.create_server((host, 0), family=family).close()
        except OSError:
            continue
        return f"[{host}]" if ":" in host else host
    return None


def _store(topology: Topology) -> Store | None:
    if topology.world_size == 1:
        return None
    store = default_store()
    if store is None:
        raise ValueError(
            f"rank {topology.rank} of {topology.world_size} gives a mixture file, whose server rank 0 would start, and "
            "no process group says where: call torch.distributed.init_process_group before making the dataset, or "
            "start the server yourself and give its address, grpc://HOST:PORT/RUN"
        )
    return store
