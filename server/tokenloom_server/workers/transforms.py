"""Functions from texts to texts, such as users' own, called in processes that are bounded in time and memory."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import IO, Any

import numpy as np
import pyarrow as pa
from tokenloom_proto.threads import Background

from tokenloom_server.errors import ConfigError, TokenizerError
from tokenloom_server.sources import arrays
from tokenloom_server.tokenizer.documents import Documents, Encoder
from tokenloom_server.workers import function_process

_log = logging.getLogger(__name__)

#: What a worker prints goes into the log: so many lines of so many bytes in so many seconds.
LOGGED_LINES, LOGGED_LINE_BYTES, LOGGED_EVERY_S = 100, 500, 60.0
#: How many of its last lines are looked at when it has ended, and how long these may take to come, seconds: what it
#: started may hold the pipe open.
LAST_LINES, LAST_LINES_S = 20, 5.0
#: What Rust and C++ print before they abort for want of memory.
NO_MEMORY = (b"memory allocation of", b"bad_alloc")


class TransformFailed(Exception):
    """A function failed at rows [``begin``, ``end``) of those that it got; ``signal``: what ended its process, or 0."""

    def __init__(self, reason: str, begin: int, end: int, signal: int = 0) -> None:
        super().__init__(reason)
        self.signal = signal
        self.begin = begin
        self.end = end


class Transform:
    """A function by its name ``MODULE:FUNCTION``. Thread-safe: as many batches are at work as threads call it."""

    def __init__(
        self, name: str, *, seconds: float = 300.0, memory_mb: int = 4096, one_each: bool = False
    ) -> None:
        """Starts a first worker. ``seconds``: for each batch; ``memory_mb``: of each worker, in 10^6 bytes,
        private and writable; 0: any. ``one_each``: it has to give one text for each, whatever else is in the batch.

        Raises ``ConfigError`` where the function cannot be imported.
        """
        self.name = name
        self.seconds, self.memory_mb = seconds, memory_mb
        self._arguments = (name, str(seconds), str(memory_mb), *(["one_each"] if one_each else []))
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._at_work: set[_Worker] = set()
        weakref.finalize(self, _end_all, self._idle, self._at_work, os.getpid())
        #: ``name``, ``distribution`` and ``version`` (None outside an installed one), and ``digest`` of its source.
        self.code: Mapping[str, str | None] = {}
        self._idle.put(self._started())
        if self.code:
            _log.info("transform %s: its code is %s", name, self.code["digest"])

    def made_of(self, column: Any) -> Any:
        """The large strings that the function makes of a column of large strings. Raises ``TransformFailed``, and
        ``ConfigError`` where the function's code has changed since the first worker started."""
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            worker = self._started()
        self._at_work.add(worker)
        texts, said = worker.ask(function_process.batch_of(column))
        self._at_work.discard(worker)
        if "error" in said:
            worker.end()
            begin, end = said.get("begin", 0), said.get("end", len(column))
            raise TransformFailed(said["error"], begin, end, said.get("signal", 0))
        self._idle.put(worker)
        return texts.column(0)

    def close(self) -> None:
        """Ends all workers. Whoever waits for one gets ``TransformFailed``."""
        _end_all(self._idle, self._at_work, os.getpid())

    def _started(self) -> _Worker:
        worker = _Worker(self._arguments)
        _, said = worker.ask(None)
        if "error" in said or said["code"] != (self.code or said["code"]):
            worker.end()
            raise ConfigError(
                f"transform {self.name!r}: expected MODULE:FUNCTION that can be imported from the current folder, "
                f"PYTHONPATH or an installed package ({said.get('error', 'it was changed meanwhile')})"
            )
        self.code = said["code"]
        return worker


def _end_all(idle: queue.SimpleQueue[_Worker], at_work: set[_Worker], owner: int) -> None:
    """``owner``: the process that started them; one that was forked from it leaves them alone."""
    if os.getpid() != owner:
        return
    for worker in tuple(at_work):
        worker.kill()
    with contextlib.suppress(queue.Empty):  # another thread may take the last one
        while True:
            idle.get_nowait().end()


def rows_named(first: int, last: int) -> str:
    """Consecutive rows, for messages."""
    return f"row {first}" if first == last else f"rows {first} to {last}"


class _ChildProcess(subprocess.Popen[bytes]):
    """A module of this package as a program, in a process group of its own. Its last argument is a pipe for
    ``end_with_parent``."""

    def __init__(self, module: str, *arguments: str, **options: Any) -> None:
        """``options`` are those of ``Popen``."""
        reading, writing = os.pipe()
        weakref.finalize(self, os.close, writing)
        try:
            command = [sys.executable, "-m", module, *arguments, str(reading)]
            super().__init__(command, pass_fds=(reading,), process_group=0, **options)
        finally:
            os.close(reading)


