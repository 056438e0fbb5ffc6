"""The server that a training job starts for itself, where it is given a mixture file in place of an address.

In: the path of a mixture file. Out: the address and the credentials that a dataset joins with. A child process serves
all ranks of a launch; ``InProcessServer`` serves one process without a socket, and is all that imports the server.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import os
import re
import secrets
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenloom_proto.address import Address
from tokenloom_proto.credentials import CONTROL_VARIABLE, Credentials
from tokenloom_proto.files import resolved
from tokenloom_proto.threads import Background

from tokenloom.connection.server import RunServer
from tokenloom.connection.topology import Topology, default_store, value_of
from tokenloom.errors import ServerUnavailable, TokenloomError, named

if TYPE_CHECKING:
    import grpc
    from torch.distributed.distributed_c10d import Store


# A path to a mixture file in a URL's place: how it is recognised, and what has to be installed to serve it.


SUFFIXES = (".yaml", ".yml")
#: Of the server's extra: enough to tell whether that is installed.
_NEEDED = ("fastapi", "pyarrow", "pydantic", "typer", "xxhash", "yaml")


def mixture_path(url: str | os.PathLike[str]) -> Path | None:
    """The mixture file that ``url`` is; None for an address. A text is a file where it ends like one."""
    if isinstance(url, str) and ("://" in url or not url.lower().endswith(SUFFIXES)):
        return None
    return Path(url)


def require_server(mixture: Path, needed: Iterable[str] = _NEEDED) -> None:
    """Raises ``ModuleNotFoundError`` where the server's packages are not installed beside the client."""
    missing = [name for name in needed if find_spec(name) is None]
    if missing or sys.version_info < (3, 11):
        lack = (
            f"Python {sys.version_info.major}.{sys.version_info.minor}"
            if not missing
            else f"no {missing[0]!r}"
        )
        raise ModuleNotFoundError(
            f"{str(mixture)!r} is a mixture file, so the server would be started here, and there is {lack}: the "
            "server wants Python 3.11 or newer and its packages, pip install 'tokenloom[server]'. Or give the address "
            "of a server that runs elsewhere, grpc://HOST:PORT/RUN"
        )


# ``tokenloom serve`` as a child of this process: started, looked after, and ended with it.
#
# A process of its own, so that it does not share the interpreter's lock with the training. It is killed by the kernel
# when this process dies, and takes its address up again when the job is restarted on the same machine: who has the
# address may take the lease over at once, so nobody waits for that to lapse.


log = logging.getLogger("tokenloom")

#: Beside the mixture file, with a folder for each host and mixture file: the server's log, and where it listens.
FOLDER = ".tokenloom-server"
#: How often it is looked whether the server is ready.
POLL_S = 0.02
#: A server that was asked to end and did not, within this, is killed: its own bounds add up to less.
GRACE_S = 20.0
#: Of the server's lease, seconds.
LEASE_S = 5
#: A server that ends again so soon after it was ready is not helped by another one...
SOUND_S = 30.0
#: ... after so many in a row.
ATTEMPTS = 3
_TAIL_LINES, _TAIL_BYTES = 25, 2**15
#: How ``tokenloom`` says why it ends.
_ERROR = re.compile(r"^([A-Z][A-Za-z]+): (?=\S)", re.MULTILINE)


