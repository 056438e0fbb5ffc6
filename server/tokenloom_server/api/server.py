"""One server process: ledger, runs, gRPC and REST, brought up in that order and closed in the other."""

from __future__ import annotations

import json
import logging
import os
import resource
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tokenloom_proto.credentials import CONTROL_VARIABLE, is_loopback, may_be_plain
from tokenloom_proto.files import resolved

from tokenloom_server.api.auth import OPEN_TO_ALL, Access
from tokenloom_server.api.grpc.server import MAX_CALLS, GrpcServer
from tokenloom_server.api.rest.server import MAX_CONNECTIONS, MAX_HEALTH_CONNECTIONS, RestServer
from tokenloom_server.api.watched_files import Watcher
from tokenloom_server.config.data_roots import DataRoots
from tokenloom_server.errors import ConfigError, reason
from tokenloom_server.ledger.base import Ledger
from tokenloom_server.ledger.open import open_ledger
from tokenloom_server.ledger.sqlite_file import boot_id
from tokenloom_server.run.timeouts import Timeouts
from tokenloom_server.storage.file import write_whole

if TYPE_CHECKING:
    from tokenloom_server.api.rest.routes import Routes
    from tokenloom_server.api.run_folder import RunFolder
    from tokenloom_server.api.service import Runs
    from tokenloom_server.config.run import RunConfig
    from tokenloom_server.workers.cluster.readers.link import RayReaders, ReaderOptions


_log = logging.getLogger(__name__)

# The system counts files and connections as one. The limit is raised as far as the system allows. REST, health and the
# process itself have a fixed part; of the rest gRPC's connections get one half, and the files of sources the other. So
# who only connects takes nothing that a source needs.

#: Files and connections that a server asks to be allowed, at most.
MAX_OPEN_FILES = 2**17
#: With fewer a server does not start.
MIN_OPEN_FILES = 512
#: The ledger, the tokeniser's processes, listeners, libraries.
OWN = 64
#: Two where it is read, two where its past samples are made again.
FILES_PER_SOURCE = 4
FIXED = MAX_CONNECTIONS + MAX_HEALTH_CONNECTIONS + OWN


def raise_open_files() -> int:
    """How many this process may have open from now on. Raises ``ConfigError`` where a server needs more."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (MAX_OPEN_FILES if each == resource.RLIM_INFINITY else each for each in allowed)
    limit = max(soft, min(hard, MAX_OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, allowed[1]))
    require_open_files(limit)
    _log.info("open files: %d at most, of which gRPC may have %d", limit, grpc_connections(limit))
    return limit


def grpc_connections(limit: int) -> int:
    """At most so many at a time, of trainers and all others."""
    return min(MAX_CALLS, (limit - FIXED) // 2)


def require_open_files(limit: int, sources: int = 0) -> None:
    """Raises ``ConfigError`` where the files of so many sources do not fit in their part, or a server in the whole."""
    needed = max(MIN_OPEN_FILES, FIXED + 2 * FILES_PER_SOURCE * sources)
    if limit < needed:
        of_sources = f" of {sources} sources" if sources else ""
        raise ConfigError(
            f"this process may have {limit} files and connections open, and a server{of_sources} needs {needed}: raise "
            f"the limit (a shell: ulimit -n {needed}; systemd: LimitNOFILE={needed}; Docker: --ulimit nofile={needed})"
        )


#: How long streams get to end when the server stops, seconds.
GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What ``tokenloom serve`` was asked for."""

    mixtures: Sequence[Path]
    grpc: str
    rest: str
    ledger: str
    ready_file: Path | None
    index_dir: Path | None
    runs_dir: Path | None = None
    """A folder whose mixture files are runs, too, as long as they are there."""
    health: str | None = None
    """Where health alone is answered, whoever has all connections of REST."""
    mixture: RunConfig | None = None
    """One more run, of the command line; its paths are below ``base_dir``."""
    base_dir: Path = Path()
    """Where relative paths of ledger and line indexes begin, unless there is a mixture file."""
    standby: bool = False
    #: Why a mixture file that differs from the mixture in force is to be a revision; None: it is refused.
    revise: str | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    access: Access = OPEN_TO_ALL
    data_roots: DataRoots = field(default_factory=DataRoots)
    plugins: Sequence[str] = ()
    """Source schemes from outside the tree that mixtures may name."""
    transforms: Sequence[str] = ()
    """Users' functions that mixtures may name."""
    readers: ReaderOptions | None = None
    """Who reads text, if not the server."""
    routes: Callable[[], Sequence[Routes]] = tuple
    """REST routes of tools; called when the packages of REST are imported."""


