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
    """A node's counters of its children; the node alone writes them, its policy reads them.

    ``out``: which cannot be chosen, because they are exhausted, paused or dropped.
    """

    samples: list[int]
    tokens: list[int]
    out: list[bool]

    @property
    def live(self) -> list[int]:
        """The positions of those that can be chosen."""
        return [i for i, out in enumerate(self.out) if not out]


class Policy(Protocol):
    """Chooses among a node's live children. Its choices are a function of its shape, the children's
    counters and what a state keeps of it, so that a policy built anew from a state goes on identically.

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

    def lost(self, child: int) -> None:
        """The child is out, and maybe none is live any more. Called after it was marked."""

    def weights(self) -> Sequence[int]:
        """The children's shares while nothing changes, as integers in their proportion; 0 for one that is out."""

    def mark(self) -> object:
        """An immutable note of the credits, the same until a child is out or weights are made anew."""

    def credits(self, mark: object, tokens: Sequence[int]) -> tuple[int, ...]:
        """The credits under a mark, given the children's tokens."""

    def made(self, mark: object) -> Sequence[tuple[int, int]]:
        """By child, the weight in force under a mark and the total that it was made from (samples); zeros where
        the policy makes none."""


class NoCredits:
    """The part of ``Policy`` of those that keep nothing beside the counters."""

    def mark(self) -> object:
        return None

    def credits(self, mark: object, tokens: Sequence[int]) -> tuple[int, ...]:
        return (0,) * len(tokens)

    def made(self, mark: object) -> Sequence[tuple[int, int]]:
        return ()
