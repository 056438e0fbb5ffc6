"""What a run's history is stored as: entries of a few kinds, beside the ledger.

Unlike the ledger it may lose what was written last, and nothing of a run waits for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, NamedTuple

#: Points of the curves; events that are rare, and those that may be frequent; up to where events were recorded.
Kind = Literal["points", "events", "frequent", "mark"]
KINDS: tuple[Kind, ...] = ("points", "events", "frequent", "mark")


class HistoryEntry(NamedTuple):
    """One of a run's entries of a kind, which count from 0."""

    kind: Kind
    number: int
    #: Unix time, seconds.
    time: float
    #: JSON; empty where only the others were asked for.
    text: str = ""


class HistoryStore(ABC):
    """Where the history of a ledger's runs lies. Any thread may call. All methods raise the ledger's errors where the
    store or the ledger cannot be used now."""

    @abstractmethod
    def write(
        self,
        uid: str,
        stream: str,
        epoch: int,
        put: Sequence[HistoryEntry],
        drop: Sequence[HistoryEntry],
    ) -> bool:
        """Adds or replaces entries, and removes others, as a whole; False, and nothing is written, where the run in the
        ledger has another uid or server epoch."""

    @abstractmethod
    def entries(self, uid: str, stream: str, *kinds: Kind) -> list[HistoryEntry]:
        """The entries of some kinds, by number and without their texts."""

    @abstractmethod
    def read(self, uid: str, stream: str, wanted: Sequence[HistoryEntry]) -> list[HistoryEntry]:
        """Entries with their texts; those that are gone by now are left out."""

    @abstractmethod
    def close(self) -> None: ...
