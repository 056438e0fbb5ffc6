"""The mixture as a tree: leaves are sources, inner nodes carry a policy.

What is decided is a *pick*: one sample, or with ``batching`` a whole global batch. In this folder "sample" means a
pick, and ``sample_tokens`` its tokens, but for the states that come in and go out.

A parent is the sole authority for its children's counters. A child is exhausted when a pick from it
fails, as part of that sample's decision, and never earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenloom_server.config.node import Child, NodeConfig
from tokenloom_server.config.run import RunConfig
from tokenloom_server.core.state import MAX_COUNTER, ChildState
from tokenloom_server.mixing.least_consumed import LeastConsumed
from tokenloom_server.mixing.policy import Children, NodeShape, Policy
from tokenloom_server.mixing.round_robin import RoundRobin
from tokenloom_server.mixing.schedule import Points, Schedule
from tokenloom_server.mixing.sequential import Sequential
from tokenloom_server.mixing.totals import SizeEstimate, SourceTotal, rows_of
from tokenloom_server.mixing.varying import (
    UPDATE_SAMPLES,
    Estimated,
    Scheduled,
    balance_remaining,
    soft_sequential,
)
from tokenloom_server.mixing.weighted import Weighted
from tokenloom_server.mixing.weights import integer_weights

#: Returned in place of a source id when a node has nothing more to give.
NOTHING = -1

#: Source ids of consecutive samples.
Picks = npt.NDArray[np.int32]

#: The rows counter of a source, and the offset of its cursor, behind its last picked sample.
RowsPicked = Callable[[int], tuple[int, int]]

_FIXED: dict[str, Callable[[NodeShape, Children, Sequence[int]], Policy]] = {
    "least_consumed": LeastConsumed,
    "weighted": Weighted,
    "round_robin": RoundRobin,
    "sequential": Sequential,
}
_RULES = {"soft_sequential": soft_sequential, "balance_remaining": balance_remaining}


class NodeRegime(NamedTuple):
    """What of a node changes only when a child turns out to be out, or weights are made anew: immutable, shared by
    many marks."""

    exhausted: tuple[bool, ...]
    credits: object


#: Of every node, in node-id order.
MixWeights = tuple[NodeRegime, ...]


class _Node:
    """One node at work. ``children`` holds a source id for a leaf, else a node."""

    def __init__(
        self,
        shape: NodeShape,
        config: NodeConfig,
        children: tuple[int | _Node, ...],
        states: Sequence[ChildState],
        pick_samples: int,
    ) -> None:
        """``pick_samples``: samples of one decision. All that is counted here is counted in these."""
        self.id = shape.node_id
        self.config = config
        self.children = children
        self.exhausted = [child.exhausted for child in states]
        self._pick_samples = pick_samples
        #: The counters when this node was built, in samples.
        self.states = tuple(states)
        if pick_samples > 1:
            states = [
                replace(child, samples=child.samples // pick_samples, total=child.total // pick_samples)
                for child in states
            ]
        self.counters = Children(
            [child.samples for child in states],
            [child.tokens for child in states],
            [
                was.exhausted or of.presence != "live" or (isinstance(child, _Node) and child.waits)
                for was, of, child in zip(states, config.children, children, strict=True)
            ],
        )
        self._sample_tokens = shape.sample_tokens
        self._leaves = np.array([NOTHING if isinstance(child, _Node) else child for child in children], np.int32)
        self._inner = [(i, child) for i, child in enumerate(children) if isinstance(child, _Node)]
        # Of leaves: a node knows its own.
        self._limited = {
            i: of.max_tokens
            for i, of in enumerate(config.children)
            if of.max_tokens is not None and not isinstance(of, NodeConfig)
        }
        self._ends = [_ends_node(child, config) for child in config.children]
        self._stopped = any(out and ends for out, ends in zip(self.exhausted, self._ends, strict=True))
        self._live = self.counters.out.count(False)
        self.policy = _policy_of(shape, config, self.counters, states)

    @property
    def is_over(self) -> bool:
        return not self._live or self._stopped or not self.room()

    @property
    def waits(self) -> bool:
        """Whether it gives nothing only because what it has left is paused."""
        return not (self._live or self._stopped) and self.room() > 0 and self.has_paused

    @property
    def has_paused(self) -> bool:
        """Whether a child that is not at its end is paused, or waits itself."""
        return any(
            not exhausted and (of.presence == "paused" or (of.presence == "live" and out))
            for exhausted, out, of in zip(self.exhausted, self.counters.out, self.config.children, strict=True)
        )

    def nodes(self) -> Iterator[_Node]:
        """This one and all below."""
        yield self
        for _, child in self._inner:
            yield from child.nodes()

    def plan(self, count: int) -> Picks:
        """The sources of the node's next ``count`` samples while no child is out; NOTHING behind one that is."""
        if self.is_over:
            return np.full(count, NOTHING, np.int32)
        choices = self.policy.upcoming(count)
        picks: Picks = self._leaves[choices]
        for position, child in self._inner:
            at = np.flatnonzero(choices == position)
            if len(at):
                picks[at] = child.plan(len(at))
        for position in self._limited:
            left = self._left(position)
            if left < count:
                picks[np.flatnonzero(choices == position)[left:]] = NOTHING
        if (room := self.room()) < count:
            picks[room:] = NOTHING
        return picks

    def issue(self, count: int) -> None:
        """Counts the first ``count`` samples of the plan, here and below."""
        counts = np.bincount(self.policy.upcoming(count), minlength=len(self.children))
        for position, child in self._inner:
            if counts[position]:
                child.issue(int(counts[position]))
        for position in np.flatnonzero(counts).tolist():
            self._count(position, int(counts[position]))
        self.policy.issued(count)

    def pick(self, has_sample: Callable[[int], bool]) -> int:
        """Decides one sample and counts it; children that turn out to be out are marked so."""
        retry = 0
        while not self.is_over:
            position = self.policy.choose(retry)
            child, source, waits = self.children[position], NOTHING, False
            if isinstance(child, _Node):
                source = child.pick(has_sample)
                waits = child.waits
            elif self._left(position) and has_sample(child):
                source = child
            if source != NOTHING:
                self._count(position, 1)
                self.policy.issued(1)
                return source
            self.counters.out[position] = True
            if not waits:
                self.exhausted[position] = True
                self._stopped = self._stopped or self._ends[position]
            self._live -= 1
            retry += 1
            self.policy.lost(position)
        return NOTHING

    def mix_weights(self) -> NodeRegime:
        return NodeRegime(tuple(self.exhausted), self.policy.mark())

    def states_at(self, mix_weights: NodeRegime, given: Sequence[int]) -> tuple[ChildState, ...]:
        """The children's states under a regime; ``given`` is how many samples each gave since the node was built."""
        pick = self._pick_samples
        samples = [was.samples + more for was, more in zip(self.states, given, strict=True)]
        tokens = [was.tokens + more * self._sample_tokens // pick for was, more in zip(self.states, given, strict=True)]
        owed = self.policy.credits(mix_weights.credits, tokens)
        made = self.policy.made(mix_weights.credits) or [(0, 0)] * len(given)
        return tuple(
            ChildState(own, own_tokens, credit, exhausted, weight, total * pick)
            for own, own_tokens, credit, exhausted, (weight, total) in zip(
                samples, tokens, owed, mix_weights.exhausted, made, strict=True
            )
        )

    def update(self, totals: Sequence[int], run_tokens: int) -> None:
        """Makes the weights anew, of the totals of the children or of the run's tokens, as the policy has it."""
        if isinstance(self.policy, Estimated):
            self.policy.update(totals)
        elif isinstance(self.policy, Scheduled):
            self.policy.update(run_tokens)

    def room(self) -> int:
        """How many more samples its own ``max_tokens`` allow."""
        if self.config.max_tokens is None:
            return MAX_COUNTER
        return max(0, self.config.max_tokens - sum(self.counters.tokens)) // self._sample_tokens

    def reached(self) -> list[str]:
        """The children that are out because they had their ``max_tokens``, by name."""
        return [
            of.name
            for i, (of, child) in enumerate(zip(self.config.children, self.children, strict=True))
            if self.exhausted[i] and not (child.room() if isinstance(child, _Node) else self._left(i))
        ]

    def _left(self, position: int) -> int:
        """How many more samples a leaf's ``max_tokens`` allow."""
        most = self._limited.get(position)
        return MAX_COUNTER if most is None else max(0, most - self.counters.tokens[position]) // self._sample_tokens

    def _count(self, position: int, samples: int) -> None:
        self.counters.samples[position] += samples
        self.counters.tokens[position] += samples * self._sample_tokens


class Mixer:
    """Decides, sample by sample, which source is next."""

    def __init__(
        self,
        config: RunConfig,
        states: Sequence[Sequence[ChildState]],
        size_estimates: Mapping[int, SizeEstimate] | None = None,
    ) -> None:
        """``states`` are the nodes' in node-id order, as in ``State.nodes``; ``size_estimates`` those of the sources in
        ``RunConfig.measured_sources``, by id."""
        shapes = {shape.node_id: (shape, state) for (_, shape), state in zip(node_shapes(config), states, strict=True)}
        # Children before parents.
        self._upwards: list[_Node] = []

        def build(node: NodeConfig) -> _Node:
            shape, state = shapes[node.id]
            children = tuple(build(child) if isinstance(child, NodeConfig) else child.id for child in node.children)
            self._upwards.append(_Node(shape, node, children, state, config.pick_samples))
            return self._upwards[-1]

        self._config = config
        self._root = build(config.mixture)
        self._nodes = sorted(self._upwards, key=lambda node: node.id)
        self._varies = [node for node in self._nodes if isinstance(node.policy, Estimated | Scheduled)]
        self._size_estimates = size_estimates or {}
        self._source_totals: dict[int, SourceTotal] = {}
        estimated = {below for node in self._nodes if isinstance(node.policy, Estimated) for below in node.nodes()}
        self._estimated = [node for node in self._upwards if node in estimated]
        #: What a state has beside the counters, now.
        self.mix_weights: MixWeights = self._mix_weights()

    def begin(self, sample_index: int, total_tokens: int, rows_picked: RowsPicked) -> int:
        """To be called before each decision, with the run's position in picks: makes weights anew where that is due,
        from the counters here. Returns how many picks may be decided before it is to be called again."""
        if not self._varies:
            return MAX_COUNTER
        # At an end nothing changes any more: a state there is the same however often it is asked.
        if not self._root.is_over:
            due = not sample_index % UPDATE_SAMPLES
            nodes = [node for node in self._varies if not node.is_over and (due or not any(node.policy.weights()))]
            if nodes:
                totals = self._totals(rows_picked) if any(node in self._estimated for node in nodes) else {}
                for node in nodes:
                    node.update(totals.get(node, ()), total_tokens)
                self.mix_weights = self._mix_weights()
        return UPDATE_SAMPLES - sample_index % UPDATE_SAMPLES

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
        self.mix_weights = self._mix_weights()
        return source

    def states(self, mix_weights: MixWeights, given: Sequence[int]) -> tuple[tuple[ChildState, ...], ...]:
        """The nodes' states under an earlier regime of this mixer, once each source gave so many samples since
        the mixer was made (by source id)."""
        below: dict[_Node, list[int]] = {}
        for node in self._upwards:
            below[node] = [sum(below[child]) if isinstance(child, _Node) else given[child] for child in node.children]
        return tuple(node.states_at(now, below[node]) for node, now in zip(self._nodes, mix_weights, strict=True))

    def exhausted(self, mix_weights: MixWeights) -> tuple[bool, ...]:
        """Which sources are out under a regime of this mixer, by source id, as their parents have it."""
        found = {
            child: out
            for node, now in zip(self._nodes, mix_weights, strict=True)
            for child, out in zip(node.children, now.exhausted, strict=True)
            if not isinstance(child, _Node)
        }
        return tuple(found[source] for source in range(len(found)))

    def weights(self) -> dict[int, tuple[int, ...]]:
        """By node id, the weights in force of its children; 0 for one that gets nothing."""
        return {
            node.id: (0,) * len(node.children) if node.is_over else tuple(node.policy.weights()) for node in self._nodes
        }

    def shares(self) -> tuple[float, ...]:
        """Each source's share of the next tokens that the weights in force ask for, by source id."""
        shares: dict[int, Fraction] = {}
        weights = self.weights()

        def visit(node: _Node, share: Fraction) -> None:
            total = sum(weights[node.id])
            for child, weight in zip(node.children, weights[node.id], strict=True):
                own = share * Fraction(weight, total) if total else Fraction(0)
                if isinstance(child, _Node):
                    visit(child, own)
                else:
                    shares[child] = own

        visit(self._root, Fraction(1))
        return tuple(float(shares[source]) for source in sorted(shares))

    def why_over(self) -> str:
        """Why there is no further sample, once a pick found none."""
        root, sources = self._root, self._config.sources
        out = self.exhausted(self.mix_weights)
        if root.waits:
            left = [of.name for of, gone in zip(sources, out, strict=True) if of.presence == "paused" and not gone]
            return f"only paused sources are left: {', '.join(left)}"
        if not root.room():
            return f"the mixture has given its max_tokens of {root.config.max_tokens:,}"
        if all(gone or of.presence == "dropped" for of, gone in zip(sources, out, strict=True)):
            reason = "every source is exhausted"
        else:
            names = ", ".join(of.name for of, gone in zip(sources, out, strict=True) if gone)
            reason = f"exhausted, and its node stops: {names}"
        reached = [name for node in self._nodes for name in node.reached()]
        return f"{reason} (max_tokens reached: {', '.join(reached)})" if reached else reason

    def _mix_weights(self) -> MixWeights:
        return tuple(node.mix_weights() for node in self._nodes)

    def _totals(self, rows_picked: RowsPicked) -> dict[_Node, list[int]]:
        """Of each node from which an estimate is made, its children's totals in samples."""
        found: dict[_Node, list[int]] = {}
        for node in self._estimated:
            samples, tokens = node.counters.samples, node.counters.tokens
            # What is out gives no more than it gave.
            totals = list(samples)
            for i in node.counters.live:
                child = node.children[i]
                if isinstance(child, _Node):
                    rest = sum(found[child]) - sum(child.counters.samples)
                    totals[i] += max(1, min(rest, child.room()))
                else:
                    totals[i] = self._source_total(child).at(samples[i], tokens[i], *rows_picked(child))
            found[node] = totals
        return found

    def _source_total(self, source: int) -> SourceTotal:
        known = self._source_totals.get(source)
        if known is None:
            of = self._config.sources[source]
            extent = self._size_estimates[source] if source in self._config.measured_sources else None
            known = self._source_totals[source] = SourceTotal(
                rows=rows_of(extent, self._config.epochs[source]) if extent is not None else None,
                tokens_per_1000_rows=extent.tokens_per_1000_rows if extent is not None else 0,
                max_tokens=of.max_tokens,
                sample_tokens=self._config.pick_tokens,
            )
        return known


def _policy_of(shape: NodeShape, config: NodeConfig, counters: Children, states: Sequence[ChildState]) -> Policy:
    if config.policy == "schedule":
        points = [_points(child) for child in config.children]
        return Scheduled(shape, counters, states, Schedule(points, linear=config.interpolate == "linear"))
    if config.policy in _RULES:
        return Estimated(shape, counters, states, _RULES[config.policy])
    return _FIXED[config.policy](shape, counters, [child.credit for child in states])


def _points(child: Child) -> Points:
    return [(0, child.weight)] if isinstance(child.weight, float) else child.weight


def _ends_node(child: Child, node: NodeConfig) -> bool:
    """Whether the child's end is the node's."""
    own = None if isinstance(child, NodeConfig) else child.on_exhausted
    return (own or node.on_exhausted) == "stop" and child.presence != "dropped"


def node_shapes(config: RunConfig) -> Iterator[tuple[NodeConfig, NodeShape]]:
    """Every node with its shape, by node id."""
    for node in config.nodes:
        ids = tuple(2 * child.id + isinstance(child, NodeConfig) for child in node.children)
        # Of a schedule, weights are the policy's own.
        numbers = [child.weight if isinstance(child.weight, float) else 1.0 for child in node.children]
        yield (
            node,
            NodeShape(
                node_id=node.id,
                seed=config.seed,
                sample_tokens=config.pick_tokens,
                weights=integer_weights(numbers),
                child_ids=ids,
            ),
        )


def initial_nodes(config: RunConfig) -> tuple[tuple[ChildState, ...], ...]:
    """The nodes' states before the first sample."""
    return tuple((ChildState(),) * len(node.children) for node in config.nodes)


def target_shares(config: RunConfig, size_estimates: Mapping[int, SizeEstimate] | None = None) -> tuple[float, ...]:
    """Each source's share of all tokens that the policies ask for at the beginning of the run, by source id; of a
    ``sequential`` node the first child has all. ``size_estimates`` as for the ``Mixer``."""
    mixer = Mixer(config, initial_nodes(config), size_estimates)
    mixer.begin(0, 0, lambda _: (0, 0))
    return mixer.shares()
