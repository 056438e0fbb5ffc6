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
from tokenloom_server.workers.cluster.connection import Needs, Node, connect, is_node, nodes, on_each
from tokenloom_server.workers.cluster.readers import messages, worker
from tokenloom_server.workers.cluster.readers.rows import ANSWER_BYTES, Request

#: Deaths of the process at a request after which each of its texts is encoded in a process that may die of it. The
#: first may be anybody's doing.
DEATHS = 2
#: Tasks of one request at a time, each asked for when those before it are late: not all on what has stopped.
ATTEMPTS = 4
#: Seconds between looks at what is free, and between tries where Ray refuses.
TICK_S = 0.5
PAUSE_S = 2.0
#: Seconds that each node has to look at a run's files.
CHECK_S = 60.0
#: Bytes of memory for an answer, if it needs no more; of which none is taken before it is written.
MEMORY_BYTES = 2 * ANSWER_BYTES
#: Ray's label of a node.
NODE_ID = "ray.io/node-id"

_log = logging.getLogger(__name__)


class Child:
    """Requests of the server, as tasks of Ray."""

    def __init__(self, server: Connection, ray: Any, needs: Needs, late_s: float) -> None:
        self._server = server
        self._ray = ray
        self._needs = needs
        self._late_s = late_s
        self._task = ray.remote(max_retries=0, **needs.options())(worker.answer)
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
                Background("readers", partial(self._listen, asyncio.get_running_loop(), heard)).start()
                while message := await heard.get():
                    self._hear(message, tasks)
                for each in (watching, *self._requests.values()):
                    each.cancel()
        except* Exception as errors:
            _log.error("Ray is lost: %s", errors.exceptions[0])
            os._exit(1)

    def _listen(self, loop: asyncio.AbstractEventLoop, heard: asyncio.Queue[dict[str, Any]]) -> None:
        """Takes messages even while the loop sends: if both sides only wrote, both would wait for ever."""
        try:
            while message := messages.receive(self._server):
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
            is_free = self._needs.fit(Node("", "", await asyncio.to_thread(self._ray.available_resources)))
            messages.send(self._server, busy="" if is_free else f"no CPU is free for a task of {self._needs}")
            await asyncio.sleep(TICK_S)
        raise ConnectionError("this machine is no node of the cluster any more")

    async def _check(self, described: worker.Described, sources: list[int]) -> None:
        """Tells the server why a node cannot read a run's sources, or that all can."""
        present = [node for node in nodes() if node.cpus]
        fault = ""
        for node, task in on_each(present, worker.check, described, sources):
            try:
                fault = fault or await asyncio.wait_for(asyncio.wrap_future(task.future()), CHECK_S)
            except (self._ray.exceptions.RayError, TimeoutError) as error:
                fault = f"{node.name}: {_words(error)}"
        messages.send(self._server, checked=described.digest, fault=fault)

    async def _answer(self, number: int, described: worker.Described, request: Request) -> None:
        """Asks for rows until they are there, and gives them to the server; which cancels this if it wants them no
        more."""
        known = self._ray.exceptions
        tasks: dict[asyncio.Future[Any], Any] = {}
        deaths, refused_by = 0, set[str]()
        try:
            while True:
                refused, pause_s = "", PAUSE_S
                elsewhere = {NODE_ID: f"!in({','.join(refused_by)})"} if refused_by else None
                task = self._task.options(label_selector=elsewhere).remote(described, request.to_json())
                tasks[asyncio.wrap_future(task.future())] = task
                try:
                    head, batches = await self._first(tasks)
                    refused, node_id = (made := json.loads(head))["refused"], made["work"][-1]
                    if not refused:
                        break
                    refused_by.add(node_id)
                    reason, pause_s = refused, 0.0
                    if refused_by >= {node.id for node in nodes() if node.cpus}:
                        refused_by, pause_s = set(), PAUSE_S
                except known.OutOfMemoryError:
                    reason = "Ray ended the task for want of memory"
                except known.WorkerCrashedError:
                    reason, pause_s = "the process that worked on it died", 0.0
                    deaths += 1
                    request = replace(request, apart=deaths >= DEATHS)
                except known.RayError as error:
                    reason = _words(error)
                except TimeoutError:
                    reason, pause_s = f"no answer within {self._late_s:g} s", 0.0
                messages.send(self._server, again=number, reason=reason[:1000], is_refused=bool(refused))
                await asyncio.sleep(pause_s)
            self._give(number, head, batches)
        finally:
            # Where others work on it nobody goes on; a process that was stopped does not once it can.
            for future, task in tasks.items():
                future.cancel()
                self._ray.cancel(task)

    def _give(self, number: int, head: str, batches: list[pa.RecordBatch]) -> None:
        # Memory that was used before is ten times cheaper than fresh one.
        size = messages.size_of(batches)
        name = next((name for name in self._free if len(self._memory[name]) >= size), "")
        if is_new := not name:
            file = os.memfd_create("tokenloom-answer")
            os.ftruncate(file, max(size, MEMORY_BYTES))
            name = f"{os.getpid()}-{len(self._memory)}"
            self._memory[name] = mmap.mmap(file, 0)
        else:
            self._free.remove(name)
        used = messages.write(self._memory[name], batches) if batches else 0
        messages.send(self._server, answer=number, head=head, memory=name, is_new=is_new, size=used)
        if is_new:
            reduction.send_handle(self._server, file, None)
            os.close(file)

    async def _first(self, tasks: dict[asyncio.Future[Any], Any]) -> Any:
        """What the first of the tasks gives that ends, or why it failed. Raises ``TimeoutError`` where all are late."""
        late_s = self._late_s if len(tasks) < ATTEMPTS else None
        ended, _ = await asyncio.wait(tasks, timeout=late_s, return_when=asyncio.FIRST_COMPLETED)
        if not ended:
            raise TimeoutError
        first = ended.pop()
        del tasks[first]
        return first.result()


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().rpartition(chr(10))[2].partition('. ')[0]}"


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

            messages.send(server, up=[[node.name, node.cpus] for node in fitting])
            asyncio.run(Child(server, ray, needs, options["late_s"]).serve())
    except TokenloomError as error:
        messages.send(server, refused=str(error))
    except Exception:
        _log.exception("the process that speaks to Ray fails")
    finally:
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
