"""A run's receipts and its report, from its ledger, its figures, and by going forward to a sample index."""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Sequence
from typing import Any, NamedTuple

from tokenloom_proto.seal import canonical
from tokenloom_server.api.served_run import ServedRun
from tokenloom_server.core.state import SourceState, State, digest_hex
from tokenloom_server.errors import BeyondHorizon
from tokenloom_server.ledger.records import Opening
from tokenloom_server.order.mixture_content import as_file
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.reports.stats import SourceStats
from tokenloom_server.run.past import with_samples
from tokenloom_server.run.revise import revision_info
from tokenloom_server.run.sizing import batch_plans_of
from tokenloom_server.run.views import RunView
from tokenloom_server.sources.manifest import commits_of
from tokenloom_server.tokenizer.engine import installed_version

from tokenloom_tools.reports.documents import (
    BatchSizeFrom,
    ExclusionReport,
    GenerationReport,
    Range,
    Receipt,
    RevisionMark,
    RunReport,
    SourceReport,
)

#: What the samples were made by.
PACKAGES = ("tokenloom", "gigatoken", "tokenizers", "pyarrow", "numpy", "xxhash")


class Unique(NamedTuple):
    """Tokens that were read at least once, and whether they are counted."""

    tokens: int
    exact: bool


class Receipts:
    """What one run has to show for its data. Thread-safe."""

    def __init__(self, run: ServedRun) -> None:
        self._past = run.past
        self._stats = run.stats

    def receipt(self, sample_index: int | None) -> Receipt:
        """At a sample index, None for the committed one. Raises ``BeyondHorizon`` for what is not committed, or lies
        before what this run's ledger has, and what going forward raises."""
        coordinator = self._past.coordinator
        view = coordinator.view()
        timeline, committed = view.timeline, view.commit
        kept = with_samples(self._past.openings())
        oldest = kept[0].start_index if kept else 0
        index = committed.sample_index if sample_index is None else sample_index
        if not oldest <= index <= committed.sample_index:
            raise BeyondHorizon(
                f"sample {index} is outside of what run {coordinator.name!r} can prove: its ledger has samples "
                f"{oldest} to {committed.sample_index} (committed)"
            )
        state = self._state_at(view, index)
        specs = timeline.at(index).record.specs
        return Receipt(
            **self._identity(state),
            samples={
                spec: source.samples for spec, source in zip(specs, state.sources, strict=True)
            },
            revisions=[
                RevisionMark(
                    sample_index=revision.sample_index,
                    digest=hashlib.sha256(revision.content.encode()).hexdigest(),
                )
                for revision in timeline.revisions
                if revision.sample_index < index
            ],
            oldest_index=oldest,
            committed_index=committed.sample_index,
            sequence_length=coordinator.order.config.sequence_length,
            manifest_digest=coordinator.order.record.manifest.digest,
        )

    def report(self) -> RunReport:
        """Of all that is committed. Raises the ledger's errors, and what going forward raises."""
        coordinator = self._past.coordinator
        openings = self._past.openings()
        view = coordinator.view()
        timeline, committed, end = view.timeline, view.commit, view.generation.end
        # The end is known as soon as it is produced; here it counts once it is reached.
        ended = end.reason if end is not None and view.generation.over else None
        index = committed.sample_index
        state = self._state_at(view, index)
        record = timeline.at(index).record
        config = record.config
        stats = self._stats.sources(committed, state)
        sources = [
            _source(timeline, index, each, source)
            for each, source in zip(stats, state.sources, strict=True)
        ]
        kept = with_samples(openings)
        versions = {
            name: number for name in PACKAGES if (number := installed_version(name)) != "none"
        }
        return RunReport.of(
            config,
            **self._identity(state),
            made_at=coordinator.wall_clock(),
            consumed_tokens=sum(source.tokens for source in sources),
            unique_tokens=sum(source.unique_tokens for source in sources),
            unique_is_exact=all(source.unique_is_exact for source in sources),
            ended=ended,
            vocab_size=record.vocab_size,
            manifest_digest=record.manifest.digest,
            mixture=as_file(config),
            sources=sources,
            generations=_generations(openings, kept, index),
            parent_run=timeline.origin.described() if timeline.origin is not None else None,
            revisions=[
                revision_info(timeline, revision, index)
                for revision in timeline.revisions
                if revision.sample_index < index
            ],
            exclusions=[ExclusionReport(**file._asdict()) for file in record.excluded.files],
            software={"python": platform.python_version(), **versions},
        )

    def _state_at(self, view: RunView, index: int) -> State:
        """At hand for the committed index, unless the server was restarted, and has the boundary before it."""
        return view.state if view.state.sample_index == index else self._past.state_at(index)[1]

    def _identity(self, state: State) -> dict[str, Any]:
        """What a receipt and the report both say: which run it is of, and where in its order."""
        coordinator = self._past.coordinator
        template = coordinator.template(coordinator.uid)
        names = ("run", "stream", "run_uid", "seed", "order_version", "config_digest", "tokenizer")
        return {
            **{name: template[name] for name in names},
            "sample_index": state.sample_index,
            "digest": digest_hex(state.digest),
            "total_tokens": state.total_tokens,
        }


