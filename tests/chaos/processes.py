"""The processes of a world: servers that an orchestrator restarts, and their addresses, which stay."""

from __future__ import annotations

import json
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
from support.forks import Fork
from support.ports import free_port
from support.server_process import server_forks

from chaos.server_at import arm, disarm

#: After an exit that nobody asked for, an orchestrator waits so long before it starts the server again, seconds.
RESTART_AFTER_S = 0.2
#: The server's own bounds on stopping add up to less, seconds.
STOP_DEADLINE_S = 120.0
#: A call that is not answered by then never is, seconds.
_CALL_TIMEOUT_S = 20.0
#: A server that does not say so soon whether it leads is busy with something else.
_LOOK_TIMEOUT_S = 1.0


class ServerError(Exception):
    """A REST call that was refused (``status``), or broken off (0)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class ChaosServer:
    """``tokenloom serve`` on ports that stay, started again whenever it ended while it is wanted."""

    def __init__(
        self, folder: Path, mixture: Path, ledger: str, options: list[str], mutant: str
    ) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.grpc_port, self.rest_port = free_port(), free_port()
        self.wanted = False
        self.stopped = False
        self.starts = 0
        self._arm_file = folder / "armed.json"
        self._ready_file = folder / "ready.json"
        self._arguments: list[object] = [
            self._arm_file,
            mutant,
            "serve",
            mixture,
            "--ledger",
            ledger,
        ]
        self._arguments += [
            "--grpc",
            f"127.0.0.1:{self.grpc_port}",
            "--rest",
            f"127.0.0.1:{self.rest_port}",
        ]
        self._arguments += [
            "--ready-file",
            self._ready_file,
            "--index-dir",
            folder.parent / "index",
            *options,
        ]
        self._process: Fork | None = None
        self._ended_at = 0.0

    @property
    def log(self) -> str:
        return (self.folder / "server.log").read_text(encoding="utf-8", errors="replace")

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def ready(self) -> bool:
        return self.running and self._ready_file.exists()

    def start(self) -> None:
        """Does not wait for it."""
        self.wanted = True
        self._ready_file.unlink(missing_ok=True)
        self._process = server_forks().fork(
            "chaos.server_at:main", self._arguments, output=self.folder / "server.log"
        )
        self.starts += 1
        self._ended_at = 0.0

    def tend(self) -> None:
        """What an orchestrator does: a server that ended by itself comes back."""
        if not self.wanted or self.running:
            return
        if not self._ended_at:
            self._ended_at = time.monotonic()
        if time.monotonic() - self._ended_at >= RESTART_AFTER_S:
            self.start()

    def kill(self) -> None:
        """As a crash would: no goodbye."""
        self.wanted = self.stopped = False
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def terminate(self) -> int:
        """As an orchestrator would; the exit status. Raises ``TimeoutExpired`` if it does not end."""
        self.wanted = False
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(STOP_DEADLINE_S)

    def children(self) -> list[psutil.Process]:
        assert self._process is not None
        return psutil.Process(self._process.pid).children(recursive=True)

    def stop(self) -> None:
        """SIGSTOP: it is there, and does nothing."""
        self.signal(signal.SIGSTOP)
        self.stopped = True

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)
        self.stopped = False

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def arm(self, point: str, how: str, skip: int = 0) -> None:
        arm(self._arm_file, point, skip, how)

    def disarm(self) -> bool:
        """Whether it had not fired."""
        return disarm(self._arm_file)

    @property
    def fired(self) -> bool:
        return not self._arm_file.exists()

    # REST

    def leads(self) -> bool:
        """Whether it serves the run, and does not stand by for another server."""
        if not self.ready or self.stopped:
            return False
        join_handler = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with join_handler.open(
                f"http://127.0.0.1:{self.rest_port}/readyz", timeout=_LOOK_TIMEOUT_S
            ):
                return True
        except urllib.error.HTTPError as error:
            with error:
                return b"stands by" not in error.read()
        except OSError:
            return False

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Raises ``ServerError``."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.rest_port}{path}",
            json.dumps(body).encode() if body is not None else None,
            {"content-type": "application/json"},
            method=method,
        )
        join_handler = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with join_handler.open(request, timeout=_CALL_TIMEOUT_S) as answer:
                found: dict[str, Any] = json.loads(answer.read())
                return found
        except urllib.error.HTTPError as error:
            with error:
                raise ServerError(error.code, error.read().decode(errors="replace")[:500]) from None
        except (OSError, ValueError) as error:
            raise ServerError(0, str(error)) from None
