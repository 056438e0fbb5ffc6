"""What a source has left, as a plan knows it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from tokenloom_server.config.run import RunConfig
from tokenloom_server.core.state import MAX_COUNTER, SourceState, tokens_in_row
from tokenloom_server.core.token_curve import TokenCurve
from tokenloom_server.mixing.totals import rows_of


class Supply:
    """The picks that the rest of a source's rows hold, and where its rows counter stands after some of them."""

    def __init__(
        self, config: RunConfig, source: int, curve: TokenCurve | None, state: SourceState
    ) -> None:
        """``curve``: None for a source that was dropped, which gives nothing."""
        self.curve = (
            curve if config.balances_real or curve is None else TokenCurve(curve.rows, curve.tokens)
        )
        #: Picks that were given since the state.
        self.given = 0
        self._balance = config.balanced(state)
        self.epochs = config.epochs[source]
        self._pick_tokens = config.pick_tokens
        # Of samples that are padded, no part of the tokens is a row's.
        self._cuts_rows = config.packing == "concat"
        self._begin = 0
        #: Picks that are left from the state on, at most MAX_COUNTER, as where the source is read for ever.
        self.picks = 0
        if curve is None:
            return
        self._begin = curve.tokens_before(state.rows) + (
            tokens_in_row(state.cursor) if self._cuts_rows else 0
        )
        if state.exhausted or not curve.epoch_tokens:
            return
        if math.isinf(self.epochs):
            self.picks = MAX_COUNTER
            return
        # With shifted labels the last sample is followed by one token more.
        needed = self._begin + (config.labels == "shifted" and self._cuts_rows)
        tokens = curve.tokens_before(rows_of(curve.epoch_rows, self.epochs)) - needed
        self.picks = min(MAX_COUNTER, max(0, tokens // self._pick_tokens))

    @property
    def real_tokens(self) -> int:
        """See ``RealLengths``; positions where balances count these."""
        return self._balance + self._real(self.given) - self._real(0)

    def real_lengths(self) -> Iterator[int]:
        """See ``RealLengths``."""
        return (
            after - before
            for before, after in pairwise(map(self._real, range(self.given, self.picks + 1)))
        )

    def real_of(self, picks: int) -> int:
        """See ``RealLengths``."""
        return self._real(self.given + picks) - self._real(self.given)

    def _real(self, picks: int) -> int:
        """The real tokens before the end of so many picks, counted as those of the curve."""
        token = self._begin + picks * self._pick_tokens
        return token if self.curve is None else self.curve.real_before(token)

    def rows_picked(self) -> tuple[int, int]:
        """The rows counter, and the tokens of the row that is not at its end, after the last pick."""
        if self.curve is None:
            return 0, 0
        token = self._begin + self.given * self._pick_tokens
        row = self.curve.row_at(token)
        return row, token - self.curve.tokens_before(row) if self._cuts_rows else 0
