"""The processes under measure: how they start and end, and what they used.

Everything is measured from outside and in one window. A process that takes batches writes how many tokens it
has to a *board*, a file that all map; whoever measures reads the board, and the CPU clocks of all processes, at
the window's two ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import psutil

from benchmarks.results import ROOT

#: A process that is not ready by then will not be.
READY_S = 900.0
#: A process that was asked to end gets this long.
END_S = 10.0
#: How often a window looks whether it is over.
TICK_S = 0.05


class Board:
    """What takers of batches say about themselves: int64 [takers, (tokens, steps, ended)] in a mapped file."""

    TOKENS, STEPS, ENDED = 0, 1, 2

    def __init__(self, path: Path, takers: int) -> None:
        self.path = path
        self.cells: npt.NDArray[np.int64] = np.memmap(path, np.int64, "w+", shape=(takers, 3))

    @property
    def tokens(self) -> int:
        return int(self.cells[:, self.TOKENS].sum())

    @property
    def slowest_steps(self) -> int:
        """Steps of the taker that has the fewest."""
        return int(self.cells[:, self.STEPS].min())

    @property
    def ended(self) -> bool:
        """Whether a taker came to the end of the data."""
        return bool(self.cells[:, self.ENDED].any())


def cpu_s(pid: int) -> float:
    """User and system seconds of a process, of its descendants, and of those of them that ended."""
    used = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                ended = one.cpu_times()
                # The process's own CPU clock counts nanoseconds, where /proc has ticks of 10 ms.
                used += (
                    time.clock_gettime(~one.pid << 3 | 2)
                    + ended.children_user
                    + ended.children_system
                )
    return used


def memory_mb(pid: int) -> tuple[float, float]:
    """(proportional set size, the anonymous part of it) of a process and its descendants, MB of 2^20 bytes.

    The rest is mapped files: pages of the page cache that happen to be mapped.
    """
    all_kb = anonymous_kb = 0
    process = psutil.Process(pid)
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{one.pid}/smaps_rollup").read_text().splitlines():
                name, _, value = line.partition(":")
                if name == "Pss":
                    all_kb += int(value.split()[0])
                elif name == "Pss_Anon":
                    anonymous_kb += int(value.split()[0])
    return all_kb / 1024, anonymous_kb / 1024


@dataclass(frozen=True, slots=True)
class Reading:
    """The clocks and the board at one moment."""

    at_s: float
    tokens: int
    cpu_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class Window:
    """A steady state, from one reading to another."""

    first: Reading
    last: Reading
    #: The greatest (PSS, anonymous PSS) seen, MB, by role.
    memory_mb: dict[str, tuple[float, float]]

    @property
    def seconds(self) -> float:
        return self.last.at_s - self.first.at_s

    @property
    def tokens(self) -> int:
        return self.last.tokens - self.first.tokens

    def ns_per_token(self, role: str) -> float:
        """CPU nanoseconds that the processes of a role used for each token."""
        return (self.last.cpu_s[role] - self.first.cpu_s[role]) / self.tokens * 1e9

    @property
    def tokens_per_cpu_s(self) -> float:
        return 1e9 / sum(self.ns_per_token(role) for role in self.first.cpu_s)


class Processes:
    """Processes by role, a scratch folder and a board for them; all ended on leaving."""

    def __init__(self, takers: int) -> None:
        self._scratch = tempfile.TemporaryDirectory(
            prefix="tokenloom-bench-", ignore_cleanup_errors=True
        )
        self.folder = Path(self._scratch.name)
        self.board = Board(self.folder / "board", takers)
        self._by_role: dict[str, list[subprocess.Popen[str]]] = {}
        self._others: dict[str, int] = {}

    def start(
        self, role: str, command: Sequence[str], env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Starts a process in the project's folder; what it prints goes to a log in the scratch folder."""
        number = sum(map(len, self._by_role.values()))
        with (self.folder / f"{role}-{number}.log").open("w") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
                cwd=ROOT,
                # Installed packages have byte code; without it, starts would be measured with a compiler.
                env={**os.environ, **(env or {}), "PYTHONDONTWRITEBYTECODE": ""},
            )
        self._by_role.setdefault(role, []).append(process)
        return process

    def count(self, role: str, pid: int) -> None:
        """Counts a process that somebody else started, and will end."""
        self._others[role] = pid

    def read(self) -> Reading:
        used = {
            role: sum(cpu_s(process.pid) for process in some)
            for role, some in self._by_role.items()
        }
        used |= {role: cpu_s(pid) for role, pid in self._others.items()}
        return Reading(time.monotonic(), self.board.tokens, used)

    def wait(self, ready: Callable[[], bool], what: str, timeout_s: float = READY_S) -> None:
        """Polls until ``ready()``. Raises ``RuntimeError``, with the logs' ends, where a process ends before."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            gone = [
                process
                for some in self._by_role.values()
                for process in some
                if process.poll() is not None
            ]
            if gone or time.monotonic() > deadline:
                why = f"status {gone[0].returncode}" if gone else f"not within {timeout_s:.0f} s"
                raise RuntimeError(f"{what} did not come ({why}).\n{self.logs()}")
            time.sleep(0.005)

    def window(self, warm_up_steps: int, seconds: float, began: Reading | None = None) -> Window:
        """A steady state: from when every taker had its warm-up, for so long, or until the data end.

        What was used since ``began`` counts, too, if it is given.
        """
        self.wait(lambda: self.board.slowest_steps >= warm_up_steps, "the steady state")
        first = last = self.read()
        memory = dict.fromkeys(self._by_role, (0.0, 0.0))
        seen_at = 0.0
        while last.at_s - first.at_s < seconds:
            time.sleep(TICK_S)
            # Reading smaps walks a process's page tables: too slow for every tick.
            if last.at_s - seen_at > 0.5:
                seen_at = last.at_s
                for role, some in self._by_role.items():
                    found = [memory_mb(process.pid) for process in some if process.poll() is None]
                    memory[role] = max(
                        memory[role], (sum(a for a, _ in found), sum(b for _, b in found))
                    )
            now = self.read()
            if self.board.ended or any(
                p.poll() is not None for some in self._by_role.values() for p in some
            ):
                break
            last = now
        if last.tokens == first.tokens:
            raise RuntimeError(
                f"the data ended before a steady state, or nothing came.\n{self.logs()}"
            )
        return Window(began or first, last, memory)

    def end(self, role: str) -> None:
        """Asks the processes of a role to end, and makes them, with all that they have started."""
        some = self._by_role.pop(role, [])
        below: list[psutil.Process] = []
        for process in some:
            if process.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    below += psutil.Process(process.pid).children(recursive=True)
                process.send_signal(signal.SIGTERM)
        for process in some:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for child in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    def logs(self) -> str:
        """The last lines of what every process printed."""
        found = []
        for path in sorted(self.folder.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-15:]
            found.append("\n".join([f"--- {path.name}", *lines]))
        return "\n".join(found)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Those started last first: clients say goodbye while their server is there.
        for role in reversed(list(self._by_role)):
            self.end(role)
        self._scratch.cleanup()


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server that is ready."""

    grpc: str
    rest: str
    process: subprocess.Popen[str]
    #: From the start of the process to the ready file.
    ready_s: float
    env: Mapping[str, str] = field(default_factory=dict)


