"""``python -m tokenloom_server.cluster.readers.child SOCKET``: the process beside a server that speaks to Ray.

Ray ends the process of its driver where its head is away for a minute: this one may end, and the server starts another.
It decides nothing and keeps nothing but what Ray works on now: what is lost with it is asked for again.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

from tokenloom_server.cluster.connection import Needs, Node, connect, nodes, on_each
from tokenloom_server.cluster.readers import messages, worker
from tokenloom_server.cluster.readers.rows import Answer, Request
from tokenloom_server.errors import TokenloomError

#: Deaths of the process at a request after which each of its texts is encoded in a process that may die of it. The
#: first may be anybody's doing.
DEATHS = 2
#: Seconds between looks at what takes long, at what is free, and between tries where Ray refuses.
TICK_S = 0.5
PAUSE_S = 2.0
#: Seconds that all nodes have to look at a run's files.
CHECK_S = 60.0
#: Ray's label of a node.
NODE_ID = "ray.io/node-id"

_log = logging.getLogger(__name__)


class _Pending:
    """A request, and Ray's tasks for it."""

    def __init__(self, number: int, request: Request) -> None:
        self.number = number
        self.request = request
        self.tasks: list[Any] = []
        self.asked_at = time.monotonic()
        self.deaths = 0
        #: The nodes that refused it.
        self.refused_by: set[str] = set()


class Child:
    """Requests of the server, as tasks of Ray."""

    def __init__(self, server: socket.socket, ray: Any, task: Any, late_s: float) -> None:
        self._server = server
        self._ray = ray
        self._task = task
        self._late_s = late_s
        self._lock = threading.Condition()
        self._described: dict[str, worker.Described] = {}
        self._by_task: dict[Any, _Pending] = {}
        self._wanted: dict[int, _Pending] = {}

    def hear(self) -> None:
        """Takes requests until the server is gone."""
        while (message := messages.receive(self._server)) is not None:
            head, content = message
            if content is None:
                self._forget(head["forget"])
                continue
            if "order" in head:
                described = worker.Described(head["order"], self._ray.put(bytes(content)))
                self._described[described.digest] = described
                if head["sources"]:
                    # A node that does not answer keeps nobody's requests.
                    threading.Thread(target=self._check, args=(described, head["sources"]), daemon=True).start()
                continue
            pending = _Pending(head["number"], Request.from_json(bytes(content)))
            with self._lock:
                self._wanted[pending.number] = pending
            self._submit(pending)

    def work(self) -> None:
        """Gives each answer to the server as it comes."""
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._by_task)
                tasks = list(self._by_task)
            ready, _ = self._ray.wait(tasks, num_returns=1, timeout=TICK_S)
            for task in ready:
                with self._lock:
                    pending = self._by_task.pop(task)
                    pending.tasks.remove(task)
                self._finish(pending, task)
            self._ask_again_late()

    def watch(self, needs: Needs) -> None:
        """Tells the server whether a CPU is free, until this machine is no node of the cluster any more: a driver does
        not come back from that, though another cluster may be at the same address."""
        here = self._ray.get_runtime_context().get_node_id()
        while any(node.id == here for node in nodes()):
            is_free = needs.fit(Node("", "", self._ray.available_resources()))
            messages.send(self._server, {"busy": "" if is_free else f"no CPU is free for a task of {needs}"})
            time.sleep(TICK_S)
        raise ConnectionError("this machine is no node of the cluster any more")

    def _check(self, described: worker.Described, sources: list[int]) -> None:
        """Tells the server why nodes cannot read a run's sources."""
        faults = []
        for node, task in on_each([node for node in nodes() if node.cpus], worker.check, described, sources):
            try:
                faults.append(self._ray.get(task, timeout=CHECK_S))
            except self._ray.exceptions.RayError as error:
                faults.append(f"{node.name}: {_words(error)}")
        messages.send(self._server, {"checked": described.digest, "faults": list(filter(None, faults))})

    def _submit(self, pending: _Pending) -> None:
        with self._lock:
            if self._wanted.get(pending.number) is not pending:
                return  # it was answered, or nobody waits for it any more
            elsewhere = {NODE_ID: f"!in({','.join(pending.refused_by)})"} if pending.refused_by else None
            described, text = self._described[pending.request.order], pending.request.to_json()
            task = self._task.options(label_selector=elsewhere).remote(described, text)
            pending.tasks.append(task)
            pending.asked_at = time.monotonic()
            self._by_task[task] = pending
            self._lock.notify()

    def _forget(self, number: int) -> None:
        """Where others work on a request nobody goes on; a process that was stopped does not once it can."""
        with self._lock:
            pending = self._wanted.pop(number, None)
            tasks = list(pending.tasks) if pending is not None else []
        for task in tasks:
            self._ray.cancel(task)

    def _finish(self, pending: _Pending, task: Any) -> None:
        if pending.number not in self._wanted:
            return  # another one was faster
        try:
            content = self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            self._ask_again(pending, error)
            return
        answer = Answer.from_bytes(content)
        if answer.refused:
            pause = 0.0
            pending.refused_by.add(answer.work.node_id)
            if pending.refused_by >= {node.id for node in nodes() if node.cpus}:
                pending.refused_by, pause = set(), PAUSE_S
            self._again(pending, answer.refused, pause, is_refused=True)
            return
        self._forget(pending.number)
        messages.send(self._server, {"number": pending.number}, content)

    def _ask_again(self, pending: _Pending, error: Exception) -> None:
        known = self._ray.exceptions
        if isinstance(error, known.OutOfMemoryError):
            self._again(pending, "Ray ended the task for want of memory", PAUSE_S)
        elif isinstance(error, known.WorkerCrashedError):
            pending.deaths += 1
            if pending.deaths >= DEATHS:
                pending.request = replace(pending.request, apart=True)
            self._again(pending, "the process that worked on it died")
        else:
            self._again(pending, _words(error), PAUSE_S)

    def _ask_again_late(self) -> None:
        with self._lock:
            late = [each for each in self._by_task.values() if time.monotonic() - each.asked_at > self._late_s]
        for pending in dict.fromkeys(late):
            if len(pending.tasks) < 2:
                self._again(pending, f"no answer within {self._late_s:g} s")

    def _again(self, pending: _Pending, reason: str, pause: float = 0.0, *, is_refused: bool = False) -> None:
        message = {"again": pending.number, "reason": reason[:1000], "is_refused": is_refused}
        messages.send(self._server, message)
        if pause:
            threading.Timer(pause, self._submit, [pending]).start()
        else:
            self._submit(pending)


