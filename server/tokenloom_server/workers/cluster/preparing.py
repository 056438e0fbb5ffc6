"""The shards of a job as tasks of Ray: what a worker makes, and first compares; which is asked for, and again. Plain
text crosses between the two."""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from time import monotonic
from typing import Any

from tokenloom_proto.seal import canonical

from tokenloom_server import errors
from tokenloom_server.errors import ConfigError, TokenloomError
from tokenloom_server.prepare.job import Job, PartRows, Task
from tokenloom_server.prepare.journal import Attempts, Journal, Shard
from tokenloom_server.prepare.preparer import Maker, OnRows, cannot_write
from tokenloom_server.sources.files import in_threads
from tokenloom_server.storage.folder import Folder
from tokenloom_server.workers.cluster.connection import Needs, Node, fitting, is_node, on_each, pinned
from tokenloom_server.workers.cluster.description import describe, named_by_node, rebuild, verify_file
from tokenloom_server.workers.cluster.readers.worker import LoggedLines
from tokenloom_server.workers.processes import Transform

_log = logging.getLogger(__name__)

#: How often a shard's worker or node may be lost.
LOSSES = 5
#: Deaths of workers at a shard after which each of its texts is encoded in a process that may die of it. The first may
#: be anybody's doing.
DEATHS = 2
#: Shards asked for at once, for each that the nodes have room for: the next begins where one ends.
AHEAD = 2
#: Between two looks at what is done, and at which nodes there are, seconds.
LOOK_S = 0.5
#: For how long a node may compare what it has with what is here, seconds. Most of it is the start of a worker.
CHECK_S = 60.0
#: A worker may have stopped, or its disk: a shard is asked for again after so many seconds, if that is also so many
#: times what as many bytes took where they took longest.
LATE_S, LATE_TIMES = 60.0, 4
#: What bytes take as long as no shard is made: the slowest tokeniser makes four times as many.
FIRST_S_PER_BYTE = 1e-6
#: Attempts of a shard at a time: not all on what has stopped.
ATTEMPTS = 4


@dataclass(slots=True, eq=False)
class _Wanted:
    """A shard that is not made yet: when it was asked for last, how often, and what became of that."""

    task: Task
    asked_at: float = 0.0
    attempts: int = 0
    losses: int = 0
    deaths: int = 0


