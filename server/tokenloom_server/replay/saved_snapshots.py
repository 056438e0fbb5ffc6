"""Snapshots of a run: taken at a sample index, and saved in its ledger."""

from __future__ import annotations

import hashlib
import time

from tokenloom_server.errors import LimitExceeded
from tokenloom_server.ledger.commands import SaveSnapshot
from tokenloom_server.ledger.records import StoredSnapshot
from tokenloom_server.reports.stats import SnapshotInfo
from tokenloom_server.run.coordinator import RunCoordinator
from tokenloom_server.run.history import History

#: In the ledger, of one run. Each may be as large as its state, and the list of them is read as a whole.
MAX_SAVED_SNAPSHOTS = 1000


class SavedSnapshots:
    """Takes snapshots of a run, and keeps them in its ledger."""

    def __init__(self, coordinator: RunCoordinator, history: History) -> None:
        self._coordinator = coordinator
        self._history = history

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
        text, index = self._history.snapshot(sample_index)
        if not save:
            return text, None
        snapshot_id = f"{index}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        run.ledger.execute(
            SaveSnapshot(
                run.uid,
                run.stream,
                StoredSnapshot(id=snapshot_id, sample_index=index, saved_at=time.time(), text=text),
            )
        )
        return text, snapshot_id

    def list(self) -> list[SnapshotInfo]:
        """All that are in the ledger."""
        run = self._coordinator
        return [
            SnapshotInfo(id=entry.id, sample_index=entry.sample_index, saved_at=entry.saved_at)
            for entry in run.ledger.snapshots(run.uid, run.stream)
        ]
