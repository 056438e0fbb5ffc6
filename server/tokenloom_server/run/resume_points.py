"""Where a launch may begin: the points of a run that a trainer's state, ``resume`` or a restore names, each proven by
going forward to it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tokenloom_proto.resume import counts_at

from tokenloom_server.core.state import (
    Cursor,
    EpochCursor,
    State,
    WindowCursor,
    digest_hex,
    row_cursor,
    tokens_in_row,
)
from tokenloom_server.errors import NotFound, SnapshotInvalid, SourceError, TokenizerError
from tokenloom_server.ledger.records import StoredRun
from tokenloom_server.order import foreign_checkpoint, foreign_payload, snapshot
from tokenloom_server.order.factory import PipelineFactory
from tokenloom_server.order.replay import Replay
from tokenloom_server.order.snapshot import ResumePoint
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.planning.forecast import Planner
from tokenloom_server.run.past import Past
from tokenloom_server.run.pins import PinnedPoint
from tokenloom_server.run.snapshots import Snapshots

#: What ``resume`` may be, beside a snapshot's id.
LATEST, FRESH = "latest", "fresh"
#: Beyond so many samples the sources are measured before, which takes seconds.
FAR_SAMPLES = 2**16
#: Of a large source only parts are read to measure it: the data may have so many times what is estimated.
MARGIN = 10


class ResumePoints:
    """The points of one run. Thread-safe."""

    def __init__(self, past: Past, snapshots: Snapshots) -> None:
        self.coordinator = past.coordinator
        self.past = past
        self.snapshots = snapshots
        # The last older checkpoint that was brought, as every rank brings it: its files are looked at once.
        self._imported: tuple[foreign_payload.Payload, Timeline, ResumePoint] | None = None

    @property
    def timeline(self) -> Timeline:
        """The run's, as it is now."""
        return self.coordinator.timeline

    def parse(self, text: str | bytes) -> ResumePoint:
        """Reads a snapshot of this run, or an older data loader's payload. Raises ``SnapshotInvalid``."""
        coordinator = self.coordinator
        payload = foreign_payload.read(text)
        if payload is not None:
            timeline, newest = coordinator.timeline, self._imported
            if newest is None or newest[:2] != (payload, timeline):
                newest = self._imported = (
                    payload,
                    timeline,
                    foreign_checkpoint.resume_point(payload, timeline),
                )
            return newest[2]
        return snapshot.parse(
            text, coordinator.template(), coordinator.timeline.shape_at, coordinator.order.config
        )

    def refuse_foreign(self, point: ResumePoint, stored: StoredRun) -> None:
        """Raises ``SnapshotInvalid`` for a state out of another ledger, unless this one never opened the run."""
        if point.run_uid is not None and point.run_uid != stored.uid and stored.opening is not None:
            raise SnapshotInvalid(
                f"the state is of run_uid {point.run_uid}, but run {stored.name!r} of this ledger is {stored.uid} "
                "and has progress of its own: use the ledger of that run, an empty one, or another run name"
            )

    def beginning(self) -> ResumePoint:
        """Where the run begins: sample 0, or where it was forked from another.

        Raises ``NotFound`` where only the ledger that a fork began with knows that."""
        timeline = self.timeline.with_clock(0)
        origin = timeline.origin
        if origin is not None and not origin.state:
            raise NotFound(
                f"run {self.coordinator.name!r} was forked from {origin.run!r} at sample {origin.sample_index}, and "
                "this ledger does not have the state there: load a checkpoint"
            )
        return ResumePoint.of(timeline.initial())

    def committed_point(self, stored: StoredRun) -> ResumePoint:
        """Where the ledger stands."""
        assert stored.committed is not None
        return ResumePoint(
            sample_index=stored.committed.sample_index,
            digest=stored.committed.digest,
            total_tokens=stored.committed.total_tokens,
            base=self.timeline.decode(stored.committed.state),
            run_uid=stored.uid,
            generation=stored.opening.generation if stored.opening else 0,
        )

    def asked_for(self, stored: StoredRun, state: bytes, resume: str) -> ResumePoint | None:
        """The point that a state, or ``resume``, says; None where neither is given.

        Raises ``SnapshotInvalid``, and ``NotFound`` for an unknown snapshot id.
        """
        if state:
            point = self.parse(state)
            self.refuse_foreign(point, stored)
            return point
        if resume == FRESH:
            return self.beginning()
        if resume == LATEST:
            return self.beginning() if stored.committed is None else self.committed_point(stored)
        return self.parse(self.snapshots.saved(resume)) if resume else None

    def pinned(self, pin: PinnedPoint | None, made_at: float = 0.0) -> Timeline:
        """The timeline of an opening at a Unix time that takes a pin: the run's, perhaps with a revision more."""
        if pin is None or pin.skips is None:
            return self.timeline
        return self.timeline.skipping(pin.skips, pin.sample_index, made_at)

    def forward(
        self, point: ResumePoint, timeline: Timeline | None = None, *, in_turn: bool = False
    ) -> State:
        """The state at a resume point, after what is passed over there. Raises ``SnapshotInvalid`` where going forward
        gives another digest.

        ``timeline``: the one to go by, None for the run's; ``in_turn``: with all others who look at the past.
        """
        timeline = timeline or self.timeline
        base = point.base or timeline.with_clock(0).initial()
        timeline = timeline.with_clock(base.clock_offset)
        _check_cursors(timeline, base)
        _refuse_beyond_data(timeline, base, point.sample_index)
        replay = Replay(timeline, timeline.settled(base))
        state = self.past.forward(replay, point.sample_index, at_once=not in_turn)
        if state.sample_index != point.sample_index:
            raise SnapshotInvalid(
                f"the state to resume from is at sample {point.sample_index}, but the data end at sample "
                f"{state.sample_index}: resume from one up to there, or give the run more data first (tokenloom "
                "mixture set URL SOURCE epochs=N, or mixture add)"
            )
        digest = digest_hex(state.digest)
        if (digest, state.total_tokens) != (point.digest or digest, point.total_tokens):
            # Perhaps it was taken without what is passed over between the two.
            timeline.check_skips(base, point.sample_index)
            between = range(base.sample_index, point.sample_index + 1)
            after = [one for one in timeline.revisions if one.sample_index in between]
            reason = "".join(
                f"without revision {one.number}, which holds from sample {one.sample_index} on, "
                for one in after
            )
            raise SnapshotInvalid(
                f"going forward from sample {base.sample_index} to {point.sample_index} gives digest {digest} and "
                f"{state.total_tokens} tokens, but the snapshot says {point.digest} and {point.total_tokens}: it was "
                f"made {reason}from other data or by other software"
            )
        counts = counts_at(
            json.loads(timeline.encode(state)), state.sample_index, state.total_tokens
        )
        theirs = counts if point.counts is None else point.counts
        for spec in sorted({*counts, *theirs}):
            if theirs.get(spec) != counts.get(spec):
                raise SnapshotInvalid(
                    f"counts: {spec!r} has {theirs.get(spec)}, but going forward to sample {point.sample_index} gives "
                    f"{counts.get(spec)}: take the state as it was written"
                )
        return state

    def began_from(self, point: ResumePoint) -> bool:
        """Whether the run's present line began from the older data loader's checkpoint that a point was made of."""
        begin = self.past.foreign_start(self.past.openings())
        return begin is not None and digest_hex(begin.digest) == point.digest


