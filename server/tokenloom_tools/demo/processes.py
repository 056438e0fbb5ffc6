"""Child processes that are always ended, whose logs are files, and for which nobody waits without a bound: the server
is one, with its stats over REST."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import quote

from tokenloom_server.api import parent_death
from tokenloom_server.errors import TokenloomError
from tokenloom_server.reports.stats import RunStats

from tokenloom_tools.demo.proof import Disproved
from tokenloom_tools.remote import Remote

POLL_S = 0.02
#: A process that was asked to end and did not, within this, is killed.
GRACE_S = 10.0
#: A killed process is gone when the kernel says so; longer means that the machine is in trouble.
KILL_S = 30.0
TAIL_LINES = 25
TAIL_BYTES = 16_384


class DemoFailed(TokenloomError):
    """A step of the demonstration failed; the message says which, and shows the log that tells why."""


class Child(subprocess.Popen[bytes]):
    """One process, in a session of its own (a Ctrl-C is for the parent), with its output in a log file."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self.log = log
        self.killed = False
        log.parent.mkdir(parents=True, exist_ok=True)
        # -I and -S: ``parent_death`` needs nothing that is installed. The program's own Python starts as usual.
        guarded = [sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid()), *command]
        with log.open("wb") as output:
            super().__init__(
                guarded,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; ``None`` while it runs."""
        return self.poll()

    def kill_on_purpose(self) -> None:
        """SIGKILL, and waits for the end."""
        self.killed = True
        self._end()

    def stop(self) -> None:
        """Asks it to end; kills it if it does not."""
        if self.status is None:
            self.terminate()
            try:
                self.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                self._end()

    def tail(self) -> str:
        """The end of its log."""
        with self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-TAIL_LINES:]) or "    (empty)"

    def failure(self, fault: str) -> DemoFailed:
        """An error that shows what the process wrote last."""
        return DemoFailed(f"{fault}\nthe end of {self.log}:\n{self.tail()}")

    def _end(self) -> None:
        self.kill()
        try:
            self.wait(KILL_S)
        except subprocess.TimeoutExpired:
            raise DemoFailed(
                f"{self.name} (pid {self.pid}) did not end within {KILL_S:g} s of SIGKILL"
            ) from None


class Processes:
    """All children of the demonstration. Leaving the block ends every one of them."""

    def __init__(self) -> None:
        self._children: list[Child] = []

    def start(self, name: str, command: Sequence[str], log: Path, **environment: str) -> Child:
        """Starts ``python -m …``, without the variables of a launcher, and without what is set for another server."""
        child = Child(name, [sys.executable, *command], log, _clean(os.environ) | environment)
        self._children.append(child)
        return child

    def all_ended(self) -> str:
        """A count for people; raises ``Disproved`` for a process that still runs or ended with an error."""
        for child in self._children:
            if child.status != (-signal.SIGKILL if child.killed else 0):
                raise Disproved(
                    f"{child.name} (pid {child.pid}) has status {child.status}; see {child.log}"
                )
        return f"{len(self._children)} processes"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for child in reversed(self._children):
                child.stop()
        finally:
            for child in self._children:
                if child.status is None:  # a second Ctrl-C came meanwhile
                    child.kill_on_purpose()


def wait_until(
    done: Callable[[], bool], event: str, timeout_s: float, children: Sequence[Child]
) -> None:
    """Waits for ``done``, which ``event`` describes.

    Raises ``DemoFailed`` after ``timeout_s``, or as soon as one of the children ends with an error.
    """
    deadline = time.monotonic() + timeout_s
    while not done():
        for child in children:
            if child.status:
                raise child.failure(
                    f"{child.name} ended with status {child.status} while waiting for {event}"
                )
        if time.monotonic() > deadline:
            logs = "\n".join(f"the end of {child.log}:\n{child.tail()}" for child in children)
            raise DemoFailed(f"waited {timeout_s:g} s for {event}, in vain\n{logs}")
        time.sleep(POLL_S)


def _clean(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what torchrun, SLURM or a proxy set: the children's ranks and addresses are given to them. And without
    tokens and data roots: their server is theirs alone."""
    launcher = {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
    prefixes = ("SLURM_", "TORCHELASTIC_", "GROUP_", "ROLE_", "TOKENLOOM_")
    return {
        k: v for k, v in environment.items() if k not in launcher and not k.startswith(prefixes)
    }


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


def start_server(
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
