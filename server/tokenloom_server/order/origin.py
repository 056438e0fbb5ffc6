"""Where a run was forked from another."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tokenloom_proto.seal import canonical


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a run was forked from another: it begins there, at that sample index and with those tokens."""

    run: str
    uid: str
    generation: int
    sample_index: int
    total_tokens: int
    digest: str
    #: Samples and tokens before that of sources which this run does not have.
    left_samples: int
    left_tokens: int
    #: ``resume_state`` at the sample index, as this run has it; empty where only a snapshot after it tells of it.
    state: str = ""
    #: (sample index, samples) of what the other run passes over, before that and, as this one does, after it.
    skips: Sequence[tuple[int, int]] = ()

    def to_json(self) -> str:
        """Canonical JSON, as an opening keeps it."""
        return str(canonical(asdict(self)))

    def described(self) -> dict[str, Any]:
        """All of it but the state."""
        return asdict(replace(self, state=""))

    @classmethod
    def from_json(cls, text: str) -> Origin | None:
        """Reads ``to_json``; None for the empty text of a run that was not forked."""
        return cls(**json.loads(text)) if text else None
