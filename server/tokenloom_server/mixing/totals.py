"""How many samples a source will have given at its end: an estimate, in integers, from what a state counts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, Protocol

from tokenloom_server.state import MAX_COUNTER


class Extent(Protocol):
    """One epoch of a source, measured once, when the run is created."""

    @property
    def rows(self) -> int: ...

    @property
    def tokens_per_1000_rows(self) -> int:
        """With begin- and end-of-text ids; decides until the first row was picked to its end."""


class Picked(NamedTuple):
    """What was picked of a source since the run began, and the tokens of that which belong to a row not yet at its
    end (the cursor's offset)."""

    samples: int
    tokens: int
    rows: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTotal:
    """A source's total. ``rows``: those of all its epochs, None where they have no end; ``max_tokens``: its own."""

    rows: int | None
    tokens_per_1000_rows: int
    max_tokens: int | None
    sample_tokens: int

    def at(self, picked: Picked) -> int:
        """In samples; at least one more than were picked."""
        rests = []
        if self.rows is not None:
            done = picked.tokens - picked.offset
            if picked.rows and done > 0:
                tokens = self.rows * done // picked.rows
            else:
                tokens = self.rows * self.tokens_per_1000_rows // 1000
            rests.append(tokens - picked.tokens)
        if self.max_tokens is not None:
            rests.append(self.max_tokens - picked.tokens)
        return picked.samples + max(1, min(rests, default=MAX_COUNTER) // self.sample_tokens)


def rows_of(extent: Extent, epochs: float) -> int:
    """The rows of all epochs, of a fraction of one the part that is read. Epochs have an end."""
    whole, fraction = divmod(Fraction(repr(epochs)), 1)
    return whole * extent.rows + math.ceil(fraction * extent.rows)
