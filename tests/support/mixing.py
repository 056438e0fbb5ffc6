"""A mixer at work without data: sources are told how many samples they hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import count
from typing import Any, NamedTuple

from tokenloom_server.config.run import RunConfig
from tokenloom_server.core.state import ChildState, SourceState, State
from tokenloom_server.core.token_curve import TokenCurve
from tokenloom_server.mixing.mixer import Mixer, initial_nodes
from tokenloom_server.mixing.node import NOTHING
from tokenloom_server.mixing.policy import Children, NodeShape, NodeStart
from tokenloom_server.mixing.varying import UPDATE_PICKS
from tokenloom_server.order.carry_over import carry

from support.corpora import flat, parsed

#: Tokens of every row.
ROW = 13

Nodes = tuple[tuple[ChildState, ...], ...]


def node(policy: str, *children: Any, **fields: Any) -> dict[str, Any]:
    """A node of a mixture file. A child is a source's weight, the fields of a source, or a node."""
    return {"policy": policy, "children": list(children), **fields}


def config_of(policy: str, *children: Any, seed: int = 7, **fields: Any) -> RunConfig:
    """A mixture (see ``node``) over ``txt:0:text``, ``txt:1:text``, …, in the order of its tree."""
    numbers = count()

    def named(child: Any) -> dict[str, Any]:
        if not isinstance(child, dict):
            return named({"weight": child})
        if "children" in child:
            return child | {"children": [named(below) for below in child["children"]]}
        return {"source": f"txt:{next(numbers)}:text"} | child

    return parsed(flat([], seed=seed) | {"mixture": named(node(policy, *children, **fields))})


class Lengths(NamedTuple):
    """Implements ``RealLengths``: of a source of a walk."""

    walk: Walk
    source: int

    @property
    def real_tokens(self) -> int:
        return self.walk.balances()[self.source]

    def real_lengths(self) -> Iterator[int]:
        for number in range(self.walk.given[self.source], self.walk.capacity[self.source]):
            self.walk.looked_at.append((self.source, number))
            yield self.walk.real[self.source][number]

    def real_of(self, picks: int) -> int:
        first = self.walk.given[self.source]
        return sum(self.walk.real[self.source][first : first + picks])


class Walk:
    """Picks from a mixer whose sources hold so many samples each, by source id.

    ``updates``: how often weights are made anew, in samples (a power of 2, at most ``UPDATE_PICKS``); the mixer is
    told of so many times as many samples as there were. ``lengths``: by source, the real tokens of each of its samples,
    where balances count these.
    """

    def __init__(
        self,
        config: RunConfig,
        capacity: list[int],
        updates: int = 8,
        lengths: Sequence[Sequence[int]] = (),
    ) -> None:
        self.capacity = capacity
        self.real = lengths
        #: Sources whose samples were looked at, in that order, and the number of the sample.
        self.looked_at: list[tuple[int, int]] = []
        self.given = [0] * len(capacity)
        self._pretended = UPDATE_PICKS // updates
        self.begin_under(config, initial_nodes(config))

    def begin_under(self, config: RunConfig, nodes: Nodes) -> None:
        self.config = config
        size_estimates = {source: self._extent(source) for source in config.measured_sources}
        lengths = [Lengths(self, source) for source in range(len(self.real))]
        self.mixer = Mixer(config, nodes, size_estimates, lengths or None)
        self.before = list(self.given)

    def _extent(self, source: int) -> TokenCurve:
        tokens = self.capacity[source] * self.config.sequence_length
        rows = max(1, round(tokens / ROW / self.config.epochs[source]))
        return TokenCurve.of([(rows, rows * ROW)])

    def rows_picked(self, source: int) -> tuple[int, int]:
        return divmod(self.given[source] * self.config.sequence_length, ROW)

    def begin(self) -> int:
        done = sum(self.given)
        tokens = done * self.config.sequence_length
        return (
            self.mixer.update_weights(done * self._pretended, tokens, self.rows_picked)
            // self._pretended
        )

    def has_sample(self, source: int) -> bool:
        return self.given[source] < self.capacity[source]

    def step(self) -> int:
        self.begin()
        source = self.mixer.decide_one(self.has_sample)
        if source != NOTHING:
            self.given[source] += 1
        return source

    def leap(self, count: int) -> list[int]:
        """The next ``count`` picks, planned as far as the sources last, as the pipeline does it."""
        found: list[int] = []
        while len(found) < count:
            some = min(count - len(found), self.begin())
            plan = self.mixer.plan(some).tolist()
            assert len(plan) == some
            ready, planned = 0, list(self.given)
            while (
                ready < len(plan)
                and plan[ready] != NOTHING
                and planned[plan[ready]] < self.capacity[plan[ready]]
            ):
                planned[plan[ready]] += 1
                ready += 1
            if ready:
                self.mixer.take_planned(ready)
                self.given = planned
                found += plan[:ready]
            if ready < len(plan):
                found.append(self.step())
                if found[-1] == NOTHING:
                    break
        return found

    def present(self) -> Nodes:
        given = [now - then for now, then in zip(self.given, self.before, strict=True)]
        return self.mixer.states(self.mixer.mix_weights, given, self.balances())

    def balances(self) -> list[int]:
        """By source, its tokens as balances count them."""
        if not self.real:
            return [given * self.config.sequence_length for given in self.given]
        return [sum(own[:given]) for own, given in zip(self.real, self.given, strict=True)]

    def restore(self) -> None:
        """Builds the mixer anew from its state, as a restart does."""
        self.begin_under(self.config, self.present())

    def revise(self, config: RunConfig, capacity: list[int]) -> None:
        """Goes on under another mixture of the run; ``capacity`` of all sources it ever had."""
        exhausted = self.mixer.exhausted(self.mixer.mix_weights)
        sources = [
            SourceState(
                samples=samples, tokens=samples * self.config.sequence_length, exhausted=out
            )
            for samples, out in zip(self.given, exhausted, strict=True)
        ]
        state = State(
            sample_index=sum(self.given),
            total_tokens=8 * sum(self.given),
            digest=0,
            sources=tuple(sources),
            nodes=self.present(),
        )
        nodes = carry(state, self.config, config).nodes
        self.capacity = capacity
        self.given += [0] * (len(capacity) - len(self.given))
        self.begin_under(config, nodes)


def node_start(
    weights: Sequence[int], tokens: int = 8, seed: int = 7, owed: Sequence[int] = ()
) -> NodeStart:
    """A node over as many sources, of which nothing was picked yet; ``tokens`` of a pick."""
    size = len(weights)
    ids = tuple(range(0, 2 * size, 2))
    return NodeStart(
        NodeShape(
            node_id=0,
            seed=seed,
            pick_tokens=tokens,
            weights=tuple(weights),
            child_ids=ids,
            points=(),
            linear=True,
        ),
        Children([0] * size, balances := [0] * size, [False] * size, balances),
        [ChildState(credit=credit) for credit in owed or [0] * size],
    )


def worst_distance(found: Sequence[int], weights: Sequence[float]) -> float:
    """The greatest distance, in samples, of any child from its share, at any sample."""
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    # In units of 1 / scale samples, to stay in integers.
    scale = total.denominator * max(weight.denominator for weight in exact) * total.numerator
    shares = [int(weight / total * scale) for weight in exact]
    given, worst = [0] * len(weights), 0
    for k, source in enumerate(found, start=1):
        given[source] += 1
        worst = max(
            worst, max(abs(g * scale - share * k) for g, share in zip(given, shares, strict=True))
        )
    return worst / scale
