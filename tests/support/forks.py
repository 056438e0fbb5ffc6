"""Processes that start with their imports done: each is a fork of one that has done them.

The imports of a server take most of a second of every start, and those of a trainer two. A fork is a process of its
own all the same, with its own sockets, threads and signals, and may be killed. Run as a program, this is the process
that forks.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import runpy
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn


class Forks:
    """A process that has imported ``modules`` (``NAME.*`` is a package with all that is in it), and can fork.

    ``options`` are the interpreter's.
    """

    def __init__(self, *modules: str, options: Sequence[str] = ()) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *options, "-P", __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # As torchrun has it; but OpenMP reads it as torch is imported, so for a fork it would come too late, and
            # idle threads of each rank would spin for the same few cores.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._count = 0
        self._statuses: dict[int, int] = {}
        self._lock = threading.Lock()
        try:
            assert self._answer_line() == "ready\n", f"{modules} cannot be imported"
        except BaseException:  # a test's time, too, may be over: no later test is to hear of it
            self._process.kill()
            self._process.communicate()
            raise

    def fork(
        self,
        program: str | Path,
        arguments: Sequence[object],
        *,
        output: Path,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Fork:
        """Starts a script (a path), or a function (``module:name``) that takes its arguments from ``sys.argv``.

        What it prints is added to the file ``output``. ``environment`` is added to this process's.
        """
        assert self._process.stdin is not None
        request = {
            "program": str(program),
            "arguments": [str(argument) for argument in arguments],
            "folder": str(folder or Path.cwd()),
            "output": str(output.absolute()),
            "environment": {**os.environ, **(environment or {})},
        }
        with self._lock:
            self._count += 1
            self._process.stdin.write(
                json.dumps({**request, "number": self._count}).encode() + b"\n"
            )
            self._process.stdin.flush()
            while "pid" not in (answer := self._answer()):
                pass
            return Fork(self, self._count, answer["pid"])

    def status(self, number: int) -> int | None:
        """How the fork of that number ended, as ``subprocess`` says it; None while it runs."""
        with self._lock:
            while number not in self._statuses and _is_readable(self._process.stdout, 0.0):
                self._answer()
            return self._statuses.get(number)

    def close(self) -> None:
        """Ends it, and with it every process that it forked."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60.0)
        self._process.stdout.close()

    def _answer(self) -> dict[str, int]:
        answer: dict[str, int] = json.loads(self._answer_line())
        if "ended" in answer:
            self._statuses[answer["ended"]] = answer["status"]
        return answer

    def _answer_line(self) -> str:
        assert self._process.stdout is not None
        line = _line(self._process.stdout.fileno())
        assert line, "the process that forks others has ended"
        return line


@dataclass(frozen=True, slots=True)
class Fork:
    """One of them, to be used as a ``subprocess.Popen``. Its number is its own; its pid is another's once it ended."""

    forks: Forks
    number: int
    pid: int

    def poll(self) -> int | None:
        return self.forks.status(self.number)

    def wait(self, timeout: float = 60.0) -> int:
        """Raises ``subprocess.TimeoutExpired``."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.005)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended, and how is still on its way here
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _is_readable(file: Any, seconds: float | None) -> bool:
    """Whether there is something to read, or the end, within a time; descriptors may be above 1,023."""
    with selectors.DefaultSelector() as selector:
        selector.register(file, selectors.EVENT_READ)
        return bool(selector.select(seconds))


def _line(descriptor: int) -> str:
    """A line, unbuffered, so that ``_is_readable`` says all that there is to know; empty at the end."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            return ""
        line += byte
    return line.decode()


def _main() -> None:
    sys.path.append(str(Path(__file__).parents[1]))  # for programs of the tests
    for name in sys.argv[1:]:
        package = importlib.import_module(name.removesuffix(".*"))
        if name.endswith(".*"):
            for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
                if not module.name.endswith(".__main__"):
                    importlib.import_module(module.name)
    gc.collect()
    gc.freeze()  # a fork's collections leave alone what was imported, and the pages that it lies in
    running: dict[int, int] = {}
    print("ready", flush=True)
    while True:
        if _is_readable(0, 0.01 if running else None):
            line = _line(0)
            if not line:
                return
            request = json.loads(line)
            pid = os.fork()
            if not pid:
                _run(request)
            running[pid] = request["number"]
            print(json.dumps({"pid": pid}), flush=True)
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                answer = {"ended": running.pop(pid), "status": os.waitstatus_to_exitcode(status)}
                print(json.dumps(answer), flush=True)


def _run(request: dict[str, Any]) -> NoReturn:
    """In the fork: what was asked for, and its end."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it dies with the process that forked it
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = [request["program"], *request["arguments"]]
    module, colon, function = request["program"].partition(":")
    status = 0
    try:
        if colon:
            getattr(importlib.import_module(module), function)()
        else:
            sys.path.insert(0, str(Path(request["program"]).parent))
            runpy.run_path(request["program"], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    # The rest of the interpreter's own end would take longest: it frees all that was imported.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _main()
