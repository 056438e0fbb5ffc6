"""One node of the tree at work: counters of its children, limits, and what happens when a child is out.

A parent is the sole authority for its children's counters. A child is exhausted when a pick from it fails, as part of
that pick's decision, and never earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tokenloom_server.config.node import Child, NodeConfig
from tokenloom_server.core.state import MAX_COUNTER, ChildState
from tokenloom_server.mixing.policy import Children, Mark, NodeShape, NodeStart, policy_of

#: Returned in place of a source id when a node has nothing more to give.
NOTHING = -1

#: Source ids of consecutive picks.
Picks = npt.NDArray[np.int32]


class NodeWeights(NamedTuple):
    """What of a node changes only when a child turns out to be out, or weights are made anew: immutable, shared by
    many marks."""

    exhausted: tuple[bool, ...]
    mark: Mark


class RealLengths(Protocol):
    """How long are a source's samples, in real tokens?"""

    @property
    def real_tokens(self) -> int:
        """Of all samples before those that are picked now."""

    def real_lengths(self) -> Iterator[int]:
        """Of its samples from the next pick on, one after the other; reads them as they are asked for."""

    def real_of(self, picks: int) -> int:
        """Of its next picks together, which it has."""


class Node:
    """``children`` holds a source id for a leaf, else a node."""

    def __init__(
        self,
        shape: NodeShape,
        config: NodeConfig,
        children: tuple[int | Node, ...],
        states: Sequence[ChildState],
        pick_samples: int,
        lengths: Sequence[RealLengths] | None,
    ) -> None:
        """``states`` count samples; all that is counted here is counted in picks, of ``pick_samples`` samples each.
        ``lengths``: None where balances count every sample alike."""
        self.id = shape.node_id
        self.config = config
        self.policy = policy_of(config)
        self.children = children
        self.exhausted = [child.exhausted for child in states]
        self._pick_samples = pick_samples
        #: Tokens beside those of its children that count for its own ``max_tokens``.
        self.given_before = 0
        #: The counters when this node was built, in samples.
        self._states = tuple(states)
        if pick_samples > 1:
            states = [
                replace(
                    child, samples=child.samples // pick_samples, total=child.total // pick_samples
                )
                for child in states
            ]
        tokens = [child.tokens for child in states]
        self.counters = Children(
            [child.samples for child in states],
            tokens,
            [
                was.exhausted or of.presence != "live" or (isinstance(child, Node) and child.waits)
                for was, of, child in zip(states, config.children, children, strict=True)
            ],
            tokens,
        )
        if lengths is not None:
            below = [child if isinstance(child, Node) else lengths[child] for child in children]
            self.counters.balances = [of.real_tokens for of in below]
            self.counters.lengths = [of.real_lengths for of in below]
        #: By source id.
        self._lengths = lengths
        self.pick_tokens = shape.pick_tokens
        self._leaves = np.array(
            [NOTHING if isinstance(child, Node) else child for child in children], np.int32
        )
        self.inner = [(i, child) for i, child in enumerate(children) if isinstance(child, Node)]
        # Of leaves: a node knows its own.
        self._limited = {
            i: of.max_tokens
            for i, of in enumerate(config.children)
            if of.max_tokens is not None and not isinstance(of, NodeConfig)
        }
        self._ends = [_ends_node(child, config) for child in config.children]
        self._stopped = any(
            out and ends for out, ends in zip(self.exhausted, self._ends, strict=True)
        )
        self._live = self.counters.out.count(False)
        self.chooser = self.policy.chooser(NodeStart(shape, self.counters, states))

    @property
    def is_over(self) -> bool:
        return not self._live or self._stopped or not self.room()

    @property
    def waits(self) -> bool:
        """Whether it gives nothing only because what it has left is paused."""
        return not (self._live or self._stopped) and self.room() > 0 and self._has_paused

    @property
    def _has_paused(self) -> bool:
        """Whether a child that is not at its end is paused, or waits itself."""
        return any(
            not exhausted and (of.presence == "paused" or (of.presence == "live" and out))
            for exhausted, out, of in zip(
                self.exhausted, self.counters.out, self.config.children, strict=True
            )
        )

    def nodes(self) -> Iterator[Node]:
        """This one and all below."""
        yield self
        for _, child in self.inner:
            yield from child.nodes()

    def plan(self, count: int) -> Picks:
        """The sources of the node's next ``count`` picks while no child is out; NOTHING after one that is."""
        if self.is_over:
            return np.full(count, NOTHING, np.int32)
        choices = self.chooser.upcoming(count)
        picks: Picks = np.full(count, NOTHING, np.int32)
        picks[: len(choices)] = self._leaves[choices]
        for position, child in self.inner:
            own = np.flatnonzero(choices == position)
            if len(own):
                picks[own] = child.plan(len(own))
        for position in self._limited:
            left = self.leaf_room(position)
            if left < count:
                picks[np.flatnonzero(choices == position)[left:]] = NOTHING
        if (room := self.room()) < count:
            picks[room:] = NOTHING
        return picks

    @property
    def real_tokens(self) -> int:
        """Of all its picks, where balances count them."""
        return sum(self.counters.balances)

    def real_lengths(self) -> Iterator[int]:
        """The real tokens of its next picks, one after the other, as far as they can be planned."""
        assert self.counters.lengths is not None, "every pick counts alike"
        of_child: dict[int, Iterator[int]] = {}
        for position in islice(self.chooser.choices(), 0 if self.is_over else self.room()):
            if position not in of_child:
                of_child[position] = islice(
                    self.counters.lengths[position](), self.leaf_room(position)
                )
            length = next(of_child[position], None)
            if length is None:
                return
            yield length

    def take_planned(self, count: int) -> None:
        """Counts the first ``count`` picks of the plan as decided, here and below."""
        counts = np.bincount(self.chooser.upcoming(count), minlength=len(self.children))
        for position, child in self.inner:
            if counts[position]:
                child.take_planned(int(counts[position]))
        for position in np.flatnonzero(counts).tolist():
            self.count(position, int(counts[position]))
        self.chooser.taken(count)

    def decide_one(self, has_sample: Callable[[int], bool]) -> int:
        """Decides one pick and counts it; children that turn out to be out are marked so."""
        retry = 0
        while not self.is_over:
            position = self.chooser.choose(retry)
            child, source, waits = self.children[position], NOTHING, False
            if isinstance(child, Node):
                source = child.decide_one(has_sample)
                waits = child.waits
            elif self.leaf_room(position) and has_sample(child):
                source = child
            if source != NOTHING:
                self.count(position, 1)
                self.chooser.taken(1)
                return source
            self.lose(position, waits)
            retry += 1
        return NOTHING

    def weights(self) -> NodeWeights:
        return NodeWeights(tuple(self.exhausted), self.chooser.mark)

    def states_at(
        self, weights: NodeWeights, below: Sequence[tuple[int, int]]
    ) -> tuple[ChildState, ...]:
        """The children's states under these weights. ``below``: how many samples each gave since the node was built,
        and its balance."""
        counts, balances = zip(*below, strict=True)
        pick = self._pick_samples
        samples = [was.samples + more for was, more in zip(self._states, counts, strict=True)]
        tokens = [
            was.tokens + more * self.pick_tokens // pick
            for was, more in zip(self._states, counts, strict=True)
        ]
        return tuple(
            ChildState(own, own_tokens, credit, exhausted, weight, total * pick)
            for own, own_tokens, credit, exhausted, (weight, total) in zip(
                samples,
                tokens,
                weights.mark.credits_at(balances),
                weights.exhausted,
                weights.mark.made(),
                strict=True,
            )
        )

    def room(self) -> int:
        """How many more picks its own ``max_tokens`` allow."""
        if self.config.max_tokens is None:
            return MAX_COUNTER
        return (
            max(0, self.config.max_tokens - self.given_before - sum(self.counters.tokens))
            // self.pick_tokens
        )

    def leaf_room(self, position: int) -> int:
        """How many more picks a leaf's ``max_tokens`` allow."""
        most = self._limited.get(position)
        return (
            MAX_COUNTER
            if most is None
            else max(0, most - self.counters.tokens[position]) // self.pick_tokens
        )

    def reached(self) -> list[str]:
        """The children that are out because they had their ``max_tokens``, by name."""
        return [
            of.name
            for i, (of, child) in enumerate(zip(self.config.children, self.children, strict=True))
            if self.exhausted[i]
            and not (child.room() if isinstance(child, Node) else self.leaf_room(i))
        ]

    def why_out(self, position: int) -> str:
        """Why an exhausted child gives no more."""
        child = self.children[position]
        if isinstance(child, Node):
            return child.why_over()
        return "is exhausted" if self.leaf_room(position) else "has its max_tokens"

    def why_over(self) -> str:
        for position, ends in enumerate(self._ends):
            if ends and self.exhausted[position]:
                return f"stops, as {self.config.children[position].name} {self.why_out(position)}"
        return "has no child left" if self.room() else "has its max_tokens"

    def lose(self, position: int, waits: bool = False) -> None:
        """Marks a child that has nothing to give; exhausted, unless it only ``waits``."""
        self.counters.out[position] = True
        if not waits:
            self.exhausted[position] = True
            self._stopped = self._stopped or self._ends[position]
        self._live -= 1
        self.chooser.lost(position)

    def count(self, position: int, picks: int) -> None:
        """A child gave so many picks, which are counted below already."""
        counters, child = self.counters, self.children[position]
        counters.picks[position] += picks
        counters.tokens[position] += picks * self.pick_tokens
        if self._lengths is not None:
            counters.balances[position] = (
                child.real_tokens
                if isinstance(child, Node)
                else counters.balances[position] + self._lengths[child].real_of(picks)
            )


def _ends_node(child: Child, node: NodeConfig) -> bool:
    """Whether the child's end is the node's."""
    own = None if isinstance(child, NodeConfig) else child.on_exhausted
    return (own or node.on_exhausted) == "stop" and child.presence != "dropped"
