"""What the ledger holds of a run: plain records, frozen. Integers are at most 2^53 - 1."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: So far the ledger's clock may go back before a lease counts as one from an earlier time, seconds.
CLOCK_SLACK_S = 1.0


def date_of(unix_s: float) -> str:
    """A Unix time for people."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """One generation of a run, as written by the opening. Generations count from 1."""

    generation: int
    #: The generation that the start state was taken in; 0 where there is none.
    parent: int
    attempt: str
    world_size: int
    batch_size: int
    #: Micro-steps between two state boundaries.
    group_micro_steps: int
    start_index: int
    #: Canonical JSON of the state at ``start_index``.
    start_state: str
    #: Unix time in seconds, for people.
    opened_at: float
    #: Canonical JSON about the run that this one was forked from; empty where it was not.
    parent_run: str = ""
    #: How the batch size changes, and micro-steps of an optimiser step, as JSON; empty where every micro-step has
    #: ``batch_size`` and is an optimiser step. ``batch_size`` and ``group_micro_steps`` are those of the first one.
    batch_plans: str = ""
    #: Rank 0's process, as its Join names it; empty where it does not say.
    process: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Committed counters of one source, keyed by its spec."""

    samples: int
    rows: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedState:
    """A committed state. ``state`` is canonical JSON; ``counters`` are keyed by spec."""

    sample_index: int
    total_tokens: int
    digest: str
    state: str
    counters: Mapping[str, Counters]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Which server serves a run, and until when by the ledger's own clock (Unix time, seconds)."""

    holder: str
    acquired_at: float
    lapses_at: float
    #: For how long it was granted, seconds.
    lasts_s: float
    #: When every rank of the present generation was last heard, as its server reported; 0 where none of them trains
    #: (each said goodbye, or was silent for longer than the liveness), None where one was not heard yet.
    heard_at: float | None

    def left_s(self, now: float) -> float:
        """How long it still lasts, seconds; 0 where the clock has gone back so far that it would last longer than
        granted: that is no reason to wait for hours."""
        left = self.lapses_at - now
        return left if 0 < left <= self.lasts_s + CLOCK_SLACK_S else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A run as the ledger holds it. ``record`` is canonical JSON that never changes."""

    name: str
    stream: str
    uid: str
    record: str
    epoch: int
    #: None before the first generation.
    opening: Opening | None
    committed: CommittedState | None
    #: Unix time of the last commit; None before the first.
    committed_at: float | None
    #: Canonical JSON of the pinned resume point; None where nothing is pinned.
    pin: str | None
    #: None before the first server.
    lease: Lease | None
    #: How many times a revision was made, or some were dropped: it only grows.
    revision_changes: int = 0
    #: The newest generation that was closed, by a revision or as a backup was restored; 0 where none was. Nothing more
    #: is served or committed in it and in those before.
    closed_generation: int = 0
    #: The ledger that the run is in instead of this one, as ``Ledger.description``; empty where it is in this one.
    elsewhere: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """A past committed state, from which later samples can be computed again."""

    generation: int
    sample_index: int
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRevision:
    """A change of the run from a sample index on. Revisions count from 1, and never go back in the order; skips, which
    openings make where they begin, may."""

    number: int
    sample_index: int
    #: Unix time in seconds, for people; so are the author and the reason.
    made_at: float
    author: str
    reason: str
    #: Canonical JSON of what changes; the ledger does not look into it.
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSnapshot:
    """A snapshot that was saved on request. ``text`` is the sealed JSON."""

    id: str
    sample_index: int
    saved_at: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContents:
    """All that a ledger holds of a run at one moment: what a backup keeps, and what goes to another ledger."""

    run: StoredRun
    #: Oldest first, as the other lists.
    openings: Sequence[Opening]
    #: rank → nonce of the client process, in the present generation.
    slots: Mapping[int, str]
    journal: Sequence[JournalEntry]
    revisions: Sequence[StoredRevision]
    snapshots: Sequence[StoredSnapshot]
