"""What readers did for one run, counted as their answers come in."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import Any

from tokenloom_server.order.readers_stats import ReaderNode, ReaderSource, ReadersStats
from tokenloom_server.storage.io_stats import NAMED_AFTER_S
from tokenloom_server.workers.cluster.readers.rows import Answer

#: Nodes that are counted by name; all others are one, for where nodes come and go there is no end of names.
MOST_NODES = 256


class ReaderCounts:
    """For whoever holds the lock of ``RayReaders``."""

    def __init__(self) -> None:
        self._nodes: dict[str, ReaderNode] = {}
        self._sources: dict[int, ReaderSource] = {}
        #: Requests that were asked again, by source.
        self.asked_again = Counter[int]()

    def asked(self, source: int, alias: str) -> None:
        self._sources.setdefault(source, ReaderSource(id=source, alias=alias))

    def answered(self, source: int, answer: Answer) -> None:
        name, work = answer.work.node, (answer.tokens, answer.work.cpu_s)
        name = name if name in self._nodes or len(self._nodes) < MOST_NODES else "others"
        self._nodes[name] = self._nodes.get(name, ReaderNode(name=name)).plus(*work)
        self._sources[source] = self._sources[source].plus(*work)

    def stats(
        self, present: Sequence[tuple[str, float]], tickets: Iterable[Any], away: str
    ) -> ReadersStats:
        """``present``: names and CPUs of the nodes that are there. ``tickets``: those of the run that are held."""
        ahead, waiting = Counter[int](), defaultdict[int, str](str)
        for ticket in tickets:
            if ticket.answer is not None:
                ahead[ticket.source] += ticket.answer.rows
            elif ticket.wait is not None and monotonic() - ticket.wait.since >= NAMED_AFTER_S:
                waiting[ticket.source] = ticket.wait.text()
        figures: Any = {
            "rows_ahead": ahead,
            "asked_again": self.asked_again,
            "waiting_for": waiting,
        }
        cpus = {
            of: sum(count for name, count in present if name == of)
            for of, _ in present[:MOST_NODES]
        }
        nodes = {name: ReaderNode(name=name) for name in cpus} | self._nodes
        return ReadersStats(
            away=away,
            nodes=[
                node.model_copy(update={"cpus": cpus.get(name, 0.0)})
                for name, node in nodes.items()
            ],
            sources=[
                source.model_copy(update={name: counts[key] for name, counts in figures.items()})
                for key, source in sorted(self._sources.items())
            ],
        )
