"""Real processes of ``tokenloom``: servers that are killed and come back, and commands that end by themselves."""

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

#: A server on two busy cores takes about two seconds, most of them imports.
START_DEADLINE_S = 60.0
#: The server's own bounds on stopping add up to less.
STOP_DEADLINE_S = 25.0
#: Longer than any command that is run here, refused ledgers and their retries included.
COMMAND_DEADLINE_S = 50


class ServerProcess:
    """``tokenloom serve`` on free ports, with warnings as errors. ``start`` again: on the same ports.

    ``options`` are the interpreter's, ``flags`` those of ``tokenloom serve``; ``environment`` is added to this
    process's.
    """

    def __init__(
        self,
        folder: Path,
        *mixtures: Path,
        ledger: str = "sqlite:///ledger.db",
        options: Sequence[str] = (),
        flags: Sequence[object] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log_path = folder / "server.log"
        self.ready_file = folder / "ready.json"
        self.grpc, self.rest = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        self._mixtures = mixtures
        self._options = options
        self._flags = tuple(map(str, flags))
        self._environment = os.environ | (environment or {})
        # A relative SQLite file lies beside the mixture file; servers of one mixture must not share it.
        self.ledger = ledger.replace("sqlite:///", f"sqlite:///{folder}/") if ledger.startswith("sqlite:") else ledger
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, run: str) -> str:
        """What ``RemoteDataset`` takes."""
        return f"grpc://{self.grpc}/{run}"

    @property
    def rest_url(self) -> str:
        return f"http://{self.rest}"

    @property
    def ledger_file(self) -> Path:
        return Path(self.ledger.removeprefix("sqlite:///"))

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8")

    def start(self) -> ServerProcess:
        assert self._process is None, "it runs"
        self.ready_file.unlink(missing_ok=True)  # of one that was killed
        command = [sys.executable, "-W", "error", *self._options, "-m", "tokenloom_server", "serve"]
        command += map(str, self._mixtures)
        command += ["--grpc", self.grpc, "--rest", self.rest, "--ledger", self.ledger]
        command += ["--ready-file", str(self.ready_file), "--index-dir", str(self.log_path.parent / "index")]
        command += self._flags
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self._environment
            )
        deadline = time.monotonic() + START_DEADLINE_S
        while not self.ready_file.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"the server does not start:\n{self.log[-4000:]}")
            time.sleep(0.02)
        addresses = json.loads(self.ready_file.read_text(encoding="utf-8"))
        self.grpc, self.rest = addresses["grpc"], addresses["rest"]
        return self

    def start_with(self, *flags: object) -> ServerProcess:
        """``start`` with other flags of ``tokenloom serve``."""
        self._flags = tuple(map(str, flags))
        return self.start()

    def pause(self) -> None:
        """As a machine would that swaps, or whose disk hangs."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def unpause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """As a crash would: no goodbye."""
        self._end(signal.SIGKILL)

    def terminate(self) -> int | None:
        """As an orchestrator would; returns the exit status."""
        return self._end(signal.SIGTERM)

    def interrupt(self) -> int | None:
        """As Ctrl-C would; returns the exit status."""
        return self._end(signal.SIGINT)

    def _end(self, how: signal.Signals) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        process.send_signal(how)
        try:
            return process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that ended. ``output`` holds standard output and error as they came."""

    status: int
    output: str


# Imports take a second of each command, so one process does them once and each command is a fork of it.
_FORKS = """
import json, os, signal, sys
from tokenloom_server.__main__ import main
import tokenloom_server.cli, tokenloom_server.tools.remote, tokenloom_server.api.server

for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if not child:
        signal.alarm(request["deadline_s"])
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.chdir(request["folder"])
        sys.argv = ["tokenloom", *request["arguments"]]
        main()
        os._exit(99)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class CommandLine:
    """Runs ``tokenloom`` commands, each in a process of its own that ends within a deadline."""

    def __init__(self, folder: Path) -> None:
        self._output = folder / "output.txt"
        environment = os.environ | {"COLUMNS": "120", "NO_COLOR": "1", "PYTHONWARNINGS": "error"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __call__(self, *arguments: object, folder: Path | None = None) -> Finished:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {
            "arguments": [str(argument) for argument in arguments],
            "folder": str(folder or self._output.parent),
            "output": str(self._output),
            "deadline_s": COMMAND_DEADLINE_S,
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        return Finished(status, self._output.read_text(encoding="utf-8"))

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(STOP_DEADLINE_S)
        self._process.stdout.close()


def run_module(*arguments: object, folder: Path | None = None) -> Finished:
    """``python -m tokenloom_server`` as a user types it."""
    command: Sequence[str] = [sys.executable, "-m", "tokenloom_server", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_DEADLINE_S
    )
    return Finished(done.returncode, done.stdout + done.stderr)
