"""The mixture as a tree: leaves are sources, inner nodes carry a policy.

What is decided is a *pick*: one sample, or with ``batching`` a whole global batch. States that come in and go out count
samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tokenloom_server.config.node import NodeConfig
from tokenloom_server.config.run import RunConfig
from tokenloom_server.core.state import MAX_COUNTER, SHARE_UNIT, ChildState, State, tokens_in_row
from tokenloom_server.core.token_curve import TokenCurve
from tokenloom_server.mixing.leap import Leaps
from tokenloom_server.mixing.node import NOTHING, Node, NodeWeights, Picks, RealLengths
from tokenloom_server.mixing.policy import NodeShape, integer_weights, points_of
from tokenloom_server.mixing.totals import RowsPicked, Totals
from tokenloom_server.mixing.varying import UPDATE_PICKS


class MixWeights(NamedTuple):
    """The weights of every node, in node-id order, and what follows from them for the sources, by id."""

    nodes: tuple[NodeWeights, ...]
    #: Each source's share of the next tokens, in 1/``SHARE_UNIT``.
    shares: tuple[int, ...]
    #: The tokens, as balances count them, that all sources gave since the mixer was made until these came in force,
    #: and what was expected of each of them till then, in 1/``SHARE_UNIT`` tokens.
    since: int
    expected: tuple[int, ...]

    def expected_after(self, tokens: int) -> tuple[int, ...]:
        """What is expected of each source once all gave so many tokens, in 1/``SHARE_UNIT`` tokens."""
        more = tokens - self.since
        return tuple(
            before + share * more for before, share in zip(self.expected, self.shares, strict=True)
        )


#: How the reason of an end begins that is that of the data.
ALL_EXHAUSTED = "every source is exhausted"


class Ending(NamedTuple):
    """What has no more to give, and why. ``source``: its id; None for a node."""

    name: str
    source: int | None
    why: str


class Stock(Protocol):
    """What do the sources have? A pipeline answers from their blocks, a plan from their token curves."""

    def has_sample(self, source: int) -> bool:
        """Whether a pick from a source succeeds."""

    def shortages(self, picks: npt.NDArray[np.int64]) -> Iterable[tuple[int, int]]:
        """``picks`` [sources]: how many are wanted of each. The sources that have fewer: (id, picks that it has)."""

    def rows_picked(self, source: int) -> tuple[int, int]:
        """Where a source stands after its last pick: its rows counter, and how many tokens of the next row are
        taken."""


class Mixer:
    """Decides, pick by pick, which source is next.

    ``decide`` is what a pipeline calls, again and again. It is made of four calls, always in this order:

    1. ``update_weights``: makes weights anew where that is due, and says for how many picks they hold;
    2. ``plan``: the sources of the next picks, if each of them has enough; changes nothing;
    3. ``take_planned``: counts the first of the planned picks, those that their sources have;
    4. ``decide_one``, where not a single planned pick can be had: one pick, for which it asks the sources.

    A forecast of the run decides many picks at once instead (``leap``).
    """

    def __init__(
        self,
        config: RunConfig,
        states: Sequence[Sequence[ChildState]],
        size_estimates: Mapping[int, TokenCurve] | None = None,
        lengths: Sequence[RealLengths] | None = None,
        *,
        clock_offset: int = 0,
    ) -> None:
        """``states`` are the nodes' in node-id order, as in ``State.nodes``, whose ``clock_offset`` counts for the
        root's ``max_tokens``; ``size_estimates`` those of the sources in ``RunConfig.measured_sources``, by id.
        ``lengths``: of the sources by id, where the run ``balances_real`` tokens."""
        states_by_node = dict(zip((node.id for node in config.nodes), states, strict=True))
        # Children before parents.
        self._upwards: list[Node] = []

        def build(node: NodeConfig) -> Node:
            children = tuple(
                build(child) if isinstance(child, NodeConfig) else child.id
                for child in node.children
            )
            shape, node_states = node_shape(config, node), states_by_node[node.id]
            self._upwards.append(
                Node(shape, node, children, node_states, config.pick_samples, lengths)
            )
            return self._upwards[-1]

        self._config = config
        self._lengths = lengths
        self._root = build(config.mixture)
        self._root.given_before = clock_offset
        self._nodes = sorted(self._upwards, key=lambda node: node.id)
        self._varying = [node for node in self._nodes if node.policy.makes_weights]
        self._totals = Totals(config, self._upwards, size_estimates or {})
        self._balance_at_start = sum(self._root.counters.balances)
        #: What a state has beside the counters, now.
        self.mix_weights = MixWeights(
            self._node_weights(), self._shares(), 0, (0,) * len(config.sources)
        )

    def update_weights(self, pick_index: int, total_tokens: int, rows_picked: RowsPicked) -> int:
        """To be called before each decision, with the run's position in picks: makes weights anew where that is due,
        from the counters there. Returns for how many picks they hold: then it is to be called again."""
        if not self._varying:
            return MAX_COUNTER
        # At an end nothing changes any more: a state there is the same however often it is asked.
        if not self._root.is_over:
            due = not pick_index % UPDATE_PICKS
            self._update(
                [
                    n
                    for n in self._varying
                    if not n.is_over and (due or not any(n.chooser.weights()))
                ],
                total_tokens,
                rows_picked,
            )
        return UPDATE_PICKS - pick_index % UPDATE_PICKS

    def decide(self, most: int, pick_index: int, total_tokens: int, stock: Stock) -> Picks:
        """Decides and counts the next picks, up to ``most``: their source ids, one at least; none at the end of data.
        ``pick_index`` and ``total_tokens`` are the run's before them, and ``mix_weights`` hold for all of them."""
        plan = self.plan(
            min(most, self.update_weights(pick_index, total_tokens, stock.rows_picked))
        )
        nothing = np.flatnonzero(plan == NOTHING)
        #: Of the plan's first picks, how many their sources have.
        available = int(nothing[0]) if len(nothing) else len(plan)
        for source, has_picks in stock.shortages(np.bincount(plan[:available], minlength=1)):
            available = min(available, int(np.flatnonzero(plan == source)[has_picks]))
        if available:
            self.take_planned(available)
            return plan[:available]
        source = self.decide_one(stock.has_sample)
        return np.array([] if source == NOTHING else [source], np.int32)

    def plan(self, count: int) -> Picks:
        """The source ids of the next ``count`` picks if each source has them (int32, [count]; NOTHING where
        none can be named). Changes nothing."""
        return self._root.plan(count)

    def take_planned(self, count: int) -> None:
        """Counts the first ``count`` picks of the plan as decided: their sources have them."""
        self._root.take_planned(count)

    def decide_one(self, has_sample: Callable[[int], bool]) -> int:
        """Decides and counts one pick, also where the planned source is out: its source id, or ``NOTHING`` at the end
        of data. ``has_sample(source)`` says whether a pick from a source succeeds."""
        tokens = self._tokens()
        source = self._root.decide_one(has_sample)
        self._put_in_force(tokens)
        self._forget()
        return source

    def states(
        self, mix_weights: MixWeights, given: Sequence[int], balances: Sequence[int]
    ) -> tuple[tuple[ChildState, ...], ...]:
        """The nodes' states under earlier weights of this mixer, once each source gave so many samples since
        the mixer was made, and has such balances (``RunConfig.balanced``), by source id."""
        below: dict[Node, list[tuple[int, int]]] = {}
        for node in self._upwards:
            below[node] = [
                (sum(own for own, _ in below[child]), sum(balance for _, balance in below[child]))
                if isinstance(child, Node)
                else (given[child], balances[child])
                for child in node.children
            ]
        return tuple(
            node.states_at(now, below[node])
            for node, now in zip(self._nodes, mix_weights.nodes, strict=True)
        )

    def exhausted(self, mix_weights: MixWeights) -> tuple[bool, ...]:
        """Which sources are out under these weights of this mixer, by source id, as their parents have it."""
        by_source = {
            child: out
            for node, now in zip(self._nodes, mix_weights.nodes, strict=True)
            for child, out in zip(node.children, now.exhausted, strict=True)
            if not isinstance(child, Node)
        }
        return tuple(by_source[source] for source in range(len(by_source)))

    def weights(self) -> dict[int, tuple[int, ...]]:
        """By node id, the weights in force of its children; 0 for one that gets nothing."""
        return {
            node.id: (0,) * len(node.children) if node.is_over else tuple(node.chooser.weights())
            for node in self._nodes
        }

    def shares(self) -> tuple[float, ...]:
        """Each source's share of the next tokens that the weights in force ask for, by source id."""
        return tuple(share / SHARE_UNIT for share in self._shares())

    def why_over(self) -> str:
        """Why there is no further pick, once one failed."""
        root, sources = self._root, self._config.sources
        out = self.exhausted(self.mix_weights)
        if root.waits:
            left = [
                of.name
                for of, gone in zip(sources, out, strict=True)
                if of.presence == "paused" and not gone
            ]
            return f"only paused sources are left: {', '.join(left)}"
        if not root.room():
            if self._config.ends_with_last_phase():
                return f"the last phase ends at {self._config.phases[-1].until_tokens:,} tokens"
            return f"the mixture has given its max_tokens of {root.config.max_tokens:,}"
        if all(gone or of.presence == "dropped" for of, gone in zip(sources, out, strict=True)):
            reason = ALL_EXHAUSTED
        else:
            names = ", ".join(of.name for of, gone in zip(sources, out, strict=True) if gone)
            reason = f"exhausted, and its node stops: {names}"
        reached = [name for node in self._nodes for name in node.reached()]
        return f"{reason} (max_tokens reached: {', '.join(reached)})" if reached else reason

    def endings(self) -> dict[tuple[int, int], Ending]:
        """What is exhausted, by the id of its node and its position there, children before parents."""
        return {
            (node.id, position): Ending(
                node.config.children[position].name,
                None if isinstance(child, Node) else child,
                node.why_out(position),
            )
            for node in self._upwards
            for position, child in enumerate(node.children)
            if node.exhausted[position]
        }

    def leap(
        self, most: int, left: Sequence[int], total_tokens: int, rows_picked: RowsPicked
    ) -> dict[int, int] | None:
        """Decides up to ``most`` picks at once, by each policy's mean shares: how many each source gives, by id; none
        where a child turns out to be out instead. ``left``: the picks that each source has. None where nothing is
        ever out, so that there are no bounds.

        Not at the end of data; and no pick is decided one by one after that.
        """
        self._update(
            [node for node in self._varying if not node.is_over], total_tokens, rows_picked
        )
        by_source = self._leaps.leap(most, left, total_tokens)
        self._put_in_force(self._tokens())
        return by_source

    @cached_property
    def _leaps(self) -> Leaps:
        return Leaps(self._upwards, self._lengths)

    @property
    def is_over(self) -> bool:
        return self._root.is_over

    @property
    def room(self) -> int:
        """How many more picks the root's own ``max_tokens`` allow."""
        return self._root.room()

    def _node_weights(self) -> tuple[NodeWeights, ...]:
        return tuple(node.weights() for node in self._nodes)

    def _tokens(self) -> int:
        """The tokens, as balances count them, that all sources gave since the mixer was made."""
        return sum(self._root.counters.balances) - self._balance_at_start

    def _put_in_force(self, tokens: int) -> None:
        """The weights that the nodes have now decide all picks after so many tokens."""
        expected = self.mix_weights.expected_after(tokens)
        self.mix_weights = MixWeights(self._node_weights(), self._shares(), tokens, expected)

    def _shares(self) -> tuple[int, ...]:
        """Each source's share of the next tokens by the weights in force, in 1/``SHARE_UNIT``, rounded down."""
        shares = [0] * len(self._config.sources)
        of_node = {self._root: 0 if self._root.is_over else SHARE_UNIT}
        for node in reversed(self._upwards):
            # One that is over has its share until the node above finds out, by a pick.
            weights = node.chooser.weights()
            share, total = of_node[node], sum(weights) or 1
            for child, weight in zip(node.children, weights, strict=True):
                if isinstance(child, Node):
                    of_node[child] = share * weight // total
                else:
                    shares[child] = share * weight // total
        return tuple(shares)

    def _update(self, nodes: Sequence[Node], total_tokens: int, rows_picked: RowsPicked) -> None:
        """Makes the weights of these nodes anew."""
        if not nodes:
            return
        totals = (
            self._totals.by_node(rows_picked)
            if any(node.policy.estimates for node in nodes)
            else {}
        )
        before = [node.chooser.weights() for node in nodes]
        for node in nodes:
            node.chooser.update(totals.get(node, ()), total_tokens)
        self._put_in_force(self._tokens())
        if before != [node.chooser.weights() for node in nodes]:
            self._forget()

    def _forget(self) -> None:
        """To be called where a node's picks are others than were planned: so are the lengths by which those above it
        planned."""
        if self._lengths is not None:
            for node in self._upwards:
                node.chooser.forget()


