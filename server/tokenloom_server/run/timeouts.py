"""How long a run waits for whom."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """All in seconds."""

    #: A server that could not renew its lease for so long has lost it.
    lease_s: float = 15.0
    #: A run whose every rank was heard within this time is busy.
    liveness_s: float = 15.0
    #: After so long a wait for a rank that does not go on, the others get an error.
    rank_timeout_s: float = 300.0
    #: After so long a wait for storage: an error.
    storage_timeout_s: float = 300.0
    #: Commits come at most this often, unless the window would fill up: each covers all micro-steps until then.
    commit_every_s: float = 0.02

    @property
    def tick_s(self) -> float:
        """So often a server notes that it runs: twice as long without that, it was paused."""
        return max(1.0, self.liveness_s / 4)
