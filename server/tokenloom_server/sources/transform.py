"""A user's function from texts to texts, called in worker processes that are bounded in time and memory."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from tokenloom_server.errors import ConfigError
from tokenloom_server.sources import transform_worker


class TransformFailed(Exception):
    """The function failed at rows [begin, end) of a batch."""

    def __init__(self, reason: str, begin: int, end: int) -> None:
        super().__init__(reason)
        self.begin = begin
        self.end = end


class Transform:
    """A function by its name ``MODULE:FUNCTION``. Thread-safe: as many batches are at work as threads call it."""

    def __init__(self, name: str, *, seconds: float, memory_bytes: int) -> None:
        """Starts a first worker. ``seconds``: for each batch; ``memory_bytes``: of each worker, private and writable.

        Raises ``ConfigError`` where the function cannot be imported.
        """
        self.name = name
        self._limits = (str(seconds), str(memory_bytes))
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        first = _Worker(name, *self._limits)
        self._idle.put(first)
        #: ``name``, ``distribution`` and ``version`` (None outside an installed one), and ``digest`` of its source.
        self.code = first.code

    def texts(self, column: Any) -> Any:
        """The large strings that the function makes of a column of large strings. Raises ``TransformFailed``, and
        ``ConfigError`` where the function's code was changed since the first worker started."""
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            worker = _Worker(self.name, *self._limits)
        try:
            if worker.code != self.code:
                raise ConfigError(f"transform {self.name}: its code was changed meanwhile; put it back, or begin anew")
            texts = worker.texts(column)
        except BaseException:
            worker.end()
            raise
        self._idle.put(worker)
        return texts

    def close(self) -> None:
        """Ends all workers; none may be at work."""
        while not self._idle.empty():
            self._idle.get().end()


class _Worker:
    """A process that calls the function. For one thread at a time."""

    def __init__(self, name: str, seconds: str, memory_bytes: str) -> None:
        self._name = name
        command = [sys.executable, "-m", transform_worker.__name__, name, seconds, memory_bytes]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            self._answers = pa.ipc.open_stream(self._process.stdout)
            _, said = self._answer()
        except (pa.ArrowException, StopIteration):
            said = {"error": self._death()}
        if "error" in said:
            self.end()
            raise ConfigError(
                f"transform {name!r}: expected MODULE:FUNCTION that can be imported from the current folder, "
                f"PYTHONPATH or an installed package ({said['error']})"
            )
        self.code: Mapping[str, str | None] = said["code"]
        self._requests = pa.ipc.new_stream(self._process.stdin, self._answers.schema)

    def texts(self, column: Any) -> Any:
        assert self._process.stdin is not None
        try:
            self._requests.write_batch(transform_worker.batch_of(column))
            self._process.stdin.flush()
            answer, said = self._answer()
        except (OSError, pa.ArrowException, StopIteration):
            answer, said = None, {"error": self._death(), "begin": 0, "end": len(column)}
        if "error" in said:
            raise TransformFailed(f"transform {self._name} failed: {said['error']}", said["begin"], said["end"])
        return answer.column(0)

    def end(self) -> None:
        self._process.kill()
        # Also closes the pipes, whatever is left in them.
        self._process.communicate()

    def _answer(self) -> tuple[Any, Any]:
        batch, metadata = self._answers.read_next_batch_with_custom_metadata()
        return batch, json.loads(metadata[transform_worker.SAID])

    def _death(self) -> str:
        status = self._process.wait()
        if status == -signal.SIGALRM:
            return "its process was ended, for it took too long"
        return f"its process ended with {f'signal {-status}' if status < 0 else f'status {status}'}"
