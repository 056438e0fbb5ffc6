"""A user's function from texts to texts, called in worker processes that are bounded in time and memory."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import pyarrow as pa

from tokenloom_server.errors import ConfigError
from tokenloom_server.sources import transform_worker
from tokenloom_server.sources.transform_worker import BEGIN, CODE, END, ERROR


class TransformLimits(NamedTuple):
    """What a worker may take: seconds for each batch, and bytes of memory (private and writable) in all."""

    seconds: float
    memory_bytes: int


class TransformFailed(Exception):
    """A batch that the function failed at, and between which of its rows: [begin, end)."""

    def __init__(self, reason: str, begin: int, end: int) -> None:
        super().__init__(reason)
        self.begin = begin
        self.end = end


class Transform:
    """A function by its name ``MODULE:FUNCTION``. Thread-safe: as many batches are at work as threads call it."""

    def __init__(self, name: str, limits: TransformLimits) -> None:
        """Starts a first worker. Raises ``ConfigError`` where the function cannot be imported."""
        self.name = name
        self._limits = limits
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        first = _Worker(name, limits)
        self._idle.put(first)
        #: ``name``, ``distribution`` and ``version`` (None outside an installed one), and ``digest`` of its source.
        self.code: Mapping[str, str | None] = first.code

    def texts(self, column: Any) -> Any:
        """The large strings that the function makes of a column of large strings. Raises ``TransformFailed``, and
        ``ConfigError`` where the function's code was changed since the first worker started."""
        worker = self._worker()
        try:
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

    def _worker(self) -> _Worker:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            worker = _Worker(self.name, self._limits)
        if worker.code != self.code:
            worker.end()
            raise ConfigError(f"transform {self.name}: its code was changed meanwhile; put it back, or begin anew")
        return worker


class _Worker:
    """A process that calls the function. For one thread at a time."""

    def __init__(self, name: str, limits: TransformLimits) -> None:
        self._name = name
        self._limits = limits
        module, found, function = name.partition(":")
        if not (module and found and function):
            raise ConfigError(f"transform {name!r}: expected MODULE:FUNCTION, such as cleaning:without_markup")
        arguments = (name, str(limits.seconds), str(limits.memory_bytes))
        self._process = subprocess.Popen(
            [sys.executable, "-m", transform_worker.__name__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            self._answers = pa.ipc.open_stream(self._process.stdout)
            _, said = self._answer()
            self._requests = pa.ipc.new_stream(self._process.stdin, self._answers.schema)
        except (OSError, pa.ArrowException, StopIteration):
            said = {ERROR: f"its process {self._death(transform_worker.START_S)}"}
        if ERROR in said:
            self.end()
            raise ConfigError(
                f"transform {name}: cannot be imported ({said[ERROR]}); it is looked for in the current folder, in "
                "PYTHONPATH and among installed packages"
            )
        self.code: Mapping[str, str | None] = json.loads(said[CODE])

    def texts(self, column: Any) -> Any:
        try:
            self._requests.write_batch(transform_worker.batch_of(column))
            assert self._process.stdin is not None
            self._process.stdin.flush()
            answer, said = self._answer()
        except (OSError, pa.ArrowException, StopIteration):
            death = self._death(self._limits.seconds)
            raise TransformFailed(f"the process of transform {self._name} {death}", 0, len(column)) from None
        if ERROR in said:
            raise TransformFailed(f"transform {self._name} failed: {said[ERROR]}", int(said[BEGIN]), int(said[END]))
        return answer.column(0)

    def end(self) -> None:
        self._process.kill()
        # Also closes the pipes, whatever is left in them.
        self._process.communicate()

    def _answer(self) -> tuple[Any, Mapping[str, str]]:
        batch, said = self._answers.read_next_batch_with_custom_metadata()
        return batch, {key.decode(): value.decode() for key, value in (said or {}).items()}

    def _death(self, seconds: float) -> str:
        status = self._process.wait()
        if status == -signal.SIGALRM:
            return f"took longer than {seconds:g} s"
        memory = f"; it may take {self._limits.memory_bytes >> 20} MiB"
        return (f"was ended by signal {-status}" if status < 0 else f"ended with status {status}") + memory
