"""How much one epoch of a source has, as policies and plans know it."""

from __future__ import annotations

from dataclasses import dataclass

from tokenloom_server.core.token_curve import TokenCurve


@dataclass(frozen=True, slots=True)
class SizeEstimate:
    """One epoch of a source: its ``rows``, and the tokens of 1,000 of them as samples count them: with begin- and
    end-of-text ids and the padding that the packing makes, without what it cuts off.

    They are estimates, unless the source is so small that all of it was read. ``curve``: how these tokens lie over the
    rows, by which policies know what is left after any row; None in what was recorded under order version 1, where the
    rows that were picked stand for those that are left, and the estimate only for the first.
    """

    rows: int
    tokens_per_1000_rows: int
    curve: TokenCurve | None = None

    @classmethod
    def of(cls, curve: TokenCurve) -> SizeEstimate:
        return cls(curve.epoch_rows, round(1000 * curve.epoch_tokens / max(1, curve.epoch_rows)), curve)

    @property
    def tokens(self) -> int:
        """Tokens of one epoch."""
        return self.tokens_before(self.rows)

    def tokens_before(self, row: int) -> int:
        """Tokens of so many rows, those of several epochs, too."""
        return self.curve.tokens_before(row) if self.curve is not None else row * self.tokens_per_1000_rows // 1000