def _end(failed: Any) -> None:
    """Where a thread fails, the process ends, and the server starts another."""
    _log.error("Ray is lost: %s", failed.exc_value)
    os._exit(1)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().rpartition(chr(10))[2].partition('. ')[0]}"


def main(arguments: list[str]) -> None:
    """Serves the server at the other end of a socket, until that is gone."""
    server = socket.socket(fileno=int(arguments[0]))
    logging.basicConfig(level=logging.WARNING)
    threading.excepthook = _end
    begin = messages.receive(server)
    assert begin is not None
    options = begin.head
    needs = Needs(**options["needs"])
    try:
        with connect(
            options["address"],
            needs,
            option="--readers",
            cpus=options["local_cpus"],
            object_store_bytes=options["store_bytes"],
        ) as fitting:
            import ray

            task = ray.remote(max_retries=0, **needs.options())(worker.answer)
            messages.send(server, {"up": [[node.name, node.cpus] for node in fitting]})
            child = Child(server, ray, task, options["late_s"])
            for work in (child.work, partial(child.watch, needs)):
                threading.Thread(target=work, daemon=True).start()
            hearing = threading.Thread(target=child.hear, daemon=True)
            hearing.start()
            hearing.join()
            threading.excepthook = lambda _: None  # the others lose Ray now
    except TokenloomError as error:
        messages.send(server, {"refused": str(error)})
    except OSError:
        pass  # the server is gone
    finally:
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
