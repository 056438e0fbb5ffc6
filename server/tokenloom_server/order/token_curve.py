"""How the tokens of a source lie over its rows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class TokenCurve:
    """One epoch in strata of consecutive rows. ``rows`` and ``tokens`` are those before the edge of each stratum, from
    0 up to all of them; between two edges rows are of one length. Rows and tokens may be counted over several epochs.
    """

    rows: Sequence[int]
    tokens: Sequence[float]

    @classmethod
    def of(cls, strata: Iterable[tuple[int, float]]) -> TokenCurve:
        """From the rows and tokens of each stratum."""
        rows, tokens = zip((0, 0.0), *strata, strict=True)
        return cls(list(accumulate(rows)), list(accumulate(tokens)))

    @property
    def epoch_rows(self) -> int:
        return self.rows[-1]

    @property
    def epoch_tokens(self) -> float:
        return self.tokens[-1]

    def flat(self, share: float = 1.0) -> TokenCurve:
        """The same rows as one stratum with this share of the tokens."""
        return TokenCurve.of([(self.epoch_rows, self.epoch_tokens * share)])

    def tokens_before(self, row: int) -> float:
        epochs, rest = divmod(row, self.epoch_rows) if self.epoch_rows else (0, 0)
        return epochs * self.epoch_tokens + _between(self.rows, self.tokens, rest)

    def row_at(self, token: float) -> int:
        """The row that a token is of."""
        epochs, rest = divmod(token, self.epoch_tokens) if self.epoch_tokens else (0, 0)
        # A row begins at its first token, whatever rounding made of that.
        return int(epochs) * self.epoch_rows + int(_between(self.tokens, self.rows, rest) + 1e-6)


def _between(edges: Sequence[float], values: Sequence[float], at: float) -> float:
    """A straight line between the values at the edges."""
    after = min(bisect_right(edges, at), len(edges) - 1)
    if not after:
        return values[0]
    begin, end = edges[after - 1], edges[after]
    part = (at - begin) / (end - begin) if end > begin else 1.0
    return values[after - 1] + part * (values[after] - values[after - 1])
