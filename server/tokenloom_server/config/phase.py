"""``phases``: parts of the run, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from tokenloom_server.config.base import Section
from tokenloom_server.config.node import NodeConfig


class PhaseConfig(Section):
    """A part of the run, by its tokens: annealing, longer contexts."""

    until_tokens: Annotated[int, Field(gt=0)] | None = None
    """The run's total tokens at which the phase ends, to the next whole sample. After the last phase the run ends, or
    with the data where that one leaves it out."""
    sequence_length: Annotated[int, Field(ge=2, le=2**24)] | None = None
    """Tokens per sample from here on; what was in force if not given."""
    mixture: NodeConfig | None = None
    """The mixture from here on; what was in force if not given."""


def check_ascending(phases: Sequence[PhaseConfig]) -> None:
    """Raises ``ValueError`` unless each phase ends after it begins, and only the last one has no end."""
    begin = 0
    for i, phase in enumerate(phases):
        if phase.until_tokens is None and i < len(phases) - 1:
            raise ValueError(
                f"phases.{i}.until_tokens: is missing; only the last phase may go on to the end"
            )
        if phase.until_tokens is not None and phase.until_tokens <= begin:
            raise ValueError(
                f"phases.{i}.until_tokens: {phase.until_tokens} is not above the {begin} at which it begins"
            )
        begin = phase.until_tokens or begin
