"""What the routes of tools answer: receipts and the report of a run's data, and the documents of samples."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from tokenloom_server.config.base import Document
from tokenloom_server.reports.stats import RevisionInfo, RunDocument


class Range(Document):
    """Sample indices from ``first`` up to, and without, ``end``."""

    first: int
    end: int


class Tokenizer(Document):
    """What made ids of text. ``engine`` is ``none`` where every source holds ids."""

    engine: str
    version: str
    digest: str
    """SHA-256 of the tokeniser's files; empty where there is none."""


class RevisionMark(Document):
    """A change of the mixture, for comparing."""

    sample_index: int
    """Of the first sample under it."""
    digest: str
    """SHA-256 of what it changes."""


class Receipt(RunDocument):
    """Which data a run had up to a sample index. Two of equal digest at one index are of the same samples."""

    run_uid: str
    sample_index: int
    digest: str
    """Rolling digest of all samples before ``sample_index``."""
    total_tokens: int
    """Tokens of all samples before ``sample_index``."""
    samples: dict[str, int]
    """Samples of each source before ``sample_index``, by spec; skipped ones, too."""
    revisions: list[RevisionMark]
    """The changes of the mixture before ``sample_index``, oldest first."""
    oldest_index: int
    """The first sample index that this run's ledger can give a receipt at."""
    committed_index: int
    """The last one."""
    seed: int
    order_version: int
    sequence_length: int
    """In the mixture file; phases may have others."""
    config_digest: str
    """Of the mixture file that the run began with; so is the manifest's."""
    manifest_digest: str
    tokenizer: Tokenizer


class SourceReport(Document):
    """One source. Counters are committed ones."""

    id: int
    spec: str
    alias: str
    files: int
    bytes: int
    """Size of the files."""
    files_digest: str
    """SHA-256 of the source's part of the manifest: paths, sizes and fingerprints, in reading order."""
    commits: list[str]
    """Of a dataset on the Hub: ``ORG/NAME@COMMIT``, and further commits whose new files were appended."""
    samples: int
    rows: int
    """Rows taken to their end, each as often as it was."""
    tokens: int
    skipped_tokens: int
    """What was passed over, and no trainer got; not part of the others."""
    excluded_rows: int
    """Rows of each epoch that revisions take out."""
    share: float
    """Of the run's tokens, as its balances count them (0 to 1)."""
    expected_share: float
    """What the weights asked for, each while it was in force (0 to 1)."""
    target_share: float
    """What those in force at the sample index ask for (0 to 1)."""
    epochs: float
    """Passes over the source so far, with the fraction of the present one."""
    unique_tokens: int
    """Tokens of rows that were read at least once: those consumed, and of several epochs one."""
    unique_is_exact: bool
    """Whether that is counted. Estimated, from the rows of an epoch, while a second or later epoch is under way."""
    dropped_tokens: int
    """The tail that filled no sample; known once exhausted."""
    exhausted: bool


class BatchSizeFrom(Document):
    """A batch size that a schedule brings."""

    sample_index: int
    """Of the first sample that comes in micro-steps of this size."""
    batch_size: int
    """Samples per rank and micro-step."""


class GenerationReport(Document):
    """One launch of the trainers."""

    generation: int
    parent: int
    """The generation that it went on from; 0 for the beginning."""
    attempt: str
    world_size: int
    batch_size: int
    """Samples per rank and micro-step, where it began."""
    batch_sizes: list[BatchSizeFrom]
    """What it becomes after that; empty where it stays."""
    accumulate: int
    """Micro-steps of an optimiser step."""
    opened_at: float
    """Unix time, seconds."""
    start_index: int
    kept: Range | None
    """Its part of the run's samples; null where a later launch began at or before its start, and replaced it all."""


class ExclusionReport(Document):
    """A file of rows that are left out."""

    path: str
    sha256: str
    rows: int


class RunReport(RunDocument):
    """What a model card needs to say about a run's data."""

    run_uid: str
    made_at: float
    """Unix time, seconds."""
    sample_index: int
    total_tokens: int
    """The run's clock there; without what was passed over."""
    consumed_tokens: int
    """What trainers got, and the sum over the sources."""
    unique_tokens: int
    """The sum over the sources."""
    unique_is_exact: bool
    digest: str
    """Rolling digest of all samples before ``sample_index``."""
    ended: str | None
    """Why the data ended; null while they have not."""
    seed: int
    order_version: int
    sequence_length: int
    packing: str
    labels: str
    vocab_size: int
    tokenizer: Tokenizer
    config_digest: str
    """SHA-256 of what decided about the order in the mixture file that the run began with."""
    manifest_digest: str
    """SHA-256 of the list of all files now, with sizes and fingerprints."""
    mixture: dict[str, Any]
    """The mixture in force, as a mixture file has it."""
    sources: list[SourceReport]
    generations: list[GenerationReport]
    parent_run: dict[str, Any] | None
    """About the run that this one was forked from; null where it was not."""
    revisions: list[RevisionInfo]
    """Those in force, oldest first."""
    exclusions: list[ExclusionReport]
    """Those in force."""
    software: dict[str, str]
    """Versions of the server's packages, by name."""


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
