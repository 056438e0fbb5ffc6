"""A function in a process of its own, between two Arrow streams.

``python -m tokenloom_server.workers.function_process MODULE:FUNCTION SECONDS MB [one_each] PIPE``: batches with the
column ``text`` come in; for each, texts go out. The first answer has no texts and says, in its metadata, which code the
function is.
"""

from __future__ import annotations

import faulthandler
import fcntl
import hashlib
import importlib
import json
import os
import resource
import select
import signal
import sys
import traceback
from functools import partial
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa

from tokenloom_server.sources import arrays

#: The column of a batch that goes in, and of one that comes back.
COLUMN = "text"
#: The key of an answer's metadata. Its value is JSON: an object with ``code`` or, where the function failed, with
#: ``error`` and the rows of the batch, [``begin``, ``end``).
SAID = "said"
#: The status with which a process ends that takes too long: faulthandler's.
LATE = 1
#: Imports may take so long, seconds.
START_S = 120.0


def batch_of(texts: Any) -> Any:
    """A record batch of large strings."""
    return pa.record_batch([texts], schema=pa.schema([(COLUMN, pa.large_string())]))


def _serve(name: str, seconds: float, memory_mb: int, one_each: bool) -> None:
    # An interrupt at a terminal is for the command; this process ends with its input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if memory_mb:
        resource.setrlimit(resource.RLIMIT_DATA, (1_000_000 * memory_mb,) * 2)
    # It may be about to crash: no image of it is wanted.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The streams are for this process alone: what the function and its own processes read is empty, what they print
    # goes beside the answers. A stream that such a process held would not end with this one.
    streams = requests, out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing_there = os.open(os.devnull, os.O_RDWR)
    os.register_at_fork(
        after_in_child=lambda: [os.dup2(nothing_there, stream.fileno()) for stream in streams]
    )
    os.dup2(nothing_there, 0)
    os.dup2(2, 1)
    nothing = batch_of(arrays.strings([]))
    with pa.ipc.new_stream(out, nothing.schema) as answers:

        def answer(batch: Any, **said: Any) -> None:
            # Time that passes between two batches is not the function's.
            faulthandler.cancel_dump_traceback_later()
            answers.write_batch(batch, custom_metadata={SAID: json.dumps(said)})
            out.flush()

        # A thread that is not Python's shows where the function hangs and ends the process, also within a library's
        # native code, whatever signals the function uses, and where nobody waits for it any more.
        limit = partial(faulthandler.dump_traceback_later, exit=True)
        limit(START_S)
        try:
            function, code = _load(name)
        except (Exception, SystemExit) as error:
            answer(nothing, error=f"{type(error).__name__}: {error}")
            return
        answer(nothing, code=code)
        function = partial(_one_each, function) if one_each else function
        for batch in pa.ipc.open_stream(requests):
            limit(seconds)
            try:
                texts = batch_of(_texts(function(batch)))
            except Exception as error:
                traceback.print_exc()
                limit(seconds)
                begin, end, error = _narrowed(function, batch, error)
                answer(nothing, error=f"{type(error).__name__}: {error}", begin=begin, end=end)
            else:
                answer(texts)


def _load(name: str) -> tuple[Any, dict[str, str | None]]:
    """The function, and which code it is."""
    module_name, _, function_name = name.partition(":")
    module = importlib.import_module(module_name)
    top = module_name.partition(".")[0]
    if top == __spec__.name.partition(".")[0]:
        return getattr(module, function_name), {}  # of the release itself
    distribution = next(iter(metadata.packages_distributions().get(top, ())), None)
    version = metadata.version(distribution) if distribution is not None else None
    digest = _digest(module, sys.modules[top], beside=distribution is None)
    code = {"name": name, "distribution": distribution, "version": version, "digest": digest}
    return getattr(module, function_name), code


def _digest(module: ModuleType, top: ModuleType, *, beside: bool) -> str:
    """Of the source files of the module's package; of a module without one: of its own file, and with ``beside`` those
    of the modules in its folder that it has imported."""
    files = {Path(module.__file__ or "")}
    if hasattr(top, "__path__"):
        files |= {path for folder in top.__path__ for path in Path(folder).rglob("*.py")}
    elif beside:
        folders = {path.parent for path in files}
        loaded = [getattr(each, "__file__", None) for each in list(sys.modules.values())]
        files |= {path for path in map(Path, filter(None, loaded)) if path.parent in folders}
    root = min(len(path.parts) for path in files) - 1
    content = hashlib.sha256()
    for path in sorted(files):
        content.update(json.dumps(["/".join(path.parts[root:]), path.stat().st_size]).encode())
        content.update(path.read_bytes())
    return f"sha256:{content.hexdigest()}"


def _texts(result: Any) -> Any:
    """What a function gave, as large strings. Raises ``TypeError``."""
    if isinstance(result, pa.RecordBatch | pa.Table):
        result = result.column(COLUMN)
    if isinstance(result, pa.ChunkedArray):
        result = result.combine_chunks()
    if not isinstance(result, pa.Array) or not arrays.is_text(result.type):
        raise TypeError(
            f"it gave {type(result).__name__}, expected texts, or a record batch with these as {COLUMN!r}"
        )
    # A cast imports Arrow's functions.
    return result if pa.types.is_large_string(result.type) else result.cast(pa.large_string())


def _one_each(function: Any, batch: Any) -> Any:
    """The texts that a function gave, one for each row of a batch, if it is seen to look at each by itself. Raises
    ``ValueError``, and what the function raises."""
    texts, last = _texts(function(batch)), batch.slice(len(batch) - 1)
    if len(texts) != len(batch) or texts.null_count:
        raise ValueError(
            f"it gave {len(texts)} texts, {texts.null_count} of them null, for {len(batch)}; expected one text for each"
        )
    # Rows are read from any of them on, so a batch may begin anywhere.
    if not _texts(function(last)).equals(texts.slice(len(batch) - 1)):
        raise ValueError(
            "it gave two texts for the last row, one among others and one alone; expected the same one"
        )
    return texts


def _narrowed(
    function: Any, batch: Any, error: Exception, first: int = 0
) -> tuple[int, int, Exception]:
    """The fewest rows [begin, end) at which the function still fails, by halving, and how; the batch begins at row
    ``first``."""
    middle = len(batch) // 2
    for begin, half in (
        ((0, batch.slice(0, middle)), (middle, batch.slice(middle))) if middle else ()
    ):
        try:
            _texts(function(half))
        except Exception as narrower:
            return _narrowed(function, half, narrower, first + begin)
    return first, first + len(batch), error


def _end_with_parent(pipe: str) -> None:
    """Has the kernel kill this process and its group once nobody has the other end of a pipe. On Linux alone.

    It is a signal, so it also ends what never comes back to Python; and one that does not ask which thread of the
    parent ended, as ``PR_SET_PDEATHSIG`` does.
    """
    if sys.platform == "linux":
        reading = int(pipe)
        fcntl.fcntl(reading, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(reading, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(reading, fcntl.F_SETFL, os.O_ASYNC)
        if select.select([reading], [], [], 0)[0]:  # it was gone before the kernel was asked
            os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    _end_with_parent(sys.argv[-1])
    _serve(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), "one_each" in sys.argv)
