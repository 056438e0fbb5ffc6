"""How much one epoch of a source has, as policies and plans know it: how its tokens lie over its rows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class TokenCurve:
    """One epoch in strata of consecutive rows. ``rows`` and ``tokens`` are those before the edge of each stratum, from
    0 up to all of them; between two edges rows are of one length. Rows and tokens may be counted over several epochs.
    ``real``: of the tokens, those of documents, where they are not all.

    Tokens are as samples count them: with begin- and end-of-text ids and the padding that the packing makes, without
    what it cuts off. All are estimates, unless the source is so small that all of it was read.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    real: tuple[int, ...] = ()

    @classmethod
    def of(cls, strata: Iterable[tuple[int, int | Fraction]]) -> TokenCurve:
        """From the rows and tokens of each stratum."""
        rows, tokens = zip((0, 0), *strata, strict=True)
        return cls(tuple(accumulate(rows)), tuple(round(total) for total in accumulate(tokens)))

    @property
    def epoch_rows(self) -> int:
        return self.rows[-1]

    @property
    def epoch_tokens(self) -> int:
        return self.tokens[-1]

    def scaled(self, share: Fraction) -> TokenCurve:
        """The same rows with this share of the tokens."""
        tokens, real = (
            tuple(round(total * share) for total in edges) for edges in (self.tokens, self.real)
        )
        return TokenCurve(self.rows, tokens, real)

    def straight(self) -> TokenCurve:
        """The same epoch in one stratum."""
        return TokenCurve(
            *((edges[0], edges[-1]) for edges in (self.rows, self.tokens, self.real) if edges)
        )

    def tokens_before(self, row: int) -> int:
        return _between(self.rows, self.tokens, row)

    def real_before(self, token: int) -> int:
        """The real tokens among so many."""
        return _between(self.tokens, self.real, token) if self.real else token

    def row_at(self, token: int) -> int:
        """The row that a token is of."""
        return _between(self.tokens, self.rows, token)


def _between(edges: Sequence[int], values: Sequence[int], position: int) -> int:
    """A straight line between the values at the edges, in whole numbers, over as many epochs as a position has."""
    if not edges[-1]:
        return 0
    epochs, rest = divmod(position, edges[-1])
    after = bisect_right(edges, rest)
    begin, value = edges[after - 1], values[after - 1]
    return (
        epochs * values[-1]
        + value
        + (rest - begin) * (values[after] - value) // (edges[after] - begin)
    )
