"""A run's stats: one document for REST, gRPC, metrics, the command line and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from tokenloom_server.config.base import Document
from tokenloom_server.core.measures import RankState, WaitReason
from tokenloom_server.order.readers_stats import ReadersStats


class RunDocument(Document):
    """What is said of a stream of a run."""

    run: str
    stream: str


class RevisionInfo(Document):
    """A change of the mixture from a sample index on."""

    number: int
    """Counts from 1."""
    sample_index: int
    """Of the first sample under it."""
    total_tokens: int
    """What the run has had before that sample."""
    made_at: float
    """Unix time, seconds."""
    author: str
    reason: str
    changes: list[str]
    """What it changes, a line each."""
    in_force: bool
    """Whether samples under it are committed, or next."""
    eta_s: float | None = None
    """In an answer to who makes it: when it is in force at the present rate, seconds from now; null elsewhere, and
    where nothing was committed lately."""


#: Where every rank waits for data at least this part of its time, the data sets the pace: as in TokenloomStarved.
SLOW_DATA_SHARE = 0.05
#: Ranks that a sentence names, at most.
_NAMED = 8


class SourceName(Document):
    """Which source it is."""

    id: int
    """What ``source_ids`` in a batch holds."""
    spec: str
    alias: str
    """The short name; the spec where the mixture file gives none."""


class SourceStats(SourceName):
    """One source. Counters are committed ones."""

    group: str = ""
    """The group that it is shown in where there are many: a node of the mixture, or what the names of several sources
    begin with; else its own alias."""
    target_share: float
    """Share of the next tokens that the weights in force ask for (0 to 1); 0 once the source gives nothing more. Where
    the data have ended, that of the last ones. Which tokens shares are of, the run's ``count`` says."""
    expected_share: float
    """Share of the run's tokens so far that the weights asked for, each while it was in force (0 to 1); 0 before the
    first."""
    actual_share: float
    """Share of the run's tokens so far (0 to 1); 0 before the first."""
    window_share: float | None
    """Share of the tokens that were committed in the last 30 s (0 to 1), the run's ``window_samples``; null where none
    were."""
    samples: int
    rows: int
    """Rows taken to their end."""
    tokens: int
    epoch: float
    """Passes over the source, with the fraction of the present one by shards and rows known so far."""
    epochs: float | None
    """Passes that are allowed; null for no limit."""
    exhausted: bool
    dropped_tokens: int
    """The tail that filled no sample; known once exhausted."""
    excluded_rows: int
    """Rows of an epoch that the revision in force leaves out."""
    bad_rows: int
    """Of ``rows``, those that did not decode (``on_bad_row: skip``); like the next four since the run began."""
    filtered_rows: int
    """Of ``rows``, those that did not pass the source's filter, and blank lines of JSON lines."""
    padding_tokens: int
    """Of ``tokens``, those that no document fills."""
    cut_documents: int
    """Documents that do not lie in one sample as a whole, though the packing would have had them so."""
    lost_tokens: int
    """Tokens of documents that were cut off; with ``batching``, rows that filled no batch of an epoch that ended."""
    label_share: float | None = None
    """Of the labels in the source's first samples, the part that counts for the loss (0 to 1); null where it has no
    loss mask."""
    fill_rate: float
    """Of the source's tokens, the part that documents fill (0 to 1)."""
    cut_rate: float | None
    """``cut_documents`` for each row that was taken to its end (0 to 1); null with ``packing: concat``, which does not
    count them."""
    skipped_samples: int
    """What was passed over (``restore --skip-samples``) is counted apart: the counters above are without it."""
    skipped_rows: int
    skipped_tokens: int
    loss: float | None
    """Mean loss over the source's tokens as trainers report it, smoothed over the last reports; null where none came
    since this server took the run up."""
    last_loss: float | None
    """That of the last report which had tokens of the source."""
    remaining_samples: int | None
    """Estimate from the rows left and the tokens per row so far; null where not known (no limit, or no rows yet)."""


class RankStats(Document):
    """One slot of the present generation."""

    rank: int
    connected: bool
    state: RankState
    """``finished``: it said goodbye; ``away``: it never came, its connection broke, or another server knew it."""
    position: int
    """Sample index up to which the rank has consumed."""
    lag: int
    """Samples that the fastest rank is ahead."""
    last_heard_s: float | None
    """Seconds since the rank's last message; null if it was never heard."""
    waited_s: float
    """Seconds that the rank's ``next()`` has waited for data since it joined, as the rank reports."""
    release: str
    """Of the rank's client, as its Join said; empty where it did not, or joined the server before this one."""


class LedgerStats(Document):
    backend: str
    """Without secrets."""
    available: bool
    error: str | None
    last_commit_index: int
    last_commit_age_s: float | None


class ReportStats(Document):
    """What a trainer reported last."""

    sample_index: int
    """Where it stood."""
    total_tokens: int
    step: int
    """Its own count."""
    loss: float | None
    """Over all sources; null where it was not reported."""
    smoothed_loss: float | None
    """The same over the last reports, as the sources' losses are smoothed."""
    learning_rate: float | None
    age_s: float
    """Seconds since it came."""


