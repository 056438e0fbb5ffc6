"""One server process: ledger, runs, gRPC and REST, brought up in that order and closed in the other."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tokenloom_proto.credentials import CONTROL_VARIABLE, is_loopback

from tokenloom_server.api import open_files
from tokenloom_server.api.auth import OPEN_TO_ALL, Access
from tokenloom_server.api.grpc import GrpcServer
from tokenloom_server.api.rest.server import RestServer
from tokenloom_server.config.data_roots import DataRoots
from tokenloom_server.errors import ConfigError
from tokenloom_server.ledger.base import Ledger
from tokenloom_server.ledger.boot_clock import boot_id
from tokenloom_server.ledger.open import open_ledger
from tokenloom_server.run.timeouts import Timeouts

if TYPE_CHECKING:
    from tokenloom_server.api.service import Runs
    from tokenloom_server.config.run import RunConfig

_log = logging.getLogger(__name__)

#: Line indexes of text files lie in this folder beside the mixture file.
INDEX_FOLDER = ".tokenloom-index"
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


class Server:
    """Brought up by its constructor; closed by ``close``, in a bounded time."""

    def __init__(self, options: ServeOptions) -> None:
        """Raises ``ConfigError`` and what sources, tokeniser and ledger raise; nothing is left open then."""
        for option, address in (("--grpc", options.grpc), ("--rest", options.rest)):
            _refuse_open_door(option, address, options.access)
        self._open_files = open_files.raise_limit()
        self._runs: Runs | None = None
        self._ledger: Ledger | None = None
        self._rest: RestServer | None = None
        self._health: RestServer | None = None
        self._ready_file: Path | None = None
        # The addresses first: a port that is taken is found before any file is read, and trainers that wait for
        # this server connect while all that it needs is imported and opened.
        self._grpc = GrpcServer(options.grpc, options.access, open_files.grpc_connections(self._open_files))
        try:
            self._bring_up(options)
        except BaseException:
            self.close()
            raise

    def _bring_up(self, options: ServeOptions) -> None:
        rest = self._rest = RestServer(*split_address("--rest", options.rest), options.access)
        if options.health is not None:
            # A token that nobody has: why it is not ready, REST says. No TLS: probes have no certificates.
            nobody = Access(secrets.token_hex())
            self._health = RestServer(*split_address("--health", options.health), nobody, only_health=True)
            _log.info("health: %shealthz and %sreadyz", self._health.url, self._health.url)
        from tokenloom_server.api.service import Runs
        from tokenloom_server.catalog import open_catalog

        ledger = self._ledger = open_ledger(options.ledger, _folder(options))
        _log.info("ledger: %s", ledger.description)
        runs = self._runs = Runs(
            ledger,
            _holder(self.grpc_address),
            options.timeouts,
            standby=options.standby,
            data_roots=options.data_roots,
            catalog=open_catalog(options.plugins, options.transforms),
        )
        rest.start(runs, grpc_address=self.grpc_address)
        if self._health is not None:
            self._health.start(runs)
        # A process that waits for a slow ledger is alive, and says so.
        ledger.check()
        if options.ready_file is not None:
            # What a killed server left there; with the ports in hand, it is not another's.
            _remove_ready(options.ready_file)
        for path in options.mixtures:
            runs.add(path, options.index_dir or path.resolve().parent / INDEX_FOLDER, options.revise)
        if options.mixture is not None:
            folder = options.base_dir.resolve()
            index_dir = options.index_dir or folder / INDEX_FOLDER
            runs.add_mixture(options.mixture, folder, index_dir, options.revise, where="--dataset-mix")
        served = map(runs.get, runs.names())
        sources = sum(len(run.coordinator.order.config.sources) for run in served)
        open_files.require(self._open_files, sources)
        self._grpc.start(runs, self.rest_address)
        if options.ready_file is not None:
            self._ready_file = options.ready_file
            _write_ready(options.ready_file, self.grpc_address, self.rest_address, self.run_names)

    def log_positions(self) -> None:
        """Where the sources of every run stand, a line each."""
        assert self._runs is not None
        for name in self._runs.names():
            self._runs.get(name).stats.log_positions()

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
        return self._runs.names()

    def close(self) -> None:
        """Commits what is acknowledged, ends streams with a reason that makes clients reconnect."""
        if self._runs is not None:
            self._runs.stop()
        self._grpc.stop(GRACE_S)
        for rest in (self._rest, self._health):
            if rest is not None:
                rest.stop(GRACE_S)
        if self._ledger is not None:
            self._ledger.close()
        if self._ready_file is not None:
            _remove_ready(self._ready_file)


def _folder(options: ServeOptions) -> Path:
    """Where a ledger lies that is named without a folder."""
    return options.mixtures[0].resolve().parent if options.mixtures else options.base_dir.resolve()


def _holder(grpc_address: str) -> str:
    """Who holds a lease: the same for this server and for its restart, which has the same address again only
    because the one before is gone; another after the machine itself was restarted."""
    return f"{socket.gethostname()} {grpc_address} {boot_id()[:8]}".rstrip()


def split_address(option: str, address: str) -> tuple[str, int]:
    """``host:port``, with IPv6 hosts in brackets. Raises ``ConfigError`` naming the option."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{option} {address!r}: expected host:port, such as 127.0.0.1:8080, or port 0 for a free one")
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
    if access.tls is None:
        _log.warning(
            "%s %s: without TLS the token and the data travel unencrypted; give --tls-cert and --tls-key, or keep "
            "strangers off this network",
            option,
            address,
        )


def _write_ready(path: Path, grpc: str, rest: str, runs: Sequence[str]) -> None:
    # Written whole or not at all: somebody is polling for it.
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps({"grpc": grpc, "rest": rest, "runs": list(runs)}) + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ConfigError(
            f"--ready-file {path}: cannot be written ({error.strerror}); give a file in a folder that exists and may "
            "be written to"
        ) from None


def _remove_ready(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("--ready-file %s: cannot be removed (%s)", path, error.strerror)
