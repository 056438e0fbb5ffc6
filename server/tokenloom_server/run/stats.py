"""A run's stats, made from what its coordinator and its sources say."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest

from tokenloom_server.config.run import RunConfig
from tokenloom_server.core.state import (
    EpochCursor,
    FileCursor,
    SourceState,
    State,
    WindowCursor,
    row_cursor,
)
from tokenloom_server.errors import TokenloomError
from tokenloom_server.ledger.records import CommittedState, Counters, StoredRevision
from tokenloom_server.mixing.mixer import ALL_EXHAUSTED, target_shares
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.notes import position_lines
from tokenloom_server.reports.stats import (
    LedgerStats,
    PlannedRevision,
    RankStats,
    RunStats,
    SourceStats,
)
from tokenloom_server.run.generation import EndOfData
from tokenloom_server.run.head import RecentCommit
from tokenloom_server.run.losses import Losses
from tokenloom_server.run.past import Past
from tokenloom_server.run.views import RunView
from tokenloom_server.sources.scheme import scheme_of

_log = logging.getLogger(__name__)

#: A shard larger than this is not indexed just to tell how far along it is, bytes.
_INDEX_FOR_STATS_BYTES = 2**30
#: Nor are the rows counted of a source with more files than these.
_FILES_FOR_STATS = 64

_NO_LOSSES: Mapping[int, tuple[float, float]] = {}


class StatsReader:
    """Reads one run's stats. Thread-safe."""

    def __init__(self, past: Past, losses: Losses) -> None:
        self._coordinator = past.coordinator
        self._past = past
        self._losses = losses
        # Row counts of shards that were asked for, by (source, shard); None where unknown.
        self._rows: dict[tuple[int, int], int | None] = {}
        self._rows_lock = threading.Lock()

    def read(self) -> RunStats:
        coordinator, view = self._coordinator, self._coordinator.view()
        generation, timeline, committed, state = (
            view.generation,
            view.timeline,
            view.commit,
            view.state,
        )
        # A skip may lie before revisions that were made earlier.
        revisions = sorted(
            timeline.revisions, key=lambda revision: (revision.sample_index, revision.number)
        )
        in_force = sum(revision.sample_index <= committed.sample_index for revision in revisions)
        (reported, losses), end = self._losses.newest(), generation.end if generation.over else None
        config, engine = (
            (order := timeline.at(state.sample_index)).config,
            order.record.serving_engine,
        )
        exhausted = end is not None and end.reason.startswith(ALL_EXHAUSTED)
        return RunStats(
            run=coordinator.name,
            stream=coordinator.stream,
            streams=list(coordinator.order.config.stream_names),
            run_uid=coordinator.uid,
            seed=config.seed,
            generation=generation.number,
            leads=view.leads,
            server_epoch=view.lease.epoch,
            world_size=generation.world_size,
            batch_size=generation.batch_size,
            **order.sample_form(),
            count="real" if config.balances_real else "positions",
            sample_index=committed.sample_index,
            produced_index=max(generation.produced_index, committed.sample_index),
            digest=committed.digest,
            total_tokens=committed.total_tokens,
            real_tokens=state.real_tokens,
            skipped_tokens=sum(source.skipped_tokens for source in state.sources),
            tokens_per_s=view.tokens_per_s if end is None else 0.0,
            window_samples=(committed.total_tokens - view.earlier_commit.total_tokens)
            // config.sequence_length,
            window_fill=min(1.0, generation.held_steps / generation.window_micro_steps),
            waiting_for=view.waiting.waiting_for,
            waiting_reason=view.waiting.reason,
            data_wait_share=generation.data_wait_share,
            straggler=generation.straggler if end is None else None,
            opening=view.opening,
            going_forward=self._past.way_forward,
            ended=end and end.reason,
            exhausted=exhausted,
            error=f"{view.error.name}: {view.error}" if view.error is not None else None,
            warning="; ".join(
                filter(None, (order.resources.io_stats.warning, *order.resources.changed))
            ),
            tokenizer=f"{engine.engine} {engine.version}"
            if engine is not None
            else "none: the sources hold ids",
            revision=revisions[in_force - 1].number if in_force else 0,
            next_revision=_planned(view, revisions[in_force:]),
            skips=timeline.skips,
            pin=view.pin.next_launch if view.pin is not None else None,
            reported=reported,
            sources=self.sources(committed, state, view.earlier_commit, end=end, losses=losses),
            readers=readers.stats(order.resources)
            if (readers := order.resources.readers) is not None
            else None,
            ranks=_ranks(view),
            ledger=self._ledger(view),
        )

    def log_positions(self) -> None:
        """A line for each source of a run that this server leads: where it stands, and its tokens."""
        view = self._coordinator.view()
        record = view.timeline.at(view.state.sample_index).record
        if view.leads and view.commit.sample_index:
            for line, source in zip(
                position_lines(record, view.state), view.state.sources, strict=True
            ):
                _log.info("%s: position: %s tokens=%d", self._coordinator.name, line, source.tokens)

    def sources(
        self,
        committed: CommittedState,
        state: State,
        earlier: RecentCommit | None = None,
        *,
        end: EndOfData | None = None,
        losses: Mapping[int, tuple[float, float]] = _NO_LOSSES,
    ) -> list[SourceStats]:
        """The sources' stats at a commit, of which ``state`` is the state. ``earlier``: where the window begins.
        ``end``: that of the data, where all of them are committed. ``losses``, by source id: smoothed and last."""
        order = self._coordinator.timeline.at(state.sample_index)
        specs, consumed = order.record.specs, order.config.consumed(state)
        expected = [
            tokens + own.owed_tokens for tokens, own in zip(consumed, state.sources, strict=True)
        ]
        in_window: Sequence[float | None] = [None] * len(specs)
        if earlier is not None and earlier.total_tokens < committed.total_tokens:
            in_window = _shares(consumed, earlier.consumed)
        in_force = target_shares(order.config, state, order.record.size_estimates)
        # A state knows a source as exhausted once a pick of it failed, and after the last sample there is none. Targets
        # stay those of the last samples.
        if end is not None and end.reason.startswith(ALL_EXHAUSTED):
            state = _all_exhausted(state, order.config)
        shares = [
            *zip(in_force, _shares(expected, ()), _shares(consumed, ()), in_window, strict=True)
        ]
        return [
            self._source(
                order,
                i,
                source,
                committed.counters[specs[i]],
                shares[i],
                end is not None,
                losses.get(i, (None, None)),
            )
            for i, source in enumerate(state.sources)
        ]

    def _source(
        self,
        order: PipelineFactory,
        source: int,
        state: SourceState,
        counters: Counters,
        shares: tuple[float, float, float, float | None],
        over: bool,
        losses: tuple[float | None, float | None],
    ) -> SourceStats:
        """``shares``: in force, as expected so far, so far, and in the window."""
        config, epochs = order.config.sources[source], order.config.epochs[source]
        rows, done = self._rows_of_epoch(order, source, state)
        if rows:
            # Right after a restart the state is that at the boundary before the counters.
            done += (counters.rows + state.skipped_rows - state.rows) / rows
        remaining = (
            0
            if over
            else self._remaining(order.config.sequence_length, epochs, state, counters, rows)
        )
        unlimited = math.isinf(epochs)
        return SourceStats(
            id=source,
            spec=order.record.specs[source],
            alias=config.name,
            group=order.config.groups[source],
            target_share=shares[0],
            expected_share=shares[1],
            actual_share=shares[2],
            window_share=shares[3],
            samples=counters.samples,
            rows=counters.rows,
            tokens=counters.tokens,
            # One that ended by its tokens stands where its cursor does.
            epoch=epochs
            if state.exhausted and not unlimited and config.max_tokens is None
            else state.epoch + done,
            epochs=None if unlimited else epochs,
            exhausted=state.exhausted,
            dropped_tokens=state.dropped_tokens,
            excluded_rows=order.record.excluded.count(order.record.specs[source]),
            **state.row_counts._asdict(),
            label_share=order.resources.label_shares.peek(config.source),
            fill_rate=1 - state.row_counts.padding_tokens / state.tokens if state.tokens else 1.0,
            cut_rate=None
            if order.config.packing == "concat" or not state.rows
            else min(1.0, state.row_counts.cut_documents / state.rows),
            skipped_samples=state.skipped_samples,
            skipped_rows=state.skipped_rows,
            skipped_tokens=state.skipped_tokens,
            loss=losses[0],
            last_loss=losses[1],
            remaining_samples=remaining,
        )

    def _ledger(self, view: RunView) -> LedgerStats:
        age_s = (
            None
            if view.committed_at is None
            else self._coordinator.lease_clock() - view.committed_at
        )
        return LedgerStats(
            backend=self._coordinator.ledger.description,
            available=view.ledger_error is None,
            error=view.ledger_error,
            last_commit_index=view.commit.sample_index,
            last_commit_age_s=None if age_s is None else max(0.0, round(age_s, 3)),
        )

    def _remaining(
        self,
        sequence_length: int,
        epochs: float,
        state: SourceState,
        counters: Counters,
        rows: float | None,
    ) -> int | None:
        if state.exhausted:
            return 0
        if rows is None or not counters.rows or math.isinf(epochs):
            return None
        per_row = counters.tokens / counters.rows
        left = epochs * rows - counters.rows - state.skipped_rows
        return max(0, round(left * per_row / sequence_length))

    def _rows_of_epoch(
        self, order: PipelineFactory, source: int, state: SourceState
    ) -> tuple[float | None, float]:
        """(rows of one epoch, estimated from the shard in use; fraction of the epoch that is done)."""
        cursor = row_cursor(state.cursor)
        if order.config.batching is not None:
            epochs = order.readers.bucket_epochs(source)
            batched, rows_done = (
                epochs.batches * epochs.size,
                cursor.rows if isinstance(cursor, EpochCursor) else 0,
            )
            return batched or None, min(1.0, rows_done / batched) if batched else 0.0
        config, sizes = order.config.sources[source], self._sizes(order, source)
        total, before, index, row = sum(sizes) or 1, 0, sizes.index(max(sizes)), 0
        if isinstance(cursor, FileCursor):
            before = sum(sizes[file] for file in order.readers.files_before(source, cursor))
            index, row = cursor.shard, cursor.row
        # No text is fetched for stats that is not being read.
        may_count = (
            isinstance(cursor, FileCursor)
            or not config.spec.is_remote
            or _stores_row_counts(order, source)
        )
        rows = self._row_count(order, source, index) if may_count else None
        epoch_rows = rows * total / (sizes[index] or 1) if rows else None
        if config.lanes > 1 or config.shuffle == "rows":
            known = order.readers.known_rows(source) or epoch_rows
            if config.lanes > 1:
                # They go on to the next epoch one by one, so it is counted in rows.
                return known, state.rows / known - state.epoch if known else 0.0
            done = (
                cursor.window * config.shuffle_window_rows + cursor.row
                if isinstance(cursor, WindowCursor)
                else 0
            )
            return known, min(1.0, done / known) if known else 0.0
        return epoch_rows, (before + (min(1.0, row / rows) * sizes[index] if rows else 0)) / total

    def _sizes(self, order: PipelineFactory, source: int) -> list[int]:
        """Of each file its rows, where these may be counted for stats; else its bytes."""
        sizes = [shard.size for shard in order.record.shards[source]]
        spec = order.config.sources[source].spec
        if spec.is_remote or len(sizes) > _FILES_FOR_STATS or sum(sizes) > _INDEX_FOR_STATS_BYTES:
            return sizes
        counts = [self._row_count(order, source, shard) for shard in range(len(sizes))]
        return sizes if None in counts else [count or 0 for count in counts]

    def _row_count(self, order: PipelineFactory, source: int, shard: int) -> int | None:
        with self._rows_lock:
            if (source, shard) not in self._rows:
                size, count = order.record.shards[source][shard].size, None
                if size <= _INDEX_FOR_STATS_BYTES or _stores_row_counts(order, source):
                    with suppress(TokenloomError):  # the producer meets the same fault and says it
                        count = order.readers.open(source).row_count(shard)
                self._rows[source, shard] = count
            return self._rows[source, shard]