def _refuse_beyond_data(timeline: Timeline, state: State, index: int) -> None:
    """Raises ``SnapshotInvalid`` where a far sample index cannot be reached from a state, by the size of the data."""
    if index - state.sample_index <= FAR_SAMPLES:
        return
    try:
        plan = Planner().plan(timeline, state, None)
    except (SourceError, TokenizerError):
        return  # what is wrong there is met on the way
    if plan.ends and index > MARGIN * plan.until_sample_index:
        raise SnapshotInvalid(
            f"the state to resume from is at sample {index}, but the data end at about sample "
            f"{plan.until_sample_index} ({plan.reason}): resume from one up to there, or give the run more data first"
        )


def _check_cursors(timeline: Timeline, state: State) -> None:
    """Raises ``SnapshotInvalid`` naming the field of ``resume_state``, its value, and what the source has."""
    factory = timeline.at(state.sample_index)
    # A revision, or the run that this one was forked from, may have had more epochs than there are from now on.
    has_other_epochs = timeline.revisions or timeline.origin is not None
    epochs = None if has_other_epochs else timeline.epochs_until(state.sample_index)
    for i, source in enumerate(state.sources):
        cursors = [lane.cursor for lane in source.lanes] or [source.cursor]
        for cursor in cursors:
            _check_cursor(factory, i, cursor, epochs)
        # Rows that are packed together may lie in several epochs, and are counted again where a phase begins.
        one_by_one = factory.config.packing != "best_fit" and factory.config.batching is None
        # Nothing is read for a source that gave nothing yet: storage may be away.
        if source.rows and epochs is not None and state.imported is None and one_by_one:
            begun = max((cursor.epoch + 1 for cursor in cursors if cursor is not None), default=0)
            rows = factory.readers.counted_rows(i)
            if rows is not None and source.rows > rows * begun:
                raise SnapshotInvalid(
                    f"resume_state.datasets.{i}: rows is {source.rows}, but it began {begun} epochs of {rows} rows"
                )


def _check_cursor(
    factory: PipelineFactory, i: int, cursor: Cursor | None, epochs: Sequence[float] | None
) -> None:
    config = factory.config.sources[i]
    first = row_cursor(cursor)
    if cursor is None or first is None:
        return
    around, rows = factory.readers.rows_around(i, first)
    if isinstance(first, EpochCursor):
        field, row, has_begun = "epoch_rows", first.rows, False
    else:
        in_window = isinstance(first, WindowCursor)
        field, row = "window_row" if in_window else "row_offset", first.row
        has_begun = first is not cursor or tokens_in_row(cursor) > 0 or (in_window and not rows)
    if row > rows or (row == rows and has_begun):
        raise SnapshotInvalid(
            f"resume_state.datasets.{i}: {field} is {row}, but {around} has {rows} rows"
        )
    if epochs is not None and cursor.epoch >= epochs[i]:
        raise SnapshotInvalid(
            f"resume_state.datasets.{i}: epoch is {cursor.epoch}, but {config.source!r} is read for {epochs[i]} "
            "epochs, counted from 0"
        )