class Server:
    """Brought up by its constructor; closed by ``close``, in a bounded time."""

    def __init__(self, options: ServeOptions) -> None:
        """Raises ``ConfigError`` and what sources, tokeniser and ledger raise; nothing is left open then."""
        for option, address in (("--grpc", options.grpc), ("--rest", options.rest)):
            _refuse_open_door(option, address, options.access)
        self._open_files = raise_open_files()
        self._watchers: list[Watcher] = []
        self._runs: Runs | None = None
        self._ledger: Ledger | None = None
        self._rest: RestServer | None = None
        self._health: RestServer | None = None
        self._ready_file: Path | None = None
        self._folder: RunFolder | None = None
        self._readers: RayReaders | None = None
        # The addresses first: a port that is taken is found before any file is read, and trainers that wait for
        # this server connect while all that it needs is imported and opened.
        self._grpc = GrpcServer(options.grpc, options.access, grpc_connections(self._open_files))
        try:
            self._bring_up(options)
        except BaseException:
            self.close()
            raise

    def _bring_up(self, options: ServeOptions) -> None:
        rest = self._rest = RestServer(
            *split_address("--rest", options.rest), options.access, routes=options.routes
        )
        if options.health is not None:
            # Why it is not ready is for who has a token; where REST asks for none, for nobody who asks here.
            access = options.access if options.access.closed else Access(secrets.token_hex())
            self._health = RestServer(
                *split_address("--health", options.health), access, only_health=True
            )
            _log.info("health: %shealthz and %sreadyz", self._health.url, self._health.url)
        from tokenloom_server.api.run_folder import RunFolder
        from tokenloom_server.api.service import Runs
        from tokenloom_server.catalog import open_catalog

        if options.readers is not None:
            from tokenloom_server.workers.cluster.readers.link import RayReaders

            self._readers = RayReaders(options.readers)
        ledger = self._ledger = open_ledger(options.ledger, _folder(options))
        _log.info("ledger: %s", ledger.description)
        runs = self._runs = Runs(
            ledger,
            _holder(self.grpc_address),
            options.timeouts,
            standby=options.standby,
            data_roots=options.data_roots,
            catalog=open_catalog(options.plugins, options.transforms),
            on_change=self._tell_ready,
            require_room=partial(require_open_files, self._open_files),
            readers=self._readers,
        )
        runs_dir = options.runs_dir.absolute() if options.runs_dir is not None else None
        folder = self._folder = RunFolder(runs, runs_dir, options.index_dir, options.data_roots)
        access, watched = options.access, [options.access.named, folder]
        if access.tls is not None:
            self._watchers = [Watcher("certificates", access.tls.look)]
            watched.append(access.tls)
        self._watchers += [
            Watcher("tokens", access.look_at_tokens),
            Watcher("access", partial(access.recheck_held, watched)),
        ]
        for watcher in self._watchers:
            watcher.start()
        rest.start(runs, folder, grpc_address=self.grpc_address)
        if self._health is not None:
            self._health.start(runs)
        # A process that waits for a slow ledger is alive, and says so.
        ledger.check()
        if options.ready_file is not None:
            # What a killed server left there; with the ports in hand, it is not another's.
            _remove_ready(options.ready_file)
        self._add_runs(options, runs, folder)
        self._grpc.start(runs, self.rest_address)
        if options.ready_file is not None:
            self._ready_file = options.ready_file
            self._write_ready(options.ready_file)

    def _add_runs(self, options: ServeOptions, runs: Runs, folder: RunFolder) -> None:
        """Those that are asked for. The only one raises what is wrong with it; of several, each is by itself."""
        from tokenloom_server.api.mixture_origin import INDEX_FOLDER, MixtureOrigin
        from tokenloom_server.api.service import Reason

        origins = [folder.origin(path) for path in options.mixtures]
        if options.mixture is not None:
            below = options.base_dir.resolve()
            index_dir = options.index_dir or below / INDEX_FOLDER
            option = "--dataset-mix"
            origins.append(
                MixtureOrigin(
                    where=option, index_dir=index_dir, mixture=options.mixture, folder=below
                )
            )
        reason = Reason(options.revise) if options.revise is not None else None
        if len(origins) == 1 and options.runs_dir is None:
            runs.add_from(origins[0], reason)
            return
        errors = [runs.follow(origin, reason) for origin in origins]
        folder.begin(reason)
        if options.runs_dir is None and errors[0] is not None and not runs.names():
            raise errors[0]

    def _tell_ready(self) -> None:
        """The ready file names the runs that there are now."""
        if self._ready_file is not None:
            try:
                self._write_ready(self._ready_file)
            except ConfigError as error:
                _log.warning("%s", error)

    def _write_ready(self, path: Path) -> None:
        """Raises ``ConfigError``."""
        document = {"grpc": self.grpc_address, "rest": self.rest_address, "runs": self.run_names}
        try:
            # Somebody is polling for it.
            write_whole(path, json.dumps(document) + "\n")
        except OSError as error:
            raise ConfigError(
                f"--ready-file {path}: cannot be written ({reason(error)}); give a file in a folder that exists and "
                "may be written to"
            ) from None

    def log_positions(self) -> None:
        """Where the sources of every run stand, a line each."""
        assert self._runs is not None
        for run in self._runs.served():
            run.stats.log_positions()

    @property
    def grpc_address(self) -> str:
        return self._grpc.address

    @property
    def rest_address(self) -> str:
        assert self._rest is not None
        return self._rest.address

    @property
    def page_url(self) -> str:
        assert self._rest is not None
        return self._rest.url

    @property
    def run_names(self) -> list[str]:
        assert self._runs is not None
        return [
            run.name for run in self._runs.served()
        ]  # whoever has just added one may not see them all

    def close(self) -> None:
        """Commits what is acknowledged, ends streams with a reason that makes clients reconnect."""
        if self._folder is not None:
            self._folder.end()
        for watcher in self._watchers:
            watcher.ending.set()
        if self._runs is not None:
            self._runs.stop()
        self._grpc.stop(GRACE_S)
        for rest in (self._rest, self._health):
            if rest is not None:
                rest.stop(GRACE_S)
        if self._ledger is not None:
            self._ledger.close()
        if self._readers is not None:
            self._readers.close()
        if self._ready_file is not None:
            _remove_ready(self._ready_file)