def _source(
    timeline: Timeline, index: int, figure: SourceStats, state: SourceState
) -> SourceReport:
    record = timeline.at(index).record
    shards = record.shards[figure.id]
    unique = unique_tokens(figure, state, steady=_is_steady(timeline, index, figure.id))
    listed = [[shard.path, shard.size, shard.fingerprint] for shard in shards]
    return SourceReport.of(
        figure,
        files=len(shards),
        bytes=sum(shard.size for shard in shards),
        files_digest=hashlib.sha256(canonical(listed).encode()).hexdigest(),
        commits=list(commits_of(shards)),
        skipped_tokens=state.tokens - figure.tokens,
        excluded_rows=record.excluded.count(figure.spec),
        share=figure.actual_share,
        epochs=figure.epoch,
        unique_tokens=unique.tokens,
        unique_is_exact=unique.exact,
    )


def _is_steady(timeline: Timeline, index: int, source: int) -> bool:
    """Whether a source ends by its epochs alone, and had the same rows and epochs since it is there."""
    records = [segment.factory.record for segment in timeline.segments if segment.begin <= index]
    states = [
        (
            record.shards[source],
            record.config.epochs[source],
            record.excluded.count(record.specs[source]),
        )
        for record in records
        if source < len(record.specs)
    ]
    return (
        all(each == states[0] for each in states)
        and timeline.at(index).config.sources[source].max_tokens is None
    )


def unique_tokens(figure: SourceStats, state: SourceState, *, steady: bool = True) -> Unique:
    """Of a source's consumed tokens, those of rows that were read at least once.

    A source's tokens are one stream, epoch after epoch, of which samples take all but the last tail. So an epoch has
    tokens / epochs of it once all of them, whole ones, were read; and before that, if more than one was begun, what
    the rows say: an estimate. ``steady``: all epochs have the same rows.
    """
    padding = state.row_counts.padding_tokens
    taken, skipped = state.tokens + state.dropped_tokens - padding, state.tokens - figure.tokens
    consumed = max(0, figure.tokens - padding)
    ended = state.epoch
    if not ended:
        # How much of the padding was skipped, nobody has counted.
        return Unique(consumed, not (skipped and padding))
    if steady and figure.exhausted and figure.epochs is not None and figure.epochs.is_integer():
        # Of what was skipped, nobody has counted which rows another epoch had.
        return Unique(min(consumed, taken // int(figure.epochs)), not skipped)
    estimate = round(taken / max(figure.epoch, 1.0))
    if steady:
        estimate = min(max(estimate, math.ceil(taken / (ended + 1))), taken // ended)
    return Unique(min(estimate, consumed), False)


def _generations(
    openings: Sequence[Opening], kept: Sequence[Opening], end: int
) -> list[GenerationReport]:
    ends = [*(after.start_index for after in kept[1:]), end]
    ranges = {
        opening.generation: Range(first=opening.start_index, end=range_end)
        for opening, range_end in zip(kept, ends, strict=False)
    }
    schedules = {opening.generation: batch_plans_of(opening) for opening in openings}
    return [
        GenerationReport.of(
            opening,
            batch_sizes=[
                BatchSizeFrom(sample_index=plan.start_index, batch_size=plan.batch_size)
                for plan in schedules[opening.generation].plans[1:]
            ],
            accumulate=schedules[opening.generation].accumulate,
            kept=ranges.get(opening.generation),
        )
        for opening in openings
    ]
