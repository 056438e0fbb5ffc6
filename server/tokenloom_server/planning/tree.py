"""The mixture as a plan sees it: what is left of each source, and how each node shares its tokens out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from tokenloom_server.config.node import NodeConfig
from tokenloom_server.config.run import RunConfig
from tokenloom_server.config.source import SourceConfig
from tokenloom_server.core.state import ChildState, SourceState, State
from tokenloom_server.mixing.totals import rows_of
from tokenloom_server.order.size_estimates import SizeEstimate
from tokenloom_server.planning.shares import Floats, Span, shares_of


class Leaf:
    """A source. Amounts are in tokens; ``left`` is what its samples still hold, infinite where it is read for ever;
    ``given`` is counted from the plan's beginning."""

    def __init__(self, config: SourceConfig, epochs: float, left: float, *, capped: bool, out: bool) -> None:
        self.config = config
        self.name = config.name
        #: Passes that are allowed, by the source and the nodes above it.
        self.epochs = epochs
        self.left = left
        #: What is left is what its ``max_tokens`` leave.
        self.capped = capped
        self.given = 0.0
        #: It gave all that it has.
        self.out = out


class Branch:
    """A node. ``children`` are leaves and branches; the arrays have one entry for each of them."""

    def __init__(
        self,
        config: NodeConfig,
        children: Sequence[Leaf | Branch],
        known: Sequence[ChildState],
        sample_tokens: int,
    ) -> None:
        self.config = config
        self.name = config.name
        self.children = tuple(children)
        pairs = list(zip(config.children, known, strict=True))
        #: Whether a child can be asked for tokens: it is there, not paused, and not found to be out.
        self.live = np.array([child.presence == "live" and not was.exhausted for child, was in pairs])
        #: Whether it was found to be out.
        self.exhausted = np.array([was.exhausted for was in known])
        self._paused = any(child.presence == "paused" and not was.exhausted for child, was in pairs)
        #: Tokens of each child since the run began.
        self.given = np.array([float(was.tokens) for was in known])
        #: What its own ``max_tokens`` leave.
        self.room = math.inf
        if config.max_tokens is not None:
            given = sum(was.tokens for was in known)
            self.room = max(0, config.max_tokens - given) // sample_tokens * sample_tokens
        #: Why it is over though a child could go on; empty while that is not so.
        self.stopped = next(
            (
                f"stops, as {child.name} is exhausted"
                for i, child in enumerate(children)
                if self.exhausted[i] and self.ends(i)
            ),
            "",
        )
        self._shares = shares_of(config, sample_tokens)

    def ends(self, position: int) -> bool:
        """Whether the end of a child is the node's."""
        child = self.config.children[position]
        own = child.on_exhausted if isinstance(child, SourceConfig) else None
        return (own or self.config.on_exhausted) == "stop" and child.presence != "dropped"

    def downwards(self) -> Iterator[Branch]:
        """Itself and the nodes below it, parents before their children."""
        yield self
        for child in self.children:
            if isinstance(child, Branch):
                yield from child.downwards()

    @property
    def over(self) -> bool:
        return bool(self.stopped) or not self.live.any()

    @property
    def waits(self) -> bool:
        """Whether all that it could still give is paused."""
        return not self.stopped and not self.live.any() and (self._paused or any(self._waiting()))

    @property
    def left(self) -> float:
        """What it may still give while nobody below stops."""
        if self.over:
            return 0.0
        return min(self.room, sum(child.left for child, live in zip(self.children, self.live, strict=True) if live))

    def shares(self, span: Span) -> Floats:
        """Mean shares of the children over a span that begins now; they add up to 1."""
        return self._shares.over(self.live, self._left(), self.given, span)

    def reach(self, at: float, rate: float) -> float:
        """How many tokens of the run may pass until the shares have to be looked at again; ``rate`` of them are this
        node's."""
        return self._shares.reach(self.live, self._left(), self.given, at, rate)

    def limits(self) -> Floats:
        """After how many tokens each child itself has no more: what is left of a source, a node's own maximum."""
        return np.array([child.left if isinstance(child, Leaf) else child.room for child in self.children])

    def take(self, tokens: Floats) -> None:
        """Gives so many tokens of each child."""
        self.given += tokens
        self.room -= float(tokens.sum())
        for child, its in zip(self.children, tokens.tolist(), strict=True):
            if isinstance(child, Leaf):
                child.left = max(0.0, child.left - its)
                child.given += its

    def _waiting(self) -> Iterator[bool]:
        for child, of in zip(self.children, self.config.children, strict=True):
            yield isinstance(child, Branch) and of.presence == "live" and child.waits

    def _left(self) -> Floats:
        if not self._shares.looks_ahead:
            return self.given
        return np.array([child.left for child in self.children])


def grow(
    config: RunConfig, size_estimates: Sequence[SizeEstimate | None], state: State
) -> tuple[Branch, tuple[Leaf, ...]]:
    """The tree from a state on: its root, and the leaves by source id."""
    leaves: dict[int, Leaf] = {}

    def leaf(source: SourceConfig, known: ChildState) -> Leaf:
        was, epochs = state.sources[source.id], config.epochs[source.id]
        left = _left_of(config, size_estimates[source.id], epochs, was)
        room = math.inf
        if source.max_tokens is not None:
            room = max(0, source.max_tokens - known.tokens) // config.sequence_length * config.sequence_length
        leaves[source.id] = Leaf(
            source, epochs, min(left, room), capped=room < left, out=was.exhausted or known.exhausted
        )
        return leaves[source.id]

    def branch(node: NodeConfig) -> Branch:
        known = state.nodes[node.id]
        children = [
            branch(child) if isinstance(child, NodeConfig) else leaf(child, was)
            for child, was in zip(node.children, known, strict=True)
        ]
        return Branch(node, children, known, config.sequence_length)

    root = branch(config.mixture)
    return root, tuple(leaves[source] for source in range(len(leaves)))


def _left_of(config: RunConfig, extent: SizeEstimate | None, epochs: float, was: SourceState) -> float:
    """Tokens that a source's samples still hold: those of its rows left, in whole samples."""
    if was.exhausted or extent is None:
        return 0.0
    if math.isinf(epochs):
        return math.inf
    tokens = (rows_of(extent, epochs) - was.rows) * extent.tokens_per_1000_rows // 1000
    lookahead = 0
    if config.packing == "concat":
        # Where samples are padded, no part of them is a row's.
        tokens -= was.cursor.offset
        lookahead = config.labels == "shifted"
    length = config.sequence_length
    return max(0.0, float((tokens - lookahead) // length * length))
