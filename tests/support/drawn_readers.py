"""Readers without Ray: what reads is the product's, and a run's record, requests and answers cross as text and bytes;
but when they cross, how often, and how much at once is drawn."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pyarrow as pa
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.record import RunRecord
from tokenloom_server.order.resources import RunResources
from tokenloom_server.sources import row_index
from tokenloom_server.sources.base import Source
from tokenloom_server.workers.cluster.description import describe, rebuild
from tokenloom_server.workers.cluster.readers import rows, source, worker
from tokenloom_server.workers.cluster.readers.rows import Answer, Request, Work
from tokenloom_server.workers.cluster.readers.source import RowsOfReaders
from tokenloom_server.workers.cluster.readers.worker import read


class DrawnReaders:
    """Implements ``Readers`` and ``Asked``: those of two machines, each of which knows the run by its description."""

    def __init__(self, seed: object, rebuilt: Callable[[str], PipelineFactory] = rebuild) -> None:
        """``rebuilt``: makes an order of its description."""
        self.seed = seed
        self.requests = self.cut = 0
        self._described: dict[str, str] = {}
        self._rebuilt = rebuilt
        self._orders: dict[tuple[int, str], PipelineFactory] = {}

    def source(
        self, record: RunRecord, resources: RunResources, source_id: int, reader: Source
    ) -> RowsOfReaders:
        """See ``Readers``."""
        order = PipelineFactory(record, resources)
        text = describe(order)
        digest = hashlib.sha256(text.encode()).hexdigest()
        self._described[digest] = text
        return RowsOfReaders(order, digest, source_id, reader, self)

    def ask(self, order: PipelineFactory, request: Request) -> _Ticket:
        """See ``Asked``."""
        self.requests += 1
        return _Ticket(self, request)

    def has_room(self) -> bool:
        """See ``Asked``."""
        return self.requests % 3 > 0

    def answer(self, request: Request, machine: int) -> tuple[str, bytes]:
        """What a machine gives, but for the time that it took."""
        text = request.to_json()
        asked = Request.from_json(text)
        if (machine, asked.order) not in self._orders:
            self._orders[machine, asked.order] = self._rebuilt(self._described[asked.order])
        # Nor does it look through a whole file for where rows begin.
        with patch.object(row_index, "cached", _no_index):
            answer = read(self._orders[machine, asked.order], asked)
        head, batches = answer._replace(work=Work()).encoded()
        memory = bytearray(rows.size_of(batches))
        return head, bytes(memory[: rows.write(memory, batches)]) if batches else b""

    def close(self) -> None:
        """Ends the processes of users' functions."""
        for order in self._orders.values():
            order.resources.close()


def _no_index(*_: object) -> None:
    raise AssertionError("an index is made")


class _Ticket:
    """Implements ``Ticket``."""

    def __init__(self, readers: DrawnReaders, request: Request) -> None:
        self.request = request
        self._readers = readers
        self._drawn = random.Random(f"{readers.seed}: {request.to_json()}")
        # Those that are made at once are there before others that were asked for earlier.
        self._early = readers.answer(request, 0) if self._drawn.random() < 0.4 else None

    def is_answered(self) -> bool:
        return self._early is not None

    def take(self) -> Answer:
        """See ``Ticket``."""
        made = self._early or self._readers.answer(self.request, 1)
        if self._drawn.random() < 0.3:
            # Taken for lost, and asked for again: whichever comes, it is the same.
            assert self._readers.answer(self.request, self._drawn.randint(0, 1)) == made
        answer = Answer.decoded(made[0], pa.ipc.open_stream(made[1]) if made[1] else ())
        self._readers.cut += self.request.after(answer.rows) is not None and answer.error is None
        return answer


@contextmanager
def drawn_sizes(seed: object) -> Iterator[None]:
    """Requests and answers of drawn sizes, mostly so small that a few rows take several."""
    drawn = random.Random(f"sizes of {seed}")
    sizes = [
        (source, "FIRST_ROWS", [1, 3, 20]),
        (source, "REQUEST_BYTES", [1, 50, 400, 1 << 22]),
        (source, "MOST_AHEAD", [2, 5, 256]),
        (worker, "ANSWER_BYTES", [1, 60, 300, 1 << 23]),
    ]
    with ExitStack() as stack:
        for module, name, values in sizes:
            stack.enter_context(patch.object(module, name, drawn.choice(values)))
        yield
