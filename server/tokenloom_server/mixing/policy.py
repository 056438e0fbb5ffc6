"""The seam for policies: how a node chooses among its live children."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


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
    counters and its credits alone, so that a policy built anew from a state goes on identically."""

    def choose(self, retry: int) -> int:
        """Position of the next child; ``retry`` counts the children that failed within this decision.

        At least one child is live. Changes nothing that a state would show.
        """

    def issued(self, child: int, tokens: int) -> None:
        """The child gave a sample of ``tokens`` tokens. Called after the counters moved."""

    def exhausted(self, child: int) -> None:
        """The child is out. Called after it was marked."""

    def mark(self) -> object:
        """A small immutable note of the credits now; cheap, taken at every step."""

    def credits(self, mark: object, tokens: Sequence[int]) -> tuple[int, ...]:
        """The credits at a mark, given the children's tokens there."""