class ChildServer:
    """A server of one mixture file, shared by all datasets of this process that are of that file."""

    def __init__(self, mixture: Path, host: str, timeout_s: float) -> None:
        """Starts it to listen at ``host``, and waits until it is ready, at most ``timeout_s``.

        Raises the server's own error, ``ModuleNotFoundError`` where it is not installed, and ``ServerUnavailable``
        where it says nothing.
        """
        require_server(mixture)
        self.mixture = (
            mixture.absolute()
        )  # a training script may go elsewhere before the server dies
        self.token = secrets.token_hex(32)
        self.folder = _folder(mixture)
        self.log = self.folder / "server.log"
        self.users = 1
        self.run = ""
        # Two jobs of one file may start at once: only this process's own server is to answer it.
        self._ready_file = self.folder / f"ready-{os.getpid()}.json"
        self._address_file = self.folder / "ready.json"
        self._grpc = f"{host}:{_port_before(self._address_file, host)}"
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._failed: TokenloomError | None = None
        self._watchers: list[Callable[[BaseException], None]] = []
        # Re-entrant: garbage is collected anywhere, and with it datasets that were not closed.
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._started = threading.Event()
        # The kernel ends a child with the thread that started it, so that has to be one which stays.
        self._thread = Background("server", self._keep, "tokenloom")
        self._thread.start()
        try:
            self._started.wait()
        except (
            BaseException
        ):  # a Ctrl-C: nobody would end the server otherwise, before this process ends
            self.close()
            raise
        if self._failed is not None:
            raise self._failed

    @property
    def url(self) -> str:
        """What ``RemoteDataset`` takes."""
        return f"grpc://{self._grpc}/{self.run}"

    def watch(self, fail: Callable[[BaseException], None]) -> None:
        """Tells of an end of the server for good."""
        with self._lock:
            self._watchers.append(fail)
            failed = self._failed
        if failed is not None:
            fail(failed)

    def close(self) -> None:
        """Ends the server, which commits what was acknowledged; bounded."""
        with self._lock:
            self._closing.set()
            process = self._process
        if process is not None:
            _end(process)
        if self._thread is not threading.current_thread():
            self._thread.join(GRACE_S)

    # The thread

    def _keep(self) -> None:
        """Starts the server, and starts it again where it dies: ranks reconnect by themselves."""
        attempts = 0
        try:
            while True:
                if not self._start():
                    return
                began = time.monotonic()
                self._started.set()
                assert self._process is not None
                status = self._process.wait()
                if self._closing.is_set():
                    return
                attempts = attempts + 1 if time.monotonic() - began < SOUND_S else 1
                ending = f"the server of {self.mixture} ended with {_status(status)}; its log is {self.log}"
                if attempts >= ATTEMPTS:
                    raise ServerUnavailable(
                        f"{ending}, {attempts} times in a row:\n{_tail(self.log, 0)}"
                    )
                log.warning("%s; starting it again", ending)
        except Exception as error:
            failure = (
                error
                if isinstance(error, TokenloomError)
                else ServerUnavailable(f"{self.mixture}: {error}")
            )
            with self._lock:
                self._failed = failure
                watchers = list(self._watchers)
            if self._started.is_set():
                log.error("%s", failure)
            for fail in watchers:
                fail(failure)
        finally:
            self._started.set()

    def _start(self) -> bool:
        """Starts the process and waits until it is ready. False where that is not wanted any more."""
        command = [
            sys.executable,
            "-m",
            "tokenloom_tools",
            "serve",
            str(self.mixture),
            "--grpc",
            self._grpc,
        ]
        command += [
            "--rest",
            "127.0.0.1:0",
            "--ready-file",
            str(self._ready_file),
            "--parent",
            str(os.getpid()),
        ]
        # Nobody but this launch can reach this server, so whoever trained before is gone. And the lease is for moves
        # to another machine or address alone: whoever starts waits for that.
        command += ["--liveness", "0", "--lease", str(LEASE_S)]
        if "TOKENLOOM_LEDGER" not in os.environ:
            command += ["--ledger", "auto"]
        self._ready_file.unlink(missing_ok=True)
        log_begin = self.log.stat().st_size if self.log.exists() else 0
        with self._lock:
            if self._closing.is_set():
                return False
            with self.log.open("ab") as output:
                process = self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=_environment(os.environ, self.token),
                    start_new_session=True,  # a Ctrl-C is for the training
                )
        log.info("starting the server of %s; its log is %s", self.mixture, self.log)
        deadline = time.monotonic() + self._timeout_s
        while (ready := _read(self._ready_file)) is None:
            status = process.poll()
            if self._closing.is_set():
                _end(process)
                return False
            if status is not None:
                raise _why(
                    self.log,
                    log_begin,
                    f"the server of {self.mixture} ended with {_status(status)}",
                )
            if time.monotonic() > deadline:
                _end(process)
                raise ServerUnavailable(
                    f"the server of {self.mixture} was not ready within {self._timeout_s:g} s (connect_timeout_s); the "
                    f"end of its log, {self.log}:\n{_tail(self.log, log_begin)}"
                )
            time.sleep(POLL_S)
        self._ready_file.replace(self._address_file)
        self._grpc, self.run = ready["grpc"], ready["runs"][0]
        log.info("%s is served at %s; its page is http://%s/", self.run, self._grpc, ready["rest"])
        return True


