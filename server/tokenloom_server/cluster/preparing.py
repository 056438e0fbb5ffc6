"""The shards of a job as tasks of Ray: what a worker makes, and first compares; which is asked for, and again. Plain
text crosses between the two."""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenloom_proto.seal import canonical

from tokenloom_server import errors
from tokenloom_server.cluster.connection import Needs, Node, nodes, on_each
from tokenloom_server.cluster.description import describe, named_by_node, rebuild, verify_file
from tokenloom_server.errors import ConfigError, TokenloomError
from tokenloom_server.prepare.job import Job, PartRows, Task
from tokenloom_server.prepare.journal import Attempts, Journal, Shard
from tokenloom_server.prepare.preparer import Maker, OnRows, cannot_write, warn_of_bad_row
from tokenloom_server.sources.files import in_threads
from tokenloom_server.sources.transform import Transform
from tokenloom_server.storage.folder import Folder

_log = logging.getLogger(__name__)

#: How often a shard is asked for whose worker or node is lost.
ATTEMPTS = 5
#: Shards asked for at once, for each that the nodes have room for: the next begins where one ends.
AHEAD = 2
#: Between two looks at what is done, and at which nodes there are, seconds.
LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class OnRay:
    """Makes shards on the cluster that this process is connected to (``preparer.MakeAll``). ``fitting``: the nodes that
    tasks may run on now. ``at_once``: shards at most, if not as many as there is room for. ``on_nodes`` is called with
    how many nodes there are."""

    needs: Needs
    fitting: Sequence[Node]
    at_once: int | None
    on_nodes: Callable[[int], None]

    def __call__(self, job: Job, tasks: Sequence[Task], journal: Journal, on_done: OnRows) -> None:
        """Raises ``ConfigError``, before any shard is made where a node does not see what this machine sees, and where
        workers were lost too often; and what making a shard raises. ``on_done`` is called with each shard."""
        import ray

        description = ray.put(described(job, journal.attempts))
        for node, reference in on_each(self.fitting, make_shard, description, "", 0):
            _answer(reference, node.name)
        remote = ray.remote(make_shard).options(max_retries=0, **self.needs.options())
        waiting, numbers = deque(tasks), Counter[str]()
        in_flight: dict[Any, Task] = {}
        while waiting or in_flight:
            fitting = [node for node in nodes() if self.needs.fit(node)]
            self.on_nodes(len(fitting))
            room = self.at_once or max(1, AHEAD * int(sum(node.cpus // self.needs.cpus for node in fitting)))
            while waiting and len(in_flight) < room:
                task = waiting.popleft()
                text = json.dumps([task.source, task.ranges, task.bytes, task.name])
                in_flight[remote.remote(description, text, numbers[task.name])] = task
            made = []
            for reference in ray.wait(list(in_flight), num_returns=len(in_flight), timeout=LOOK_S)[0]:
                task = in_flight.pop(reference)
                answer = _answer(reference, task.name)
                if "shard" in answer:
                    made.append((task, Shard(**answer["shard"]), answer["attempt"]))
                    continue
                waiting.appendleft(task)
                numbers[task.name] += 1
                if numbers[task.name] == ATTEMPTS:
                    raise ConfigError(f"{task.name}: was lost {ATTEMPTS} times; the last time: {answer['lost']}")
            # An object store takes its time for each.
            in_threads(lambda each: journal.add(*each[1:]), made, remote=True)
            for task, shard, _ in made:
                on_done(1, shard.tokens, task.bytes)


def _answer(reference: Any, name: str) -> dict[str, Any]:
    """What a worker said; ``lost`` with why where it or its node is lost, which is logged. Raises the error that it
    said."""
    import ray

    try:
        answer: dict[str, Any] = json.loads(ray.get(reference))
    except ray.exceptions.RayTaskError:
        raise  # a fault of the program
    except ray.exceptions.RayError as error:
        lost = str(error).strip().partition("\n")[0]
        if isinstance(error, ray.exceptions.OutOfMemoryError):
            lost = f"its node had no memory left, and it was killed: say with --ray-memory what it takes ({lost})"
        _log.warning("%s: its worker or node was lost: %s", name, lost)
        return {"lost": lost}
    for reason in answer.get("bad", ()):
        warn_of_bad_row(reason)
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
            "transform": function and [function.name, function.seconds, function.memory_mb, dict(function.code)],
            "place": str(Path(folder.place).absolute()) if folder.is_local else folder.place,
            "attempts": [attempts.name, attempts.digest],
            "current_folder": str(Path.cwd()),
        }
    )


def make_shard(description: str, task: str, number: int) -> str:
    """Makes the shard of a task in an attempt's file; attempts at a task are numbered from 0. The answer is JSON:
    ``shard`` with its fields, the file as ``attempt``, ``bad`` with the reason of its first bad row; or ``error`` and
    ``message``. Where the driver has ended meanwhile, nothing stays.

    First it compares what is on this node with what the driver has: versions, tokeniser, functions, the folder to write
    into, and the task's files. Without a task (an empty text) it does nothing else, with the first file of each source.
    """
    bad: list[str] = []
    try:
        worker = _worker(description, number)
        if not task:
            worker.check({(source, 0) for source in worker.sources})
            return "{}"
        source, ranges, size, name = json.loads(task)
        todo = Task(source, tuple(PartRows(*each) for each in ranges), size, name)
        worker.check(worker.files_of(todo))
    except (TokenloomError, OSError) as error:
        return _refused(error)
    attempts, attempt = worker.attempts, worker.attempts.named(name, number)
    try:
        with attempts.folder.created(attempt) as path:
            shard = worker.maker.make(todo, path, lambda *_: None, bad.append)
    except TokenloomError as error:
        return json.dumps({"error": error.name, "message": str(error)})  # as one process says it
    except OSError as error:
        return _refused(cannot_write(error, attempts.folder))
    if attempts.is_open():
        return json.dumps({"shard": asdict(shard), "attempt": attempt, "bad": bad})
    attempts.folder.remove(attempt)
    return _refused(ConfigError(f"{name} was made after its command had ended, and is removed"))


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
            return {(task.source, file) for file in range(len(self.maker.order.record.shards[task.source]))}
        return {(task.source, each.part) for each in task.ranges}


@lru_cache(maxsize=1)
def _worker(description: str, number: int) -> _Worker:
    """One for all tasks of a process. An attempt that follows another has one of its own, which knows at which rows
    processes died."""
    fields = json.loads(description)
    with suppress(OSError):
        # A function of the user's is found from where the command was given.
        os.chdir(fields["current_folder"])
    folder, held, function = Folder(fields["place"]), ExitStack(), None
    order = rebuild(fields["order"], held.enter_context(folder.on_disk(".index")))
    held.callback(order.resources.close)
    if fields["transform"] is not None:
        name, seconds, memory_mb, code = fields["transform"]
        function = held.enter_context(closing(Transform(name, seconds=seconds, memory_mb=memory_mb)))
        if dict(function.code) != code:
            raise ConfigError(f"transform {name!r}: its code is {dict(function.code)}, expected {code}: put it there")
    maker = Maker(order, fields["form"], function)
    worker = _Worker(maker, Attempts(folder, *fields["attempts"]), fields["sources"], set())
    weakref.finalize(worker, held.close)
    return worker


def _refused(error: TokenloomError | OSError) -> str:
    """An answer with the node's name."""
    return json.dumps({"error": getattr(error, "name", "ConfigError"), "message": named_by_node(error)})
