"""Nodes over sources that were consumed elsewhere: counters are summed, and balances go on from them.

A source that is new there gets a balance, no counters: it begins as if it had consumed as much for each unit of its
weight as ``new_source_baseline`` says of its siblings, so that it neither starves them nor waits for its share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from tokenloom_server.config.node import NodeConfig
from tokenloom_server.config.run import RunConfig
from tokenloom_server.config.source import SourceConfig
from tokenloom_server.core.state import MAX_COUNTER, ChildState
from tokenloom_server.mixing.mixer import node_shapes
from tokenloom_server.mixing.round_robin import levelled


@dataclass(frozen=True, slots=True)
class Carried:
    """``nodes`` is as in ``State.nodes``. ``baselines``, by source id: at how many tokens the balance of a new source
    (or of the new node around it) begins; None for a source that is not new, or where no policy keeps balances."""

    nodes: tuple[tuple[ChildState, ...], ...]
    baselines: tuple[int | None, ...]


def carry(config: RunConfig, samples: Sequence[int], known: Sequence[bool]) -> Carried:
    """The nodes' states where each source gave so many samples before. By source id; ``known``: whether it was read
    before at all."""
    shapes = {shape.node_id: shape for _, shape in node_shapes(config)}
    nodes: dict[int, tuple[ChildState, ...]] = {}
    baselines: list[int | None] = [None] * len(samples)

    def visit(node: NodeConfig) -> tuple[int, bool]:
        """Samples below a node, and whether any of it was read before."""
        below = [
            visit(child) if isinstance(child, NodeConfig) else (samples[child.id], known[child.id])
            for child in node.children
        ]
        shape, counts, old = shapes[node.id], [count for count, _ in below], [was for _, was in below]
        tokens = [count * shape.sample_tokens for count in counts]
        live = [child.presence == "live" for child in node.children]
        owed: tuple[int, ...] = (0,) * len(tokens)
        if node.policy == "round_robin":
            # The next round is the first for all of them.
            owed = levelled(counts, owed, [False] * len(counts), live)
        elif node.policy == "least_consumed":
            weights = [weight if there else 0 for weight, there in zip(shape.weights, live, strict=True)]
            balanced = _begun(config.new_source_baseline, weights, tokens, old)
            owed = _credits(weights, balanced)
            for child, at, was in zip(node.children, balanced, old, strict=True):
                if not was:
                    # What an inner node noted goes: the outermost balance is the one that a new source waits for.
                    baselines[:] = [at if i in _leaves(child) else noted for i, noted in enumerate(baselines)]
        nodes[node.id] = tuple(map(ChildState, counts, tokens, owed))
        return sum(counts), any(old)

    visit(config.mixture)
    return Carried(tuple(nodes[number] for number in sorted(nodes)), tuple(baselines))


def _begun(which: str, weights: Sequence[int], tokens: Sequence[int], old: Sequence[bool]) -> list[int]:
    """The tokens that each child's balance begins with: its own, and for a new one as many for each unit of its weight
    as its siblings have. A weight of 0 takes no part."""
    siblings = [Fraction(own, weight) for own, weight, was in zip(tokens, weights, old, strict=True) if was and weight]
    start = Fraction(0)
    if siblings and which != "zero":
        start = min(siblings) if which == "min" else sum(siblings, start) / len(siblings)
    return [own if was else int(start * weight) for own, weight, was in zip(tokens, weights, old, strict=True)]


def _credits(weights: Sequence[int], tokens: Sequence[int]) -> tuple[int, ...]:
    """What each child is owed of all tokens, in 1/W tokens, where W is the sum of the weights. A balance that is too
    far off to be counted keeps its proportions within what can be: it lasts as long as anyone will train."""
    whole, total = sum(weights), sum(own for own, weight in zip(tokens, weights, strict=True) if weight)
    owed = [weight * total - whole * own if weight else 0 for weight, own in zip(weights, tokens, strict=True)]
    most = max(map(abs, owed))
    return tuple(owed if most <= MAX_COUNTER else (credit * MAX_COUNTER // most for credit in owed))


def _leaves(child: NodeConfig | SourceConfig) -> frozenset[int]:
    """The ids of the sources at or below a child."""
    if isinstance(child, NodeConfig):
        return frozenset().union(*map(_leaves, child.children))
    return frozenset([child.id])
