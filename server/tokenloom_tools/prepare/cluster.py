"""The shards of a job as tasks of Ray: what a worker makes, and first compares; which is asked for, and again. Plain
text crosses between the two."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from time import monotonic
from typing import Any

from tokenloom_proto.seal import canonical
from tokenloom_server import errors
from tokenloom_server.errors import ConfigError, TokenloomError
from tokenloom_server.sources.files import in_threads
from tokenloom_server.workers.cluster import tasks
from tokenloom_server.workers.cluster.connection import Needs, Node, fitting, is_node
from tokenloom_server.workers.cluster.description import (
    LoggedLines,
    describe,
    named_by_node,
    rebuild,
    verify_file,
)
from tokenloom_server.workers.transforms import Transform

from tokenloom_tools.prepare.folder import Folder
from tokenloom_tools.prepare.job import Job, PartRows, Task
from tokenloom_tools.prepare.journal import Attempts, Journal, Shard
from tokenloom_tools.prepare.preparer import Maker, OnRows, cannot_write

_log = logging.getLogger(__name__)

#: How often a shard's worker or node may be lost.
LOSSES = 5
#: Shards asked for at once, for each that the nodes have room for: the next begins where one ends.
AHEAD = 2
#: Between two looks at what is done, and at which nodes there are, seconds.
LOOK_S = 0.5
#: A worker may have stopped, or its disk: a shard is asked for again after so many seconds, if that is also so many
#: times what as many bytes took where they took longest.
LATE_S, LATE_TIMES = 60.0, 4
#: What bytes take as long as no shard is made: the slowest tokeniser makes four times as many.
FIRST_S_PER_BYTE = 1e-6


@dataclass(frozen=True, slots=True)
class OnRay:
    """Makes shards on the cluster that this process is connected to (``preparer.MakeAll``). ``at_once``: shards at
    most, if not as many as there is room for. ``on_nodes`` is called with how many nodes there are."""

    needs: Needs
    at_once: int | None
    on_nodes: Callable[[int], None]

    def __call__(self, job: Job, wanted: Sequence[Task], journal: Journal, on_done: OnRows) -> None:
        """Raises ``ConfigError``, before any shard is made where a node does not see what this machine sees or none
        answers, and where workers were lost too often or this machine's raylet ended; and what making a shard raises.
        ``on_done`` is called with each shard."""
        asyncio.run(self._make(job, deque(wanted), journal, on_done))

    async def _make(
        self, job: Job, waiting: deque[Task], journal: Journal, on_done: OnRows
    ) -> None:
        import ray

        description = ray.put(described(job, journal.attempts))
        silent = await self._silent(description)
        shards = _Shards(
            ray.remote(max_retries=0, **self.needs.options(silent))(make_shard), description
        )
        under_way: set[asyncio.Task[tuple[Task, Shard, str]]] = set()
        while waiting or under_way:
            if not is_node():
                raise ConfigError(
                    "Ray's process on this machine (raylet) has ended, and the command with it: start it again; it "
                    "goes on with the shards that are not there"
                )
            shards.nodes = [node for node in fitting(self.needs) if node.id not in silent]
            self.on_nodes(len(shards.nodes))
            room = self.at_once or max(
                1, AHEAD * int(sum(node.cpus // self.needs.cpus for node in shards.nodes))
            )
            while waiting and len(under_way) < room:
                under_way.add(asyncio.create_task(shards.make(waiting.popleft())))
            ended, under_way = await asyncio.wait(under_way, timeout=LOOK_S)
            made = await asyncio.gather(*ended)
            # An object store takes its time for each.
            in_threads(lambda each: journal.add(*each[1:]), made, remote=True)
            for task, shard, _ in made:
                on_done(1, shard.tokens, task.bytes)

    async def _silent(self, description: Any) -> set[str]:
        """The nodes that are left out, as they do not answer. One of many may hang; what others find raises."""
        answers = await tasks.on_each(fitting(self.needs), make_shard, description)
        silent = {node.id: node.name for node, said in answers if isinstance(said, TimeoutError)}
        for node, said in answers:
            if isinstance(said, str):
                _heard(said)
            elif node.id not in silent:
                _lost(node.name, said)
        if silent:
            fault = f"{', '.join(silent.values())}: no answer within {tasks.CHECK_S:g} s"
            fault += " to what is compared before shards"
            if len(silent) == len(answers):
                raise ConfigError(
                    f"{fault}; expected one: look at what hangs there, such as the disk of --out"
                )
            _log.warning("%s: left out", fault)
        return set(silent)


class _Shards:
    """Asks for shards. ``nodes``: those that there are now."""

    def __init__(self, remote: Any, description: Any) -> None:
        self._remote, self._description = remote, description
        self.nodes: Sequence[Node] = ()
        self._slowest_s_per_byte = 0.0

    async def make(self, task: Task) -> tuple[Task, Shard, str]:
        """A shard, and the attempt's file that it lies in. Raises ``ConfigError`` where it was lost too often, and the
        error that a worker said."""
        text, losses, asked_at = (
            json.dumps([task.source, task.ranges, task.bytes, task.name]),
            0,
            0.0,
        )

        def begin(number: int, apart: bool) -> Any:
            nonlocal asked_at
            asked_at, remote = monotonic(), self._remote
            if number and self.nodes:
                # Ray may want it on the same node, and does not say which one that is; so two in turn are on two.
                node = self.nodes[(hash(task.name) + number) % len(self.nodes)]
                remote = tasks.pinned(remote, node, soft=True)
            return remote.remote(self._description, text, number, apart)

        def again(error: Exception) -> float:
            nonlocal losses
            if isinstance(error, TimeoutError):
                took_s = monotonic() - asked_at
                _log.warning(
                    "%s: no answer within %.0f s: it is asked for again", task.name, took_s
                )
            else:
                lost, losses = _lost(task.name, error), losses + 1
                if losses == LOSSES:
                    raise ConfigError(
                        f"{task.name}: was lost {LOSSES} times; the last time: {lost}"
                    )
            return 0.0

        def late_s() -> float:
            return max(
                LATE_S, LATE_TIMES * (self._slowest_s_per_byte or FIRST_S_PER_BYTE) * task.bytes
            )

        answer = _heard(await tasks.answered(begin, late_s, again))
        took_s = monotonic() - asked_at
        self._slowest_s_per_byte = max(self._slowest_s_per_byte, took_s / max(1, task.bytes))
        return task, Shard(**answer["shard"]), answer["attempt"]


def _lost(name: str, error: Exception) -> str:
    """How a worker or its node was lost. Raises the error where it is a fault of the program."""
    import ray

    if isinstance(error, ray.exceptions.RayTaskError):
        raise error
    is_oom = isinstance(error, ray.exceptions.OutOfMemoryError)
    lost = tasks.lost_by(error) + ": say with --ray-memory what it takes" * is_oom
    _log.warning("%s: its worker or node was lost: %s", name, lost)
    return lost


def _heard(text: str) -> dict[str, Any]:
    """What a worker said, after what it logged. Raises the error that it said."""
    answer: dict[str, Any] = json.loads(text)
    for level, line in answer["log"]:
        _log.log(level, "%s", line)
    if "error" in answer:
        raise getattr(errors, answer["error"])(answer["message"])
    return answer


def described(job: Job, attempts: Attempts) -> str:
    """What workers need to know of a job, beside the task."""
    function, folder = job.transform, attempts.folder
    return canonical(
        {
            "order": describe(job.order),
            "form": job.form,
            "sources": [prepared.source for prepared in job.sources],
            "transform": function
            and [function.name, function.seconds, function.memory_mb, dict(function.code)],
            "place": str(Path(folder.place).absolute()) if folder.is_local else folder.place,
            "attempts": attempts.name,
            "current_folder": str(Path.cwd()),
        }
    )


def make_shard(description: str, task: str = "", number: int = 0, apart: bool = False) -> str:
    """Makes the shard of a task in an attempt's file; attempts at a task are numbered from 0. ``apart``: each text is
    encoded in a process that may die of it. The answer is JSON: ``shard`` with its fields, and the file as ``attempt``;
    or ``error`` and ``message``; and as ``log`` levels and lines of what was logged. Where the driver has ended
    meanwhile, nothing stays.

    First it compares what is on this node with what the driver has: versions, tokeniser, functions, the folder to write
    into, and the task's files. Without a task it does nothing else, with the first file of each source.
    """
    with LoggedLines() as lines:
        try:
            answer = _made(_worker(description), task, number, apart)
        except (TokenloomError, OSError) as error:
            name = getattr(error, "name", "ConfigError")
            answer = {"error": name, "message": named_by_node(error)}
    return json.dumps({**answer, "log": lines.lines()})


def _made(worker: _Worker, text: str, number: int, apart: bool) -> dict[str, Any]:
    if not text:
        worker.check({(source, 0) for source in worker.sources})
        return {}
    source, ranges, size, name = json.loads(text)
    task = Task(source, tuple(PartRows(*each) for each in ranges), size, name)
    worker.check(worker.files_of(task))
    folder, attempt, maker = (
        worker.attempts.folder,
        worker.attempts.named(name, number),
        worker.maker,
    )
    if apart:
        maker = replace(maker, order=maker.order.apart())
    try:
        with folder.created(attempt) as path:
            shard = maker.make(task, path, lambda *_: None)
    except TokenloomError as error:
        return {"error": error.name, "message": str(error)}  # as one process says it
    except OSError as error:
        raise cannot_write(error, folder) from None
    if worker.attempts.is_open():
        return {"shard": asdict(shard), "attempt": attempt}
    folder.remove(attempt)
    raise ConfigError(f"{name} was made after its command had ended, and is removed")


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _Worker:
    maker: Maker
    attempts: Attempts
    sources: list[int]
    verified: set[tuple[int, int]]

    def check(self, files: set[tuple[int, int]]) -> None:
        """Raises ``ConfigError`` where the driver's folder is not the one that is here, ``SourceChanged`` where a file
        is not."""
        if not self.attempts.is_open():
            raise ConfigError(
                f"what the command writes in {self.attempts.folder.place} is not seen here; expected a folder that all "
                "nodes have at the same path, or a URL, and no other command that prepares into it"
            )
        for file in files - self.verified:
            verify_file(self.maker.order, *file)
            self.verified.add(file)

    def files_of(self, task: Task) -> set[tuple[int, int]]:
        """The files that a task's rows lie in; a window has rows of any."""
        if self.maker.order.config.sources[task.source].shuffle == "rows":
            return {
                (task.source, file)
                for file in range(len(self.maker.order.record.shards[task.source]))
            }
        return {(task.source, each.part) for each in task.ranges}


@lru_cache(maxsize=1)
def _worker(description: str) -> _Worker:
    """One for all tasks of a process."""
    fields = json.loads(description)
    with suppress(OSError):
        # A function of the user's is found from where the command was given.
        os.chdir(fields["current_folder"])
    folder, held, function = Folder(fields["place"]), ExitStack(), None
    order = rebuild(fields["order"], held.enter_context(folder.on_disk(".index")))
    held.callback(order.resources.close)
    if fields["transform"] is not None:
        name, seconds, memory_mb, code = fields["transform"]
        function = held.enter_context(
            closing(Transform(name, seconds=seconds, memory_mb=memory_mb))
        )
        if dict(function.code) != code:
            raise ConfigError(
                f"transform {name!r}: its code is {dict(function.code)}, expected {code}: put it there"
            )
    maker = Maker(order, fields["form"], function)
    worker = _Worker(maker, Attempts(folder, fields["attempts"]), fields["sources"], set())
    weakref.finalize(worker, held.close)
    return worker