class _Worker:
    """A process that calls the function. For one thread at a time."""

    def __init__(self, arguments: tuple[str, ...]) -> None:
        self._seconds = float(arguments[1])
        pipe = subprocess.PIPE
        self._process = _ChildProcess(
            function_process.__name__, *arguments, stdin=pipe, stdout=pipe, stderr=pipe
        )
        assert (
            self._process.stdin is not None
            and self._process.stdout is not None
            and self._process.stderr is not None
        )
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        #: The last that it printed.
        self._printed: deque[bytes] = deque(maxlen=LAST_LINES)
        self._log = Background(
            "transform-log",
            partial(_log_printed, arguments[0], self._process.stderr, self._printed),
        )
        self._log.start()

    def ask(self, batch: Any) -> tuple[Any, Mapping[str, Any]]:
        """The texts made of a batch, and what is said of them; first of None, for which the code of the function is
        said."""
        began = time.monotonic()
        try:
            if batch is None:
                self._answers = pa.ipc.open_stream(self._stdout)
                self._requests = pa.ipc.new_stream(self._stdin, self._answers.schema)
            else:
                self._requests.write_batch(batch)
                self._stdin.flush()
            texts, metadata = self._answers.read_next_batch_with_custom_metadata()
        except (OSError, pa.ArrowException, StopIteration):
            status = self._process.wait()
            limit_s = function_process.START_S if batch is None else self._seconds
            late = status == function_process.LATE and time.monotonic() - began >= limit_s
            fault = "it took too long" if late else f"its process ended with {status}"
            if status == -signal.SIGABRT:
                self._log.join(LAST_LINES_S)  # what it printed says why
                if any(sign in line for line in self._printed for sign in NO_MEMORY):
                    return None, {"error": f"it had no memory left: {fault}"}
            return None, {"error": fault, "signal": max(0, -status)}
        return texts, json.loads(metadata[function_process.SAID])

    def kill(self) -> None:
        """Kills the process, with all that the function started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kills the process, and waits for it."""
        self.kill()
        self._process.wait()
        with contextlib.suppress(OSError):  # what is left in it
            self._stdin.close()
        self._stdout.close()


def _log_printed(name: str, printed: IO[bytes], last: deque[bytes]) -> None:
    """Logs what a worker prints until it ends; more than ``LOGGED_LINES`` is counted alone."""
    until, count = 0.0, 0
    with printed:
        while line := printed.readline(LOGGED_LINE_BYTES):
            last.append(line)
            if time.monotonic() >= until:
                until, count = time.monotonic() + LOGGED_EVERY_S, 0
            count += 1
            if count <= LOGGED_LINES:
                _log.warning("%s prints: %s", name, line.decode(errors="replace").rstrip())
            elif count == LOGGED_LINES + 1:
                _log.warning(
                    "%s prints more, which is not shown for up to %g s", name, LOGGED_EVERY_S
                )


class TransformEncoder:
    """Implements ``Encoder``: a function makes one text of each, and another encoder takes these. As thread-safe as
    that one."""

    def __init__(self, transform: Transform, encoder: Encoder) -> None:
        self._transform = transform
        self._encoder = encoder

    def encode(self, column: Any, first_row: int, shard: int) -> Documents:
        """Rows without text, also bad and filtered ones, do not reach the function, and stay without tokens.

        Raises ``TokenizerError``, naming the rows, where the function fails, ``ConfigError`` where its code has
        changed, and what the other encoder raises.
        """
        texts = arrays.filled(arrays.plain(column).cast(pa.large_string()))
        filled = np.diff(arrays.offsets(texts)) > 0
        positions = np.flatnonzero(filled)
        if not len(positions):
            return self._encoder.encode(texts, first_row, shard)
        try:
            made = self._transform.made_of(texts.take(arrays.from_numbers(positions)))
        except TransformFailed as error:
            begin, last = int(positions[error.begin]), int(positions[error.end - 1])
            raise TokenizerError(
                f"{rows_named(first_row + begin, first_row + last)}: transform {self._transform.name} failed: {error}; "
                "mend it, and begin a new run: a run goes on with its own code alone",
                begin,
            ) from None
        if len(positions) < len(texts):
            # Each row's place among the texts; that of a row without one is the empty text after them.
            index = np.where(filled, np.cumsum(filled) - 1, len(positions))
            made = pa.concat_arrays([made, arrays.strings([""])]).take(arrays.from_numbers(index))
        return self._encoder.encode(made, first_row, shard)
