"""How many picks a child will have given at its end: an estimate, in integers, from what a state counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from tokenloom_server.config.run import RunConfig
from tokenloom_server.core.state import MAX_COUNTER
from tokenloom_server.core.token_curve import TokenCurve
from tokenloom_server.mixing.node import Node

#: The rows counter of a source, and the offset of its cursor, after its last pick.
RowsPicked = Callable[[int], tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTotal:
    """A source's total. ``curve``: None where its epochs have no end; ``end``: by it, the tokens of all of them;
    ``max_tokens``: its own.

    What is left follows from the rows to come alone: those that were picked say nothing about them. A measure that is
    wrong by one factor all over a source moves its shares, and hardly its end, since less is given of what seems less.
    """

    curve: TokenCurve | None
    end: int
    max_tokens: int | None
    pick_tokens: int

    def at(self, picks: int, tokens: int, rows: int, offset: int) -> int:
        """In picks, at least one more than were picked; from what was picked since the run began, of which the
        last ``offset`` tokens belong to a row that is not at its end."""
        rest = MAX_COUNTER
        if self.curve is not None:
            rest = self.end - self.curve.tokens_before(rows) - offset
        if self.max_tokens is not None:
            rest = min(rest, self.max_tokens - tokens)
        return picks + max(1, rest // self.pick_tokens)


def rows_of(epoch_rows: int, epochs: float) -> int:
    """The rows of all epochs, of a fraction of one the part that is read. Epochs have an end."""
    whole, fraction = divmod(Fraction(repr(epochs)), 1)
    return whole * epoch_rows + math.ceil(fraction * epoch_rows)


class Totals:
    """The totals of all children from which a policy makes an estimate."""

    def __init__(
        self, config: RunConfig, upwards: Sequence[Node], size_estimates: Mapping[int, TokenCurve]
    ) -> None:
        """``upwards``: all nodes, children before parents. ``size_estimates``: those of the sources in
        ``RunConfig.measured_sources``, by id."""
        estimated = {below for node in upwards if node.policy.estimates for below in node.nodes()}
        self._nodes = [node for node in upwards if node in estimated]
        self._config, self._size_estimates = config, size_estimates
        self._sources: dict[int, SourceTotal] = {}

    def by_node(self, rows_picked: RowsPicked) -> dict[Node, list[int]]:
        """Of each node from which an estimate is made, its children's totals in picks, from the counters there."""
        by_node: dict[Node, list[int]] = {}
        for node in self._nodes:
            picks, tokens = node.counters.picks, node.counters.tokens
            # What is out gives no more than it gave.
            totals = list(picks)
            for i in node.counters.live:
                child = node.children[i]
                if isinstance(child, Node):
                    rest = sum(by_node[child]) - sum(child.counters.picks)
                    totals[i] += max(1, min(rest, child.room()))
                else:
                    source = self._sources.get(child) or self._source(child)
                    totals[i] = source.at(picks[i], tokens[i], *rows_picked(child))
            by_node[node] = totals
        return by_node

    def _source(self, source: int) -> SourceTotal:
        if source not in self._sources:
            config = self._config
            curve = self._size_estimates[source] if source in config.measured_sources else None
            self._sources[source] = SourceTotal(
                curve=curve,
                end=curve.tokens_before(rows_of(curve.epoch_rows, config.epochs[source]))
                if curve is not None
                else 0,
                max_tokens=config.sources[source].max_tokens,
                pick_tokens=config.pick_tokens,
            )
        return self._sources[source]
