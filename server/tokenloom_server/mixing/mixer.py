"""The mixture as a tree: leaves are sources, inner nodes carry a policy.

A parent is the sole authority for its children's counters. A child is exhausted when a pick from it
fails, as part of that sample's decision, and never earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenloom_server.config import NodeConfig, RunConfig
from tokenloom_server.mixing.least_consumed import LeastConsumed
from tokenloom_server.mixing.policy import Children, NodeShape, Policy
from tokenloom_server.mixing.round_robin import RoundRobin
from tokenloom_server.mixing.sequential import Sequential
from tokenloom_server.mixing.weighted import Weighted
from tokenloom_server.mixing.weights import integer_weights
from tokenloom_server.state import ChildState

#: Returned in place of a source id when a node has nothing more to give.
NOTHING = -1

#: Source ids of consecutive samples.
Picks = npt.NDArray[np.int32]

_POLICIES: dict[str, Callable[[NodeShape, Children, Sequence[int]], Policy]] = {
    "least_consumed": LeastConsumed,
    "weighted": Weighted,
    "round_robin": RoundRobin,
    "sequential": Sequential,
}


class NodeRegime(NamedTuple):
    """What of a node changes only when a child turns out to be out: immutable, shared by many marks."""

    exhausted: tuple[bool, ...]
    credits: object


#: Of every node, in node-id order.
Regime = tuple[NodeRegime, ...]


class _Node:
    """One node at work. ``children`` holds a source id for a leaf, else a node."""

    def __init__(
        self,
        shape: NodeShape,
        config: NodeConfig,
        children: tuple[int | _Node, ...],
        states: Sequence[ChildState],
    ) -> None:
        self.id = shape.node_id
        self.children = children
        self._sample_tokens = shape.sample_tokens
        self._leaves = np.array([NOTHING if isinstance(child, _Node) else child for child in children], np.int32)
        self._inner = [(i, child) for i, child in enumerate(children) if isinstance(child, _Node)]
        self._stop_on_exhausted = config.on_exhausted == "stop"
        self._counters = Children(
            [child.samples for child in states],
            [child.tokens for child in states],
            [child.exhausted for child in states],
        )
        self._live = self._counters.exhausted.count(False)
        self._policy = _POLICIES[config.policy](shape, self._counters, [child.credit for child in states])
        #: The counters when this node was built.
        self.states = tuple(states)

    def plan(self, count: int) -> Picks:
        """The sources of the node's next ``count`` samples while no child is out; NOTHING behind one that is."""
        if self._is_over():
            return np.full(count, NOTHING, np.int32)
        choices = self._policy.upcoming(count)
        picks: Picks = self._leaves[choices]
        for position, child in self._inner:
            at = np.flatnonzero(choices == position)
            if len(at):
                picks[at] = child.plan(len(at))
        return picks

    def issue(self, count: int) -> None:
        """Counts the first ``count`` samples of the plan, here and below."""
        counts = np.bincount(self._policy.upcoming(count), minlength=len(self.children))
        for position, child in self._inner:
            if counts[position]:
                child.issue(int(counts[position]))
        for position in np.flatnonzero(counts).tolist():
            self._count(position, int(counts[position]))
        self._policy.issued(count)

    def pick(self, has_sample: Callable[[int], bool]) -> int:
        """Decides one sample and counts it; children that turn out to be out are marked so."""
        retry = 0
        while not self._is_over():
            position = self._policy.choose(retry)
            child, source = self.children[position], NOTHING
            if isinstance(child, _Node):
                source = child.pick(has_sample)
            elif has_sample(child):
                source = child
            if source != NOTHING:
                self._count(position, 1)
                self._policy.issued(1)
                return source
            self._counters.exhausted[position] = True
            self._live -= 1
            retry += 1
            if self._live:
                self._policy.exhausted(position)
        return NOTHING

    def regime(self) -> NodeRegime:
        return NodeRegime(tuple(self._counters.exhausted), self._policy.mark())

    def states_at(self, regime: NodeRegime, given: Sequence[int]) -> tuple[ChildState, ...]:
        """The children's states under a regime; ``given`` is how many samples each gave since the node was built."""
        samples = [was.samples + more for was, more in zip(self.states, given, strict=True)]
        tokens = [was.tokens + more * self._sample_tokens for was, more in zip(self.states, given, strict=True)]
        owed = self._policy.credits(regime.credits, tokens)
        return tuple(ChildState(*child) for child in zip(samples, tokens, owed, regime.exhausted, strict=True))

    def _is_over(self) -> bool:
        return not self._live or (self._stop_on_exhausted and self._live < len(self.children))

    def _count(self, position: int, samples: int) -> None:
        self._counters.samples[position] += samples
        self._counters.tokens[position] += samples * self._sample_tokens


