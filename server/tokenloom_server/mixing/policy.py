"""What a policy is: all that the tree, the mixture file, revisions and inspectors need to know of it.

A ``Policy`` is what a mixture file names: it has no state, and there is one of each. Its ``Chooser`` is at work in one
node.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenloom_server.config.catalog import FileWeight
from tokenloom_server.config.node import NodeConfig
from tokenloom_server.core.state import ChildState

#: Positions of children within their node, one for each of a node's next picks.
Choices = npt.NDArray[np.intp]
#: One number for each child of a node.
Floats = npt.NDArray[np.float64]
#: [tokens, weight], ascending in tokens; a plain weight is one point.
Points = Sequence[tuple[int, float]]

#: Choices that are worked out ahead; fewer at first, so that a new chooser answers at once.
_FIRST_AHEAD, _AHEAD = 64, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShape:
    """What never changes about a node. ``child_ids`` are stable: 2 × source id, or 2 × node id + 1. ``points``: the
    weights as in the mixture file; ``linear``: whether those between two points lie on a straight line."""

    node_id: int
    seed: int
    pick_tokens: int
    weights: tuple[int, ...]
    child_ids: tuple[int, ...]
    points: tuple[Points, ...]
    linear: bool


@dataclass(slots=True)
class Children:
    """A node's counters of its children; the node alone writes them, its chooser reads them.

    ``tokens`` are positions. ``out``: which cannot be chosen, because they are exhausted, paused or dropped.
    ``balances``: their tokens as balances count them. ``lengths``: by child, what gives the same of each of its next
    picks, as far as it has any; None where every pick counts ``pick_tokens``.
    """

    picks: list[int]
    tokens: list[int]
    out: list[bool]
    balances: list[int]
    lengths: Sequence[Callable[[], Iterator[int]]] | None = None

    @property
    def live(self) -> list[int]:
        """The positions of those that can be chosen."""
        return [i for i, out in enumerate(self.out) if not out]


class Span(NamedTuple):
    """A span of the run for a node: from the run's total tokens on, so many of its tokens; picks are the node's."""

    begin: int
    tokens: float
    picks: float


@dataclass(frozen=True, slots=True)
class Mark:
    """What a state keeps of a chooser: immutable, and the same until a child is out or weights are made anew."""

    #: Each child's credit when the mark was made.
    credits: tuple[int, ...]

    def credits_at(self, balances: Sequence[int]) -> tuple[int, ...]:
        """The credits once the children have these ``Children.balances``."""
        return self.credits

    def made(self) -> Sequence[tuple[int, int]]:
        """By child, the weight in force and the total that it was made from (picks); zeros where the policy makes
        none."""
        return [(0, 0)] * len(self.credits)


class Chooser(ABC):
    """Chooses among a node's live children. Its choices are a function of its shape, the children's
    counters and what a state keeps of it, so that a chooser built anew from a state goes on identically.

    Choices are asked for by the thousand, because Python spent on each pick is what a fast source waits
    for: they are worked out ahead, in arrays, and thrown away where a child turns out to be out.
    """

    def __init__(self, node: NodeStart) -> None:
        self._shape = node.shape
        self._children = node.children
        self._mark = Mark(tuple(child.credit for child in node.states))
        #: Choices that succeeded since it was made.
        self._passed = 0
        self.forget()

    def forget(self) -> None:
        """Throws away what was worked out ahead."""
        self._ahead: Choices = np.empty(0, np.intp)
        # A length that nobody asks for is not looked up.
        self._taken, self._size = 0, 0 if self._children.lengths else _FIRST_AHEAD

    @abstractmethod
    def work_out(self, count: int) -> Choices:
        """At least the next ``count`` choices from the counters on, if each of them succeeds. At least one child is
        live."""

    @abstractmethod
    def weights(self) -> Sequence[int]:
        """The children's shares while nothing changes, as integers in their proportion; 0 for one that is out."""

    def upcoming(self, count: int) -> Choices:
        """The next ``count`` choices if each of them succeeds; fewer, but one at least, where others depend on the
        length of a sample that is not there. At least one child is live. Changes nothing that a state would show; the
        caller does not write into the array."""
        if len(self._ahead) - self._taken < count:
            self._ahead, self._taken = self.work_out(max(count, self._size)), 0
            self._size = min(2 * self._size, _AHEAD)
        return self._ahead[self._taken : self._taken + count]

    def choices(self) -> Iterator[int]:
        """The ``upcoming`` ones, one after the other. Those that are counted meanwhile are among them, and were asked
        for."""
        for number in count(self._passed):
            ahead = number - self._passed
            yield int(self.upcoming(max(_FIRST_AHEAD, 1 << ahead.bit_length()))[ahead])

    def choose(self, retry: int) -> int:
        """The next choice, where ``retry`` children turned out to be out within this pick."""
        return int(self.upcoming(1)[0])

    def taken(self, count: int) -> None:
        """The next ``count`` choices succeeded. Called after the counters moved."""
        self._taken += count
        self._passed += count

    def lost(self, child: int) -> None:
        """The child is out, and maybe none is live any more. Called after it was marked."""
        self.forget()

    def update(self, totals: Sequence[int], run_tokens: int) -> None:  # noqa: B027
        """Makes weights anew, where they follow the run: from the estimates of all that each child will give, in
        picks (empty unless the policy ``estimates``), or from the run's total tokens."""

    def mean_shares(self, span: Span) -> Floats:
        """The children's mean shares of the node's picks over a span that begins now, while nobody goes out. They
        add up to 1. For plans of runs that are too long to be gone through pick by pick."""
        return normal(self.weights())

    def horizon(self, run_tokens: int, rate: float) -> float:
        """Over how many of the run's tokens means may be taken at once; ``rate`` of these are the node's."""
        return math.inf

    @property
    def mark(self) -> Mark:
        """What a state keeps of it."""
        return self._mark


