"""Tasks of Ray: asked for again where they are late or lost, and looked at on each node before any work."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from tokenloom_server.workers.cluster.connection import Node

#: Deaths of the process at a task after which each of its texts is encoded in a process that may die of it. The first
#: may be anybody's doing.
DEATHS = 2
#: Attempts at one task at a time, each begun when those before it are late: not all on what has stopped.
ATTEMPTS = 4
#: For how long a node may compare what it has with what is here, seconds. Most of it is the start of a worker.
CHECK_S = 60.0


async def answered(
    begin: Callable[[int, bool], Any],
    late_s: Callable[[], float],
    again: Callable[[Exception], float],
) -> Any:
    """What the first attempt at a task gives that ends.

    ``begin`` asks for an attempt, by its number from 0 on and whether each text is encoded in a process that may die of
    it, and gives Ray's reference. Attempts are late after ``late_s``. ``again`` is called with why there is to be
    another one, a ``TimeoutError`` or what Ray says of a loss; it raises where there is to be none, and gives the
    seconds before it.
    """
    import ray

    attempts: dict[asyncio.Future[Any], Any] = {}
    deaths = 0
    try:
        for number in itertools.count():
            reference = begin(number, deaths >= DEATHS)
            attempts[asyncio.wrap_future(reference.future())] = reference
            timeout_s = late_s() if len(attempts) < ATTEMPTS else None
            ended, _ = await asyncio.wait(
                attempts, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            try:
                if not ended:
                    raise TimeoutError
                first = ended.pop()
                del attempts[first]
                return first.result()
            except (ray.exceptions.RayError, TimeoutError) as error:
                deaths += isinstance(error, ray.exceptions.WorkerCrashedError)
                pause_s = again(error)
            await asyncio.sleep(pause_s)
    finally:
        # Where others work on it nobody goes on; a process that was stopped does not once it can.
        for future, reference in attempts.items():
            future.cancel()
            with contextlib.suppress(Exception):  # Ray may be gone, which is why this ends
                ray.cancel(reference)


def lost_by(error: Exception) -> str:
    """How a task was lost, by what Ray says of it."""
    import ray

    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return "its node had no memory left, and it was killed"
    if isinstance(error, ray.exceptions.WorkerCrashedError):
        return "the process that worked on it died"
    return f"{type(error).__name__}: {str(error).strip().rpartition(chr(10))[2].partition('. ')[0]}"


async def on_each(
    nodes: Sequence[Node], work: Callable[..., Any], *arguments: Any
) -> list[tuple[Node, Any]]:
    """What a function gives on each of these nodes, beside whatever they do: its answer, or the exception in its place,
    ``TimeoutError`` after ``CHECK_S``."""
    import ray

    task = ray.remote(max_retries=0, num_cpus=0)(work)

    async def answer(node: Node) -> Any:
        reference = pinned(task, node, soft=False).remote(*arguments)
        return await asyncio.wait_for(asyncio.wrap_future(reference.future()), CHECK_S)

    answers = await asyncio.gather(*map(answer, nodes), return_exceptions=True)
    return list(zip(nodes, answers, strict=True))


def pinned(task: Any, node: Node, *, soft: bool) -> Any:
    """A remote function on one node; ``soft``: on another one where that is lost."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=soft))
