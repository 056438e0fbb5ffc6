"""The seam for policies: how a node chooses among its live children."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

#: Positions of children within their node, one for each of a node's next samples.
Choices = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShape:
    """What never changes about a node. ``child_ids`` are stable: 2 × source id, or 2 × node id + 1."""

    node_id: int
    seed: int
    sample_tokens: int
    weights: tuple[int, ...]
    child_ids: tuple[int, ...]


@dataclass(slots=True)
class Children:
    """A node's counters of its children; the node alone writes them, its policy reads them."""

    samples: list[int]
    tokens: list[int]
    exhausted: list[bool]


class Policy(Protocol):
    """Chooses among a node's live children. Its choices are a function of its shape, the children's
    counters and its credits alone, so that a policy built anew from a state goes on identically.

    Choices are asked for by the thousand, because Python spent on each sample is what a fast source waits
    for: a policy works them out ahead, in arrays, and throws them away where a child turns out to be out.
    """

    def upcoming(self, count: int) -> Choices:
        """The next ``count`` choices if each of them succeeds. At least one child is live. Changes nothing
        that a state would show; the caller does not write into the array."""

    def choose(self, retry: int) -> int:
        """The next choice, where ``retry`` children were found to be out within this decision."""

    def issued(self, count: int) -> None:
        """The next ``count`` choices succeeded. Called after the counters moved."""

    def exhausted(self, child: int) -> None:
        """The child is out. Called after it was marked."""

    def mark(self) -> object:
        """An immutable note of the credits, the same until a child is exhausted."""

    def credits(self, mark: object, tokens: Sequence[int]) -> tuple[int, ...]:
        """The credits under a mark, given the children's tokens."""


class NoCredits:
    """The part of ``Policy`` of those that keep nothing beside the counters."""

    def mark(self) -> object:
        return None

    def credits(self, mark: object, tokens: Sequence[int]) -> tuple[int, ...]:
        return (0,) * len(tokens)
