"""Snapshots of a run: taken at a sample index, and saved in its ledger."""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress

from tokenloom_server.errors import LimitExceeded, TokenloomError
from tokenloom_server.ledger.commands import SaveSnapshot
from tokenloom_server.ledger.records import StoredSnapshot
from tokenloom_server.reports.stats import SnapshotInfo
from tokenloom_server.run.coordinator import RunCoordinator
from tokenloom_server.run.past_states import PastStates

#: In the ledger, of one run. Each may be as large as its state, and the list of them is read as a whole.
MAX_SAVED_SNAPSHOTS = 1000


class SavedSnapshots:
    """Takes snapshots of a run, and keeps them in its ledger."""

    def __init__(self, coordinator: RunCoordinator, past_states: PastStates) -> None:
        self._coordinator = coordinator
        self._past_states = past_states
        # When the newest was saved, and the server epoch at which the ledger was asked for it.
        self._saved_at: float | None = None
        self._asked_at = 0

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
            text, index = self._past_states.snapshot(sample_index)
        if not save:
            return text, None
        snapshot_id = f"{index}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        snapshot = StoredSnapshot(id=snapshot_id, sample_index=index, saved_at=time.time(), text=text)
        run.ledger.execute(SaveSnapshot(run.uid, run.stream, snapshot))
        self._saved_at = snapshot.saved_at
        return text, snapshot_id

    def saved_at(self) -> float | None:
        """When the newest was saved, Unix time; None where there is none, and where another server leads. The ledger is
        asked once each time that this server takes the lead."""
        run, epoch = self._coordinator, self._coordinator.lease.epoch
        if not run.leads():
            return None
        if self._asked_at != epoch:
            with suppress(TokenloomError):  # an alert is not worth one that is away: it is asked again
                self._saved_at = max((entry.saved_at for entry in self.list()), default=None)
                self._asked_at = epoch
        return self._saved_at

    def list(self) -> list[SnapshotInfo]:
        """All that are in the ledger."""
        run = self._coordinator
        return [SnapshotInfo.of(entry) for entry in run.ledger.snapshots(run.uid, run.stream)]
