"""Any sample index that the run ever held, as a snapshot: from memory, or by going forward from the journal."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence

from tokenloom_proto.resume import counts_at
from tokenloom_proto.seal import canonical

from tokenloom_server.core.state import MAX_COUNTER, Imported, State, digest_hex
from tokenloom_server.errors import (
    BeyondHorizon,
    ConfigError,
    LedgerRolledBack,
    NotFound,
    OrderMismatch,
    SnapshotInvalid,
)
from tokenloom_server.ledger.records import Opening, StoredRevision, StoredRun
from tokenloom_server.order import foreign_checkpoint, foreign_payload, snapshot, snapshot_encode
from tokenloom_server.order.replay import Replay, beyond_the_end
from tokenloom_server.order.segments import skip_content, skips_after
from tokenloom_server.order.snapshot import ResumePoint
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.run.coordinator import RunCoordinator
from tokenloom_server.run.cursor_check import check_cursors
from tokenloom_server.run.far_sample import refuse_beyond_data
from tokenloom_server.run.lineage import NearestState, covering, lineage
from tokenloom_server.run.pins import PinnedPoint
from tokenloom_server.run.sizing import batch_plans_of
from tokenloom_server.run.views import RunView

#: Goes from a state to a sample index, by a timeline.
Advance = Callable[[State, int, Timeline], State]

#: What ``resume`` may be, beside a snapshot's id.
LATEST, FRESH = "latest", "fresh"


class PastStates:
    """Snapshots of one run. Thread-safe; going forward is done by one caller at a time."""

    def __init__(self, coordinator: RunCoordinator) -> None:
        self._coordinator = coordinator
        self._forward_lock = threading.Lock()
        # The last older checkpoint that was brought, as every rank brings it: its files are looked at once.
        self._imported: tuple[foreign_payload.Payload, Timeline, ResumePoint] | None = None

    @property
    def timeline(self) -> Timeline:
        """The run's, as it is now."""
        return self._coordinator.timeline

    def parse(self, text: str | bytes) -> ResumePoint:
        """Reads a snapshot of this run, or an older data loader's payload. Raises ``SnapshotInvalid``."""
        coordinator = self._coordinator
        payload = foreign_payload.read(text)
        if payload is not None:
            timeline, newest = coordinator.timeline, self._imported
            if newest is None or newest[:2] != (payload, timeline):
                newest = self._imported = payload, timeline, foreign_checkpoint.resume_point(payload, timeline)
            return newest[2]
        return snapshot.parse(text, coordinator.template(), coordinator.timeline.shape_at, coordinator.order.config)

    def pin(self, text: str, skip: int = 0, undo: bool = False, advance: Advance | None = None) -> PinnedPoint:
        """A snapshot as the ledger keeps it until the next opening; ``skip`` samples after it are to be passed over,
        and with ``undo`` no other than those that it passed.

        Goes forward, which proves the point before it is pinned and not when the next job starts; ``advance`` as in
        ``forward``. Raises ``SnapshotInvalid``, ``BeyondHorizon`` where the data end among those to skip, and
        ``ConfigError`` where there is nothing to undo.
        """
        point, known = self.parse(text), self.timeline.skips
        if point.digest is None:
            # Of an older payload that only counts samples: what it stands for is known now.
            state = self.forward(point, advance, self._before_skip(point.sample_index))
            text = self.seal(state, point.generation, uid=point.run_uid)
            point = self.parse(text)
        skips = skips_after(dict(point.passed) if undo else known, point.sample_index, skip)
        if undo and skips == known:
            raise ConfigError(
                f"the state at sample {point.sample_index} passed all skips of the run (at samples {[*known]}): to "
                "take one back, name its sample by --sample, or a sample or state before it"
            )
        changed = [*skips.items()] if skips != known else None
        pin = PinnedPoint(text, point.sample_index, point.digest or "", changed)
        self.forward(point, advance, self.pinned(pin))
        return pin

    def pinned(self, pin: PinnedPoint | None, made_at: float = 0.0) -> Timeline:
        """The timeline of an opening at a Unix time that takes a pin: the run's, perhaps with a revision more."""
        if pin is None or pin.skips is None:
            return self.timeline
        return self.skipping(pin.skips, self.parse(pin.snapshot).sample_index, made_at)

    def skipping(self, skips: Sequence[tuple[int, int]], sample_index: int, made_at: float = 0.0) -> Timeline:
        """The run's timeline where these, and no others, are passed over, by a revision at a sample index."""
        timeline = self.timeline
        revision = StoredRevision(
            number=len(timeline.revisions) + 1,
            sample_index=sample_index,
            made_at=made_at,
            author="",
            reason="a restore",
            content=canonical(skip_content(dict(skips))),
        )
        return timeline.with_revisions((*timeline.revisions, revision))

    def _before_skip(self, sample_index: int) -> Timeline:
        """The run's timeline where nothing is passed over at a sample index."""
        others = [skip for skip in self.timeline.skips.items() if skip[0] != sample_index]
        return self.skipping(others, sample_index)

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
                f"run {self._coordinator.name!r} was forked from {origin.run!r} at sample {origin.sample_index}, and "
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
        return self.parse(self.saved(resume)) if resume else None

    def saved(self, snapshot_id: str) -> str:
        """The text of a snapshot that the ledger has. Raises ``NotFound``."""
        ledger, of_run = self._coordinator.ledger, (self._coordinator.uid, self._coordinator.stream)
        stored = ledger.snapshot(*of_run, snapshot_id)
        if stored is None:
            known = [entry.id for entry in ledger.snapshots(*of_run)][:5]
            raise NotFound(
                f"run {self._coordinator.name!r} has no snapshot {snapshot_id!r} (newest: {known or 'none'}; GET "
                f"/v1/runs/{self._coordinator.name}/snapshots lists all); resume may also be 'latest' or 'fresh'"
            )
        return stored.text

    def nearest(self, index: int, generation: int | None = None) -> NearestState:
        """The newest state that the ledger has at or before a sample index; the initial one where it has none.

        ``generation``: as that one saw the order; None for the present one. Raises ``NotFound`` for an unknown one, and
        ``BeyondHorizon`` for what is another run's, that this one was forked from.
        """
        coordinator, openings = self._coordinator, self.openings()
        opening = covering(openings, index, generation)
        timeline = self.timeline_of(openings, generation)
        origin = timeline.origin
        if origin is not None and index < origin.sample_index:
            raise BeyondHorizon(
                f"sample {index} lies before sample {origin.sample_index}, at which run {coordinator.name!r} was "
                f"forked from {origin.run!r}: look for it there"
            )
        if opening is None:
            begin = self._foreign_start(openings)
            if begin is not None:
                raise BeyondHorizon(
                    f"sample {index} lies before the first state that the ledger holds; run {coordinator.name!r} "
                    f"began at sample {begin.sample_index} from an older data loader's checkpoint, and samples before "
                    "that are not of its order"
                )
            return NearestState(timeline.initial(), 0, 0, timeline)
        state = self._journalled(opening, index, timeline)
        if generation is not None and generation != openings[-1].generation:
            return NearestState(state, opening.generation, self._farthest(generation, timeline), timeline)
        commit = coordinator.view().commit
        if opening is openings[-1] and state.sample_index < commit.sample_index <= index:
            # After the newest journal entry there may be a good deal more, and its boundary is at hand.
            state = timeline.decode(commit.state)
        return NearestState(state, opening.generation, commit.sample_index, timeline)

    def began_from(self, point: ResumePoint) -> bool:
        """Whether the run's present line began from the older data loader's checkpoint that a point was made of."""
        begin = self._foreign_start(self.openings())
        return begin is not None and digest_hex(begin.digest) == point.digest

    def _foreign_start(self, openings: Sequence[Opening]) -> Imported | None:
        """Where the present line began, if from an older data loader's checkpoint."""
        return self.timeline.decode(openings[-1].start_state).imported if openings else None

    def timeline_of(self, openings: Sequence[Opening], generation: int | None) -> Timeline:
        """The timeline that a generation had when it ended; that of the run for the present one, or None."""
        timeline = self.timeline
        later = [opening for opening in openings if generation is not None and opening.generation > generation]
        if not later:
            return timeline
        timeline = timeline.with_revisions([r for r in timeline.revisions if r.made_at < later[0].opened_at])
        return timeline.of_state(openings[-len(later) - 1].start_state)

    def _farthest(self, generation: int, timeline: Timeline) -> int:
        """How far a generation that is over may have come, guessed from its journal, whose entries lie apart.

        Raises ``SnapshotInvalid`` where it came there under a revision that was dropped since.
        """
        coordinator = self._coordinator
        last = coordinator.ledger.journal(coordinator.uid, coordinator.stream, generation, MAX_COUNTER)
        if last is None:
            return 0
        timeline.decode(last.state)
        earlier = max(0, last.sample_index - 1)
        before = coordinator.ledger.journal(coordinator.uid, coordinator.stream, generation, earlier)
        # Every second entry may have gone since, the newest too.
        return last.sample_index + 2 * (last.sample_index - (before or last).sample_index)

    def openings(self) -> Sequence[Opening]:
        return self._coordinator.ledger.openings(self._coordinator.uid, self._coordinator.stream)

    def forward(self, point: ResumePoint, advance: Advance | None = None, timeline: Timeline | None = None) -> State:
        """The state at a resume point, after what is passed over there. Raises ``SnapshotInvalid`` where going forward
        gives another digest.

        ``advance`` goes from a state to a sample index, in the caller's own way; ``timeline``: the one to go by, None
        for the run's.
        """
        timeline = timeline or self.timeline
        base = point.base or timeline.with_clock(0).initial()
        timeline = timeline.with_clock(base.clock_offset)
        check_cursors(timeline, base)
        refuse_beyond_data(timeline, base, point.sample_index)
        state = (advance or self._advance)(timeline.settled(base), point.sample_index, timeline)
        if state.sample_index != point.sample_index:
            raise SnapshotInvalid(
                f"the state to resume from is at sample {point.sample_index}, but the data end at sample "
                f"{state.sample_index}: resume from one up to there, or give the run more data first (tokenloom "
                "mixture set --epochs, or mixture add)"
            )
        digest = digest_hex(state.digest)
        if (digest, state.total_tokens) != (point.digest or digest, point.total_tokens):
            # Perhaps it was taken without what is passed over between the two.
            timeline.check_skips(base, point.sample_index)
            between = range(base.sample_index, point.sample_index + 1)
            after = [one for one in timeline.revisions if one.sample_index in between]
            reason = "".join(
                f"without revision {one.number}, which holds from sample {one.sample_index} on, " for one in after
            )
            raise SnapshotInvalid(
                f"going forward from sample {base.sample_index} to {point.sample_index} gives digest {digest} and "
                f"{state.total_tokens} tokens, but the snapshot says {point.digest} and {point.total_tokens}: it was "
                f"made {reason}from other data or by other software"
            )
        counts = counts_at(json.loads(timeline.encode(state)), state.sample_index, state.total_tokens)
        theirs = counts if point.counts is None else point.counts
        for spec in sorted({*counts, *theirs}):
            if theirs.get(spec) != counts.get(spec):
                raise SnapshotInvalid(
                    f"counts: {spec!r} has {theirs.get(spec)}, but going forward to sample {point.sample_index} gives "
                    f"{counts.get(spec)}: take the state as it was written"
                )
        return state

    def snapshot(self, sample_index: int | None) -> tuple[str, int]:
        """(sealed text, sample index) at a sample index, None for the committed one.

        Any index from the oldest that the ledger's journal reaches up to the horizon, micro-step boundary or
        not. Raises ``BeyondHorizon`` naming the limits, and ``OrderMismatch`` where going forward to the commit gives
        another digest than it has.
        """
        while True:
            view = self._coordinator.view()
            # An opening may pass over samples before the index: all that the text is made of is of one line.
            try:
                made = self._snapshot(view, sample_index)
            except SnapshotInvalid:
                if self._coordinator.view().timeline is view.timeline:
                    raise
                continue
            if self._coordinator.view().timeline is view.timeline:
                return made

    def text_to_restore(self, sample_index: int, before_skip: bool) -> str:
        """The snapshot at a sample index; ``before_skip``: of the state before what the run passes over there. Raises
        what ``snapshot`` does."""
        timeline = self.timeline
        if not before_skip or sample_index not in timeline.skips:
            return self.snapshot(sample_index)[0]
        for opening in lineage(self.openings()):
            if opening.start_index > sample_index:
                continue
            base = self._journalled(opening, sample_index - 1, timeline)
            if sample_index not in [skip.sample_index for skip in base.skips]:
                state = self._advance(base, sample_index, self._before_skip(sample_index))
                return self.seal(state, opening.generation, timeline.encode(base, opening.generation))
        raise BeyondHorizon(
            f"the ledger has no state from before the skip at sample {sample_index}: restore to a trainer's state from "
            "before it (tokenloom restore --state)"
        )

    def _snapshot(self, view: RunView, sample_index: int | None) -> tuple[str, int]:
        coordinator, generation, commit = self._coordinator, view.generation, view.commit
        if not generation.number:
            start = view.timeline.initial()
            if sample_index is not None and sample_index != start.sample_index:
                lies = "before the beginning" if sample_index < start.sample_index else "beyond the horizon"
                raise BeyondHorizon(
                    f"sample {sample_index} is {lies} {start.sample_index}: no trainer has joined this run yet"
                )
            return self.seal(start, 0), start.sample_index
        index = commit.sample_index if sample_index is None else sample_index
        if index > generation.horizon_index:
            raise BeyondHorizon(
                f"sample {index} is beyond the horizon {generation.horizon_index}: {commit.sample_index} is committed, "
                f"and production may go {generation.window_micro_steps} micro-steps further"
            )
        if (point := coordinator.point_at(index)) is not None:
            group, steps = point
            state = group.state_after(steps - 1) if steps else group.base
            text = self.seal(state, generation.number, group.resume_state)
        elif index == commit.sample_index:
            state = self._advance(view.timeline.decode(commit.state), index, view.timeline)
            if (digest := digest_hex(state.digest)) != commit.digest:
                raise OrderMismatch(
                    f"sample {index} is committed with digest {commit.digest}, but going forward to it gives "
                    f"{digest}: serve the run with the data and the software that it was committed with"
                )
            text = self.seal(state, generation.number, commit.state)
        else:
            text = self._recomputed(index, generation.number)
        return text, index

    def seal(self, state: State, generation: int, resume_state: str = "", uid: str | None = None) -> str:
        """The snapshot at a state; ``resume_state``: where going forward to it begins, if not at itself; ``uid``: of
        the run where it is not this ledger's."""
        template = self._coordinator.template(uid or self._coordinator.uid, generation)
        there = self.timeline.encode(state, generation)
        return snapshot_encode.compose(template, resume_state or there, there)

    def _recomputed(self, index: int, present: int) -> str:
        """By going forward from the nearest state that the ledger has in the index's lineage; ``present``: the
        generation that this server has. Raises ``LedgerRolledBack`` where the ledger has not even that."""
        openings = self.openings()
        if present not in (opening.generation for opening in openings):
            raise LedgerRolledBack(
                f"run {self._coordinator.name!r} is at generation {present}, but "
                f"{self._coordinator.ledger.description} has no opening of it: it lost data. {LedgerRolledBack.remedy}"
            )
        opening = covering(openings, index)
        if opening is None:
            raise BeyondHorizon(f"sample {index} lies before the first state that the ledger holds of this run")
        boundary = batch_plans_of(opening).boundary(index)
        timeline = self.timeline
        base = self._advance(self._journalled(opening, boundary, timeline), boundary, timeline)
        state = self._advance(base, index, timeline)
        if state.sample_index != index:
            raise beyond_the_end(index, state.sample_index)
        return self.seal(state, opening.generation, timeline.encode(base, opening.generation))

    def _journalled(self, opening: Opening, index: int, timeline: Timeline) -> State:
        """The newest state at or before a sample index that the ledger's journal has of a generation."""
        coordinator = self._coordinator
        start = timeline.decode(opening.start_state)
        entry = coordinator.ledger.journal(coordinator.uid, coordinator.stream, opening.generation, index)
        if entry is None:
            return start
        journalled = timeline.decode(entry.state)
        return journalled if start.sample_index < journalled.sample_index <= index else start

    def _advance(self, state: State, sample_index: int, timeline: Timeline) -> State:
        if state.sample_index == sample_index:
            return state
        replay = Replay(timeline, state)
        with self._forward_lock, self._coordinator.way_forward.reported(replay, sample_index) as report:
            return replay.forward(sample_index, report)
