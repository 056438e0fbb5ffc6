"""What a restore pins for the next launch, as the ledger keeps it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from tokenloom_proto.seal import canonical


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

    @classmethod
    def read(cls, text: str) -> PinnedPoint:
        """Reads ``text`` back."""
        return cls(**json.loads(text))