class PlannedRevision(Document):
    """A revision that production has yet to reach, or samples of which are not committed yet."""

    number: int
    sample_index: int
    """Of the first sample under it."""
    eta_s: float | None
    """Seconds until it is committed up to there, at the present rate; null where nothing moves."""


class NextLaunch(Document):
    """Where the next launch starts."""

    sample_index: int
    """Of its first sample; and where a trainer that brings a state of its own has to stand."""
    digest: str
    """The rolling digest there."""
    skips: dict[int, int] | None
    """How many samples of the order the run passes over from then on, by sample index; null where that stays."""


def skips_text(skips: Mapping[int, int]) -> str:
    """What a run passes over, for people."""
    return (
        ", ".join(f"{samples:,} samples at sample {index:,}" for index, samples in skips.items())
        or "nothing"
    )


def ranks_text(ranks: Sequence[int], verb: str, plural: str) -> str:
    """Some ranks and a verb, for people."""
    named = ", ".join(map(str, ranks[:_NAMED]))
    more = f" and {len(ranks) - _NAMED:,} more" if len(ranks) > _NAMED else ""
    return f"ranks {named}{more} {plural}" if len(ranks) > 1 else f"rank {named} {verb}"


class Straggler(Document):
    """Ranks that hold the others up."""

    ranks: list[int]
    waited_share: float
    """The part of the time that the others waited for data (0 to 1), in the median."""
    seconds: float
    """How long that time is: the last ten minutes at most."""

    @property
    def text(self) -> str:
        return (
            f"{ranks_text(self.ranks, 'holds', 'hold')} the others up: they waited {self.waited_share:.0%} of the last "
            f"{self.seconds / 60:.0f} minutes"
        )


class RunState(RunDocument):
    """How a run is: what all that is said of it begins with."""

    generation: int
    """0 before the first trainer."""
    world_size: int
    sample_index: int
    """Committed."""
    total_tokens: int
    """Committed: the run's clock."""
    tokens_per_s: float
    """Committed tokens per second over the last seconds; 0 once the data have ended."""
    waiting_for: str
    """What production waits for; empty while it works."""
    waiting_reason: WaitReason | None
    """Which kind of that: ``ranks`` is health, samples are ready and training sets the pace; with ``rows`` these are
    being read and tokenised, and a rank has nothing left. Null while it waits for nothing."""
    data_wait_share: float | None
    """The part of the last half a minute that the rank which waited least for data did (0 to 1): near 0 training sets
    the pace, near 1 the data does. Null where no rank has reported it."""
    straggler: Straggler | None
    """The ranks that the others wait for; null where none holds others up, or that is not known yet."""
    opening: bool
    """Whether a launch is being opened, which may take as long as going forward to where it begins."""
    going_forward: str
    """How far the server is on the way to a far sample that a launch, a peek or a restore begins at, and when it will
    be there; empty where it is on no such way."""
    ended: str | None
    """Why the data ended, once all of it is committed; null before."""
    error: str | None
    """What stopped the run; null while it is well."""
    warning: str
    """What is to be looked at while the run goes on, such as files that were written since it began; or nothing."""
    ledger: LedgerStats


class RunStats(RunState):
    """One run. ``readers``: null without ``serve --readers``."""

    streams: list[str]
    """Those that may be evaluated on beside it."""
    run_uid: str
    seed: int
    leads: bool
    """Whether this server has the lease on the run; one that stands by shows no ranks and no progress."""
    server_epoch: int
    """The newest number of this server among those that led the run; 0 before it led."""
    batch_size: int
    sequence_length: int
    vocab_size: int
    """How many ids there are; 0 with `batching`."""
    pad_id: int
    """What padding is made of, where samples are padded."""
    end_of_text_id: int | None
    """Ends a document; null where the tokeniser has none."""
    count: Literal["real", "positions"]
    """What the shares of sources count: real tokens, those of documents, where samples are padded and the run balances
    these; else positions, ``sequence_length`` for each sample."""
    produced_index: int
    digest: str
    """Rolling digest at ``sample_index``."""
    real_tokens: int
    """Of these, documents': without padding."""
    skipped_tokens: int
    """Of samples that were passed over; the clock is without them."""
    window_samples: int
    """Samples that were committed in the last 30 s: their shares are coarse, as they change by whole samples."""
    window_fill: float
    """Produced and not yet committed, as a fraction of the window (0 to 1)."""
    exhausted: bool
    """Whether every source is that was not dropped, and the last of their samples is committed."""
    tokenizer: str
    """Engine and version."""
    revision: int
    """The number of the revision in force; 0 for the mixture that the run began with."""
    next_revision: PlannedRevision | None
    """The next one, which samples to come will be under; null where none was made."""
    skips: dict[int, int]
    """How many samples of the order the run passes over, by sample index."""
    pin: NextLaunch | None
    """What a restore pinned for the next launch; null where that begins as it asks to."""
    reported: ReportStats | None
    """What a trainer reported last of its losses; null where nothing came since this server took the run up."""
    sources: list[SourceStats]
    readers: ReadersStats | None
    ranks: list[RankStats]


