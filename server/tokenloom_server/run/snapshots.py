"""Snapshots of a run: made at any sample index that it ever held, from memory or by going forward from the journal, and
saved in its ledger."""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress

from tokenloom_server.core.state import State, digest_hex
from tokenloom_server.errors import (
    BeyondHorizon,
    LedgerRolledBack,
    LimitExceeded,
    NotFound,
    OrderMismatch,
    SnapshotInvalid,
    TokenloomError,
)
from tokenloom_server.ledger.commands import SaveSnapshot
from tokenloom_server.ledger.records import StoredSnapshot
from tokenloom_server.order import snapshot_encode
from tokenloom_server.order.replay import Replay, beyond_the_end
from tokenloom_server.reports.stats import SnapshotInfo
from tokenloom_server.run.past import Past, covering, lineage
from tokenloom_server.run.sizing import batch_plans_of
from tokenloom_server.run.views import RunView

#: In the ledger, of one run. Each may be as large as its state, and the list of them is read as a whole.
MAX_SAVED_SNAPSHOTS = 1000


class Snapshots:
    """Makes snapshots of one run, and keeps them in its ledger. Thread-safe."""

    def __init__(self, past: Past) -> None:
        self._coordinator = past.coordinator
        self._past = past
        # When the newest was saved, and the server epoch at which the ledger was asked for it.
        self._saved_at: float | None = None
        self._asked_at = 0

    # --- made --------------------------------------------------------------------------------------

    def at(self, sample_index: int | None) -> tuple[str, int]:
        """(sealed text, sample index) at a sample index, None for the committed one.

        Any index from the oldest that the ledger's journal reaches up to the horizon, micro-step boundary or
        not. Raises ``BeyondHorizon`` naming the limits, and ``OrderMismatch`` where going forward to the commit gives
        another digest than it has.
        """
        while True:
            view = self._coordinator.view()
            # An opening may pass over samples before the index: all that the text is made of is of one line.
            try:
                made = self._at(view, sample_index)
            except SnapshotInvalid:
                if self._coordinator.view().timeline is view.timeline:
                    raise
                continue
            if self._coordinator.view().timeline is view.timeline:
                return made

    def to_restore(self, sample_index: int, before_skip: bool) -> str:
        """The snapshot at a sample index; ``before_skip``: of the state before what the run passes over there. Raises
        what ``at`` does."""
        timeline = self._coordinator.timeline
        if not before_skip or sample_index not in timeline.skips:
            return self.at(sample_index)[0]
        for opening in lineage(self._past.openings()):
            if opening.start_index > sample_index:
                continue
            base = self._past.journalled(opening, sample_index - 1, timeline)
            if sample_index not in [skip.sample_index for skip in base.skips]:
                state = self._forward(
                    Replay(timeline.before_skip(sample_index), base), sample_index
                )
                return self.seal(
                    state, opening.generation, timeline.encode(base, opening.generation)
                )
        raise BeyondHorizon(
            f"the ledger has no state from before the skip at sample {sample_index}: restore to a trainer's state from "
            "before it (tokenloom restore --state)"
        )

    def _at(self, view: RunView, sample_index: int | None) -> tuple[str, int]:
        coordinator, generation, commit = self._coordinator, view.generation, view.commit
        if not generation.number:
            start = view.timeline.initial()
            if sample_index is not None and sample_index != start.sample_index:
                lies = (
                    "before the beginning"
                    if sample_index < start.sample_index
                    else "beyond the horizon"
                )
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
            state = self._forward(Replay(view.timeline, view.timeline.decode(commit.state)), index)
            if (digest := digest_hex(state.digest)) != commit.digest:
                raise OrderMismatch(
                    f"sample {index} is committed with digest {commit.digest}, but going forward to it gives "
                    f"{digest}: serve the run with the data and the software that it was committed with"
                )
            text = self.seal(state, generation.number, commit.state)
        else:
            text = self._recomputed(index, generation.number)
        return text, index

    def seal(
        self, state: State, generation: int, resume_state: str = "", uid: str | None = None
    ) -> str:
        """The snapshot at a state; ``resume_state``: where going forward to it begins, if not at itself; ``uid``: of
        the run where it is not this ledger's."""
        template = self._coordinator.template(uid or self._coordinator.uid, generation)
        there = self._coordinator.timeline.encode(state, generation)
        return snapshot_encode.compose(template, resume_state or there, there)

    def _recomputed(self, index: int, present: int) -> str:
        """By going forward from the nearest state that the ledger has in the index's lineage; ``present``: the
        generation that this server has. Raises ``LedgerRolledBack`` where the ledger has not even that."""
        openings = self._past.openings()
        if present not in (opening.generation for opening in openings):
            raise LedgerRolledBack(
                f"run {self._coordinator.name!r} is at generation {present}, but "
                f"{self._coordinator.ledger.description} has no opening of it: it lost data. {LedgerRolledBack.remedy}"
            )
        opening = covering(openings, index)
        if opening is None:
            raise BeyondHorizon(
                f"sample {index} lies before the first state that the ledger holds of this run"
            )
        boundary, timeline = batch_plans_of(opening).boundary(index), self._coordinator.timeline
        replay = Replay(timeline, self._past.journalled(opening, boundary, timeline))
        base, state = self._forward(replay, boundary), self._forward(replay, index)
        if state.sample_index != index:
            raise beyond_the_end(index, state.sample_index)
        return self.seal(state, opening.generation, timeline.encode(base, opening.generation))

    def _forward(self, replay: Replay, index: int) -> State:
        return self._past.forward(replay, index, at_once=True)

    # --- in the ledger -----------------------------------------------------------------------------

    def take(self, sample_index: int | None, *, save: bool) -> tuple[str, str | None]:
        """(sealed text, id if saved) at a sample index, None for the committed one. Raises ``BeyondHorizon``,
        ``LimitExceeded``, and what ``require_lead`` raises."""
        run = self._coordinator
        run.require_lead()
        saved = run.ledger.snapshot_count(run.uid, run.stream) if save else 0
        if saved >= MAX_SAVED_SNAPSHOTS:
            raise LimitExceeded(
                f"run {run.name!r} has {saved} saved snapshots, and the ledger keeps at most {MAX_SAVED_SNAPSHOTS}; "
                "take this one without saving it (the Snapshot RPC), or out of a trainer's checkpoint"
            )
        with run.measures.snapshots.timing(run.clock):
            text, index = self.at(sample_index)
        if not save:
            return text, None
        snapshot_id = f"{index}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        snapshot = StoredSnapshot(
            id=snapshot_id, sample_index=index, saved_at=time.time(), text=text
        )
        run.ledger.execute(SaveSnapshot(run.uid, run.stream, snapshot))
        self._saved_at = snapshot.saved_at
        return text, snapshot_id

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

    def saved_at(self) -> float | None:
        """When the newest was saved, Unix time; None where there is none, and where another server leads. The ledger is
        asked once each time that this server takes the lead."""
        run, epoch = self._coordinator, self._coordinator.lease.epoch
        if not run.leads():
            return None
        if self._asked_at != epoch:
            with suppress(
                TokenloomError
            ):  # an alert is not worth one that is away: it is asked again
                self._saved_at = max((entry.saved_at for entry in self.list()), default=None)
                self._asked_at = epoch
        return self._saved_at

    def list(self) -> list[SnapshotInfo]:
        """All that are in the ledger."""
        run = self._coordinator
        return [SnapshotInfo.of(entry) for entry in run.ledger.snapshots(run.uid, run.stream)]