def normal(weights: Sequence[int]) -> Floats:
    """Shares in the proportion of weights, of which one is above 0."""
    numbers: Floats = np.array(weights, np.float64)
    total: np.float64 = numbers.sum()
    return numbers / total


class NodeStart(NamedTuple):
    """A node from a state on. ``states`` count picks."""

    shape: NodeShape
    children: Children
    states: Sequence[ChildState]


class NodeChange(NamedTuple):
    """A node that a revision makes anew, by child of the node as it is then."""

    #: The node's policy before; None where the node is new.
    old_policy: Policy | None
    #: Children as they were; None for one that was not there.
    old: Sequence[ChildState | None]
    new: Sequence[ChildState]
    #: Weights in force before and after; 0 for a child that gets nothing.
    old_weights: Sequence[int]
    new_weights: Sequence[int]
    #: Samples and tokens of a pick.
    pick_samples: int
    pick_tokens: int


class Elsewhere(NamedTuple):
    """A node whose sources were consumed by another run or an older data loader, by child."""

    picks: Sequence[int]
    #: As balances are to count them: an older loader may not have said how many they were.
    tokens: Sequence[int]
    live: Sequence[bool]
    #: Whether any of it was consumed there at all.
    known: Sequence[bool]
    weights: Sequence[int]
    #: At which balance a child begins that was not consumed there: ``new_source_baseline`` of the mixture file.
    baseline: str


class Policy(ABC):
    """How a node's picks fall to its children. The attributes say what the rest of the server needs to know of it."""

    name: ClassVar[str]
    #: What the weights of its children may be in the mixture file.
    takes: ClassVar[Literal["nothing", "numbers", "points"]] = "nothing"
    #: The fields of a node in the mixture file that are for this policy alone.
    options: Collection[str] = ()
    #: Whether weights follow from what the sources below have left: their sizes are measured then.
    estimates: bool = False
    #: Whether shares change as the run goes on, so that those of a few picks are not those of the run.
    follows_progress: ClassVar[bool] = False
    #: Whether the policy makes the weights itself, every ``UPDATE_PICKS``, and a state keeps those in force.
    makes_weights: ClassVar[bool] = False
    #: What the credit of a child counts.
    credit: ClassVar[Literal["nothing", "owed tokens", "turns"]] = "nothing"

    @abstractmethod
    def chooser(self, node: NodeStart) -> Chooser:
        """The choices of one node."""

    def check(self, weights: Sequence[FileWeight], options: Mapping[str, Any]) -> None:
        """Raises ``ValueError`` for weights in the mixture file that mean nothing under this policy."""
        for i, weight in enumerate(weights):
            text = f"{len(weight)} points" if isinstance(weight, list) else f"{weight:g}"
            if self.takes == "nothing" and weight != 1.0:
                raise ValueError(
                    f"children.{i}.weight: found {text}, but the policy {self.name!r} knows no weights; leave it out, "
                    "or take the policy 'least_consumed' or 'weighted'"
                )
            if self.takes == "numbers" and isinstance(weight, list):
                raise ValueError(
                    f"children.{i}.weight: found {text}, but the policy {self.name!r} takes one number; give one, or "
                    "take the policy 'schedule'"
                )

    def revised(self, change: NodeChange) -> Sequence[int]:
        """The credits that a node's children have once a revision is in force."""
        return [0] * len(change.new)

    def forked(self, node: Elsewhere) -> Sequence[int]:
        """The credits of children that another run consumed: nobody is owed anything for it."""
        return [0] * len(node.picks)

    def imported(self, node: Elsewhere) -> tuple[Sequence[int], Sequence[int] | None]:
        """The credits of children that an older data loader consumed, and the balances, in tokens, that they begin
        with; None where the policy keeps no balances."""
        return self.forked(node), None


def points_of(weight: FileWeight) -> Points:
    """A weight of the mixture file as points."""
    return [(0, weight)] if isinstance(weight, float) else weight


def policy_of(config: NodeConfig) -> Policy:
    """The policy that a node names."""
    rules = config.rules
    assert isinstance(rules, Policy), f"{rules.name}: its catalog was not made of policies"
    return rules


# Weights as integers: every decision about the order is exact.


#: Credits are below (sum of weights) × (tokens per pick); with 2^24 tokens they stay below 2^53.
MAX_SUM = 2**28


def integer_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest integers in the proportion of ``weights`` (taken as the decimals they are written as).

    Where those add up to more than ``MAX_SUM``, they are rounded to that resolution, never to 0.
    """
    return reduced(whole(weights))


def whole(weights: Sequence[float]) -> list[int]:
    """Integers in the exact proportion of ``weights`` (taken as the decimals they are written as)."""
    exact = [Fraction(repr(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    return [int(weight * scale) for weight in exact]


def reduced(weights: Sequence[int]) -> tuple[int, ...]:
    """The smallest integers in the proportion of these, of which one is above 0; rounded, but to 0 only where it
    was 0, where they would add up to more than ``MAX_SUM``."""
    divisor = math.gcd(*weights)
    smallest = [weight // divisor for weight in weights]
    total = sum(smallest)
    if total <= MAX_SUM:
        return tuple(smallest)
    room = MAX_SUM - len(smallest)
    return tuple(max(1, weight * room // total) if weight else 0 for weight in smallest)
