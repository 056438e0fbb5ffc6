"""Training scripts as a launcher runs them, one process for each rank, that may be killed.

Importing torch and a framework takes seconds of each process, so one process does it once and each rank is a fork
of it: a process of its own all the same, with its own sockets, threads and process group.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .ports import free_port

#: Longer than any job here takes on two busy cores.
JOB_DEADLINE_S = 90.0

_FORKS = """
import ctypes, gc, importlib, json, os, runpy, select, signal, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
gc.freeze()  # a rank's collections leave alone what was imported, and the pages that it lies in

def run(request):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # a child dies with this process
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = [request["script"], *request["arguments"]]
    sys.path.insert(0, os.path.dirname(request["script"]))
    status = 0
    try:
        runpy.run_path(request["script"], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        import traceback
        traceback.print_exc()
        status = 1
    import atexit
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

alive = set()
print("ready", flush=True)
while True:
    readable, _, _ = select.select([0], [], [], 0.02)
    if readable:
        line = b""
        while not line.endswith(b"\\n"):
            byte = os.read(0, 1)
            if not byte:
                sys.exit()
            line += byte
        pid = os.fork()
        if not pid:
            run(json.loads(line))
        alive.add(pid)
        print(json.dumps({"pid": pid}), flush=True)
    for pid in list(alive):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            alive.discard(pid)
            print(json.dumps({"ended": pid, "status": os.waitstatus_to_exitcode(status)}), flush=True)
"""


class Forks:
    """Where ranks come from: a process that has imported ``modules``."""

    def __init__(self, *modules: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _FORKS, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # As torchrun has it; but OpenMP reads it as torch is imported, so for a fork it would come too late, and
            # idle threads of each rank would spin for the same few cores.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.statuses: dict[int, int] = {}
        assert self._answer_line() == "ready\n", f"{modules} cannot be imported"

    def fork(self, script: Path, arguments: Sequence[object], folder: Path, environment: Mapping[str, str]) -> int:
        """Runs a script in a new process; returns its pid. What it prints goes to ``output.txt`` in the folder."""
        assert self._process.stdin is not None
        request = {
            "script": str(script.resolve()),
            "arguments": [str(argument) for argument in arguments],
            "folder": str(folder),
            "output": str(folder / "output.txt"),
            "environment": dict(environment),
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        while "pid" not in (answer := self._answer()):
            pass
        return int(answer["pid"])

    def status(self, pid: int) -> int | None:
        """A process's exit status; None while it runs."""
        assert self._process.stdout is not None
        import select

        while pid not in self.statuses and select.select([self._process.stdout], [], [], 0)[0]:
            self._answer()
        return self.statuses.get(pid)

    def close(self) -> None:
        """Ends it, and with it every process that it forked."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10.0)
        self._process.stdout.close()

    def _answer(self) -> dict[str, int]:
        answer: dict[str, int] = json.loads(self._answer_line())
        if "ended" in answer:
            self.statuses[answer["ended"]] = answer["status"]
        return answer

    def _answer_line(self) -> str:
        assert self._process.stdout is not None
        # Unbuffered below, so that what select says is all that there is to know.
        line = bytearray()
        while not line.endswith(b"\n"):
            byte = os.read(self._process.stdout.fileno(), 1)
            assert byte, "the process that forks ranks has ended"
            line += byte
        return line.decode()


@dataclass(frozen=True, slots=True)
class Job:
    """The ranks of one launch of a script."""

    forks: Forks
    pids: tuple[int, ...]
    folder: Path

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text(encoding="utf-8", errors="replace")

    def wait(self) -> None:
        """Until every rank has ended, well; raises with what they printed otherwise."""
        deadline = time.monotonic() + JOB_DEADLINE_S
        while (waiting := [pid for pid in self.pids if self.forks.status(pid) is None]) and time.monotonic() < deadline:
            if any(self.forks.statuses.get(pid, 0) for pid in self.pids):
                break
            time.sleep(0.02)
        statuses = [self.forks.statuses.get(pid) for pid in self.pids]
        if any(status != 0 for status in statuses):
            for pid in waiting:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"the ranks ended with {statuses}:\n{self.output[-8000:]}")

    def kill(self) -> None:
        """SIGKILL for every rank, as the end of a preempted node; waits until they are gone."""
        for pid in self.pids:
            if self.forks.status(pid) is None:
                os.kill(pid, signal.SIGKILL)
        while any(self.forks.status(pid) is None for pid in self.pids):
            time.sleep(0.01)


def launch(
    forks: Forks,
    script: Path,
    arguments: Sequence[object],
    *,
    world_size: int,
    folder: Path,
    environment: Mapping[str, str] | None = None,
) -> Job:
    """Starts a script on every rank, with the variables that torchrun sets."""
    folder.mkdir(parents=True, exist_ok=True)
    port = str(free_port())
    pids = []
    for rank in range(world_size):
        variables = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            **(environment or {}),
        }
        pids.append(forks.fork(script, arguments, folder, variables))
    return Job(forks, tuple(pids), folder)
