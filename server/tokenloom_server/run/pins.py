"""What a restore pins for the next launch, here and as the ledger keeps it until that opens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokenloom_proto.seal import canonical

from tokenloom_server.ledger.commands import Pin
from tokenloom_server.ledger.records import StoredRun
from tokenloom_server.order.timeline import Timeline
from tokenloom_server.reports.stats import NextLaunch
from tokenloom_server.run.context import RunContext
from tokenloom_server.run.head import Head
from tokenloom_server.run.lease import Lease


class PinnedPoint(NamedTuple):
    """Where the next launch begins."""

    #: The snapshot there. A trainer that loads a state must load the one of this point.
    snapshot: str
    sample_index: int
    #: The rolling digest there.
    digest: str
    #: (sample index, samples) of all that the run passes over from then on; None where that stays.
    skips: Sequence[tuple[int, int]] | None = None

    @property
    def text(self) -> str:
        """Canonical JSON."""
        return str(canonical(self._asdict()))

    @property
    def next_launch(self) -> NextLaunch:
        """For people."""
        skips = None if self.skips is None else dict(self.skips)
        return NextLaunch(sample_index=self.sample_index, digest=self.digest, skips=skips)

    @classmethod
    def read(cls, text: str) -> PinnedPoint:
        """Reads ``text`` back."""
        return cls(**json.loads(text))


@dataclass(eq=False)
class Pins:
    """Where the next launch of a run begins, for this server. Thread-safe."""

    _context: RunContext
    _head: Head
    _lease: Lease
    #: None where nothing is pinned.
    pin: PinnedPoint | None = None
    #: Of this server's last change; an opening is one, too, as the ledger counts.
    _number: int = 0

    def set(self, pin: PinnedPoint | None, timeline: Timeline | None = None) -> bool:
        """Writes where the next launch begins; None takes it back. Writes nothing, and returns False, where the run has
        another timeline by now than the pin was worked out for. Raises the ledger's errors."""
        context, head = self._context, self._head
        with context.one_change:
            if timeline is not None and timeline is not head.timeline:
                return False
            text, epoch, known = (
                pin.text if pin is not None else None,
                self._lease.state.epoch,
                head.revision_changes,
            )
            # Before the call: one whose answer is lost has its number, too.
            self._number += 1
            context.ledger.execute(
                Pin(head.uid, context.stream, epoch, text, self._number, known_changes=known)
            )
            self.pin = pin
            return True

    def read(self, stored: StoredRun) -> None:
        """This server takes the run up, with what the ledger has."""
        self.pin = PinnedPoint.read(stored.pin) if stored.pin is not None else None

    def take(self) -> None:
        """A launch opened there."""
        self.pin = None
        self._number += 1
