"""The mixture as a tree: leaves are sources, inner nodes carry a policy.

A parent is the sole authority for its children's counters. A child is exhausted when a pick from it
fails, as part of that sample's decision, and never earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from tokenloom_server.config import NodeConfig, RunConfig
from tokenloom_server.mixing.least_consumed import LeastConsumed
from tokenloom_server.mixing.policy import Children, NodeShape, Policy
from tokenloom_server.mixing.weighted import Weighted
from tokenloom_server.mixing.weights import integer_weights
from tokenloom_server.state import ChildState

#: Returned in place of a source id when a node has nothing more to give.
NOTHING = -1

_POLICIES: dict[str, Callable[[NodeShape, Children, Sequence[int]], Policy]] = {
    "least_consumed": LeastConsumed,
    "weighted": Weighted,
}


class NodeMark(NamedTuple):
    """A node's counters at a step: immutable, cheap to take; ``Mixer.states`` reads it."""

    samples: tuple[int, ...]
    tokens: tuple[int, ...]
    exhausted: tuple[bool, ...]
    credits: object


class _Node:
    """One node at work. ``children`` holds a source id for a leaf, else a node."""

    def __init__(
        self,
        shape: NodeShape,
        config: NodeConfig,
        children: tuple[int | _Node, ...],
        states: Sequence[ChildState],
    ) -> None:
        self.children = children
        self.stop_on_exhausted = config.on_exhausted == "stop"
        self.counters = Children(
            [child.samples for child in states],
            [child.tokens for child in states],
            [child.exhausted for child in states],
        )
        self.live = self.counters.exhausted.count(False)
        self.policy = _POLICIES[config.policy](shape, self.counters, [child.credit for child in states])

    def pick(self, has_sample: Callable[[int], bool], path: list[tuple[_Node, int]]) -> int:
        retry = 0
        while self.live and not (self.stop_on_exhausted and self.live < len(self.children)):
            position = self.policy.choose(retry)
            child = self.children[position]
            if isinstance(child, _Node):
                source = child.pick(has_sample, path)
            else:
                source = child if has_sample(child) else NOTHING
            if source != NOTHING:
                path.append((self, position))
                return source
            self.counters.exhausted[position] = True
            self.live -= 1
            retry += 1
            if self.live:
                self.policy.exhausted(position)
        return NOTHING

    def mark(self) -> NodeMark:
        counters = self.counters
        return NodeMark(tuple(counters.samples), tuple(counters.tokens), tuple(counters.exhausted), self.policy.mark())


class Mixer:
    """Decides, sample by sample, which source is next."""

    def __init__(self, config: RunConfig, states: Sequence[Sequence[ChildState]]) -> None:
        """``states`` are the nodes' in node-id order, as in ``State.nodes``."""
        self._nodes: list[_Node] = []
        shapes = list(node_shapes(config))
        built: dict[int, _Node] = {}
        # Children before parents, so that a parent can hold them; ids are depth first, parents first.
        for number in reversed(range(len(shapes))):
            node, shape, child_ids = shapes[number]
            children = tuple(child // 2 if child % 2 == 0 else built[child // 2] for child in child_ids)
            built[number] = _Node(shape, node, children, states[number])
        self._nodes = [built[number] for number in range(len(shapes))]
        self._path: list[tuple[_Node, int]] = []

    def pick(self, has_sample: Callable[[int], bool]) -> int:
        """The next sample's source id, or ``NOTHING`` at the end of data.

        ``has_sample(source)`` says whether a pick from a source succeeds. Follow with ``issue``.
        """
        self._path.clear()
        return self._nodes[0].pick(has_sample, self._path)

    def issue(self, tokens: int) -> None:
        """Counts the sample that was picked last, in every node on its path."""
        for node, position in self._path:
            node.counters.samples[position] += 1
            node.counters.tokens[position] += tokens
            node.policy.issued(position, tokens)

    def marks(self) -> tuple[NodeMark, ...]:
        """Every node's counters now."""
        return tuple(node.mark() for node in self._nodes)

    def states(self, marks: Sequence[NodeMark]) -> tuple[tuple[ChildState, ...], ...]:
        """The nodes' states at earlier marks of this mixer."""
        return tuple(
            tuple(
                ChildState(*child)
                for child in zip(
                    mark.samples,
                    mark.tokens,
                    node.policy.credits(mark.credits, mark.tokens),
                    mark.exhausted,
                    strict=True,
                )
            )
            for node, mark in zip(self._nodes, marks, strict=True)
        )


def node_shapes(config: RunConfig) -> Iterator[tuple[NodeConfig, NodeShape, tuple[int, ...]]]:
    """Every node in id order (depth first, parents first) with its shape and its children's stable ids."""
    nodes: list[tuple[NodeConfig, list[int]]] = []
    sources = 0

    def visit(node: NodeConfig) -> int:
        nonlocal sources
        number = len(nodes)
        ids: list[int] = []
        nodes.append((node, ids))
        for child in node.children:
            if isinstance(child, NodeConfig):
                ids.append(2 * visit(child) + 1)
            else:
                ids.append(2 * sources)
                sources += 1
        return number

    visit(config.mixture)
    for number, (node, ids) in enumerate(nodes):
        shape = NodeShape(
            node_id=number,
            seed=config.seed,
            sample_tokens=config.sequence_length,
            weights=integer_weights([child.weight for child in node.children]),
            child_ids=tuple(ids),
        )
        yield node, shape, shape.child_ids


def initial_nodes(config: RunConfig) -> tuple[tuple[ChildState, ...], ...]:
    """The nodes' states before the first sample."""
    return tuple((ChildState(),) * len(ids) for _, _, ids in node_shapes(config))


def target_shares(config: RunConfig) -> tuple[float, ...]:
    """Each source's share of all tokens that the weights ask for while everything lasts, by source id."""
    shares: list[Fraction] = []

    def visit(node: NodeConfig, share: Fraction) -> None:
        weights = integer_weights([child.weight for child in node.children])
        for child, weight in zip(node.children, weights, strict=True):
            own = share * Fraction(weight, sum(weights))
            if isinstance(child, NodeConfig):
                visit(child, own)
            else:
                shares.append(own)

    visit(config.mixture, Fraction(1))
    return tuple(float(share) for share in shares)


def exhausted_sources(config: RunConfig, nodes: Sequence[Sequence[ChildState]]) -> tuple[bool, ...]:
    """Which sources are exhausted, by source id, as their parents have it."""
    found = {
        child_id // 2: child.exhausted
        for (_, _, ids), children in zip(node_shapes(config), nodes, strict=True)
        for child_id, child in zip(ids, children, strict=True)
        if child_id % 2 == 0
    }
    return tuple(found[source] for source in range(len(found)))