@dataclass(frozen=True, slots=True)
class OnRay:
    """Makes shards on the cluster that this process is connected to (``preparer.MakeAll``). ``at_once``: shards at
    most, if not as many as there is room for. ``on_nodes`` is called with how many nodes there are."""

    needs: Needs
    at_once: int | None
    on_nodes: Callable[[int], None]

    def __call__(self, job: Job, tasks: Sequence[Task], journal: Journal, on_done: OnRows) -> None:
        """Raises ``ConfigError``, before any shard is made where a node does not see what this machine sees or none
        answers, and where workers were lost too often or this machine's raylet ended; and what making a shard raises.
        ``on_done`` is called with each shard."""
        import ray

        description = ray.put(described(job, journal.attempts))
        silent = self._silent(description)
        remote = ray.remote(max_retries=0, **self.needs.options(silent))(make_shard)
        requests = _Requests(remote, description)
        waiting = deque(map(_Wanted, tasks))
        while waiting or requests.by_reference:
            if not is_node():
                raise ConfigError(
                    "Ray's process on this machine (raylet) has ended, and the command with it: start it again; it "
                    "goes on with the shards that are not there"
                )
            there = [node for node in fitting(self.needs) if node.id not in silent]
            self.on_nodes(len(there))
            room = self.at_once or max(1, AHEAD * int(sum(node.cpus // self.needs.cpus for node in there)))
            while waiting and len(requests.by_reference) < room:
                requests.ask(waiting.popleft())
            requests.ask_late_again(there)
            made = []
            for wanted, answer in requests.answers():
                if "lost" in answer:
                    waiting.appendleft(wanted)
                else:
                    made.append((wanted.task, Shard(**answer["shard"]), answer["attempt"]))
            # An object store takes its time for each.
            in_threads(lambda each: journal.add(*each[1:]), made, remote=True)
            for task, shard, _ in made:
                on_done(1, shard.tokens, task.bytes)

    def _silent(self, description: Any) -> set[str]:
        """The nodes that are left out, as they do not answer. One of many may hang; what others find raises."""
        import ray

        silent, checks, until = {}, on_each(fitting(self.needs), make_shard, description), monotonic() + CHECK_S
        for node, reference in checks:
            try:
                _answer(reference, node.name, max(0.0, until - monotonic()))
            except ray.exceptions.GetTimeoutError:
                silent[node.id] = node.name
        if silent:
            said = f"{', '.join(silent.values())}: no answer within {CHECK_S:g} s to what is compared before shards"
            if len(silent) == len(checks):
                raise ConfigError(f"{said}; expected one: look at what hangs there, such as the disk of --out")
            _log.warning("%s: left out", said)
        return set(silent)


class _Requests:
    """The shards that are asked for now, and Ray's references to their answers."""

    def __init__(self, remote: Any, description: Any) -> None:
        self._remote, self._description = remote, description
        self.by_reference: dict[Any, _Wanted] = {}
        self._slowest_s_per_byte = 0.0

    def ask(self, wanted: _Wanted, nodes: Sequence[Node] = ()) -> None:
        """One more attempt at a shard: on the next of ``nodes``, or where Ray wants it."""
        task, remote = wanted.task, self._remote
        if nodes:
            remote = pinned(remote, nodes[(hash(task.name) + wanted.attempts) % len(nodes)], soft=True)
        text = json.dumps([task.source, task.ranges, task.bytes, task.name])
        reference = remote.remote(self._description, text, wanted.attempts, wanted.deaths >= DEATHS)
        self.by_reference[reference] = wanted
        wanted.attempts, wanted.asked_at = wanted.attempts + 1, monotonic()

    def ask_late_again(self, there: Sequence[Node]) -> None:
        """Another attempt beside those that are late. Ray may want it on the same node, and does not say which one
        that is; so two attempts in turn are on two."""
        for wanted, attempts in Counter(self.by_reference.values()).items():
            usual_s = (self._slowest_s_per_byte or FIRST_S_PER_BYTE) * wanted.task.bytes
            took_s = monotonic() - wanted.asked_at
            if attempts < ATTEMPTS and took_s > max(LATE_S, LATE_TIMES * usual_s):
                _log.warning("%s: no answer within %.0f s: it is asked for again", wanted.task.name, took_s)
                self.ask(wanted, there)

    def answers(self) -> Iterator[tuple[_Wanted, dict[str, Any]]]:
        """What there is after a look: the first shard of several attempts; ``lost`` once none is left of them. Raises
        ``ConfigError`` where that was so too often, and the error that a worker said."""
        import ray

        for reference in ray.wait(list(self.by_reference), num_returns=len(self.by_reference), timeout=LOOK_S)[0]:
            if reference not in self.by_reference:
                continue  # another attempt was faster
            wanted = self.by_reference.pop(reference)
            answer = _answer(reference, wanted.task.name)
            others = [other for other, same in self.by_reference.items() if same is wanted]
            if "lost" in answer:
                wanted.losses, wanted.deaths = wanted.losses + 1, wanted.deaths + answer["died"]
                if wanted.losses == LOSSES:
                    raise ConfigError(f"{wanted.task.name}: was lost {LOSSES} times; the last time: {answer['lost']}")
                if others:
                    continue
            else:
                took_s = monotonic() - wanted.asked_at
                self._slowest_s_per_byte = max(self._slowest_s_per_byte, took_s / max(1, wanted.task.bytes))
                for other in others:
                    del self.by_reference[other]
                    ray.cancel(other)
            yield wanted, answer


def _answer(reference: Any, name: str, timeout_s: float | None = None) -> dict[str, Any]:
    """What a worker said, after what it logged; ``lost`` with why where it or its node is lost, ``died`` where it
    crashed. Raises the error that it said, and Ray's ``GetTimeoutError``."""
    import ray

    try:
        answer: dict[str, Any] = json.loads(ray.get(reference, timeout=timeout_s))
    except (ray.exceptions.RayTaskError, ray.exceptions.GetTimeoutError):
        raise  # a fault of the program, or the caller's business
    except ray.exceptions.RayError as error:
        lost = str(error).strip().partition("\n")[0]
        if isinstance(error, ray.exceptions.OutOfMemoryError):
            lost = f"its node had no memory left, and it was killed: say with --ray-memory what it takes ({lost})"
        _log.warning("%s: its worker or node was lost: %s", name, lost)
        return {"lost": lost, "died": isinstance(error, ray.exceptions.WorkerCrashedError)}
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
            "transform": function and [function.name, function.seconds, function.memory_mb, dict(function.code)],
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
    lines, logger = LoggedLines(), logging.getLogger("tokenloom_server")
    logger.addHandler(lines)
    try:
        answer = _made(_worker(description), task, number, apart)
    except (TokenloomError, OSError) as error:
        answer = {"error": getattr(error, "name", "ConfigError"), "message": named_by_node(error)}
    finally:
        logger.removeHandler(lines)
    return json.dumps({**answer, "log": lines.lines()})


def _made(worker: _Worker, text: str, number: int, apart: bool) -> dict[str, Any]:
    if not text:
        worker.check({(source, 0) for source in worker.sources})
        return {}
    source, ranges, size, name = json.loads(text)
    task = Task(source, tuple(PartRows(*each) for each in ranges), size, name)
    worker.check(worker.files_of(task))
    folder, attempt = worker.attempts.folder, worker.attempts.named(name, number)
    try:
        with folder.created(attempt) as path:
            shard = replace(worker.maker, apart=apart).make(task, path, lambda *_: None)
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
            return {(task.source, file) for file in range(len(self.maker.order.record.shards[task.source]))}
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
        function = held.enter_context(closing(Transform(name, seconds=seconds, memory_mb=memory_mb)))
        if dict(function.code) != code:
            raise ConfigError(f"transform {name!r}: its code is {dict(function.code)}, expected {code}: put it there")
    maker = Maker(order, fields["form"], function)
    worker = _Worker(maker, Attempts(folder, fields["attempts"]), fields["sources"], set())
    weakref.finalize(worker, held.close)
    return worker