def _stores_row_counts(order: PipelineFactory, source: int) -> bool:
    """Whether files say how many rows they have, so that counting reads nothing else of them."""
    return (
        scheme_of(order.config.sources[source].spec)
        .reader(order.record.shards[source])
        .stores_row_counts
    )


def _all_exhausted(state: State, config: RunConfig) -> State:
    """A state as its sources are once the data ended: each that was not dropped is exhausted."""
    # A source that a revision brings there has no state yet.
    pairs = zip(state.sources, config.sources, strict=False)
    out = (own if of.presence == "dropped" else replace(own, exhausted=True) for own, of in pairs)
    return replace(state, sources=tuple(out))


def _planned(view: RunView, revisions: Sequence[StoredRevision]) -> PlannedRevision | None:
    """The first of the revisions after those in force."""
    if not revisions:
        return None
    coming = revisions[0]
    eta_s = view.seconds_until(coming.sample_index)
    return PlannedRevision(number=coming.number, sample_index=coming.sample_index, eta_s=eta_s)


def _ranks(view: RunView) -> list[RankStats]:
    ranks = view.generation.ranks
    farthest = max((rank.position for rank in ranks), default=0)
    return [
        RankStats(
            rank=rank.rank,
            connected=rank.state == "connected",
            state=rank.state,
            position=rank.position,
            lag=farthest - rank.position,
            last_heard_s=None if rank.last_heard is None else round(view.now - rank.last_heard, 3),
            waited_s=round(rank.waited_s, 3),
            release=rank.release,
        )
        for rank in ranks
    ]


def _shares(now: Sequence[float], before: Sequence[float]) -> list[float]:
    """Each source's share of what was ``consumed`` between two commits; one may be new since the first."""
    tokens = [own - earlier for own, earlier in zip_longest(now, before, fillvalue=0)]
    total = sum(tokens)
    return [count / total if total > 0 else 0.0 for count in tokens]