def _folder(options: ServeOptions) -> Path:
    """Where a ledger lies that is named without a folder."""
    first = (
        resolved(options.mixtures[0]).parent
        if options.mixtures
        else options.runs_dir or options.base_dir
    )
    return resolved(first)


def _holder(grpc_address: str) -> str:
    """Who holds a lease: the same for this server and for its restart, which has the same address again only
    because the one before is gone; another after the machine itself was restarted."""
    return f"{socket.gethostname()} {grpc_address} {boot_id()[:8]}".rstrip()


def split_address(option: str, address: str) -> tuple[str, int]:
    """``host:port``, with IPv6 hosts in brackets. Raises ``ConfigError`` naming the option."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(
            f"{option} {address!r}: expected host:port, such as 127.0.0.1:8080, or port 0 for a free one"
        )
    return host.strip("[]"), int(port)


def _refuse_open_door(option: str, address: str, access: Access) -> None:
    """Raises ``ConfigError`` where others than this machine would reach an address without a token."""
    host = split_address(option, address)[0]
    if is_loopback(host):
        return
    if not access.closed:
        raise ConfigError(
            f"{option} {address}: others than this machine reach this address, and there is no token; set "
            f"{CONTROL_VARIABLE} (make one: openssl rand -hex 32) or --token-file FILE, let the server make one with "
            "--make-token, or listen on 127.0.0.1"
        )
    if access.tls is None and not may_be_plain(host, os.environ):
        _log.warning(
            "%s %s: without TLS the token and the data travel unencrypted; give --tls-cert and --tls-key, or keep "
            "strangers off this network",
            option,
            address,
        )


def _remove_ready(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("--ready-file %s: cannot be removed (%s)", path, reason(error))