def node_shape(config: RunConfig, node: NodeConfig) -> NodeShape:
    """What never changes about a node of a run."""
    # Of a schedule, weights are the policy's own.
    numbers = [child.weight if isinstance(child.weight, float) else 1.0 for child in node.children]
    return NodeShape(
        node_id=node.id,
        seed=config.seed,
        pick_tokens=config.pick_tokens,
        weights=integer_weights(numbers),
        child_ids=tuple(2 * child.id + isinstance(child, NodeConfig) for child in node.children),
        points=tuple(points_of(child.weight) for child in node.children),
        linear=node.interpolate == "linear",
    )


def initial_nodes(config: RunConfig) -> tuple[tuple[ChildState, ...], ...]:
    """The nodes' states before the first sample."""
    return tuple((ChildState(),) * len(node.children) for node in config.nodes)


def mixer_at(
    config: RunConfig, state: State, size_estimates: Mapping[int, TokenCurve] | None = None
) -> Mixer:
    """The mixer that decides what follows a state, with the weights that hold there. ``size_estimates`` as for the
    ``Mixer``."""
    mixer = Mixer(config, state.nodes, size_estimates, clock_offset=state.clock_ahead)

    def rows_picked(source: int) -> tuple[int, int]:
        cursor = state.sources[source].cursor
        return state.sources[source].rows, tokens_in_row(
            cursor
        ) if config.packing == "concat" else 0

    # Those that a state has stay, also where the next pick makes others: only what has none yet makes some.
    mixer.update_weights(1, state.total_tokens, rows_picked)
    return mixer


def target_shares(
    config: RunConfig, state: State, size_estimates: Mapping[int, TokenCurve] | None = None
) -> tuple[float, ...]:
    """Each source's share of the tokens that the weights in force at a state ask for, by source id; 0 for one that
    gives nothing more. ``size_estimates`` as for the ``Mixer``."""
    return mixer_at(config, state, size_estimates).shares()
