"""How many picks a source will have given at its end: an estimate, in integers, from what a state counts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from tokenloom_server.core.state import MAX_COUNTER


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTotal:
    """A source's total. ``rows``: those of all its epochs, None where they have no end; ``max_tokens``: its own."""

    rows: int | None
    tokens_per_1000_rows: int
    max_tokens: int | None
    pick_tokens: int

    def at(self, picks: int, tokens: int, rows: int, offset: int) -> int:
        """In picks, at least one more than were picked; from what was picked since the run began, of which the
        last ``offset`` tokens belong to a row that is not at its end."""
        rest = MAX_COUNTER
        if self.rows is not None:
            done = tokens - offset
            if rows and done > 0:
                rest = self.rows * done // rows - tokens
            else:
                rest = self.rows * self.tokens_per_1000_rows // 1000 - tokens
        if self.max_tokens is not None:
            rest = min(rest, self.max_tokens - tokens)
        return picks + max(1, rest // self.pick_tokens)


def rows_of(epoch_rows: int, epochs: float) -> int:
    """The rows of all epochs, of a fraction of one the part that is read. Epochs have an end."""
    whole, fraction = divmod(Fraction(repr(epochs)), 1)
    return whole * epoch_rows + math.ceil(fraction * epoch_rows)
