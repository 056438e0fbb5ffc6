"""A run's future: one document for REST, the command line and the picture."""

from __future__ import annotations

from typing import Literal

from tokenloom_server.config.base import Document


class PlannedSource(Document):
    """What becomes of one source. Counts are since the run began, with what a restore skipped."""

    id: int
    spec: str
    alias: str
    """The short name; the spec where the mixture file gives none."""
    rows: int | None
    """Of one epoch: exact for Parquet and Arrow files and little text, else estimated. Null for a source that was
    dropped: it is not looked at."""
    tokens_per_row: float | None
    """As samples count them: with begin- and end-of-text ids and padding, without what is cut off; rows that are left
    out count as empty. From a sample of rows, unless the source is small."""
    tokens_per_epoch: int | None
    epochs: float | None
    """Passes that are allowed, by the source and the nodes above it; null for no limit."""
    epochs_read: float | None
    """Passes that it gets."""
    tokens: int
    """Tokens that it gives."""
    share: float
    """Its part of the run's tokens (0 to 1), as the plan's ``count`` says."""
    exhausted: bool
    """Whether it has no more to give where the plan ends."""
    exhausted_at_tokens: int | None
    """The run's total tokens when that comes; null where the plan ends before, or it was so when it began."""
    exhausted_at_sample: int | None


class PlannedEnding(Document):
    """A source or a node has no more to give."""

    tokens: int
    """The run's total tokens then."""
    sample_index: int
    name: str
    """The source or node: its alias, else its spec or its place in the mixture file."""
    why: str


class PlannedSegment(Document):
    """A segment of the run with its shares."""

    from_tokens: int
    until_tokens: int
    shares: list[float]
    """Each source's mean share of the segment's tokens, by source id, as the plan's ``count`` says."""


class RunPlan(Document):
    """What a run will be, from a state on, if nothing is changed.

    Up to two million samples are mixed as the run mixes them; in longer plans drawn policies are planned at their mean.
    Totals are the run's, counted since it began.
    """

    run: str
    sequence_length: int
    count: Literal["real", "positions"]
    """What shares count: real tokens, those of documents, where samples are padded and the run balances these; else
    positions, ``sequence_length`` for each sample, as ``tokens`` everywhere."""
    labels: str
    """Whether labels equal the input ids (`same`), or are the next ids already (`shifted`)."""
    last_micro_step: str
    """Whether samples that fill no last micro-step are dropped (`drop`), or that is padded (`pad`)."""
    from_sample_index: int
    from_tokens: int
    until_sample_index: int
    until_tokens: int
    ends: bool
    """Whether the data end there; else the plan only goes no further."""
    reason: str
    """Why the data, or the plan, end there."""
    sources: list[PlannedSource]
    endings: list[PlannedEnding]
    """In time."""
    segments: list[PlannedSegment]
    """In time, without gaps. Where shares change all the time, in as many segments as show it."""
