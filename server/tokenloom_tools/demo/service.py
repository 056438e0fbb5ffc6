"""The server as a child process, and its stats over REST."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from tokenloom_server.errors import TokenloomError
from tokenloom_server.reports.stats import RunStats

from tokenloom_tools.demo.processes import POLL_S, Child, Processes, wait_until
from tokenloom_tools.remote import Remote

#: Imports, the ledger, the files and the check of the tokeniser: seconds, on a machine that is busy otherwise.
READY_TIMEOUT_S = 120.0
#: The last acknowledgement travels and is committed in well under a second.
COMMIT_TIMEOUT_S = 30.0
#: The server's --lease and --liveness, seconds.
CERTAIN_AFTER_S = 3


@dataclass(frozen=True, slots=True)
class Service:
    """A running server."""

    child: Child
    grpc: str
    rest: str

    @property
    def page(self) -> str:
        return f"http://{self.rest}/"

    def url(self, run: str) -> str:
        """What RemoteDataset takes."""
        return f"grpc://{self.grpc}/{run}"

    def committed(self, run: str, sample_index: int) -> RunStats:
        """The stats once everything before ``sample_index`` is in the ledger."""
        deadline = time.monotonic() + COMMIT_TIMEOUT_S
        remote = Remote(f"{self.page}{run}", {})
        while True:
            try:
                (stats,) = remote.stats()
            except TokenloomError as error:
                raise self.child.failure(str(error)) from None
            if stats.sample_index >= sample_index:
                return stats
            if time.monotonic() > deadline:
                raise self.child.failure(
                    f"the trainers acknowledged samples up to {sample_index}, but after {COMMIT_TIMEOUT_S:g} s "
                    f"the ledger of {run!r} is at {stats.sample_index} (waiting for: {stats.waiting_for or 'nothing'})"
                )
            time.sleep(POLL_S)


def serve_arguments(mixture: Path, ledger: Path) -> list[str]:
    """What follows ``tokenloom`` on the command line; the ledger's file is named from the mixture file's folder."""
    return [
        "serve",
        str(mixture),
        "--ledger",
        f"sqlite:///{quote(os.path.relpath(ledger, mixture.parent))}",
    ]


def start(
    processes: Processes,
    name: str,
    mixture: Path,
    ledger: Path,
    log: Path,
    *,
    successor_of: Service | None = None,
) -> Service:
    """Starts a server on this machine alone, at the addresses of the one that it follows, or on free ports; and waits
    until it is ready."""
    ready_file = log.with_suffix(".ready.json")
    ready_file.unlink(missing_ok=True)
    grpc, rest = (
        (successor_of.grpc, successor_of.rest) if successor_of else ("127.0.0.1:0", "127.0.0.1:0")
    )
    options = ["--grpc", grpc, "--rest", rest, "--ready-file", str(ready_file)]
    # What is killed here is known to be dead: nobody has to wait as long as in earnest until that is certain.
    options += ["--lease", str(CERTAIN_AFTER_S), "--liveness", str(CERTAIN_AFTER_S)]
    child = processes.start(
        name, ["-m", "tokenloom_tools", *serve_arguments(mixture, ledger), *options], log
    )
    wait_until(ready_file.exists, name, READY_TIMEOUT_S, [child])
    # It appears whole.
    addresses = json.loads(ready_file.read_bytes())
    return Service(child, addresses["grpc"], addresses["rest"])
