"""What was recorded of a run over time: curves and events."""

from __future__ import annotations

from typing import Literal

from tokenloom_server.config.base import Document
from tokenloom_server.reports.stats import RunDocument, SourceName

#: What happened, in a word.
EventKind = Literal[
    "launch",
    "rewind",
    "skip",
    "fork",
    "pin",
    "revision",
    "failover",
    "bad_rows",
    "exhausted",
    "rank",
    "straggler",
    "error",
    "end",
    "ledger",
    "audit",
]


class SourceHistory(SourceName):
    """A source's curves: a value for each point of the run's; null before the source was part of the run."""

    tokens: list[int | None]
    """Committed since the run began."""
    target_share: list[float | None]
    """Share of the next tokens that the weights in force asked for (0 to 1)."""
    expected_share: list[float | None]
    """Share of the tokens so far that the weights asked for, each while it was in force (0 to 1)."""
    actual_share: list[float | None]
    """Share of the tokens so far (0 to 1)."""
    window_share: list[float | None]
    """Share of the tokens since the point before (0 to 1); null where there were none, or a launch went back."""
    loss: list[float | None]
    """Mean loss of the source as trainers reported it; null where none was reported."""
    epoch: list[float | None]
    """Passes over the source."""


class RunHistory(RunDocument):
    """Points of a run over time, oldest first: each list has a value for each of them."""

    every_s: float
    """So many seconds lie between points, but for the first ones of a run; older ones are thinned out."""
    time: list[float]
    """Unix time, seconds."""
    generation: list[int]
    sample_index: list[int]
    """Committed."""
    total_tokens: list[int]
    """Committed."""
    rewound: list[bool]
    """Whether a later launch began before this sample index, so that its samples were taken back."""
    world_size: list[int]
    tokens_per_s: list[float]
    data_wait_share: list[float | None]
    window_fill: list[float]
    loss: list[float | None]
    """Over all sources, as trainers reported it, smoothed as those of the sources."""
    learning_rate: list[float | None]
    step: list[int | None]
    """The trainer's own count."""
    sources: list[SourceHistory]


class RunEvent(Document):
    """Something that happened to a run."""

    id: int
    time: float
    """Unix time, seconds."""
    kind: EventKind
    sample_index: int
    """Where the run stood, or where it holds from."""
    total_tokens: int
    generation: int
    author: str
    """Who did it, where that is known."""
    text: str
    """One sentence."""
    rewound: bool
    """Whether a later launch began before ``sample_index``."""


class RunEvents(RunDocument):
    """What happened to a run, oldest first."""

    dropped: int
    """How many older events are kept no more."""
    events: list[RunEvent]
