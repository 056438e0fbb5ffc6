"""A server that leads a run, as tests of the ledger write to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tokenloom_server.ledger.base import Ledger
from tokenloom_server.ledger.commands import (
    Acquire,
    ClaimSlot,
    Command,
    Commit,
    DropRevisions,
    Open,
    Revise,
)
from tokenloom_server.ledger.records import CommittedState, StoredRevision, StoredRun

from support.ledger_data import commit_at, opening_of, revision_of

NAME, STREAM, UID = "wiki-and-code", "train", "uid-1"


@dataclass(frozen=True)
class Server:
    """A server process that holds the lease of the run in an opened generation."""

    ledger: Ledger
    epoch: int

    def do(self, kind: Callable[..., Command], *values: Any, **more: Any) -> int:
        """Any command on this run, by this server."""
        return self.ledger.execute(kind(UID, STREAM, self.epoch, *values, **more))

    def commit(
        self, index: int, generation: int = 1, *, order: str = "0", journal: bool = False
    ) -> int:
        return self.do(Commit, generation, commit_at(index, order), journal)

    def open(
        self,
        generation: int,
        start: int,
        attempt: str | None = None,
        opened_at: float | None = None,
    ) -> None:
        opening = opening_of(generation, commit_at(start), attempt)
        if opened_at is not None:
            opening = replace(opening, opened_at=opened_at)
        self.do(Open, opening, commit_at(start))

    def claim(self, rank: int, nonce: str, generation: int = 1) -> None:
        self.do(ClaimSlot, generation, rank, nonce)

    def revise(
        self,
        number: int,
        sample_index: int,
        reason: str = "more code",
        known: int | None = None,
        closes: int = 0,
    ) -> int:
        """``known``: of the changes of the revisions; all, if not given. ``closes``: this generation."""
        known = self.run.revision_changes if known is None else known
        revision = revision_of(number, sample_index, reason)
        return self.do(Revise, revision, closes, known_changes=known)

    def drop(self, number: int, known: int | None = None) -> int:
        known = self.run.revision_changes if known is None else known
        return self.do(DropRevisions, number, known_changes=known)

    @property
    def revisions(self) -> list[StoredRevision]:
        return list(self.ledger.revisions(UID, STREAM))

    @property
    def run(self) -> StoredRun:
        found = self.ledger.read_run(NAME, STREAM)
        assert found is not None
        return found

    @property
    def committed(self) -> CommittedState:
        assert self.run.committed is not None
        return self.run.committed


def lead(ledger: Ledger) -> Server:
    ledger.create_run(NAME, STREAM, UID, "{}")
    return Server(ledger, ledger.execute(Acquire(UID, STREAM, "one", 0.0)))
