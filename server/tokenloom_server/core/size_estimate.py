"""How much one epoch of a source has, as policies and plans know it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SizeEstimate:
    """One epoch of a source: its ``rows``, and the tokens of 1,000 of them as samples count them: with begin- and
    end-of-text ids and the padding that the packing makes, without what it cuts off.

    ``tokens_per_1000_rows`` is an estimate, unless the source is so small that all of it was read. Policies use it
    until the first row was picked to its end.
    """

    rows: int
    tokens_per_1000_rows: int

    @property
    def tokens(self) -> int:
        """Tokens of one epoch."""
        return self.rows * self.tokens_per_1000_rows // 1000
