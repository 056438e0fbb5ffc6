"""``python -m tokenloom_server.workers.cluster.readers.child``: the process beside a server that speaks to Ray.

Ray ends the process of its driver where its head is away for a minute: this one may end, and the server starts another.
It decides nothing and keeps nothing but what Ray works on now: what is lost with it is asked for again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import mmap
import os
import sys
from dataclasses import replace
from functools import partial
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import pyarrow as pa
from tokenloom_proto.threads import Background, name_for_kernel

from tokenloom_server.errors import TokenloomError
from tokenloom_server.workers.cluster.connection import Needs, Node, connect, is_node, nodes
from tokenloom_server.workers.cluster.readers import rows, worker
from tokenloom_server.workers.cluster.readers.rows import ANSWER_BYTES, Request
from tokenloom_server.workers.cluster.tasks import answered, lost_by, on_each

#: Seconds between looks at what is free, and between tries where Ray refuses.
TICK_S = 0.5
PAUSE_S = 2.0
#: Bytes of memory for an answer, if it needs no more; of which none is taken before it is written.
MEMORY_BYTES = 2 * ANSWER_BYTES

_log = logging.getLogger(__name__)


class Child:
    """Requests of the server, as tasks of Ray."""

    def __init__(self, server: Connection, ray: Any, needs: Needs, late_s: float) -> None:
        self._server = server
        self._ray = ray
        self._needs = needs
        self._late_s = late_s
        self._task = ray.remote(max_retries=0)(worker.answer)
        self._described: dict[str, worker.Described] = {}
        self._requests: dict[int, asyncio.Task[None]] = {}
        #: By name, memory that is shared with the server; and the names of what that one uses no more.
        self._memory: dict[str, mmap.mmap] = {}
        self._free: list[str] = []

    async def serve(self) -> None:
        """Until the server is gone. Where Ray is lost the process ends, and the server starts another."""
        try:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self._watch())
                heard = asyncio.Queue[dict[str, Any]]()
                Background(
                    "readers", partial(self._listen, asyncio.get_running_loop(), heard)
                ).start()
                while message := await heard.get():
                    self._hear(message, tasks)
                for each in (watching, *self._requests.values()):
                    each.cancel()
        except* Exception as errors:
            _log.error("Ray is lost: %s", errors.exceptions[0])
            os._exit(1)

    def _listen(
        self, loop: asyncio.AbstractEventLoop, heard: asyncio.Queue[dict[str, Any]]
    ) -> None:
        """Takes messages even while the loop sends: if both sides only wrote, both would wait for ever."""
        try:
            while message := rows.receive(self._server):
                loop.call_soon_threadsafe(heard.put_nowait, message)
        finally:
            loop.call_soon_threadsafe(heard.put_nowait, {})

    def _hear(self, message: dict[str, Any], tasks: asyncio.TaskGroup) -> None:
        if "number" in message:
            number, request = message["number"], Request.from_json(message["request"])
            answering = self._answer(number, self._described[request.order], request)
            self._requests[number] = tasks.create_task(answering)
        elif "digest" in message:
            described = worker.Described(message["digest"], self._ray.put(message["text"]))
            self._described[described.digest] = described
            if message["sources"]:
                tasks.create_task(self._check(described, message["sources"]))
        elif "drop" in message:
            del self._described[message["drop"]]
        elif "forget" in message:
            if request_at_work := self._requests.pop(message["forget"], None):
                request_at_work.cancel()
        elif message["free"] in self._memory:  # not that of a process before this one
            self._free.append(message["free"])

    async def _watch(self) -> None:
        """Tells the server whether a CPU is free, until this machine is no node of the cluster any more: a driver does
        not come back from that, though another cluster may be at the same address."""
        while await asyncio.to_thread(is_node):
            is_free = self._needs.fit(
                Node("", "", await asyncio.to_thread(self._ray.available_resources))
            )
            rows.send(
                self._server, busy="" if is_free else f"no CPU is free for a task of {self._needs}"
            )
            await asyncio.sleep(TICK_S)
        raise ConnectionError("this machine is no node of the cluster any more")

    async def _check(self, described: worker.Described, sources: list[int]) -> None:
        """Tells the server why a node cannot read a run's sources, or that all can."""
        present, fault = [node for node in nodes() if node.cpus], ""
        for node, said in await on_each(present, worker.check, described, sources):
            fault = fault or (
                f"{node.name}: {lost_by(said)}" if isinstance(said, Exception) else said
            )
        rows.send(self._server, checked=described.digest, fault=fault)

    async def _answer(self, number: int, described: worker.Described, request: Request) -> None:
        """Asks for rows until they are there, and gives them to the server; which cancels this if it wants them no
        more."""
        refused_by = set[str]()
        is_apart = False

        def begin(_: int, apart: bool) -> Any:
            nonlocal is_apart
            is_apart = is_apart or apart  # also after a refusal, which is no death
            task = self._task.options(**self._needs.options(refused_by))
            return task.remote(described, replace(request, apart=is_apart).to_json())

        def again(error: Exception | str) -> float:
            is_late = type(error) is TimeoutError  # and not one of the task's own
            reason = error if isinstance(error, str) else lost_by(error)
            reason = f"no answer within {self._late_s:g} s" if is_late else reason[:1000]
            rows.send(self._server, again=number, reason=reason, is_refused=isinstance(error, str))
            return 0.0 if is_late else PAUSE_S

        while True:
            head, batches = await answered(begin, lambda: self._late_s, again)
            made = json.loads(head)
            if not made["refused"]:
                break
            refused_by.add(made["work"][-1])
            again(made["refused"])
            if refused_by >= {node.id for node in nodes() if node.cpus}:
                refused_by.clear()
                await asyncio.sleep(PAUSE_S)
        self._give(number, head, batches)

    def _give(self, number: int, head: str, batches: list[pa.RecordBatch]) -> None:
        # Memory that was used before is ten times cheaper than fresh one.
        size = rows.size_of(batches)
        name = next((name for name in self._free if len(self._memory[name]) >= size), "")
        if is_new := not name:
            file = os.memfd_create("tokenloom-answer")
            os.ftruncate(file, max(size, MEMORY_BYTES))
            name = f"{os.getpid()}-{len(self._memory)}"
            self._memory[name] = mmap.mmap(file, 0)
        else:
            self._free.remove(name)
        used = rows.write(self._memory[name], batches) if batches else 0
        rows.send(self._server, answer=number, head=head, memory=name, is_new=is_new, size=used)
        if is_new:
            reduction.send_handle(self._server, file, None)
            os.close(file)


def main(arguments: list[str]) -> None:
    """Serves the server at the other end of a socket, until that is gone."""
    name_for_kernel("readers")
    server, options = Connection(int(arguments[0])), json.loads(arguments[1])
    needs = Needs(**options["needs"])
    logging.basicConfig(level=logging.WARNING)
    try:
        with connect(
            options["address"],
            needs,
            option="--readers",
            cpus=options["local_cpus"],
            object_store_bytes=options["store_bytes"],
        ) as fitting:
            import ray

            rows.send(server, up=[[node.name, node.cpus] for node in fitting])
            asyncio.run(Child(server, ray, needs, options["late_s"]).serve())
    except TokenloomError as error:
        rows.send(server, refused=str(error))
    except Exception:
        _log.exception("the process that speaks to Ray fails")
    finally:
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