class ChildServers:
    """The servers that this process has started and still uses, by mixture file. Several datasets may share one: two
    servers of one run would be in each other's way."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._servers: dict[tuple[Path, int], ChildServer] = {}

    def take(self, mixture: Path, host: str, timeout_s: float) -> ChildServer:
        """The server of a mixture file, started where there is none; ``give_back`` it."""
        key = resolved(mixture), os.getpid()
        with self._lock:
            server = self._servers.get(key)
            if server is None:
                server = self._servers[key] = ChildServer(mixture, host, timeout_s)
            else:
                server.users += 1
            return server

    def give_back(self, server: ChildServer) -> None:
        """Ends a server that nobody of this process uses any more."""
        with self._lock:
            server.users -= 1
            if server.users:
                return
            self._servers = {
                key: other for key, other in self._servers.items() if other is not server
            }
            server.close()


def _folder(mixture: Path) -> Path:
    """Where the server's log goes: beside the mixture file, or where that cannot be, among temporary files. For each
    host a folder, since several may train on one file system, and in it one for each mixture file, since the jobs of
    several may lie in one folder and start at once."""
    path = resolved(mixture)
    beside = path.parent
    folder = beside / FOLDER / socket.gethostname() / path.name
    try:
        if beside.is_dir():  # else the server tells, which looks for the mixture file there
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    except OSError:
        pass
    # The same one at each launch: there is the address that the last one had.
    own = Path(tempfile.gettempdir()) / f"tokenloom-{os.getuid()}"
    folder = own / f"server-{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}"
    try:
        own.mkdir(mode=0o700, exist_ok=True)
        there = own.lstat()  # anybody may make such a folder, or a link, among temporary files
        if there.st_uid == os.getuid() and stat.S_ISDIR(there.st_mode):
            folder.mkdir(exist_ok=True)
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="tokenloom-server-"))


def _port_before(address_file: Path, host: str) -> int:
    """The port that the last server of this folder had, where it can be had again; 0 for any."""
    ready = _read(address_file)
    before_host, _, port = str((ready or {}).get("grpc", "")).rpartition(":")
    if before_host != host or not port.isdigit():
        return 0
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host.strip("[]"), int(port)), family=family).close()
    except OSError:
        return 0
    return int(port)


def _read(ready_file: Path) -> dict[str, Any] | None:
    try:
        ready: dict[str, Any] = json.loads(ready_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return ready


def _environment(environment: Mapping[str, str], token: str) -> dict[str, str]:
    """This process's, with the server's own token. Threads are counted for the ranks of a machine, not for it."""
    kept = {
        k: v
        for k, v in environment.items()
        if k not in (f"{CONTROL_VARIABLE}_FILE", "OMP_NUM_THREADS")
    }
    return kept | {CONTROL_VARIABLE: token}


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(GRACE_S)


def _why(file: Path, begin: int, ending: str) -> TokenloomError:
    """The error that a server ended with, as its log has it from ``begin`` on."""
    tail = _tail(file, begin)
    text = _since(file, begin)
    for match in reversed(list(_ERROR.finditer(text))):
        error = named(match[1], text[match.end() :].strip())
        if type(error) is not TokenloomError:
            return error
    return ServerUnavailable(f"{ending}; the end of its log, {file}:\n{tail}")


def _since(file: Path, begin: int) -> str:
    with file.open("rb") as log_file:
        log_file.seek(max(begin, log_file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return log_file.read().decode(errors="replace")


def _tail(file: Path, begin: int) -> str:
    return "\n".join(_since(file, begin).splitlines()[-_TAIL_LINES:]) or "(empty)"


def _status(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"status {status}"


# A mixture file in place of a server's address: rank 0 starts the server, and all ranks of the launch join it.
#
# Where it is, its token, and what kept it from starting travel through the process group's store, under the launch's
# attempt id, which is used once.


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


# The server's part in this process, called without a socket: what ``LocalDataset`` reads from.
#
# The one place where the client imports the server, and only when it is asked to: who trains with a server elsewhere
# needs none of that installed.


class InProcessServer(RunServer):
    """A mixture file's run within this process. It begins with the first ``connect``, so that a ``DataLoader``'s worker
    has it where the batches are read."""

    in_job = True

    def __init__(self, mixture: Path) -> None:
        """Reads the mixture file. Raises ``ConfigError``."""
        require_server(mixture)
        from tokenloom_server.api.grpc.local import LocalServer

        self._server = LocalServer(mixture)
        super().__init__(
            Address((str(mixture),), self._server.run, connect=self.connect), Credentials()
        )
        self._channel: grpc.Channel | None = None
        self._pid: int | None = None

    def connect(self) -> grpc.Channel:
        """To the run, which is brought up where it was not. Raises what is wrong with sources, tokeniser and
        mixture."""
        if (
            self._channel is None or self._pid != os.getpid()
        ):  # a forked child has none of its parent's threads
            self._channel = self._server.start()
            self._pid = os.getpid()
        return self._channel

    def close(self) -> None:
        """Ends the run's threads; bounded."""
        if self._pid == os.getpid():
            self._server.close()
        self._channel = self._pid = None
