"""Real processes of ``tokenloom``: servers that are killed and come back, and commands that end by themselves."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from .forks import Fork, Forks
from .ports import free_port

#: A server on two busy cores takes about two seconds, most of them imports.
START_DEADLINE_S = 120.0
#: The server's own bounds on stopping add up to 25.
STOP_DEADLINE_S = 120.0
#: Longer than any command that is run here, refused ledgers and their retries included.
COMMAND_DEADLINE_S = 240


MAIN = "tokenloom_tools.__main__:main"
#: What servers and commands import while they work.
_WORK = (
    *(
        "awkward",
        "email.headerregistry",
        "encodings.idna",
        "fastapi",
        "gigatoken",
        "grpc_reflection.v1alpha.reflection",
    ),
    *(
        "prometheus_client",
        "pyarrow.dataset",
        "pydantic.v1",
        "redis",
        "rich._emoji_codes",
        "rich.status",
        "tokenizers",
    ),
    *("uvicorn.protocols.http.h11_impl",),
)


@cache
def server_forks() -> Forks:
    """Where this process's servers and commands come from, with warnings as errors."""
    forks = Forks(
        "tokenloom_server.*",
        "tokenloom_tools.*",
        "tokenloom_proto.*",
        *_WORK,
        options=("-W", "error"),
    )
    atexit.register(forks.close)
    return forks


class ServerProcess:
    """``tokenloom serve`` on free ports, with warnings as errors. ``start`` again: on the same ports.

    ``flags`` are those of ``tokenloom serve``; ``environment`` is added to this process's. With ``options``, which are
    the interpreter's and may be none, the server is no fork but has an interpreter of its own.
    """

    def __init__(
        self,
        folder: Path,
        *mixtures: Path,
        ledger: str = "sqlite:///ledger.db",
        options: Sequence[str] | None = None,
        flags: Sequence[object] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log_path = folder / "server.log"
        self.ready_file = folder / "ready.json"
        self.grpc, self.rest = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        self._mixtures = mixtures
        self._options = options
        self._flags = tuple(flags)
        self._environment = dict(environment or {})
        # A relative SQLite file lies beside the mixture file; servers of one mixture must not share it.
        self.ledger = (
            ledger.replace("sqlite:///", f"sqlite:///{folder}/")
            if ledger.startswith("sqlite:")
            else ledger
        )
        self._process: subprocess.Popen[bytes] | Fork | None = None

    def url(self, run: str) -> str:
        """What ``RemoteDataset`` takes."""
        return f"grpc://{self.grpc}/{run}"

    @property
    def rest_url(self) -> str:
        return f"http://{self.rest}"

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """What REST answers, whatever proxy the environment names. ``options`` are those of ``httpx.request``."""
        return httpx.request(
            method, f"{self.rest_url}{path}", trust_env=False, verify=False, timeout=60, **options
        )

    def get(self, path: str, **query: object) -> Any:
        """The document that REST has there."""
        answer = self.request(
            "GET", path, params={name: str(value) for name, value in query.items()}
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    @property
    def ledger_file(self) -> Path:
        return Path(self.ledger.removeprefix("sqlite:///"))

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8")

    def start(self) -> ServerProcess:
        assert self._process is None, "it runs"
        self.ready_file.unlink(missing_ok=True)  # of one that was killed
        arguments: list[object] = [
            "serve",
            *self._mixtures,
            "--grpc",
            self.grpc,
            "--rest",
            self.rest,
        ]
        arguments += ["--ledger", self.ledger, "--ready-file", self.ready_file]
        arguments += ["--index-dir", self.log_path.parent / "index", *self._flags]
        if self._options is not None:
            command = [
                sys.executable,
                "-W",
                "error",
                *self._options,
                "-m",
                "tokenloom_tools",
                *map(str, arguments),
            ]
            with self.log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                    env=os.environ | self._environment,
                )
        else:
            self._process = server_forks().fork(
                MAIN, arguments, output=self.log_path, environment=self._environment
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
        self._flags = tuple(flags)
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


class CommandLine:
    """Runs ``tokenloom`` commands, each in a process of its own that ends within a deadline."""

    def __init__(self, folder: Path) -> None:
        self._output = folder / "output.txt"

    def __call__(
        self,
        *arguments: object,
        folder: Path | None = None,
        columns: int = 120,
        environment: Mapping[str, str] | None = None,
    ) -> Finished:
        self._output.unlink(missing_ok=True)
        process = server_forks().fork(
            MAIN,
            arguments,
            output=self._output,
            folder=folder or self._output.parent,
            environment={"COLUMNS": str(columns), "NO_COLOR": "1", **(environment or {})},
        )
        try:
            status = process.wait(COMMAND_DEADLINE_S)
        finally:
            process.kill()
        return Finished(status, self._output.read_text(encoding="utf-8"))


def run_module(*arguments: object) -> Finished:
    """``python -m tokenloom_tools`` as a user types it, in an interpreter of its own with this one's environment."""
    done = subprocess.run(
        [sys.executable, "-m", "tokenloom_tools", *map(str, arguments)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_DEADLINE_S,
    )  # fmt: skip
    return Finished(done.returncode, done.stdout + done.stderr)
