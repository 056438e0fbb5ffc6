"""The client that is held to the contract: a process that is told what to do by lines of JSON, and answers each."""

from __future__ import annotations

import json
import queue
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: For an answer; a client that waits for a server to come back has longer than that.
PATIENCE_S = 60.0


class Broken(Exception):
    """The client does not do what the contract says."""


class Refused(Exception):
    """An error of Tokenloom, as the client named it."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


class Client:
    """One rank."""

    def __init__(self, command: str) -> None:
        self._process = subprocess.Popen(
            shlex.split(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stderr,
            encoding="utf-8",
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """Raises ``Refused`` with the client's error, and ``Broken`` where there is no answer that can be read."""
        request = json.dumps({"do": do, **fields})
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=PATIENCE_S)
        except OSError as error:
            raise Broken(
                f"the client is gone before it was asked {request[:200]}: {error}"
            ) from None
        except queue.Empty:
            raise Broken(f"no answer within {PATIENCE_S:g} s to {request[:200]}") from None
        if not line:
            raise Broken(f"the client ended instead of an answer to {request[:200]}")
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise Broken(
                f"{request[:200]}: expected a line of JSON, got {line[:200]!r}: {error}"
            ) from None
        if "error" in answer:
            raise Refused(answer["error"], answer.get("message", ""))
        return dict(answer)

    def batches(self, count: int) -> list[dict[str, Any]]:
        """The next ones, fewer where the data end."""
        taken: list[dict[str, Any]] = []
        while len(taken) < count and "end" not in (batch := self.ask("next")):
            taken.append(batch)
        return taken

    def state(self) -> str:
        return str(self.ask("state")["state"])

    def end(self) -> None:
        """Asks it to end, and ends it where it does not."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class Pool:
    """Processes of the client. One that a check is done with is used again, since they take a while to start."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._idle: list[Client] = []

    @contextmanager
    def take(self, count: int) -> Iterator[list[Client]]:
        """So many of them."""
        taken = [self._idle.pop() if self._idle else Client(self._command) for _ in range(count)]
        try:
            yield taken
            for client in taken:
                client.ask("close")
        except BaseException:
            # Nobody knows what these do now.
            for client in taken:
                client.end()
            raise
        self._idle += taken

    def close(self) -> None:
        for client in self._idle:
            client.end()