class Mixer:
    """Decides, sample by sample, which source is next."""

    def __init__(self, config: RunConfig, states: Sequence[Sequence[ChildState]]) -> None:
        """``states`` are the nodes' in node-id order, as in ``State.nodes``."""
        shapes = {shape.node_id: (shape, state) for (_, shape), state in zip(node_shapes(config), states, strict=True)}
        # Children before parents.
        self._upwards: list[_Node] = []

        def build(node: NodeConfig) -> _Node:
            shape, state = shapes[node.id]
            children = tuple(build(child) if isinstance(child, NodeConfig) else child.id for child in node.children)
            self._upwards.append(_Node(shape, node, children, state))
            return self._upwards[-1]

        self._root = build(config.mixture)
        self._nodes = sorted(self._upwards, key=lambda node: node.id)
        #: What a state has beside the counters, now.
        self.regime: Regime = self._regime()

    def plan(self, count: int) -> Picks:
        """The source ids of the next ``count`` samples if each source has them (int32, [count]; NOTHING where
        none can be named). Decides nothing: ``issue`` as many as there are, then ``pick``."""
        return self._root.plan(count)

    def issue(self, count: int) -> None:
        """Decides and counts the first ``count`` samples of the plan: their sources have them."""
        self._root.issue(count)

    def pick(self, has_sample: Callable[[int], bool]) -> int:
        """Decides and counts the next sample where a source of the plan may be out: its source id, or ``NOTHING``
        at the end of data. ``has_sample(source)`` says whether a pick from a source succeeds."""
        source = self._root.pick(has_sample)
        self.regime = self._regime()
        return source

    def states(self, regime: Regime, given: Sequence[int]) -> tuple[tuple[ChildState, ...], ...]:
        """The nodes' states under an earlier regime of this mixer, once each source gave so many samples since
        the mixer was made (by source id)."""
        below: dict[_Node, list[int]] = {}
        for node in self._upwards:
            below[node] = [sum(below[child]) if isinstance(child, _Node) else given[child] for child in node.children]
        return tuple(node.states_at(now, below[node]) for node, now in zip(self._nodes, regime, strict=True))

    def exhausted(self, regime: Regime) -> tuple[bool, ...]:
        """Which sources are out under a regime of this mixer, by source id, as their parents have it."""
        found = {
            child: out
            for node, now in zip(self._nodes, regime, strict=True)
            for child, out in zip(node.children, now.exhausted, strict=True)
            if not isinstance(child, _Node)
        }
        return tuple(found[source] for source in range(len(found)))

    def _regime(self) -> Regime:
        return tuple(node.regime() for node in self._nodes)


def node_shapes(config: RunConfig) -> Iterator[tuple[NodeConfig, NodeShape]]:
    """Every node with its shape, by node id."""
    for node in config.nodes:
        ids = tuple(2 * child.id + isinstance(child, NodeConfig) for child in node.children)
        yield (
            node,
            NodeShape(
                node_id=node.id,
                seed=config.seed,
                sample_tokens=config.sequence_length,
                weights=integer_weights([child.weight for child in node.children]),
                child_ids=ids,
            ),
        )


def initial_nodes(config: RunConfig) -> tuple[tuple[ChildState, ...], ...]:
    """The nodes' states before the first sample."""
    return tuple((ChildState(),) * len(node.children) for node in config.nodes)


def target_shares(config: RunConfig) -> tuple[float, ...]:
    """Each source's share of all tokens that the policies ask for while everything lasts, by source id; of a
    ``sequential`` node the first child has all."""
    shares: dict[int, Fraction] = {}

    def visit(node: NodeConfig, share: Fraction) -> None:
        weights = integer_weights([child.weight for child in node.children])
        if node.policy == "sequential":
            weights = (1,) + (0,) * (len(weights) - 1)
        for child, weight in zip(node.children, weights, strict=True):
            own = share * Fraction(weight, sum(weights))
            if isinstance(child, NodeConfig):
                visit(child, own)
            else:
                shares[child.id] = own

    visit(config.mixture, Fraction(1))
    return tuple(float(shares[source]) for source in sorted(shares))