class Deviation(Document):
    """How far a source is from its plan."""

    alias: str
    share: float
    """Its share of the tokens so far, less the one that the weights asked for (-1 to 1)."""


class NewestEvent(Document):
    """What happened last to a run."""

    kind: str
    time: float
    """Unix time, seconds."""
    text: str
    """One sentence."""


class RunSummary(RunState):
    """What a list of runs says of one."""

    ranks_connected: int
    ranks_away: int
    seconds_left: float | None
    """Until the data end at the present rate, by the rows that are left; null where nothing moves, where a source has
    no limit, or where that is not known."""
    deviation: Deviation | None
    """Of the source that is furthest from its plan; null where none is by more than one sample."""
    rates: list[float]
    """Tokens per second at the newest points of its history, oldest first; empty where this server does not lead."""
    last_event: NewestEvent | None
    """Null where this server does not lead, or nothing has happened yet."""

    @classmethod
    def of_stats(
        cls, stats: RunStats, rates: Sequence[float] = (), last_event: NewestEvent | None = None
    ) -> RunSummary:
        left = [source.remaining_samples for source in stats.sources if source.target_share > 0]
        seconds_left = None
        if None not in left and stats.tokens_per_s > 0:
            seconds_left = (
                sum(count or 0 for count in left) * stats.sequence_length / stats.tokens_per_s
            )
        states = [rank.state for rank in stats.ranks]
        off = max(
            (
                Deviation(alias=source.alias, share=source.actual_share - source.expected_share)
                for source in stats.sources
            ),
            key=lambda deviation: abs(deviation.share),
        )
        return cls.of(
            stats,
            ranks_connected=states.count("connected"),
            ranks_away=states.count("away"),
            seconds_left=seconds_left,
            deviation=off if abs(off.share) * stats.sample_index > 1 else None,
            rates=[*rates],
            last_event=last_event,
        )


class SourceLosses(SourceName):
    """A source's part of a curve: a number for each point of it."""

    losses: list[float | None]
    """Mean over the tokens of a point; null where it has none of the source."""
    tokens: list[int]
    """That the mean is of."""


class RunLosses(RunDocument):
    """The losses that trainers reported, as a curve: each list has a number for each point."""

    since: float
    """When this server took the run up, Unix time: what was reported before that is not known any more."""
    stride: int
    """Reports in a point. It doubles where a curve has as many points as there is room for."""
    sample_index: list[int]
    """End of each point; ascending. A launch that goes on before the end of a curve takes the rest of it back."""
    total_tokens: list[int]
    step: list[int]
    """The trainer's own count."""
    loss: list[float | None]
    """Over all sources."""
    learning_rate: list[float | None]
    sources: list[SourceLosses]
    """Those of which anything was reported."""


class SnapshotInfo(Document):
    """A snapshot that was saved in the ledger."""

    id: str
    sample_index: int
    saved_at: float
    """Unix time, seconds."""


class PhaseInfo(Document):
    """A part of the run, as the mixture file plans it."""

    number: int
    """Counts from 0."""
    sample_index: int
    """Of its first sample."""
    total_tokens: int
    """What the run has had before that sample."""
    sequence_length: int


class MixtureInfo(Document):
    """The mixture of a run, and how it came about."""

    run: str
    sample_index: int
    """Committed."""
    sequence_length: int
    mixture: dict[str, Any]
    """The mixture in force at ``sample_index``, as a mixture file has it, without what was dropped."""
    paused: list[str]
    """Sources and nodes that give nothing until they are set to go on; a node without an alias by its place."""
    dropped: list[str]
    """Sources that left; their cursors and counters stay."""
    phases: list[PhaseInfo]
    revisions: list[RevisionInfo]
    """All that were made, oldest first; those to come, too."""
    first_revisable: int
    """The least sample index from which on a new revision can hold."""


class BrokenRun(Document):
    """A mixture that is not served, or not as its file has it now."""

    run: str = Field(examples=["wiki"])
    """The run's name, or that of its file where this says none."""
    served: bool
    """Whether it is served nevertheless, as it was before."""
    origin: str = Field(examples=["/srv/runs/wiki.yaml"])
    """Where its mixture stands."""
    error: str = Field(examples=["ConfigError"])
    """The error's stable name."""
    message: str
    """What was found, what was expected, and what to do."""


class RunList(Document):
    """The runs of a server."""

    runs: list[str] = Field(examples=[["wiki-and-code"]])
    """Names of those that are served, as in the mixture files."""
    broken: list[BrokenRun]
    """The mixtures that are not served, or not as they stand now."""
    version: str = Field(examples=["0.1.0"])
    """The server's version."""
    grpc_address: str | None = Field(examples=["127.0.0.1:50051"])
    """Where trainers connect; null where that is not known."""


class ChangedRun(Document):
    """A run that was added, reloaded or removed."""

    run: str = Field(examples=["wiki"])
    origin: str = Field(examples=["/srv/runs/wiki.yaml"])
    """Where its mixture stands."""
    note: str
    """What came of it, or becomes of it when the server starts again; for people."""
