"""What readers (``serve --readers``) do for a run: a part of its stats."""

from __future__ import annotations

from typing import Self

from tokenloom_server.config.base import Document


class ReaderWork(Document):
    """What was answered since this server took the run up; ``cpu_s`` and ``ns_per_token`` are of the readers' CPUs."""

    answers: int = 0
    tokens: int = 0
    cpu_s: float = 0.0
    ns_per_token: float = 0.0

    def plus(self, tokens: int, cpu_s: float) -> Self:
        """With another answer."""
        tokens, cpu_s = self.tokens + tokens, self.cpu_s + cpu_s
        work = {
            "tokens": tokens,
            "cpu_s": cpu_s,
            "ns_per_token": round(1e9 * cpu_s / max(1, tokens), 2),
        }
        return self.model_copy(update=work | {"answers": self.answers + 1})


class ReaderNode(ReaderWork):
    """A machine on which readers work; ``others``: all that came after the first 256. ``cpus``: 0 for one that was not
    there when the server connected."""

    name: str
    cpus: float = 0.0


class ReaderSource(ReaderWork):
    """A source whose rows come from readers. ``rows_ahead``: answered, and not used yet; ``asked_again``: requests that
    were, because a process died, a node refused or was lost, or an answer was late; ``waiting_for``: empty unless a
    wait lasts."""

    id: int
    alias: str
    rows_ahead: int = 0
    asked_again: int = 0
    waiting_for: str = ""


class ReadersStats(Document):
    """What readers do for a run. ``away``: why Ray is away; empty where it is not."""

    away: str
    nodes: list[ReaderNode]
    sources: list[ReaderSource]
