"""The task of a reader, as it runs in a process of Ray's."""

from __future__ import annotations

import logging
import platform
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pyarrow as pa

from tokenloom_server.errors import SourceChanged, StorageError, TokenloomError
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.workers.cluster.description import named_by_node, rebuild, verify_file
from tokenloom_server.workers.cluster.readers.reading import read
from tokenloom_server.workers.cluster.readers.rows import Answer, Request

#: What of the lines that a task logs comes to the server's log.
LINES, LINE_CHARACTERS = 20, 1000


@dataclass(frozen=True, slots=True)
class Described:
    """A run's record as it lies in Ray's store, known by its digest."""

    digest: str
    text: Any = field(compare=False)
    """A reference to the description."""


class LoggedLines(logging.Handler):
    """What is logged meanwhile: the first lines, and how many more there were."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: list[tuple[int, str]] = []
        self._more = 0

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._lines) < LINES:
            self._lines.append((record.levelno, record.getMessage()[:LINE_CHARACTERS]))
        else:
            self._more += 1

    def lines(self) -> list[tuple[int, str]]:
        """Levels and lines."""
        more = (logging.WARNING, f"{self._more:,} more lines were logged there")
        return [*self._lines, more] if self._more else self._lines


def answer(described: Described, request_json: str) -> tuple[str, list[pa.RecordBatch]]:
    """``Answer.encoded``. Never raises for what the run's files or this machine hold."""
    import ray

    request, node, lines = Request.from_json(request_json), platform.node(), LoggedLines()
    logging.getLogger("tokenloom_server").addHandler(lines)
    try:
        order = _order(described)
        for shard in {part.shard for part in request.parts}:
            _check(described, request.source, shard)
        made = read(order, request, node)
        if isinstance(made.error, (SourceChanged, StorageError)):
            raise made.error  # of this machine, perhaps, alone
    except TokenloomError as error:
        made = Answer(refused=named_by_node(error))
    finally:
        logging.getLogger("tokenloom_server").removeHandler(lines)
    work = made.work._replace(
        node=node, log=lines.lines(), node_id=ray.get_runtime_context().get_node_id()
    )
    return made._replace(work=work).encoded()


def check(described: Described, sources: Sequence[int]) -> str:
    """Why this machine cannot read these sources of a run; or nothing. Looks at the first file of each."""
    try:
        for source in sources:
            _check(described, source, 0)
    except TokenloomError as error:
        return named_by_node(error)
    return ""


@lru_cache(maxsize=4)
def _order(described: Described) -> PipelineFactory:
    import ray

    order = rebuild(ray.get(described.text))
    weakref.finalize(order, order.resources.close)
    return order


@lru_cache(maxsize=1 << 16)
def _check(described: Described, source: int, shard: int) -> None:
    verify_file(_order(described), source, shard)