def serve(processes: Processes, mixture: Path, ledger: str | None = None) -> Served:
    """Starts ``tokenloom serve`` and waits until it is ready; its ledger is new unless given."""
    ready = processes.folder / f"{mixture.stem}.ready"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tokenloom_tools", "serve", str(mixture)]
    command += [
        "--grpc",
        "127.0.0.1:0",
        "--rest",
        "127.0.0.1:0",
        "--ready-file",
        str(ready),
        "--log-level",
        "warning",
    ]
    command += ["--ledger", ledger or f"sqlite:///{processes.folder}/{mixture.stem}.db"]
    began = time.monotonic()
    process = processes.start("server", command)
    processes.wait(ready.exists, "the server's ready file")
    ready_s = time.monotonic() - began
    addresses = json.loads(ready.read_text())
    # The server imports REST's packages once somebody asks, or 2 s after its start: before the window, not within it.
    with urllib.request.urlopen(f"http://{addresses['rest']}/healthz", timeout=READY_S):
        pass
    return Served(grpc=addresses["grpc"], rest=addresses["rest"], process=process, ready_s=ready_s)


@contextlib.contextmanager
def redis(processes: Processes) -> Iterator[str]:
    """The URL of an empty Redis of our own, as durable as the ledger demands; its CPU time counts."""
    from tests.support.redis_server import RedisServer

    with tempfile.TemporaryDirectory(prefix="tokenloom-bench-redis-") as folder:
        server = RedisServer(Path(folder)).start()
        processes.count("redis", server.pid)
        try:
            yield server.url()
        finally:
            server.stop()
