"""What a trace says of a sample, or of a micro-step by rank: the documents that its tokens are of."""

from __future__ import annotations

from typing import Literal, TypeAlias

from tokenloom_server.config.base import Document

#: ``committed``: the run's present line has it, and the ledger counts it. ``produced``: made, and perhaps sent, but
#: not committed yet. ``rewound``: of a generation that a later one took back.
#: ``evaluated``: of a stream beside training.
Status: TypeAlias = Literal["committed", "produced", "rewound", "evaluated"]


class TracedPart(Document):
    """Consecutive tokens of a document that all count for the loss, or all do not."""

    tokens: int
    counts: bool
    text: str | None
    """Their text; null where the run has no tokeniser."""


class TracedDocument(Document):
    """Consecutive tokens of one row."""

    position: int
    """Where they stand in the sample, in tokens from its first."""
    shard: str
    """The file, as the run's manifest names it."""
    shard_index: int
    """Its position in the source's files."""
    row: int
    """The row within the file, from 0: of parquet and Arrow the row, of jsonl and txt the line."""
    epoch: int
    """Which pass over the source, from 0."""
    begin: int
    """The first of them, counted in the row's tokens, its begin- and end-of-text ids included."""
    end: int
    """After the last of them."""
    row_tokens: int
    """How many tokens the whole row has."""
    fim: Literal["psm", "spm"] | None = None
    """Where the row was rearranged to fill in its middle: in which order. ``begin`` and ``end`` count its tokens as
    they are then, the three marks included."""
    text: str | None = None
    """Their text; null where it was not asked for, or the run has no tokeniser. A character that the sample cuts in two
    is U+FFFD."""
    parts: list[TracedPart] | None = None
    """Where text was asked for and not all of them count for the loss: the document by parts. A loss mask leaves tokens
    out, and ``mask_boundaries`` the first of a document. (The first of a sample is no label either; of that
    nothing is said here.)"""


class TracedSample(Document):
    """One sample. Its documents' tokens, one after the other, are its ids."""

    sample: int
    """The sample index."""
    generation: int
    """The generation in whose part of the run's line it lies; 0 where that was in another ledger, or it was evaluated
    on."""
    status: Status
    micro_step: int | None
    """The generation's micro-step, from 0; null where the generation is not known."""
    rank: int | None
    """The rank that got it."""
    place: int | None
    """Its place in the rank's batch."""
    source_id: int
    source: str
    """The source's alias."""
    spec: str
    source_sample: int
    """The how manieth sample of its source, from 0."""
    tokens: int
    """Tokens that it counts. With shifted labels one id more travels: the last one is a label only."""
    hash: str
    """XXH3-128 of its ids as they travel, seeded with the source's id: what the rolling digest takes in."""
    digest: str
    """The rolling digest after it."""
    documents: list[TracedDocument]
    ids: list[int] | None = None
    """Its ids as they travel; null where text was not asked for."""


class TracedRank(Document):
    """What one rank got in a micro-step."""

    rank: int
    samples: list[TracedSample]
    padding: int
    """Padding samples after them, where the data ended within the micro-step."""


class TracedMicroStep(Document):
    """One micro-step of a generation: all ranks of it, or the one that was asked for."""

    generation: int
    micro_step: int
    """From 0."""
    begin: int
    """Its first sample."""
    end: int
    """After its last sample."""
    world_size: int
    batch_size: int
    rotation: int
    """Rank r has slice (r + rotation) mod world_size of the micro-step."""
    ranks: list[TracedRank]
